"""Makes PyTorch know the `sky` device: the only place that touches its registration machinery.

PyTorch's Python backend API (`torch.utils.backend_registration`, tried on 2.11 to 2.13) is private; each use of it
that may change is in this package, and what is missing is reported here, when the device is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyproxy.errors import ConfigurationError
from skyproxy.tensor.dispatch import dispatch
from skyproxy.tensor.engine import Guard, Hooks
from skyproxy.tensor.plans import is_divided

_NATIVE = frozenset({"aten::detach"})
"""Ops left to PyTorch's own kernel: inside fake tensors of our device it makes tensors that no Python may have seen."""
SUPPORTED_TORCH = ((2, 11), (2, 13))
_library: torch.library.Library | None = None
_dispatch_key = "PrivateUse1"


def register(module: Any) -> None:
    """Registers the device, its module (`torch.sky`) and a kernel for every op.

    Raises:
        ConfigurationError: this torch is not supported, or another backend took the one place there is.
    """
    from torch.utils import backend_registration

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None or version < SUPPORTED_TORCH[0]:
        raise ConfigurationError(
            f"skyproxy needs torch 2.11 to 2.13, this is {torch.__version__}. Try: pip install torch==2.13.0"
        )
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "sky"):
        raise ConfigurationError(
            f"the backend {name!r} already uses PyTorch's one place for out-of-tree devices in this process. "
            "Import skyproxy in a process without it."
        )
    setup("sky", backend_module=module, hook=Hooks(), device_guard=Guard())
    _register_kernels()


def _register_kernels() -> None:
    """A kernel for every aten op, and a fallback for the rest.

    A fallback alone breaks whenever a mode is on the stack, or the Python key is excluded: `torch.tensor(...,
    device="sky")`, `new_tensor`, lists of remote tensors. About 2,400 ops, 0.1 s, once.
    """
    global _library
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), _dispatch_key)
    library = torch.library.Library("aten", "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        if is_divided(name) or has_kernel(name, _dispatch_key) or name in _NATIVE:
            continue
        library.m.impl(name[len("aten::") :], _dispatch_key, kernel(name), False)
    _library = library
    _keep.append(fallback)


_keep: list[Any] = []


def kernel(name: str) -> Callable[..., Any]:
    """A kernel for the op of this name that records it."""
    packet_name, _, overload_name = name[len("aten::") :].partition(".")
    resolved: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not resolved:
            resolved.append(getattr(getattr(torch.ops.aten, packet_name), overload_name or "default"))
        return dispatch(resolved[0], args, kwargs)

    return run


def library() -> torch.library.Library:
    """Where further kernels for aten ops are registered."""
    assert _library is not None
    return _library
