"""TorchScript: C++ writes and reads files, and handles storages of tensors without a word to the device; and traces."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.metadata import plain_meta
from skyproxy.tensor.core.prefetching import reading_ahead
from skyproxy.tensor.core.remote_tensor import RemoteTensor, adopt
from skyproxy.tensor.core.storage import root_of, view_of
from skyproxy.tensor.core.torch_private import OpOverload, TensorBase

_TESTS = "tests/tensor/torch_api/test_torchscript.py"
_WRITERS = {
    "ScriptModule": ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"),
    "ScriptFunction": ("save", "save_to_buffer"),
}
_SETTERS = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
_TRACERS = {
    "": ("_create_graph_by_tracing", "_create_function_from_trace", "_create_function_from_trace_with_dict"),
    "ScriptModule": ("_create_method_from_trace", "_create_method_from_trace_with_dict"),
}
_READERS = ("import_ir_module", "import_ir_module_from_buffer", "_import_ir_module_from_package")


# --- writing ---------------------------------------------------------------------------------------------------------


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that a script module or function would write: parameters, attributes, constants of graphs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch._C.ScriptModule):
        module: Any = value
        for parts in ("ParameterDict", "BufferDict", "ModuleDict"):
            for _, item in getattr(torch._C, parts)(module).items():
                yield from _tensors_of(item)
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._type())
        for name in kind.get_attributes():
            yield from _tensors_of(module.getattr(name))
        for name in module._method_names():
            yield from _constants_of(module._get_method(name).inlined_graph)
    elif isinstance(value, torch._C.ScriptFunction):
        yield from _constants_of(value.inlined_graph)
    elif isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            yield from _tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)


def _constants_of(graph: Any) -> Iterator[torch.Tensor]:
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            yield node.t("value")


class _Writing(TorchDispatchMode):
    """Answers C++, which sets the storage of each tensor that it writes into an empty one, and copies that to the CPU.

    All values are read before, in blocks. A storage of C++ ends where its tensor does, and is that tensor's own.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: dict[int, torch.Tensor] = {}
        self._copied: dict[int, torch.Tensor] = {}
        wholes: dict[int, RemoteTensor] = {}
        for tensor in tensors:
            if type(tensor) is RemoteTensor and tensor.layout is torch.strided and _address(tensor) not in wholes:
                storage: Any = TensorBase.untyped_storage(tensor)
                count = storage.nbytes() // tensor.element_size()
                wholes[storage._cdata] = view_of(root_of(tensor), plain_meta((count,), tensor.dtype))
        with reading_ahead(wholes.values()):
            for address, whole in wholes.items():
                self._values[address] = whole.cpu().clone()  # it has a storage of its own

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in _SETTERS and type(args[0]) is RemoteTensor and args[1]._cdata in self._values:
            self._copied[id(args[0])] = self._values[args[1]._cdata]
            return args[0]
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._copied:
            return self._copied.pop(id(args[0]))
        return func(*args, **(kwargs or {}))


def _writing(write: Callable[..., object]) -> Callable[..., object]:
    """Return a writer of C++ to whom the values of all tensors are there."""

    @functools.wraps(write)
    def write_watched(self: Any, *args: Any, **kwargs: Any) -> object:
        with torch.no_grad(), _Writing(_tensors_of(self)):
            return write(self, *args, **kwargs)

    return write_watched


def _packaging(serialize: Callable[..., object]) -> Callable[..., object]:
    """Return the same of the writer of `torch.package`, which is given the module."""

    @functools.wraps(serialize)
    def serialize_watched(self: object, module: Any, *args: Any, **kwargs: Any) -> object:
        with torch.no_grad(), _Writing(_tensors_of(module)):
            return serialize(self, module, *args, **kwargs)

    return serialize_watched


# --- reading ---------------------------------------------------------------------------------------------------------


class _Reading(TorchDispatchMode):
    """Watches C++ read a file.

    A storage goes to the device as a tensor of one dimension, and each tensor of the file is an empty one into which
    C++ sets that storage, sizes and strides. Of that the device hears nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, RemoteTensor] = {}
        self._tensors: list[RemoteTensor] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            self._tell(args[0])  # C++ has just put the tensor together, and makes a variable of it
        result = func(*args, **(kwargs or {}))
        if type(result) is RemoteTensor:
            if func is torch.ops.aten._to_copy.default:
                self._storages[_address(result)] = result
            else:
                self._tensors.append(result)
        return result

    def _tell(self, tensor: object) -> None:
        if type(tensor) is not RemoteTensor or tensor.layout is not torch.strided:
            return
        storage = self._storages.get(_address(tensor))
        if storage is not None and storage is not tensor:
            offset = int(tensor.storage_offset())
            meta = plain_meta(tuple(tensor.size()), tensor.dtype, tensor.stride(), offset)
            adopt(tensor, view_of(root_of(storage), meta)._sky)

    def finish(self) -> None:
        """Do the same for tensors that C++ kept as they were."""
        with torch.no_grad():
            for tensor in self._tensors:
                self._tell(tensor)


def _address(tensor: torch.Tensor) -> int:
    return int(TensorBase.untyped_storage(tensor)._cdata)


def _reading(read: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(read)
    def read_watched(*args: object, **kwargs: object) -> object:
        with _Reading() as reading:
            module = read(*args, **kwargs)
        reading.finish()
        return module

    return read_watched


# --- tracing ---------------------------------------------------------------------------------------------------------


def _trace_convolution(*args: Any) -> torch.Tensor:
    """A convolution, by the operation that it becomes in ATen: a trace has that one, and nothing of the former."""
    flags = torch.backends.cudnn
    result: torch.Tensor = torch.ops.aten._convolution.default(
        *args, flags.benchmark, flags.deterministic, flags.enabled, flags.allow_tf32
    )
    return result


class _Traces:
    """The traces that are being made, in all threads."""

    count = 0
    kernels: torch.library.Library | None = None
    lock = threading.Lock()

    @classmethod
    def add(cls, number: int) -> None:
        """Count traces that begin or end, and have our kernel in force while there are any."""
        with cls.lock:
            cls.count += number
            if cls.count and cls.kernels is None:
                cls.kernels = torch.library.Library("aten", "IMPL")
                cls.kernels.impl("convolution", _trace_convolution, "AutogradPrivateUse1")
            elif not cls.count and cls.kernels is not None:
                cls.kernels._destroy()
                cls.kernels = None


def _tracing(trace: Callable[..., object]) -> Callable[..., object]:
    """Return a tracer of C++ that sees convolutions of remote tensors."""

    @functools.wraps(trace)
    def trace_watched(*args: object, **kwargs: object) -> object:
        _Traces.add(1)
        try:
            return trace(*args, **kwargs)
        finally:
            _Traces.add(-1)

    return trace_watched


def _install_tracers() -> None:
    for kind, names in _TRACERS.items():
        owner = getattr(torch._C, kind) if kind else torch._C
        for name in names:
            if not patching.is_replaced(owner, name):
                patching.wrap(
                    owner,
                    name,
                    _tracing,
                    why="a trace leaves out convolutions, for ATen traces what they become in its own kernel",
                    test=f"{_TESTS}::test_a_trace_has_convolutions",
                    when=patching.When.FIRST_DEVICE,
                )


def _install_writers() -> None:
    """Replace the writers when the first device comes to exist: before that there is nothing of ours to write."""
    writers = [(getattr(torch._C, kind), name, _writing) for kind, names in _WRITERS.items() for name in names]
    for owner, name, make in (*writers, (torch._C.ScriptModuleSerializer, "serialize", _packaging)):
        if not patching.is_replaced(owner, name):
            patching.wrap(
                owner,
                name,
                make,
                why="C++ writes TorchScript, and asks for storages of tensors by their addresses",
                test=f"{_TESTS}::test_a_file_is_loaded_where_map_location_says",
                when=patching.When.FIRST_DEVICE,
            )


def install() -> None:
    """Have files of TorchScript read and written with the device's help.

    Raises:
        ConfigurationError: this torch reads or writes them in another way.
    """
    for name in _READERS:
        patching.wrap(
            torch._C,
            name,
            _reading,
            why="C++ reads TorchScript, and sets storages and sizes of tensors without a word to the device",
            test=f"{_TESTS}::test_a_file_of_the_cpu_is_loaded_on_a_worker",
        )
    DEVICES.before_new[_install_writers] = None
    DEVICES.before_new[_install_tracers] = None
