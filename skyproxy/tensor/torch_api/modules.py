"""Modules and optimizers: a parameter that moves to a worker stays the same object."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from skyproxy import patching
from skyproxy.interrupts import raised_by_handler
from skyproxy.session.transfer_groups import grouped_upload
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.prefetching import READER, ModuleTensors, SequentialReads, reading_ahead
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.torch_api.subclasses import local_class, put_in_class
from skyproxy.tensor.torch_api.tensor_methods import exchange

_Function = Callable[[torch.Tensor], torch.Tensor]
_plain_apply: Any = None
_ALONE = 3
"""References to a moved tensor that only `DeviceMove` holds: those of its two functions, and that of who counts."""


class _Move(threading.local):
    """The outermost `Module._apply` on this thread.

    Attributes:
        function: what it does to each tensor; None if none is under way.
        replaced: parameters that could not keep their identity, each with its old and new object, by the old one's id.
    """

    function: DeviceMove | None = None
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]]


_move = _Move()


class DeviceMove:
    """The function that `Module._apply` calls for each tensor, and more for a parameter that changes sides.

    A tensor of the CPU and one of a worker are of different classes, so PyTorch could not put the new values into the
    old parameter and would make a new one, which an optimizer made before would never see. So the two are exchanged
    here: the old object becomes the new parameter, and PyTorch finds that nothing is left to do.

    Args:
        function: makes the new tensor of an old one.
        ready: new tensors that were made already, each with its old one, by the old one's id.

    Attributes:
        parameters: those of script modules, by their ids: where one was loaded or copied, their class does not say it.
    """

    def __init__(self, function: _Function, ready: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        self._plain = function
        self._ready = ready or {}
        self.parameters: dict[int, torch.Tensor] = {}

    def function(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what becomes of a tensor."""
        # Only once: a parameter that is met again is another tensor by then.
        ready = self._ready.pop(id(tensor), None)
        return ready[1] if ready is not None else self._plain(tensor)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.nn.parameter.is_lazy(tensor):
            return self._lazy(tensor)
        result = self.function(tensor)
        if isinstance(tensor, RemoteTensor) == isinstance(result, RemoteTensor):
            return result
        is_parameter = isinstance(tensor, torch.nn.Parameter) or id(tensor) in self.parameters
        return tensor if is_parameter and self._exchange(tensor, result) else result

    def _lazy(self, tensor: Any) -> torch.Tensor:
        """There is nothing to move yet: the tensor only remembers where it will be, and in which dtype."""
        place = tensor.__dict__.pop("_sky_place", "cpu")
        example = self.function(torch.empty(0, dtype=tensor.data.dtype, device=place))
        if type(example) is not RemoteTensor:
            return self.function(tensor)
        tensor._sky_place = example.device
        tensor.data = torch.empty(0, dtype=example.dtype, device="cpu")
        return tensor  # type: ignore[no-any-return]

    def _exchange(self, parameter: torch.Tensor, result: torch.Tensor) -> bool:
        gradient = _gradient(parameter)
        if gradient is not None:
            parameter.grad = None
        try:
            if isinstance(parameter, torch.nn.Parameter):
                result = _as_parameter(result, sys.getrefcount(result), parameter.requires_grad)
            elif result.requires_grad is not parameter.requires_grad:
                result.requires_grad_(parameter.requires_grad)
            exchange(parameter, result)
        except RuntimeError as error:
            if gradient is not None:
                parameter.grad = gradient  # then PyTorch's way for other devices of this kind: a new parameter
            if raised_by_handler(error):
                raise
            return False
        if gradient is not None:
            moved = self.function(gradient)
            parameter.grad = moved.requires_grad_(gradient.requires_grad)
        return True


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient. What is no leaf, as copies of script modules have, is not asked: that warns."""
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def _as_parameter(fresh: torch.Tensor, references: int, requires_grad: bool) -> torch.Tensor:
    """Make a parameter of a moved tensor: of itself where nobody else holds it, as `Parameter` would of a second one.

    Args:
        fresh: what the move gave.
        references: how many hold it where it is exchanged.
        requires_grad: of the parameter.
    """
    if type(fresh) is not RemoteTensor or references > _ALONE or fresh.requires_grad or fresh.is_inference():
        return torch.nn.Parameter(fresh, requires_grad)
    fresh.requires_grad_(requires_grad)
    fresh._is_param = True
    return fresh


def _new_parameter(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make the constructor of parameters one that keeps the user's classes, also where a function is transformed.

    PyTorch makes parameters of its own tensors in one step, and those of other classes by `requires_grad_`, which it
    refuses in functions that are transformed. What is new belongs to no transformation yet.
    """

    def new(
        cls: type[torch.nn.Parameter], data: torch.Tensor | None = None, requires_grad: bool = True
    ) -> torch.nn.Parameter:
        kind = local_class(cls)
        if not isinstance(data, RemoteTensor):
            made: torch.nn.Parameter = plain(kind, data, requires_grad)
            return made
        if torch._C._functorch.peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                made = plain(kind, data, requires_grad)
        else:
            made = plain(kind, data, requires_grad)
        if kind is not torch.nn.Parameter:
            put_in_class(made, kind)
        return made

    return new


def _apply(self: torch.nn.Module, fn: _Function, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, on which `to`, `half`, `cpu`, `to_empty` and the others stand."""
    if isinstance(fn, DeviceMove):
        return _apply_one(self, fn, recurse)
    outermost = _move.function is None
    if outermost and torch.is_inference_mode_enabled() and not any(p.is_inference() for p in self.parameters()):
        # As PyTorch does on every device: parameters that move in inference mode stay trainable.
        with torch.inference_mode(False), torch.no_grad():
            return _apply(self, fn, recurse)
    crossing = DeviceMove(fn)
    if outermost:
        _move.function, _move.replaced = crossing, {}
    try:
        if outermost:
            crossing = DeviceMove(fn, _move_ahead(self, fn, recurse))
            tensors = ModuleTensors(self)
            READER.module = SequentialReads(lambda: tensors, change=True)
        return _apply_one(self, crossing, recurse)
    finally:
        if outermost:
            _move.function, _move.replaced = None, {}


def _travellers(module: torch.nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    """The module's own tensors that are remote, or travel on the bulk connection; tied ones come more than once."""
    for part in module.modules() if recurse else (module,):
        parameters = [value for value in part._parameters.values() if value is not None]
        gradients = [_gradient(value) for value in parameters if not torch.nn.parameter.is_lazy(value)]  # type: ignore[redundant-expr]
        for tensor in (*parameters, *gradients, *part._buffers.values()):
            if tensor is None:
                continue
            plain = type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.device.type == "cpu"
            if not (plain or type(tensor) is RemoteTensor) or tensor.layout is not torch.strided:
                continue
            travels = type(tensor) is RemoteTensor or tensor.nbytes > SETTINGS.max_inline_bytes
            if travels and (tensor.is_leaf or not tensor.requires_grad):
                yield tensor


def _move_ahead(module: torch.nn.Module, fn: _Function, recurse: bool) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that `fn` moves to another device, moved at once and before the module changes.

    So they travel back to back and behind one progress bar, and an interrupt leaves the module as it was. Small ones
    that are uploaded are left out, because they wait for nothing.
    """
    tensors = {id(tensor): tensor for tensor in _travellers(module, recurse)}
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    total = sum(tensor.nbytes for tensor in tensors.values())
    progress = grouped_upload(f"{type(module).__name__} on its way", total, SETTINGS.show_progress)
    with progress as group, reading_ahead(tensors.values()), torch.no_grad():
        for key, tensor in tensors.items():
            result = fn(tensor)
            moved[key] = tensor, result
            if result.device == tensor.device:
                break  # it moves nothing, or not all
            group.expected_bytes += result.nbytes - tensor.nbytes
    return moved


def _apply_one(module: torch.nn.Module, fn: DeviceMove, recurse: bool) -> torch.nn.Module:
    before = dict(module._parameters.items())
    is_script = isinstance(module, torch.jit.ScriptModule)
    if is_script:
        fn.parameters.update((id(parameter), parameter) for parameter in before.values() if parameter is not None)
    _plain_apply(module, fn, recurse)
    if is_script:
        # C++ holds its parameters, and does not see that an object has become another tensor.
        for name, parameter in before.items():
            module._parameters[name] = parameter
        return module
    replaced = _move.replaced
    for name, old in before.items():
        new = module._parameters.get(name)
        if old is not None and new is not None and new is not old:
            # The old object is kept too: its id must not be given to another one meanwhile.
            known = replaced.setdefault(id(old), (old, new))
            module._parameters[name] = known[1]  # type: ignore[assignment]  # tied weights stay tied
    return module


# --- DataParallel ----------------------------------------------------------------------------------------------------

_plain_parallel: Callable[..., object]


@functools.wraps(torch.nn.DataParallel.__init__)
def _init_parallel(self: Any, module: torch.nn.Module, device_ids: Any = None, *args: object, **kwargs: object) -> None:
    """Have `DataParallel` hand its input to the module where we are the accelerator: workers share no memory."""
    if torch._utils._get_available_device_type() != "sky":
        _plain_parallel(self, module, device_ids, *args, **kwargs)
        return
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, []
    places = DEVICES.existing() if device_ids is None else device_ids
    if len(places) > 1 and any(isinstance(p, RemoteTensor) for p in module.parameters()):
        warnings.warn(
            "DataParallel does not split batches over sky devices: the module runs where its parameters are. To use "
            "several workers, see skyproxy.Compute.",
            stacklevel=2,
        )


# --- lazy modules ----------------------------------------------------------------------------------------------------

_Uninitialized = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_plain_materialize = _Uninitialized.materialize


def _materialize(self: Any, shape: Any, device: torch.device | str | int | None = None, dtype: object = None) -> None:
    """Until it knows its shape, a parameter for a worker stays here, and its class can say that it is lazy."""
    place = torch.device(device) if device is not None else self.__dict__.pop("_sky_place", self.data.device)
    if place.type != "sky":
        _plain_materialize(self, shape, device, dtype)
        return
    _plain_materialize(self, 0, torch.device("cpu"), dtype)
    self.data = torch.empty(shape, device=place, dtype=self.dtype)


def _lazy_new(plain_new: Callable[..., Any]) -> Callable[..., object]:
    signature = inspect.signature(plain_new)

    def new(cls: object, *args: object, **kwargs: object) -> object:
        call = signature.bind(cls, *args, **kwargs)
        device = call.arguments.get("device")
        place = torch.device(device) if device is not None else torch.get_default_device()
        if place.type == "sky":
            call.arguments["device"] = torch.device("cpu")
        tensor = plain_new(*call.args, **call.kwargs)
        if place.type == "sky":
            tensor._sky_place = place
        return tensor

    return staticmethod(new)


def install_parameters() -> None:
    """Replace the constructor of parameters when the first device comes to exist: before, no tensor is remote."""
    if patching.is_replaced(torch.nn.Parameter, "__new__"):
        return
    patching.wrap(
        torch.nn.Parameter,
        "__new__",
        _new_parameter,
        why="transformed functions may make parameters; PyTorch refuses them there for tensors of other classes",
        test="tests/tensor/torch_api/test_modules.py::test_a_transformed_function_may_make_parameters",
        when=patching.When.FIRST_DEVICE,
    )


def install() -> None:
    """Replaces `Module._apply`, and lets optimizers use their fused and foreach kernels on remote tensors.

    Raises:
        ConfigurationError: this torch lacks one of the places to do so.
    """
    global _plain_apply, _plain_parallel
    for place in (optimizer_module, _foreach_utils):
        patching.append(
            place,
            "_foreach_supported_types",
            RemoteTensor,
            why="optimizers take one op for all parameters only where the class of each is on this list",
            test="tests/tensor/torch_api/test_optimizers.py::test_an_optimizer_step_costs_few_operations",
        )
    _plain_apply = patching.wrap(
        torch.nn.Module,
        "_apply",
        lambda plain: _apply,
        why="a whole module travels at once, tied weights stay tied, and an interrupt leaves it as it was",
        test="tests/tensor/torch_api/test_modules.py::test_parameters_stay_the_same_objects_on_any_journey",
    )
    _plain_parallel = patching.wrap(
        torch.nn.DataParallel,
        "__init__",
        lambda plain: _init_parallel,
        why="it would spread a module over workers, which share no memory",
        test="tests/tensor/torch_api/test_training_tools.py::test_data_parallel_hands_its_input_to_the_module",
    )
    DEVICES.before_new[install_parameters] = None
    lazy = "a lazy parameter for a worker stays here until it knows its shape"
    test = "tests/tensor/torch_api/test_modules.py::test_lazy_modules_take_shape_on_the_worker"
    patching.replace(_Uninitialized, "materialize", _materialize, why=lazy, test=test)
    for kind in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        patching.wrap(kind, "__new__", _lazy_new, why=lazy, test=test)
