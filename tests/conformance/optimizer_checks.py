"""Holds one entry of PyTorch's optimizer database against the local device: three steps in every form it has."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tests.conformance.op_checks import Tally
from tests.conformance.reference import REFERENCE

STEPS = 3
FORMS: tuple[dict[str, bool], ...] = (
    {},
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"capturable": True},
    {"differentiable": True},
)
_SHAPES = ((3, 4), (4,), (2, 3, 3), (1,))


def check_optimizer(info: Any, device: str) -> Tally:
    """Compares parameters and state after three steps, for each set of options and each form.

    A form that the local device does not have is left out, as is one that the optimizer refuses.
    """
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options, what in _options(info):
            for sparse in (False, True) if info.supports_sparse or info.only_supports_sparse_grads else (False,):
                if info.only_supports_sparse_grads and not sparse:
                    continue

                def run(place: str, options: dict[str, Any] = options, sparse: bool = sparse) -> Any:
                    return _optimize(info, copy.deepcopy(options), place, sparse)

                tally.check(
                    f"{what}{', sparse' if sparse else ''}", lambda run=run: run(REFERENCE), lambda run=run: run(device)
                )
    return tally


def _options(info: Any) -> Iterator[tuple[dict[str, Any], str]]:
    for sample in info.optim_inputs_func(device="cpu"):
        for form in FORMS:
            if all(name not in sample.kwargs for name in form):
                yield {**sample.kwargs, **form}, f"{sample.desc}, {form or 'default'}"


def _optimize(info: Any, options: dict[str, Any], place: str, sparse: bool) -> Any:
    generator = torch.Generator().manual_seed(5)
    shapes = [shape for shape in _SHAPES if len(shape) == 2] if info.optim_cls is torch.optim.Muon else _SHAPES
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    targets = [torch.randn(shape, generator=generator).to(place) for shape in shapes]
    parameters = [torch.nn.Parameter(value.to(place)) for value in values]
    optimizer = info.optim_cls(parameters, **options)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = sum(((p - t) ** 2).sum() for p, t in zip(parameters, targets))
        result.backward()
        if sparse:
            for parameter in parameters:
                parameter.grad = parameter.grad.to_sparse()
        return result

    losses = []
    for _ in range(STEPS):
        if info.step_requires_closure:
            losses.append(optimizer.step(loss))
        else:
            losses.append(loss().detach())
            optimizer.step()
    return losses, [p.detach() for p in parameters], [_state(optimizer.state[p]) for p in parameters]


def _state(state: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state of one parameter; what it keeps on the CPU by itself is left to the parameters to show."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step" and value.dim() > 0
    }
