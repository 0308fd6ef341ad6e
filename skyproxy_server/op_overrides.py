"""Ops that are picked for an accelerator and that have no kernel on the CPU, written with ops that have one.

The client cannot choose otherwise: PyTorch's C++ asks only whether a tensor is on a PrivateUse1 device, and libraries
ask only whether it is on the CPU. Each function does what PyTorch's own CPU path does, operation by operation, so that
the results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy_server.safe_forms import SAFE_FORMS

Tensor = torch.Tensor
CPU_OVERRIDES: dict[str, Callable[..., object]] = {}


def _override(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(function: Callable[..., object]) -> Callable[..., object]:
        CPU_OVERRIDES[name] = function
        return function

    return register


@_override("aten::_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM step: gates (N, 4H) and cell (N, H) to hidden (N, H), cell (N, H) and the activated gates (N, 4H)."""
    gates = _add_bias(input_gates, input_bias) + _add_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = (f * cx).add_(i * g)
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@_override("aten::_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the gates (N, 4H), of the cell (N, H), and of the bias (4H)."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    if grad_hy is None:
        grad_o, grad_c = torch.zeros_like(cx), grad_cy
    else:
        grad_o = grad_hy * tanh_cy
        grad_c = torch.ops.aten.tanh_backward(grad_hy * o, tanh_cy)
        if grad_cy is not None:
            grad_c = grad_cy + grad_c
    assert grad_c is not None
    grad_gates = torch.cat(
        [
            torch.ops.aten.sigmoid_backward(grad_c * g, i),
            torch.ops.aten.sigmoid_backward(grad_c * cx, f),
            torch.ops.aten.tanh_backward(grad_c * i, g),
            torch.ops.aten.sigmoid_backward(grad_o, o),
        ],
        1,
    )
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


@_override("aten::_thnn_fused_gru_cell")
def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One GRU step: gates (N, 3H) and hidden (N, H) to hidden (N, H) and a workspace (N, 5H)."""
    ir, ii, inn = _add_bias(input_gates, input_bias).chunk(3, 1)
    hr, hi, hn = _add_bias(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (hr + ir).sigmoid()
    update = (hi + ii).sigmoid()
    new = (inn + reset * hn).tanh()
    return (hx - new) * update + new, torch.cat([reset, update, new, hx, hn], 1)


@_override("aten::_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of the input gates, the hidden gates (N, 3H), the hidden state (N, H) and the two biases (3H)."""
    reset, update, new, hx, hn = workspace.chunk(5, 1)
    grad_update = torch.ops.aten.sigmoid_backward(grad_hy * (hx - new), update)
    grad_new = torch.ops.aten.tanh_backward(grad_hy - grad_hy * update, new)
    grad_reset = torch.ops.aten.sigmoid_backward(grad_new * hn, reset)
    grad_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    grad_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    grad_hx = grad_hy * update
    if not has_bias:
        return grad_input, grad_hidden, grad_hx, None, None
    return grad_input, grad_hidden, grad_hx, grad_input.sum(0), grad_hidden.sum(0)


def _add_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


@_override("aten::mkldnn_rnn_layer")
def lstm_layer(*arguments: object) -> tuple[Tensor, ...]:
    """One oneDNN layer of an LSTM. The kernel rounds otherwise where gradients are off.

    The last argument, whether to train, tells whether they are on for the client.
    """
    with torch.set_grad_enabled(bool(arguments[-1])):
        layer: tuple[Tensor, ...] = SAFE_FORMS["aten::mkldnn_rnn_layer"](*arguments)
    return layer


@_override("aten::_sparse_mm_reduce_impl")
def sparse_mm_reduce(left: Tensor, right: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The product of a CSR matrix (N, K) and a dense one (K, M), reduced; and where each result came from.

    The kernel notes the latter for inputs that require gradients only. Gradients are the client's business, so that
    here no input does; but its backward needs the note, and crashes without it.
    """
    if reduce not in ("amax", "amin"):
        plain: tuple[Tensor, Tensor] = torch.ops.aten._sparse_mm_reduce_impl(left, right, reduce)
        return plain
    with torch.enable_grad():
        noted: tuple[Tensor, Tensor] = torch.ops.aten._sparse_mm_reduce_impl(
            left, right.detach().requires_grad_(), reduce
        )
    return noted


@_override("aten::_sparse_mm_reduce_impl_backward")
def sparse_mm_reduce_backward(
    left: Tensor, grad: Tensor, weight: Tensor, reduce: str, places: Tensor, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of both factors; refuses what would crash the kernel."""
    grads: tuple[Tensor | None, Tensor | None] = SAFE_FORMS["aten::_sparse_mm_reduce_impl_backward"](
        left, grad, weight, reduce, places, output_mask
    )
    return grads


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@_override("aten::histc")
def histogram(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts of values in equal bins, (bins,), in the dtype of the values. The CPU's kernel knows no integers."""
    if values.dtype not in _INTEGERS:  # of complex numbers and booleans, whose kernels refuse them, half would be lost
        return torch.histc(values, bins, min, max)
    # Exact: a double holds every count, and every integer up to 2^53.
    return torch.histc(values.double(), bins, min, max).to(values.dtype)


@_override("aten::addbmm_")
def addbmm_in_place(
    target: Tensor, first: Tensor, second: Tensor, *, beta: float | complex = 1, alpha: float | complex = 1
) -> Tensor:
    """Add products of matrices, (B, N, M) and (B, M, P), to a target that broadcasts to (N, P) and gets that size.

    PyTorch's kernel resizes the target before it looks at dtypes. So one product is tried beside it first: an operation
    that is refused leaves the target alone.
    """
    if first.dim() == second.dim() == 3:
        torch.addbmm(target, first[:1], second[:1], beta=beta, alpha=alpha)
    return target.addbmm_(first, second, beta=beta, alpha=alpha)
