"""Every shape rule against PyTorch's own operator database, with other layouts and batches of one mixed in."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.operator_database import op_db
from tests.tensor.rule_checking import Checking

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
_SAMPLES = 2
_KNOWN_BY_VALUE_ONLY = (
    "IndexError",
    "index out of",
    "out of bounds",
    "Expected all rows of lengths",
    "out of range",
)
"""What only the values of a tensor of indices or lengths tell; the worker raises it."""


def _first(t: torch.Tensor) -> torch.Tensor:
    return t[:1] if t.dim() else t


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t


def _spread(t: torch.Tensor) -> torch.Tensor:
    if t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


_LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (lambda t: t, _turned, _spread, _first)


def _each(change: Callable[[torch.Tensor], torch.Tensor], a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return change(a)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return [_each(change, item) for item in a]
    return a


def _samples(op: Any) -> Iterator[tuple[Any, list[Any], dict[str, Any], bool]]:
    for dtype in _DTYPES:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), _SAMPLES):
            for change in _LAYOUTS:
                with contextlib.suppress(RuntimeError):
                    args = _each(change, list(sample.args))
                    yield _each(change, sample.input), args, sample.kwargs, dtype is torch.float32


def _differentiate(inputs: Any, result: Any) -> None:
    results = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    sums = [t.sum() for t in results if t.requires_grad]
    if sums:
        inputs = inputs if isinstance(inputs, list) else [inputs]
        torch.autograd.grad(sums, inputs, allow_unused=True)


def _run(op: Any, checking: Checking) -> None:
    for value, args, kwargs, is_float in _samples(op):
        for learns in (False, True) if is_float and op.supports_autograd else (False,):
            fresh = _each(lambda t, learns=learns: t.detach().clone().requires_grad_(learns), value)
            # Whatever PyTorch refuses is no answer to compare with.
            with contextlib.suppress(Exception), checking:
                _differentiate(fresh, op(fresh, *args, **kwargs)) if learns else op(fresh, *args, **kwargs)
        if op.inplace_variant is not None:
            with contextlib.suppress(Exception), checking:
                op.inplace_variant(_each(torch.clone, value), *args, **kwargs)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))
def test_every_rule_agrees_with_pytorch_on_its_operator_database(part: int) -> None:
    checking = Checking()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db[part::8]:
            _run(op, checking)
    wrong = {
        name: [text for text in texts if not any(word in text for word in _KNOWN_BY_VALUE_ONLY)]
        for name, texts in checking.wrong.items()
    }
    shown = [f"{len(texts)} of {name}: {texts[0]}" for name, texts in wrong.items() if texts]
    assert not shown, "\n".join(shown)
    assert sum(checking.answered.values()) > 500
