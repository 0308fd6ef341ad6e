"""Shape rules for the cells of recurrent networks. PyTorch has no fake kernels for those of accelerators.

See `shapes.rules`; this module completes its table.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.rules import FLOATS, RuleResult, rule
from skyproxy.tensor.shapes.selections import plain
from skyproxy.tensor.shapes.special_functions import RULES


def _gates(*tensors: Meta, count: int) -> int | None:
    """The hidden size of gates (N, count * H); None if they are none."""
    first = tensors[0]
    fits = all(
        isinstance(t, Meta) and t.plain and t.size == first.size and t.dtype is first.dtype  # type: ignore[redundant-expr]
        for t in tensors
    )
    if not fits or len(first.size) != 2 or first.size[1] % count or first.dtype not in FLOATS:
        return None
    hidden: int = first.size[1] // count
    return hidden


def _rows(like: Meta, *widths: int) -> list[tuple[Meta | None, int | None]]:
    return [(plain_meta((like.size[0], width), like.dtype), None) for width in widths]


@rule("_thnn_fused_gru_cell")
def _gru_cell(input_gates: Meta, hidden_gates: Meta, hx: Meta, *biases: object) -> RuleResult:
    hidden = _gates(input_gates, hidden_gates, count=3)
    fits = (
        hidden is not None and hx.plain and hx.size == (input_gates.size[0], hidden) and hx.dtype is input_gates.dtype
    )
    return _rows(hx, hidden, 5 * hidden) if fits and hidden is not None else None


@rule("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(grad_hy: Meta, workspace: Meta, has_bias: bool) -> RuleResult:
    hidden = _gates(workspace, count=5)
    if hidden is None or grad_hy.size != (workspace.size[0], hidden):
        return None
    bias = (plain_meta((3 * hidden,), workspace.dtype) if has_bias else None, None)
    return [*_rows(workspace, 3 * hidden, 3 * hidden, hidden), bias, bias]


@rule("_thnn_fused_lstm_cell")
def _lstm_cell(input_gates: Meta, hidden_gates: Meta, cx: Meta, *biases: object) -> RuleResult:
    hidden = _gates(input_gates, hidden_gates, count=4)
    fits = (
        hidden is not None and cx.plain and cx.size == (input_gates.size[0], hidden) and cx.dtype is input_gates.dtype
    )
    return _rows(cx, hidden, hidden, 4 * hidden) if fits and hidden is not None else None


@rule("_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(
    grad_hy: Meta | None, grad_cy: Meta | None, cx: Meta, cy: Meta, workspace: Meta, has_bias: bool
) -> RuleResult:
    hidden = _gates(workspace, count=4)
    if hidden is None or cx.size != (workspace.size[0], hidden) or (grad_hy is None and grad_cy is None):
        return None
    bias = (plain_meta((4 * hidden,), workspace.dtype) if has_bias else None, None)
    return [*_rows(workspace, 4 * hidden, hidden), bias]


@rule("_cudnn_rnn_backward")
def _network_backward(
    x: Meta,
    weights: Sequence[Meta],
    weight_stride0: int,
    weight_buffer: Meta,
    hx: Meta,
    cx: Meta | None,
    output: Meta,
    grad_output: Meta | None,
    grad_hy: Meta | None,
    grad_cy: Meta | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Meta | None,
    reserve: Meta,
    output_mask: Sequence[bool],
) -> RuleResult:
    """The kernel computes the gradients of input and states whether they are wanted or not."""
    known = plain(x, hx, *weights) and (cx is None or cx.plain)
    if not known or not train or (grad_output is None and grad_hy is None and grad_cy is None):
        return None
    size = x.size
    time_first = bool(batch_sizes) or not batch_first
    stride = None if time_first else (size[2], size[0] * size[2], 1)
    of_cells = None if cx is None else plain_meta(cx.size, x.dtype)
    of_weights: list[tuple[Meta, int | None]] = [(plain_meta(w.size, w.dtype), None) for w in weights]
    return [
        (plain_meta(size, x.dtype, stride), None),
        (plain_meta(hx.size, x.dtype), None),
        (of_cells, None),
        of_weights if output_mask[3] else [],
    ]


__all__ = ["RULES"]
