"""LSTM, GRU and simple recurrent networks on a CPU worker, as PyTorch computes them on the CPU.

For accelerators PyTorch takes another way: fused cells, and the input's product step by step. On a CPU worker that
would round otherwise than local PyTorch does, in backward too. So the CPU's way is written out (ATen/native/RNN.cpp):
for an LSTM in float32 one oneDNN operation a layer, otherwise the whole sequence's product with the input weights
first, then one cell a step.
On a CUDA worker cuDNN computes whole networks (`cuda_recurrent`), and what it does not takes PyTorch's own way for
accelerators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    function_transform_level,
    is_forward_ad_active,
    mkldnn_enabled,
    name_gradients,
    unwrap_gradients,
)
from skyproxy.tensor.dispatch.op_info import OpInfo, implements
from skyproxy.tensor.ops import cuda_recurrent
from skyproxy.tensor.ops.own_gradients import wants_stock_formula
from skyproxy.torch_codec import DTYPE_NAMES

Tensor = torch.Tensor
Hidden = tuple[Tensor, ...]
Cell = Callable[[Tensor, Hidden, Sequence[Tensor | None]], Hidden]


def _input_product(step: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    """Return what a step adds to the gates: itself where there is no weight, for it was multiplied before.

    Cells ask for both products in ATen's order, which is that of their nodes in backward, and of what the engine sums.
    """
    weight = weights[0]
    return step if weight is None else linear(step, weight, weights[2])


def _hidden_product(hidden: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    weight = weights[1]
    assert weight is not None
    return linear(hidden, weight, weights[3])


def _lstm_cell(step: Tensor, hidden: Hidden, weights: Sequence[Tensor | None]) -> Hidden:
    hx, cx = hidden
    i, f, g, o = _hidden_product(hx, weights).add_(_input_product(step, weights)).unsafe_chunk(4, 1)
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    cy = (f * cx).add_(i * g)
    hy = o * cy.tanh()
    projection = weights[4]
    return (hy if projection is None else hy.matmul(projection.t())), cy


def _gru_cell(step: Tensor, hidden: Hidden, weights: Sequence[Tensor | None]) -> Hidden:
    (hx,) = hidden
    ir, iz, inew = _input_product(step, weights).unsafe_chunk(3, 1)
    hr, hz, hnew = _hidden_product(hx, weights).unsafe_chunk(3, 1)
    reset = hr.add_(ir).sigmoid_()
    update = hz.add_(iz).sigmoid_()
    new = inew.add(hnew.mul_(reset)).tanh_()
    return ((hx - new).mul_(update).add_(new),)


def _tanh_cell(step: Tensor, hidden: Hidden, weights: Sequence[Tensor | None]) -> Hidden:
    return (_hidden_product(hidden[0], weights).add_(_input_product(step, weights)).tanh(),)


def _relu_cell(step: Tensor, hidden: Hidden, weights: Sequence[Tensor | None]) -> Hidden:
    return (_hidden_product(hidden[0], weights).add_(_input_product(step, weights)).relu(),)


_ONEDNN_LSTM = 2  # oneDNN's number for the kind of network


def _onednn_way(
    sequence: Tensor, hidden: Hidden, weights: Sequence[Tensor | None], backwards: bool, layout: Any
) -> Any:
    weight = weights[0]
    assert weight is not None
    biases = [torch.zeros_like(weight) if bias is None else bias for bias in weights[2:4]]
    hx, cx = hidden
    output, hy, cy, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        sequence, weight, weights[1], *biases, hx, cx, backwards, [], _ONEDNN_LSTM, *layout
    )
    return output, (hy, cy)


def _one_direction(
    cell: Cell, sequence: Tensor, hidden: Hidden, weights: Sequence[Tensor | None], backwards: bool
) -> tuple[Tensor, Hidden]:
    assert weights[0] is not None
    steps = linear(sequence, weights[0], weights[2]).unbind(0)
    weights = [None, *weights[1:]]
    outputs = []
    for step in reversed(steps) if backwards else steps:
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0])
    if not outputs:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    return torch.stack(outputs[::-1] if backwards else outputs, 0), hidden


def _packed_direction(
    cell: Cell,
    batch_sizes: Sequence[int],
    rows: Tensor,
    hidden: Hidden,
    weights: Sequence[Tensor | None],
    backwards: bool,
) -> tuple[Tensor, Hidden]:
    """One direction over a packed sequence: the rows of all steps, of which each has at most as many as the one before.

    Forwards, the states of sequences that have ended are put aside; backwards, those of sequences that begin are added.
    """
    assert weights[0] is not None
    steps = _divide(linear(rows, weights[0], weights[2]), batch_sizes)
    weights = [None, *weights[1:]]
    if backwards:
        initial, count = hidden, batch_sizes[-1]
        hidden = _rows_of(initial, 0, count)
        outputs = []
        for step in reversed(steps):
            if step.size(0) > count:
                hidden = _join([hidden, _rows_of(initial, count, step.size(0))])
                count = step.size(0)
            hidden = cell(step, hidden, weights)
            outputs.append(hidden[0])
        return _unite(outputs[::-1]), hidden
    ended: list[Hidden] = []
    outputs = []
    count = batch_sizes[0]
    for step in steps:
        if step.size(0) < count:
            ended.append(_rows_of(hidden, step.size(0), count))
            hidden = _rows_of(hidden, 0, step.size(0))
            count = step.size(0)
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0])
    return _unite(outputs), _join([hidden, *reversed(ended)])


class _Context(torch.autograd.function.FunctionCtx):
    """Numbers that a forward keeps for its backward."""

    counts: list[int]


class _United(torch.autograd.Function):
    """`torch.cat` of rows. Gradients are parts that begin their memory, each of which looks like many others."""

    @staticmethod
    def forward(ctx: _Context, *parts: Tensor) -> Tensor:
        ctx.counts = [part.size(0) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(_copied_parts(gradient, ctx.counts))


name_gradients(_United, "CatBackward0")
_copied_parts = torch.ops.aten.split_with_sizes_copy.default


def _unite(parts: list[Tensor]) -> Tensor:
    differentiates = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    if not differentiates or wants_stock_formula():
        return torch.cat(parts)
    result: Tensor = _United.apply(*parts)  # type: ignore[no-untyped-call]
    return result


def _divide(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Return the rows of each step. As views they would begin elsewhere for each set of lengths."""
    divide: Callable[[list[int]], Sequence[Tensor]] = functools.partial(_copied_parts, rows)
    return rows.split(list(counts)) if wants_stock_formula() else divide(list(counts))


def _rows_of(hidden: Hidden, begin: int, end: int) -> Hidden:
    return tuple(part.narrow(0, begin, end - begin) for part in hidden)


def _join(hiddens: Sequence[Hidden]) -> Hidden:
    return tuple(torch.cat(parts) for parts in zip(*hiddens, strict=True))


def _network(
    cell: Cell,
    sequence: Tensor,
    hiddens: list[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    batch_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """All layers: (T, N, I), or (N, T, I) batch first, to the outputs and the final hidden states, one each.

    With `batch_sizes`, the number of rows of each step, the sequence is packed: (rows, I).
    """
    if batch_first:
        sequence = sequence.transpose(0, 1)
    onednn = cell is _lstm_cell and batch_sizes is None and _takes_onednn(sequence, hiddens)
    if onednn:
        sequence, hiddens = sequence.contiguous(), [hidden.contiguous() for hidden in hiddens]
        # The kernel looks at whether gradients are on, and at `train` for its backward only: one flag tells the worker.
        layout = (hiddens[0].size(-1), num_layers, has_biases, bidirectional, batch_first, torch.is_grad_enabled())
    ways = 2 if bidirectional else 1
    width = len(params) // (num_layers * ways)
    states = list(zip(*(hidden.unbind(0) for hidden in hiddens), strict=True))
    final: list[Hidden] = []
    for layer in range(num_layers):
        results = []
        for way in range(ways):
            number = layer * ways + way
            weights = _weights(params[number * width : (number + 1) * width], has_biases)
            if onednn:
                output, hidden = _onednn_way(sequence, states[number], weights, way == 1, layout)
            elif batch_sizes is not None:
                output, hidden = _packed_direction(cell, batch_sizes, sequence, states[number], weights, way == 1)
            else:
                output, hidden = _one_direction(cell, sequence, states[number], weights, way == 1)
            results.append(output)
            final.append(hidden)
        sequence = results[0] if ways == 1 else torch.cat(results, results[0].dim() - 1)
        if dropout != 0 and train and layer < num_layers - 1:
            sequence = drop(sequence, dropout)
    if batch_first:
        sequence = sequence.transpose(0, 1)
    return (sequence, *(torch.stack(parts, 0) for parts in zip(*final, strict=True)))


def _takes_onednn(sequence: Tensor, hiddens: list[Tensor]) -> bool:
    """Tell whether PyTorch would compute an LSTM with oneDNN on the worker's CPU: one without a projection, in a dtype
    that its processor has instructions for.
    """
    plain = hiddens[0].size(-1) == hiddens[1].size(-1) and sequence.numel() > 0
    if not plain or not mkldnn_enabled() or is_forward_ad_active():  # oneDNN's way has no tangents
        return False
    if sequence.dtype is torch.float16 and torch.is_grad_enabled():
        return False
    inner = unwrap_gradients(sequence)[0]
    return DTYPE_NAMES.get(sequence.dtype) in inner._sky.device.row.get("onednn_lstm", ())


class _RecordOneDNNCalls(TorchDispatchMode):
    found = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.found |= func._overloadpacket is torch.ops.aten.mkldnn_rnn_layer
        return func(*args, **kwargs or {})


@functools.cache
def _takes_onednn_for_packed() -> bool:
    """Tell whether this PyTorch computes packed sequences of one length with oneDNN, as 2.13 does and 2.11 does not."""
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
    rows, weights, states = zeros(2, 1), [zeros(4, 1), zeros(4, 1)], [zeros(1, 1, 1), zeros(1, 1, 1)]
    mode = _RecordOneDNNCalls()  # type: ignore[no-untyped-call]
    with disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False), mode:
        torch.lstm(rows, torch.tensor([1, 1], device="cpu"), states, weights, False, 1, 0.0, False, False)
    return mode.found


def _weights(given: Sequence[Tensor], has_biases: bool) -> list[Tensor | None]:
    """Input weight, hidden weight, their biases, projection; None for what there is not."""
    count = 4 if has_biases else 2
    biases: list[Tensor | None] = [*given[2:4]] if has_biases else [None, None]
    return [given[0], given[1], *biases, given[count] if len(given) > count else None]


def _is_computed_here(values: Tensor, hx: Any, params: Sequence[Tensor | None]) -> bool:
    """Tell whether tensors are those of a worker's CPU, as they are or under transforms for gradients."""
    inner = unwrap_gradients(values)[0]
    if type(inner) is not RemoteTensor or inner._sky.device.place[0] != "cpu":
        return False
    if function_transform_level() is None:
        return True
    others = (*(hx if isinstance(hx, list | tuple) else [hx]), *params)
    return all(other is None or type(unwrap_gradients(other)[0]) is RemoteTensor for other in others)


def _kernel(overload: OpOverload, cell: Cell, mode: int) -> Callable[..., object]:
    several = cell is _lstm_cell

    def kernel(sequence: Tensor, hx: Any, params: Sequence[Tensor], *options: Any, **named: Any) -> object:
        if cuda_recurrent.takes_cudnn(sequence):
            hiddens = list(hx) if several else [hx]
            return cuda_recurrent.compute_network(mode, sequence, hiddens, params, *options, **named)
        if not _is_computed_here(sequence, hx, params):
            return overload.decompose(sequence, hx, params, *options, **named)
        return _network(cell, sequence, list(hx) if several else [hx], params, *options, **named)

    return kernel


def _packed_kernel(overload: OpOverload, cell: Cell, mode: int) -> Callable[..., object]:
    several = cell is _lstm_cell

    def kernel(rows: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], *options: Any) -> object:
        if cuda_recurrent.takes_cudnn(rows) and batch_sizes.device.type == "cpu":
            hiddens, sizes = list(hx) if several else [hx], batch_sizes.tolist()
            return cuda_recurrent.compute_network(mode, rows, hiddens, params, *options, batch_sizes=sizes)  # type: ignore[misc]
        if batch_sizes.device.type != "cpu" or not _is_computed_here(rows, hx, params):
            return overload.decompose(rows, batch_sizes, hx, params, *options)
        sizes, hiddens = batch_sizes.tolist(), list(hx) if several else [hx]
        gapless = cell is _lstm_cell and sizes[0] == sizes[-1] and _takes_onednn(rows, hiddens)
        if gapless and _takes_onednn_for_packed():
            sequence = rows.view(len(sizes), sizes[0], rows.size(-1))
            output, *final = _network(cell, sequence, hiddens, params, *options)
            return (output.view(rows.size(0), output.size(-1)), *final)
        return _network(cell, rows, hiddens, params, *options, batch_sizes=sizes)  # type: ignore[misc]

    return kernel


_KERNELS: dict[str, Callable[..., object]] = {}
for _name, _cell in (("lstm", _lstm_cell), ("gru", _gru_cell), ("rnn_tanh", _tanh_cell), ("rnn_relu", _relu_cell)):
    _packet = getattr(torch.ops.aten, _name)
    _KERNELS[_name + ".input"] = _kernel(_packet.input, _cell, cuda_recurrent.MODES[_name])
    _KERNELS[_name + ".data"] = _packed_kernel(_packet.data, _cell, cuda_recurrent.MODES[_name])


def _single_step(overload: OpOverload, cell: Cell, several: bool) -> Callable[..., object]:
    """Compute one step, as `nn.LSTMCell` and `nn.GRUCell` ask for it."""

    def kernel(step: Tensor, hx: Any, *weights: Tensor | None) -> object:
        if not _is_computed_here(step, hx, weights):
            return overload.decompose(step, hx, *weights)
        w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
        assert w_ih is not None
        assert w_hh is not None
        _check_step(step, hx if several else [hx], w_ih.size(1), w_hh.size(1))
        hidden = cell(step, tuple(hx) if several else (hx,), (w_ih, w_hh, b_ih, b_hh, None))
        return hidden if several else hidden[0]

    return kernel


def _check_step(step: Tensor, hidden: Sequence[Tensor], input_size: int, hidden_size: int) -> None:
    """Refuse sizes that PyTorch refuses before it computes, in its words.

    Raises:
        RuntimeError: the step or a hidden state has another size than the weights, or other rows.
    """
    if step.size(1) != input_size:
        raise RuntimeError(f"input has inconsistent input_size: got {step.size(1)} expected {input_size}")
    for number, state in enumerate(hidden):
        if step.size(0) != state.size(0):
            rows = f"Input batch size {step.size(0)} doesn't match hidden{number} batch size {state.size(0)}"
            raise RuntimeError(rows)
        if state.size(1) != hidden_size:
            got = f"got {state.size(1)}, expected {hidden_size}"
            raise RuntimeError(f"hidden{number} has inconsistent hidden_size: {got}")


_KERNELS["lstm_cell"] = _single_step(torch.ops.aten.lstm_cell.default, _lstm_cell, True)
_KERNELS["gru_cell"] = _single_step(torch.ops.aten.gru_cell.default, _gru_cell, False)


@implements(*("aten::" + name for name in _KERNELS))
def _undivided_layer(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """In inference mode the op arrives here undecomposed."""
    return _KERNELS[info.name.removeprefix("aten::")](*args, **kwargs)


def install(library: torch.library.Library) -> None:
    """Puts the CPU's way in the place of PyTorch's way for accelerators."""
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
