"""Kernels that record, for PyTorch's dispatcher: they run where no remote tensor's class is asked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy.tensor.dispatch.factories import create
from skyproxy.tensor.dispatch.op_info import OpInfo, info_of
from skyproxy.tensor.dispatch.recording import record


def kernel(name: str) -> Callable[..., object]:
    """A kernel for the op of this name that records it."""
    packet_name, _, overload_name = name[len("aten::") :].partition(".")
    infos: list[OpInfo] = []

    def run(*args: object, **kwargs: object) -> object:
        if not infos:
            infos.append(info_of(getattr(getattr(torch.ops.aten, packet_name), overload_name or "default")))
        info = infos[0]
        return create(info, info.func, args, kwargs) if info.creates else record(info, info.func, args, kwargs)

    return run
