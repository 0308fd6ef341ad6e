"""Kernels that record, for PyTorch's dispatcher: they run where no remote tensor's class is asked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy.tensor.dispatch.factories import create
from skyproxy.tensor.dispatch.op_info import Plan, plan_of
from skyproxy.tensor.dispatch.recording import record


def kernel(name: str) -> Callable[..., object]:
    """A kernel for the op of this name that records it."""
    packet_name, _, overload_name = name[len("aten::") :].partition(".")
    plans: list[Plan] = []

    def run(*args: object, **kwargs: object) -> object:
        if not plans:
            plans.append(plan_of(getattr(getattr(torch.ops.aten, packet_name), overload_name or "default")))
        plan = plans[0]
        return create(plan, plan.func, args, kwargs) if plan.creates else record(plan, plan.func, args, kwargs)

    return run
