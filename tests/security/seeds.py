"""Calls of operators as PyTorch's own samples make them, to be made hostile by small changes: right in all but one."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_CALLS_AN_OPERATOR = 6
_MOST_ELEMENTS = 4096
Seed = tuple[tuple[Any, ...], dict[str, Any]]


class _Recording(TorchDispatchMode):
    def __init__(self, seeds: dict[str, list[Seed]]) -> None:
        super().__init__()
        self._seeds = seeds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = self._seeds[func.name()]
        leaves = pytree.tree_leaves((args, kwargs))
        small = all(not isinstance(leaf, torch.Tensor) or leaf.numel() <= _MOST_ELEMENTS for leaf in leaves)
        if len(known) < _CALLS_AN_OPERATOR and small:
            known.append(pytree.tree_map(_copied, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf


def record_seeds() -> dict[str, list[Seed]]:
    """Calls by operator, forward and backward, out= and in-place forms included; about a minute."""
    from tests.operator_database import op_db

    seeds: dict[str, list[Seed]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            for dtype in (torch.float32, torch.int64):
                if op.supports_dtype(dtype, "cpu"):
                    _record(op, dtype, seeds)
        _record_layers(seeds)
    return dict(seeds)


def _record_layers(seeds: dict[str, list[Seed]]) -> None:
    """Layers whose operators no sample reaches by itself."""
    nn = torch.nn
    cases: list[tuple[torch.nn.Module, torch.Tensor]] = [
        (nn.LSTM(4, 6), torch.ones(3, 2, 4)),
        (nn.LSTM(4, 6, num_layers=2, bidirectional=True, bias=False), torch.ones(3, 2, 4)),
        (nn.GRU(4, 6), torch.ones(3, 2, 4)),
        (nn.EmbeddingBag(10, 3, mode="max"), torch.ones(4, 2, dtype=torch.int64)),
        (nn.EmbeddingBag(10, 3, mode="mean"), torch.ones(4, 2, dtype=torch.int64)),
        (nn.BatchNorm2d(3), torch.ones(2, 3, 4, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 3, 8)),
    ]
    for module, tensor in cases:
        with _Recording(seeds):
            result = module(tensor)
            (result[0] if isinstance(result, tuple) else result).sum().backward()


def _record(op: Any, dtype: torch.dtype, seeds: dict[str, list[Seed]]) -> None:
    differentiable = op.supports_autograd and dtype is torch.float32
    try:
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), 6))
    except Exception:
        return
    for sample in samples[1::2] or samples:
        try:
            with _Recording(seeds):
                result = op(sample.input, *sample.args, **sample.kwargs)
                leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
                if op.supports_out and "out" not in sample.kwargs and not differentiable:
                    op(sample.input, *sample.args, **sample.kwargs, out=pytree.tree_map(torch.empty_like, result))
                wanted = [x for x in leaves if x.requires_grad]
                if wanted:
                    torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
        except Exception:
            continue
