"""Methods that need remote values: printing, numbers, numpy; and `.data`. Each waits once, or says why not."""

from __future__ import annotations

import functools
import html
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import _tensor_str
from torch.overrides import handle_torch_function, has_torch_function_unary

from skyproxy import patching
from skyproxy.errors import SELF_EXPLAINING
from skyproxy.tensor.core.attributes import exchange_dicts, user_attributes
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import OWN_CLASSES, RemoteTensor, adopt
from skyproxy.tensor.core.torch_private import DisableTorchFunction, TensorBase
from skyproxy.tensor.core.transfers import download
from skyproxy.tensor.core.user_lines import user_frame
from skyproxy.tensor.torch_api.subclasses import class_of_user, put_in_class

_REPR_PARTS = ("_str", "_str_intern", "_tensor_str", "_tensor_str_with_formatter", "_Formatter", "PRINT_OPTS")
# By element size: dtypes that every device can join and cut, in place of those that some devices cannot.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def telling(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Make a decorator of methods of which a mode or a class of the user's is told by a name, not of their parts.

    They are told of the method itself: PyTorch's own one of that name cannot do with a remote tensor.
    """

    def decorate(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def call(self: RemoteTensor, *args: object, **kwargs: object) -> object:
            if has_torch_function_unary(self):
                return handle_torch_function(call, (self,), self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except SELF_EXPLAINING as error:
                error.__traceback__ = None
                raise

        call.__name__ = name
        return call

    return decorate


# --- text ------------------------------------------------------------------------------------------------------------


def edges(tensor: torch.Tensor, edge_items: int) -> torch.Tensor:
    """Return what of a large tensor is printed: the first and last items of each dimension, and one between them.

    The one between stands for the rest: with it, PyTorch's formatter sees that there is more than it prints.
    """
    dtype = tensor.dtype
    tensor = tensor.resolve_conj().resolve_neg()
    if dtype.itemsize in _BITS and not dtype.is_complex:
        tensor = tensor.view(_BITS[dtype.itemsize])
    for dim, size in enumerate(tensor.shape):
        if size > 2 * edge_items + 1:
            ends = (tensor.narrow(dim, 0, edge_items + 1), tensor.narrow(dim, size - edge_items, edge_items))
            tensor = torch.cat(ends, dim)
    return tensor.view(dtype)


def _contents(tensor: RemoteTensor, indent: int) -> str:
    """The numbers of a strided tensor as PyTorch prints them. One round trip."""
    options = _tensor_str.PRINT_OPTS
    if tensor.numel() <= options.threshold:
        return str(_tensor_str._tensor_str(download(tensor), indent))
    values = download(edges(tensor, options.edgeitems))  # type: ignore[arg-type]
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        values = values.half()
    parts = (values.real, values.imag) if values.dtype.is_complex else (values,)
    # The formatters must not see the items that stand for the rest.
    formatters = [_tensor_str._Formatter(_tensor_str.get_summarized_data(part)) for part in parts]
    return str(_tensor_str._tensor_str_with_formatter(values, indent, True, *formatters))


def _sparse_contents(tensor: RemoteTensor) -> str:
    """The parts of a sparse tensor as PyTorch prints them, up to the first word on the whole."""
    text = str(_tensor_str._str(download(tensor)))
    return text[len("tensor(") : text.rindex("size=(")].rstrip(", \n")


def _values_to_print(self: RemoteTensor) -> str | None:
    """Return the numbers of a tensor as text; None where it has none to print."""
    if not self.numel() and self.layout is torch.strided:
        return None
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        outside = torch._C._DisableFuncTorch()  # of transforms that run, until it is deleted: as PyTorch prints
        try:
            values: RemoteTensor = self.detach()  # type: ignore[assignment]
            strided = self.layout is torch.strided
            name = "tensor" if type(self) in OWN_CLASSES else type(self).__name__
            return _contents(values, len(name) + 1) if strided else _sparse_contents(values)
        except SELF_EXPLAINING as error:
            error.__traceback__ = None
            raise
        finally:
            del outside  # an error's traceback would keep it, and no transform work as long as somebody has that


def _repr(self: RemoteTensor, *, tensor_contents: object = None) -> str:
    """Looks as PyTorch prints a tensor of any other device."""
    is_told = has_torch_function_unary(self)
    with DisableTorchFunction():
        contents = _values_to_print(self) if tensor_contents is None else tensor_contents
    if is_told:  # a mode or a class of the user's, of `__repr__` alone
        printer: Callable[..., object] = torch.Tensor.__repr__
        told = handle_torch_function(printer, (self,), self, tensor_contents=contents)
        if not isinstance(told, str):
            return told  # type: ignore[return-value]  # which Python refuses
        text = told
    else:
        text = str(_tensor_str._str(self, tensor_contents=contents))
    if type(self) not in OWN_CLASSES:
        return text
    # PyTorch names a subclass it does not know by its class; this one is not a class of the user's.
    name = f"{type(self).__name__}("
    if text.startswith(f"Parameter({name}"):
        return "Parameter containing:\ntensor(" + text[len(f"Parameter({name}") : -1]
    return "tensor(" + text[len(name) :] if text.startswith(name) else text


def _mimebundle(self: RemoteTensor, **unused: object) -> dict[str, str]:
    """Return what Jupyter shows: both forms of one answer, so that a cell's last line fetches once."""
    text = repr(self)
    device = self._sky.device
    place = f"{self.device}, {device.worker_device} of {device.row.get('name', 'a worker')}"
    title = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {place}"
    return {
        "text/plain": text,
        "text/html": f"<div><code>{html.escape(title)}</code><pre>{html.escape(text)}</pre></div>",
    }


@telling("__format__")
def _format(self: RemoteTensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


# --- numbers and arrays ----------------------------------------------------------------------------------------------


def _tolist(self: RemoteTensor) -> object:
    if has_torch_function_unary(self):  # a mode or a class of the user's is told of `tolist` alone, as on the CPU
        return handle_torch_function(torch.Tensor.tolist, (self,), self)
    return self.detach().cpu().tolist()


@telling("numpy")
def _numpy(self: RemoteTensor, *, force: bool = False) -> object:
    if not force:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )
    return self.detach().cpu().numpy(force=True)


def _no_dlpack(self: RemoteTensor, **unused: object) -> NoReturn:
    raise BufferError(
        f"a tensor on {self.device} lives on another machine and cannot be shared by DLPack. Copy it first: x.cpu()"
    )


def _guard(export: Callable[..., object]) -> Callable[..., object]:
    """PyTorch's own exporter does not ask the tensor, and would hand out an address that is none."""

    @functools.wraps(export)
    def to_dlpack(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if type(tensor) is RemoteTensor:
            _no_dlpack(tensor)
        return export(tensor, *args, **kwargs)

    return to_dlpack


# --- .data -----------------------------------------------------------------------------------------------------------


def _get_data(self: torch.Tensor) -> torch.Tensor:
    return TensorBase.data.__get__(self)  # type: ignore[attr-defined,no-any-return]


def _set_data(self: torch.Tensor, value: object) -> None:
    """`p.data = q`: p shares q's storage, and keeps its identity, its gradient and its history."""
    if isinstance(value, RemoteTensor) and isinstance(self, RemoteTensor):
        if value is self:
            return  # as `Module._apply` does for parameters that have moved
        # An alias of its own: what changes the shape of q in place later on is not to change p's.
        adopt(self, value.detach()._sky)  # type: ignore[attr-defined]
    elif isinstance(value, torch.Tensor) and (isinstance(value, RemoteTensor) or isinstance(self, RemoteTensor)):
        _move_data(self, value)
    else:
        TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]


def _delete_data(self: torch.Tensor) -> None:
    TensorBase.data.__delete__(self)  # type: ignore[attr-defined]


def _move_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else None
    with torch.no_grad():
        fresh = value.detach()
        fresh = kind(fresh, tensor.requires_grad) if kind else fresh.requires_grad_(tensor.requires_grad)
    gradient, tensor.grad = tensor.grad, None
    exchange(tensor, fresh)
    if gradient is not None:
        # PyTorch lets a gradient stay on the old device here; a tensor of another class cannot hold it.
        tensor.grad = gradient.to(tensor.device)


def _poison(gradients: object) -> NoReturn:
    raise RuntimeError(
        "this graph was made before its parameter moved to another device, so its gradient has nowhere to go. Run "
        "backward before the move, or forward again after it."
    )


def exchange(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Makes `tensor` what `fresh` is; it stays the same object, with its attributes, hooks and the user's class.

    Like `torch.utils.swap_tensors`, which also wants that nobody else holds either of the two. Here those who hold the
    Python object (optimizers, weak references) get the new values, and a graph that saved the tensor keeps the old.

    Raises:
        RuntimeError: C++ watches one of them by a weak reference.
    """
    # A node that accumulates gradients holds the tensor that they belong to. Inference tensors are in no graph.
    if tensor._use_count() > 1 and tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_poison)
    attributes, kind = user_attributes(tensor), class_of_user(tensor)
    hooks, late_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, fresh)
    tensor.__class__, fresh.__class__ = fresh.__class__, tensor.__class__
    exchange_dicts(tensor, fresh)
    if kind is not None and isinstance(tensor, RemoteTensor):
        put_in_class(tensor, kind)
    elif kind is not None:
        tensor.__class__ = kind
    tensor.__dict__.update(attributes)
    if hooks:
        tensor._backward_hooks = hooks
    if late_hooks:
        tensor._post_accumulate_grad_hooks = late_hooks


# --- tensors of the same kind ----------------------------------------------------------------------------------------


def _device_of_new(tensor: torch.Tensor, device: object) -> torch.device:
    """Return the device of a tensor where none is given, or one without a number: PyTorch would take the first one."""
    asked = torch.device(device) if device is not None else tensor.device  # type: ignore[call-overload]
    if asked.type == tensor.device.type and asked.index is None:
        return tensor.device
    return torch.device("sky", DEVICES.current) if asked.type == "sky" and asked.index is None else asked


class _OnItsDevice:
    """`Tensor.new` or `Tensor.new_tensor`: PyTorch's own, and ours for tensors of `sky` that are not of our class.

    Such are those that `torch.func` wraps, fake and functional ones. PyTorch makes their device the current one, and
    asks C++ for its number, where ours is always the first. Other tensors have PyTorch's own method, whose warnings
    name the line that calls it, and so has the class.
    """

    def __init__(self, plain: types.MethodDescriptorType, ours: Callable[..., torch.Tensor]) -> None:
        self._plain, self._ours = plain, ours

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is not None:
            with DisableTorchFunction():  # no mode is to see the question
                ours = DEVICES.current or tensor.device.type == "sky"
            if ours:
                return types.MethodType(self._ours, tensor)
        return self._plain.__get__(tensor, owner)


def _new_tensor(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    kwargs["device"] = _device_of_new(self, kwargs.get("device"))
    if args and isinstance(args[0], torch.Tensor) and not kwargs.get("pin_memory"):
        return copy_with_warning("tensor.new_tensor", self.dtype, *args, **kwargs)  # type: ignore[arg-type]
    return torch.Tensor.new_tensor(self, *args, **kwargs)  # type: ignore[arg-type]


def copy_with_warning(
    function: str,
    own: torch.dtype,
    source: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    **rest: object,
) -> torch.Tensor:
    """Do what `torch.tensor` and `new_tensor` do for a tensor; PyTorch's own would warn at a line of ours.

    Args:
        function: the one that the program called, as its warning names it.
        own: the dtype where none is given.
        source: what is copied.
        device: where to.
        dtype: the copy's dtype.
        rest: further options, of which `requires_grad` counts.
    """
    frame = user_frame(sys._getframe(1))
    warnings.warn_explicit(
        "To copy construct from a tensor, it is recommended to use sourceTensor.detach().clone() or "
        f"sourceTensor.detach().clone().requires_grad_(True), rather than {function}(sourceTensor).",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
    copy = source.detach().to(device, dtype or own, copy=True)
    return copy.requires_grad_(bool(rest.get("requires_grad")))


def _new(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if kwargs.get("device") is None and not args and len(kwargs) == ("device" in kwargs):
        return self.new_empty(0)  # PyTorch's own `new(device=...)` takes the first device all the same
    if len(args) == 1 and isinstance(args[0], torch.TypedStorage) and args[0].dtype == self.dtype:
        # PyTorch asks beside `device=` whether it is a size, and a typed storage warns when it is asked for its length.
        args = (args[0]._untyped_storage,)
    if len(args) != 1 or not isinstance(args[0], torch.Tensor):
        kwargs["device"] = _device_of_new(self, kwargs.get("device"))
    return torch.Tensor.new(self, *args, **kwargs)  # type: ignore[call-overload,no-any-return]


def _install_for_a_second_device() -> None:
    for name, ours in (("new", _new), ("new_tensor", _new_tensor)):
        if not patching.is_replaced(torch.Tensor, name):
            patching.wrap(
                torch.Tensor,
                name,
                functools.partial(_OnItsDevice, ours=ours),
                why="PyTorch takes the first device for that of a tensor that a transform or a fake mode wraps",
                test="tests/tensor/torch_api/test_tensor_methods.py::test_a_wrapped_tensor_makes_others_where_it_is",
                when=patching.When.SECOND_DEVICE,
            )


def install() -> None:
    """Gives remote tensors the methods above, and every tensor a `.data` that can move it to a worker.

    Raises:
        ConfigurationError: this torch prints tensors in another way.
    """
    patching.require(_tensor_str, *_REPR_PARTS)
    patching.require(torch._C, "_swap_tensor_impl")
    RemoteTensor.__repr__ = _repr  # type: ignore[method-assign,assignment]
    RemoteTensor._repr_mimebundle_ = _mimebundle  # type: ignore[attr-defined]
    RemoteTensor.__format__ = _format  # type: ignore[method-assign]
    RemoteTensor.new_tensor = _new_tensor  # type: ignore[method-assign,assignment]
    RemoteTensor.new = _new  # type: ignore[method-assign,assignment]
    DEVICES.before_second = _install_for_a_second_device
    RemoteTensor.tolist = _tolist  # type: ignore[method-assign,assignment]
    RemoteTensor.numpy = _numpy  # type: ignore[method-assign,assignment]
    RemoteTensor.__dlpack__ = _no_dlpack  # type: ignore[method-assign,assignment]
    RemoteTensor.__dlpack_device__ = _no_dlpack  # type: ignore[method-assign,assignment]
    RemoteTensor.__dlpack_c_exchange_api__ = None
    guarded = _guard(torch._C._to_dlpack)
    for owner in (torch, torch.utils.dlpack):
        patching.replace(
            owner,
            "to_dlpack",
            guarded,
            why="PyTorch's exporter does not ask the tensor, and would hand out an address that is none",
            test="tests/tensor/torch_api/test_tensor_methods.py::test_dlpack_is_refused_with_a_way_out",
        )
    patching.replace(
        torch.Tensor,
        "data",
        property(_get_data, _set_data, _delete_data),
        why="`p.data = q` moves a parameter to another device without another object, as `Module.to` does",
        test="tests/tensor/torch_api/test_tensor_methods.py::test_data_moves_a_parameter_to_the_worker_and_back",
    )
