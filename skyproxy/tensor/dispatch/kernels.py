"""Kernels that record, for PyTorch's dispatcher: they run where no remote tensor's class is asked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy.errors import SELF_EXPLAINING
from skyproxy.tensor.core.torch_private import DispatchKey, has_kernel
from skyproxy.tensor.dispatch.factories import create
from skyproxy.tensor.dispatch.op_info import OpInfo, info_of
from skyproxy.tensor.dispatch.recording import record

_FOR_ANY_DEVICE = (DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional)
"""Keys of kernels that PyTorch writes in terms of other ops, for every device without one of its own."""


def kernel(name: str) -> Callable[..., object]:
    """A kernel for the op of this name that records it."""
    packet_name, _, overload_name = name[len("aten::") :].partition(".")
    infos: list[OpInfo] = []

    def run(*args: object, **kwargs: object) -> object:
        if not infos:
            infos.append(info_of(getattr(getattr(torch.ops.aten, packet_name), overload_name or "default")))
        info = infos[0]
        try:
            if info.creates:
                return create(info, info.func, args, kwargs)
            result = record(info, info.func, args, kwargs)
        except SELF_EXPLAINING as error:  # of a worker that did not start, too: this may be a program's first operation
            error.__traceback__ = None
            raise
        return _run_on_wrapper(info, args, kwargs) if result is NotImplemented else result

    return run


def _run_on_wrapper(info: OpInfo, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run an op on another class's wrapper of remote tensors, whose own dispatch is off, as on any other device.

    So `torch.compile` turns what it traces in place: `squeeze_` and its like change the sizes of a wrapper. And so
    classes give the wrapper of a view the storage of the wrapper that it is a view of.
    """
    for key in _FOR_ANY_DEVICE:
        if has_kernel(info.name, key.name):
            return info.func._op_dk(key, *args, **kwargs)
    if info.is_view or info.name.startswith("aten::set_.source_"):
        # Only sizes, strides and storages are new, which the kernels for tensors without memory give on any device.
        return info.func._op_dk(DispatchKey.Meta, *args, **kwargs)
    raise NotImplementedError(f"{info.name} is not implemented for {type(args[0]).__name__} on the device sky")
