"""Looks that CUDA's kernels give results other than the CPU's: the client knows each such operator, and asks for it.

The client infers the looks of results with the CPU's rules, whatever the worker has. This needs a build of PyTorch for
CUDA, and no GPU: `make matrix` has one. What PyTorch's fake kernels say of strides was the real ones' on an H200, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from skyproxy.tensor.core.metadata import meta_of
from skyproxy.tensor.dispatch.op_info import OpInfo
from tests.conformance.op_checks import entry_name
from tests.operator_database import op_db

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64)
_SAMPLES = 4
_ENTRIES = op_db if torch.version.cuda else []
_HALVES = (torch.bfloat16, torch.float16)
_HAVE_RULES = ("fft.rfftn", "fft.irfft", "fft.hfft2", "svd", "linalg.eig")


class BothKinds(TorchDispatchMode):
    """Runs each operation of fake tensors of CUDA also with fake tensors of the CPU, and compares.

    Attributes:
        compared: how many were.
        held: how many rules of our own for CUDA were held against its fake kernels.
        problems: those that differ although the client does not ask its worker about them.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.compared = self.held = 0
        self.problems: set[str] = set()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = tree_map(self._on_cpu, (args, kwargs))
        found = func(*args, **kwargs)
        try:
            with self._fakes:
                expected = func(*there[0], **there[1])
        except (RuntimeError, NotImplementedError):  # the CPU has no such kernel: its client would ask, too
            return found
        self.compared += 1
        self._hold_rule(func, args, kwargs, found)
        for on_cuda, on_cpu in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if isinstance(on_cuda, torch.Tensor):
                looks = [_look_of(x) for x in (on_cuda, on_cpu)]
                if looks[0] != looks[1] and not _is_asked_for(func, inputs):
                    self.problems.add(f"{func.name()}: {looks[0]} on CUDA, {looks[1]} on the CPU")
        return found

    def _hold_rule(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        rule = OpInfo(func).cuda_rule
        if rule is None:
            return
        looks = tree_map(lambda x: meta_of(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        told = rule(*looks[0], **looks[1])
        if told is None:
            return
        self.held += 1
        results = [found] if isinstance(found, torch.Tensor) else found
        for real, (meta, _) in zip(results, told, strict=True):
            # The fake kernels do not say that vectors of complex matrices are conjugates; workers are asked there.
            if real.numel() and (real.dtype, tuple(real.shape), real.stride()) != (meta.dtype, meta.size, meta.stride):
                self.problems.add(f"{func.name()}: {_look_of(real)} on CUDA, {meta} by its rule")

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            with self._fakes:
                made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
                return made.conj() if value.is_conj() else made
        return torch.device("cpu") if isinstance(value, torch.device) else value


def _look_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.is_conj(), tensor.stride() if tensor.numel() else None


def _is_asked_for(func: Any, inputs: list[torch.Tensor]) -> bool:
    info = OpInfo(func)
    has_halves = info.asks_worker_for_halves and any(x.dtype in _HALVES for x in inputs)
    return info.asks_worker_for_shape or info.asks_cuda_for_shape or has_halves


def _run(sample: Any, op: Callable[..., Any]) -> BothKinds:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    both = BothKinds(fakes)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        with fakes:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")

    first, rest, named = tree_map(fake, (sample.input, sample.args, sample.kwargs))
    for each in tree_leaves(first):
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            each.requires_grad_()
    try:
        with fakes, both:
            for result in tree_leaves(op(first, *rest, **named)):
                if isinstance(result, torch.Tensor) and result.requires_grad and result.is_floating_point():
                    result.sum().backward(retain_graph=True)
    except Exception:  # what no fake tensor can do; what came before was compared
        pass
    return both


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of PyTorch for CUDA; make matrix has one")
@pytest.mark.parametrize("op", [pytest.param(op, id=entry_name(op)) for op in _ENTRIES])
def test_what_cuda_gives_another_look_is_asked_for(op: Any) -> None:
    compared, held, problems = 0, 0, set()
    for dtype in _DTYPES:
        if op.supports_dtype(dtype, "cpu"):
            for sample in list(op.sample_inputs("cpu", dtype, requires_grad=False))[:_SAMPLES]:
                both = _run(sample, op.op)
                compared, held = compared + both.compared, held + both.held
                problems |= both.problems
    assert problems == set()
    assert held or entry_name(op) not in _HAVE_RULES
    if not compared:
        pytest.skip("nothing of this entry runs with fake tensors of CUDA")
