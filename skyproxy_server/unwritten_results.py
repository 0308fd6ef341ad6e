"""Parts of results that kernels leave as they were in memory, cleared behind them: nobody defined what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Clear = Callable[[dict[str, Any], Any], None]
"""Takes the arguments of a call and its result."""


def _lengths(given: dict[str, Any], name: str, like: Tensor) -> Tensor:
    return torch.as_tensor(given[name], device=like.device).reshape(-1, 1, 1)


def _clear_alignments(given: dict[str, Any], result: Any) -> None:
    """Clear what belongs to no step of a sequence and to no place of its target; the backward op reads none of it."""
    alpha: Tensor = result[1]
    steps = torch.arange(alpha.shape[1], device=alpha.device).reshape(1, -1, 1)
    places = torch.arange(alpha.shape[2], device=alpha.device).reshape(1, 1, -1)
    inputs, targets = _lengths(given, "input_lengths", alpha), _lengths(given, "target_lengths", alpha)
    alpha.masked_fill_((steps >= inputs) | (places > 2 * targets), 0)


def _clear_rest_of_groups(given: dict[str, Any], result: Tensor) -> None:
    """Clear what lies behind the last group, and groups of nothing."""
    ends: Tensor | None = given.get("offs")
    if ends is None or result.device.type != "cpu":
        return
    if result.dim() == 3:
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        result[sizes == 0] = 0
    elif given["self"].dim() == 2:
        result[int(ends[-1]) :] = 0
    else:
        result[:, int(ends[-1]) :] = 0


UNWRITTEN: dict[str, Clear] = {"_ctc_loss": _clear_alignments, "_grouped_mm": _clear_rest_of_groups}
"""By the operator's name without its namespace, for each of its overloads."""
