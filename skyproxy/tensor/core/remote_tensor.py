"""`RemoteTensor`: a tensor whose values live on a worker. PyTorch sees an ordinary tensor on `sky:k`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from skyproxy.tensor.core.attributes import WHOLE_DICT, Attributes
from skyproxy.tensor.core.memory import note_change
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.torch_private import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    TensorBase,
    disabled_torch_function,
    make_wrapper_subclass,
    set_conjugate,
    set_negative,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skyproxy.tensor.core.devices import Handle

_make_wrapper = make_wrapper_subclass
_ZERO_TENSOR = DispatchKeySet(DispatchKey.ZeroTensor)


class RemoteTensor(torch.Tensor):
    """A tensor on `sky:k`.

    Its metadata (shape, strides, dtype, gradients, views) is here, its values are on the worker. Every operation is
    recorded and sent; only asking for values waits: `.item()`, `.cpu()`, `.tolist()`, `bool()`, printing.

    No `__slots__`: `torch.utils.swap_tensors`, by which `Module.to` keeps a parameter's identity, wants equal slots.

    Example:
        ```python
        x = torch.arange(4.0, device="sky:0")
        assert isinstance(x, skyproxy.RemoteTensor)
        print((x * x).sum().item())  # the only line that waits
        ```
    """

    # As `torch.cuda.FloatTensor` has it: libraries ask the module of a tensor's class whose functions to call, and take
    # what is not in `torch` for an array of NumPy or of nobody (opt_einsum, autoray, eagerpy, wandb).
    __module__ = "torch.sky"

    _sky: Handle

    # By this name, setting it costs each operation no more than setting `__dict__` would.
    _sky_dict = WHOLE_DICT

    @property
    def __dict__(self) -> dict[str, Any]:
        """The attributes that users set. Python itself looks them up in the dict below, where the handle is too."""
        found: dict[str, Any] = self._sky_dict
        if type(found) is not Attributes and "_sky" in found:
            found = self._sky_dict = Attributes(found)
        return found

    @__dict__.setter
    def __dict__(self, attributes: dict[str, Any]) -> None:
        own = self.__dict__
        # Without a handle it becomes a remote tensor now: `torch.utils.swap_tensors` gives it all of another's.
        self._sky_dict = Attributes(attributes, **own.hidden()) if isinstance(own, Attributes) else attributes

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`type(tensor)(values)`, as if our tensors and parameters were of PyTorch's own classes.

        Elsewhere a parameter's class is `Parameter`, and code moves one with `type(p)(values, requires_grad=...)`, or
        with `requires_grad` among all that it finds in `p.__dict__`, as accelerate and peft do.
        """
        make = torch.nn.Parameter if "requires_grad" in kwargs else torch.Tensor
        return make(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        raise AssertionError("replaced by skyproxy.tensor.dispatch.recording")


def make_tensor(meta: Meta, handle: Handle) -> RemoteTensor:
    """A tensor that looks like `meta` and holds `handle`."""
    device = handle.device.torch_device
    if meta.plain:
        tensor = _make_wrapper(RemoteTensor, meta.size, meta.stride, meta.offset, None, meta.dtype, meta.layout, device)
    elif meta.layout is torch.strided:
        tensor = _make_wrapper(RemoteTensor, meta.size, meta.stride, meta.offset, dtype=meta.dtype, device=device)
        if meta.conjugate:
            set_conjugate(tensor, True)
        if meta.negative:
            set_negative(tensor, True)
    else:
        # Compressed layouts abort the process unless the class also answers for the layout itself, and refuses to tell
        # strides, as PyTorch's do: what `torch.func` wraps takes them along, and has no layout (`ops.sparse_tensors`).
        compressed = meta.layout is not torch.sparse_coo
        tensor = _make_wrapper(
            RemoteTensor,
            meta.size,
            (0,) * len(meta.size) if compressed else None,
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
            dispatch_layout=compressed,
            dispatch_sizes_strides_policy="strides" if compressed else None,
        )
    # Not `tensor._sky = handle`: that would give the tensor a dict with room for thirty attributes.
    tensor._sky_dict = {"_sky": handle}
    return tensor


class RemoteZeros(RemoteTensor):
    """Zeros that PyTorch's C++ knows to be zeros: times an infinity they stay zeros, as tangents do that are missing.

    PyTorch calls these ZeroTensors, and makes them for forward-mode AD alone. Elsewhere they have no memory; here they
    are ordinary zeros with PyTorch's dispatch key. See `ops.zero_tensors`.
    """

    __module__ = RemoteTensor.__module__


OWN_CLASSES = frozenset({RemoteTensor, RemoteZeros})
"""Classes of tensors that are of no class of the user's."""


def make_zeros(meta: Meta, handle: Handle) -> RemoteZeros:
    """Zeros that look like the strided `meta` and hold `handle`, whose value on the worker is zeros."""
    zeros: RemoteZeros = _make_wrapper(
        RemoteZeros,
        meta.size,
        meta.stride,
        meta.offset,
        dtype=meta.dtype,
        device=handle.device.torch_device,
        _extra_dispatch_keys=_ZERO_TENSOR,
    )
    if meta.conjugate:
        set_conjugate(zeros, True)
    if meta.negative:
        set_negative(zeros, True)
    zeros._sky_dict = {"_sky": handle}
    return zeros


def is_wrapper_class(kind: type) -> bool:
    """Return whether this is a class of tensors with its own dispatch in Python, which may have no memory."""
    own = torch.Tensor.__torch_dispatch__
    return kind is not RemoteTensor and issubclass(kind, torch.Tensor) and kind.__torch_dispatch__ is not own


def run_on_wrappers(
    func: OpOverload, types: Iterable[type] | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Run an operation by the dispatch of other classes among its operands, to which ours are what plain tensors are.

    PyTorch names the classes that have a dispatch to each of them, and so ours, but never `torch.Tensor`: a class that
    knows no other than its own takes a tensor of the CPU, and would refuse one of ours.

    Returns:
        What the first of them gives; `NotImplemented` if none takes the operation, or there is none.
    """
    others = tuple(kind for kind in types or () if not issubclass(kind, RemoteTensor))
    for kind in others:
        result: object = kind.__torch_dispatch__(func, others, args, kwargs)  # type: ignore[attr-defined]
        if result is not NotImplemented:
            return result
    return NotImplemented


def make_view(meta: Meta, handle: Handle, base: torch.Tensor) -> RemoteTensor:
    """A tensor that shares its storage with `base`; an inference tensor if that is one, whatever the mode is now."""
    inference = base.is_inference()
    if inference == torch.is_inference_mode_enabled():
        return make_tensor(meta, handle)
    with torch.inference_mode(inference):
        return make_tensor(meta, handle)


def set_metadata(tensor: RemoteTensor, meta: Meta) -> None:
    """Makes a tensor look otherwise after an operation that changed it in place; identity and version stay."""
    handle = tensor._sky
    owner = handle.root or handle
    if owner.copied and owner.copy.final:
        # It may be the very tensor that a sparse one has for a part, whose look is known as that one's.
        handle.device.recorder.hidden_writes += 1
    note_change(handle, meta)
    handle.meta = meta
    adopt(tensor, handle)


def adopt(tensor: RemoteTensor, handle: Handle) -> None:
    """Makes a tensor hold `handle`, and look like it; its identity, version counter and history stay."""
    meta = handle.meta
    make = make_zeros if type(tensor) is RemoteZeros else make_tensor
    inference = tensor.is_inference()
    if inference == torch.is_inference_mode_enabled():
        fresh = make(meta, handle)
    else:
        with torch.inference_mode(inference):
            fresh = make(meta, handle)
    # PyTorch lets a tensor take over another's look only if their dispatch keys agree, these two bits included; and the
    # first one is for complex numbers only, which the tensor may not have yet.
    if tensor.dtype.is_complex and tensor.is_conj():
        set_conjugate(tensor, False)
    if tensor.is_neg():
        set_negative(tensor, False)
    if meta.conjugate:
        set_conjugate(fresh, False)
    if meta.negative:
        set_negative(fresh, False)
    TensorBase.data.__set__(tensor, fresh)  # type: ignore[attr-defined]
    if meta.conjugate:
        set_conjugate(tensor, True)
    if meta.negative:
        set_negative(tensor, True)
    if (handle.root or handle) is not (tensor._sky.root or tensor._sky):
        tensor._sky_dict.pop("_sky_storage", None)  # would keep memory that the tensor has left
    tensor._sky = handle
