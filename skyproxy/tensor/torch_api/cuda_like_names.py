"""Names that code written for `torch.cuda` expects: `torch.sky.amp`, `FloatTensor`, `default_generators` and so on."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.generators import DefaultGenerator
from skyproxy.tensor.torch_api import cuda_like_queries, sky_module, sync_debug
from skyproxy.torch_codec import DTYPE_NAMES

_LEGACY_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _TensorType(type):
    """A legacy tensor type: `isinstance` looks at device and dtype, a call makes a tensor of sizes or of values."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.device.type == "sky" and instance.dtype is cls.dtype

    def __call__(cls, *args: Any, device: Any = "sky") -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype, device=device)
        sizes = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.empty(*(sizes or (0,)), dtype=cls.dtype, device=device)


class _StorageType(torch.storage._LegacyStorage):
    """A legacy storage type, as `torch.cuda.FloatStorage`: its name, its module and its dtype are all it has."""

    @classmethod
    def from_buffer(cls, *args: object, **kwargs: object) -> Any:
        raise RuntimeError("from_buffer: Not available for sky storage")

    @classmethod
    def _new_with_weak_ptr(cls, *args: object, **kwargs: object) -> Any:
        raise RuntimeError("_new_with_weak_ptr: Not available for sky storage")

    @classmethod
    def _new_shared_filename(cls, *args: object, **kwargs: object) -> Any:
        raise RuntimeError("_new_shared_filename: Not available for sky storage")


def _storage_types() -> dict[str, type]:
    """Return `FloatStorage` and its like, which `Tensor.storage_type` and `TypedStorage.type` look for by name."""
    dtypes = {name.replace("Tensor", "Storage"): dtype for name, dtype in _LEGACY_DTYPES.items()}
    dtypes |= {"ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128}
    return {
        name: type(_StorageType)(  # type: ignore[misc]
            name, (_StorageType,), {"dtype": dtype, "_dtype": dtype, "__module__": "torch.sky"}
        )
        for name, dtype in dtypes.items()
    }


class _DefaultGenerators:
    """One default generator a device, by its number."""

    def __init__(self) -> None:
        self._made: dict[int, DefaultGenerator] = {}

    def __len__(self) -> int:
        return sky_module.device_count()

    def __getitem__(self, index: int) -> DefaultGenerator:
        try:
            number = range(len(self))[index]
        except IndexError:
            raise IndexError(f"there is no sky:{index}") from None
        made = self._made.get(number)
        if made is None or made.sky_device is not DEVICES.at(number):  # another session took its place
            made = self._made[number] = DefaultGenerator(f"sky:{number}")
        return made

    def __iter__(self) -> Iterator[DefaultGenerator]:
        return (self[index] for index in range(len(self)))


def _amp() -> types.ModuleType:
    """`torch.sky.amp`, in the shape of `torch.cuda.amp`."""

    class autocast(torch.amp.autocast_mode.autocast):
        """`torch.autocast("sky")`."""

        def __init__(
            self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
        ) -> None:
            super().__init__("sky", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        """`torch.amp.GradScaler("sky")`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("sky", *args, **kwargs)

    module = types.ModuleType("torch.sky.amp", "Automatic mixed precision on remote devices.")
    module.__dict__.update(
        autocast=autocast,
        GradScaler=GradScaler,
        custom_fwd=functools.partial(torch.amp.custom_fwd, device_type="sky"),
        custom_bwd=functools.partial(torch.amp.custom_bwd, device_type="sky"),
    )
    return module


def _parts() -> dict[str, types.ModuleType]:
    """Make `torch.sky.random`, `memory`, `graphs` and `streams`, where other devices have names of `torch.sky`."""
    named = {
        "random": "manual_seed manual_seed_all seed seed_all initial_seed get_rng_state get_rng_state_all "
        "set_rng_state set_rng_state_all",
        "memory": "empty_cache max_memory_allocated max_memory_reserved mem_get_info memory_allocated memory_reserved "
        "memory_stats memory_stats_as_nested_dict memory_summary reset_accumulated_memory_stats "
        "reset_max_memory_allocated reset_peak_memory_stats " + " ".join(cuda_like_queries.OF_MEMORY),
        "graphs": "CUDAGraph graph graph_pool_handle is_current_stream_capturing make_graphed_callables",
        "streams": "Event Stream current_stream default_stream set_stream stream",
    }
    parts = {}
    for part, names in named.items():
        parts[part] = types.ModuleType(f"torch.sky.{part}", f"Functions of `torch.sky`, as in `torch.cuda.{part}`.")
        parts[part].__dict__.update((name, getattr(sky_module.MODULE, name)) for name in names.split())
    return parts


def _warn_of_no_events(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def begin(self: Any, *, activities: Any = None, **options: Any) -> None:
        chosen = set(activities or ())
        if chosen == {torch.profiler.ProfilerActivity.PrivateUse1}:
            warnings.warn(
                "ProfilerActivity.SKY alone records nothing: PyTorch takes events of such a device from C++ only. Add "
                "ProfilerActivity.CPU for the operations that this program records, or take skyproxy.profile(), which "
                "shows what workers do",
                stacklevel=2,
            )
        plain(self, activities=None if activities is None else chosen, **options)

    return begin


def _install_for_devices() -> None:
    """Have profiles that would be empty warned of when the first device comes to exist."""
    if patching.is_replaced(torch.profiler.profile, "__init__"):
        return
    patching.wrap(
        torch.profiler.profile,
        "__init__",
        _warn_of_no_events,
        why="a profile of `ProfilerActivity.SKY` alone is empty: PyTorch takes events of such a device from C++ only",
        test="tests/tensor/torch_api/test_cuda_like_names.py::test_a_profile_that_would_be_empty_is_warned_of",
        when=patching.When.FIRST_DEVICE,
    )


def install() -> None:
    """Put these names into `torch.sky`."""
    DEVICES.before_new[_install_for_devices] = None
    amp = _amp()
    queries = cuda_like_queries.names()
    sky_module.MODULE.__dict__.update(queries)
    parts = _parts()
    importable = {"amp": amp, "amp.autocast_mode": amp, "amp.grad_scaler": amp, "nvtx": queries["nvtx"], **parts}
    for name, part in importable.items():
        patching.enter(
            sys,
            "modules",
            f"torch.sky.{name}",
            part,
            why="`import torch.sky.amp` and its like",
            test="tests/tensor/torch_api/test_cuda_like_names.py::test_parts_can_be_imported_as_those_of_cuda",
        )
    kinds = {
        # The name with its module, which is what `Tensor.type` reads.
        name: _TensorType(
            f"torch.sky.{name}", (), {"dtype": dtype, "__doc__": f"Remote tensors of {DTYPE_NAMES[dtype]}."}
        )
        for name, dtype in _LEGACY_DTYPES.items()
    }
    sky_module.MODULE.__dict__.update(
        amp=amp,
        default_generators=_DefaultGenerators(),
        OutOfMemoryError=torch.OutOfMemoryError,
        AcceleratorError=torch.AcceleratorError,
        get_sync_debug_mode=sync_debug.get_sync_debug_mode,
        set_sync_debug_mode=sync_debug.set_sync_debug_mode,
        **parts,
        **kinds,
        **_storage_types(),
    )
