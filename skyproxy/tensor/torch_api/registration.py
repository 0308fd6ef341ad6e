"""Makes PyTorch know the `sky` device: the only place that touches its registration machinery.

PyTorch's Python backend API (`torch.utils.backend_registration`) is private; each use of it that may change is in this
package, and what is missing is reported here, when the device is registered.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch

from skyproxy import patching, torch_versions
from skyproxy.errors import ConfigurationError
from skyproxy.tensor.core.torch_private import all_op_names, op_names_with_kernel
from skyproxy.tensor.dispatch.kernels import kernel
from skyproxy.tensor.dispatch.op_info import decomposed_ops
from skyproxy.tensor.dispatch.recording import dispatch
from skyproxy.tensor.torch_api import local_accelerator
from skyproxy.tensor.torch_api.autograd import Guard, Hooks

_NATIVE = frozenset({"aten::detach"})
"""Ops left to PyTorch's own kernel: inside fake tensors of our device it makes tensors that no Python may have seen."""
_library: torch.library.Library | None = None
_fallback: torch.library.Library | None = None
_dispatch_key = "PrivateUse1"
_is_named = False
_TESTS = "tests/tensor/torch_api/test_cuda_like_names.py"


def register(module: object) -> None:
    """Register the device, its module (`torch.sky`) and a kernel for every op.

    Warns of a torch that was never tried: most of what is private there stays from one version to the next.

    Raises:
        ConfigurationError: if this torch lacks what the device stands on, or another backend took its only place.
    """
    from torch.utils import backend_registration

    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise ConfigurationError(
            f"torch {torch.__version__} cannot have a device that is written in Python "
            "(torch.utils.backend_registration._setup_privateuseone_for_python_backend is missing). skyproxy was tried "
            f"on torch {torch_versions.TRIED}."
        )
    if (caution := torch_versions.caution(torch.__version__)) is not None:
        warnings.warn(caution, stacklevel=2)
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "sky"):
        raise ConfigurationError(
            f"the backend {name!r} already uses PyTorch's one place for out-of-tree devices in this process. "
            "Import skyproxy in a process without it."
        )
    _name_device(module, setup)
    _register_kernels()


def _name_device(module: object, setup: Callable[..., object]) -> None:
    """Have PyTorch name the device and make the names that every device has: `torch.sky`, `Tensor.sky`, and so on."""
    global _is_named
    backends = torch.utils.backend_registration
    storages = (torch.storage._StorageBase, torch.storage.TypedStorage)
    named = (backends, torch._C._autograd.DeviceType, torch._C._profiler.ProfilerActivity)
    with (
        patching.noting(
            (torch, torch.Tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence, *storages),
            why="PyTorch's own functions make these names for a new device",
            test=f"{_TESTS}::test_storages_move_to_a_device_and_know_theirs",
        ),
        patching.noting(
            named,
            why="the device has its name in C++, and here",
            test=f"{_TESTS}::test_the_backend_has_its_name",
            stays="PyTorch gives its one place for out-of-tree devices to the first who asks, for the whole process",
        ),
    ):
        if _is_named:
            backends.generate_methods_for_privateuse1_backend()
            torch._register_device_module("sky", module)
        else:
            local_accelerator.find_flag()
            setup("sky", backend_module=module, hook=Hooks(), device_guard=Guard())
            local_accelerator.confirm_flag()
            _is_named = True
        backends.generate_methods_for_privateuse1_backend(
            for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
        )
    patching.registered(
        "sys.modules['torch.sky']",
        lambda: sys.modules.pop("torch.sky", None),
        why="`import torch.sky`",
        test=f"{_TESTS}::test_mixed_precision_is_where_cuda_has_it",
    )


def _register_kernels() -> None:
    """A kernel for every aten op, and a fallback for the rest.

    A fallback alone breaks whenever a mode is on the stack, or the Python key is excluded: `torch.tensor(...,
    device="sky")`, `new_tensor`, lists of remote tensors. About 2,400 ops, 0.1 s, once.
    """
    global _library, _fallback
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), _dispatch_key)
    library = torch.library.Library("aten", "IMPL")
    left_out = decomposed_ops().union(op_names_with_kernel(_dispatch_key), _NATIVE)
    for name in all_op_names():
        if not name.startswith("aten::") or name in left_out:
            continue
        library.m.impl(name[len("aten::") :], _dispatch_key, kernel(name), False)  # type: ignore[union-attr]
    _library, _fallback = library, fallback
    patching.registered(
        "kernels of `aten` for the device, and a fallback for other operators",
        _destroy_kernels,
        why="each operation is recorded, and runs on the worker",
        test="tests/tensor/dispatch/test_factories.py::test_a_factory_makes_what_it_makes_locally",
    )


def _destroy_kernels() -> None:
    global _library, _fallback
    for library in (_library, _fallback):
        if library is not None:
            library._destroy()
    _library = _fallback = None


def library() -> torch.library.Library:
    """Return the library in which further kernels for aten ops are registered."""
    assert _library is not None
    return _library
