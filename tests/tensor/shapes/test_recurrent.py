"""Shape rules of recurrent cells, against what the worker computes with; and the cells themselves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from skyproxy.tensor.core.metadata import Meta, meta_of
from skyproxy.tensor.dispatch import inference
from skyproxy.tensor.shapes.recurrent import RULES
from skyproxy_server.op_overrides import CPU_OVERRIDES

ROWS, HIDDEN = 3, 5


def _gates(count: int) -> torch.Tensor:
    return torch.randn(ROWS, count * HIDDEN)


_CELL = torch.randn(ROWS, HIDDEN)
CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("aten::_thnn_fused_gru_cell", (_gates(3), _gates(3), _CELL)),
    ("aten::_thnn_fused_gru_cell", (_gates(3), _gates(3), _CELL, torch.ones(15), torch.ones(15))),
    ("aten::_thnn_fused_lstm_cell", (_gates(4), _gates(4), _CELL)),
    ("aten::_thnn_fused_lstm_cell", (_gates(4), _gates(4), _CELL, torch.ones(20), torch.ones(20))),
    ("aten::_thnn_fused_gru_cell_backward", (_CELL, _gates(5), True)),
    ("aten::_thnn_fused_gru_cell_backward", (_CELL, _gates(5), False)),
    ("aten::_thnn_fused_lstm_cell_backward_impl", (_CELL, _CELL, _CELL, _CELL, _gates(4), True)),
    ("aten::_thnn_fused_lstm_cell_backward_impl", (_CELL, None, _CELL, _CELL, _gates(4), False)),
    ("aten::_thnn_fused_lstm_cell_backward_impl", (None, _CELL, _CELL, _CELL, _gates(4), False)),
]


@pytest.mark.parametrize(("name", "args"), CASES)
def test_rules_of_cells_say_what_comes(name: str, args: tuple[Any, ...]) -> None:
    found = RULES[name](*[meta_of(a) if isinstance(a, torch.Tensor) else a for a in args])
    expected: list[Meta | None] = [None if t is None else meta_of(t) for t in CPU_OVERRIDES[name](*args)]
    assert found is not None
    assert [row[0] for row in found] == expected


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_rules_of_cells_leave_what_does_not_fit_alone(name: str) -> None:
    args = next(args for case, args in CASES if case == name)
    bent = [meta_of(a[:, :-1]) if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args]
    assert RULES[name](*[meta_of(a) if isinstance(a, torch.Tensor) else a for a in bent]) is None


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("slice_backward", (torch.ones(2, 3), [2, 7], 1, 2, 5, 1)),
        ("slice_backward", (torch.ones(3, 2).t(), [2, 7], 1, 0, 9223372036854775807, 3)),
        ("select_backward", (torch.ones(3), [4, 3], 0, -1)),
    ],
)
def test_the_gradient_of_a_part_has_the_size_of_the_whole(name: str, args: tuple[Any, ...]) -> None:
    found = RULES["aten::" + name](*[meta_of(a) if isinstance(a, torch.Tensor) else a for a in args])
    result = getattr(torch.ops.aten, name).default(*args)
    assert found is not None
    assert [row[0] for row in found] == [meta_of(result)]


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell, nn.LSTMCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cells_never_wait(kind: Any, bias: bool, dtype: torch.dtype, sky: str) -> None:
    torch.manual_seed(0)
    cell = kind(6, 7, bias=bias).to(dtype)
    twin = kind(6, 7, bias=bias).to(dtype)
    twin.load_state_dict(cell.state_dict())
    x = torch.randn(4, 3, 6).to(dtype)
    remote, there = cell.to(sky), x.to(sky)

    def run(module: nn.Module, steps: torch.Tensor) -> Any:
        module.zero_grad()
        hidden: Any = None
        for step in steps:
            hidden = module(step, hidden)
        (hidden[0] if isinstance(hidden, tuple) else hidden).sum().backward()
        return hidden

    run(remote, there)
    before = torch.sky.stats()
    found = run(remote, there)
    assert torch.sky.stats()["round_trips"] == before["round_trips"]
    assert torch.sky.stats()["cache_misses"] == before["cache_misses"]
    expected = run(twin, x)
    for ours, theirs in zip(
        found if isinstance(found, tuple) else (found,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        assert torch.equal(ours.cpu(), theirs)
    for ours, theirs in zip(remote.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize(("kind", "most"), [(nn.GRU, 40), (nn.RNN, 40), (nn.LSTM, 60)])
def test_packed_sequences_of_changing_lengths_wait_for_nothing(
    kind: Any, most: int, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, network = random.Random(0), kind(6, 7, batch_first=True).to(sky)
    x = torch.randn(8, 30, 6).to(sky)

    def step() -> None:
        network.zero_grad()
        rows = torch.tensor([30, *(lengths.randint(1, 30) for _ in range(7))])
        packed = pack_padded_sequence(x, rows, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(network(packed)[0], batch_first=True)
        output.sum().backward()

    asked: list[str] = []
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: asked.append(call.info.name))
    step()
    before = torch.sky.stats()
    for _ in range(5):
        step()
    after = torch.sky.stats()
    assert after["round_trips"] == before["round_trips"]
    assert asked == []
    # A few for each time step, of batches that become smaller there in other ways.
    assert after["cache_misses"] - before["cache_misses"] <= 5 * most


NETWORKS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"proj_size": 3}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {}),
    (nn.GRU, {"bias": False}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("kind", "options"), NETWORKS)
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_packed_sequences_are_exact(mode: Any, ways: int, kind: Any, options: dict[str, Any], sky: str) -> None:
    torch.manual_seed(0)
    network = kind(6, 7, 2, bidirectional=ways == 2, batch_first=True, **options)
    twin = kind(6, 7, 2, bidirectional=ways == 2, batch_first=True, **options)
    twin.load_state_dict(network.state_dict())
    x = torch.randn(4, 9, 6)

    def run(module: nn.Module, padded: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for lengths in ([9, 3, 5, 5], [1, 1, 1, 1], [9, 9, 9, 9]):
            rows = pack_padded_sequence(padded, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
            with mode():
                output, hidden = module(rows)
                padded_again, _ = pad_packed_sequence(output, batch_first=True)
            found += [padded_again, *(hidden if isinstance(hidden, tuple) else (hidden,))]
        if mode is torch.enable_grad:
            sum(t.square().sum() for t in found).backward()
            found += [p.grad for p in module.parameters()]
        return [t.detach() for t in found]

    expected = run(twin, x)
    for ours, theirs in zip(run(network.to(sky), x.to(sky)), expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("train", [True, False])
def test_an_lstm_of_one_sequence_is_exact_with_and_without_gradients(train: bool, mode: Any, sky: str) -> None:
    torch.manual_seed(0)
    network, twin = nn.LSTM(6, 7, 2, bidirectional=True).train(train), nn.LSTM(6, 7, 2, bidirectional=True).train(train)
    twin.load_state_dict(network.state_dict())
    network.to(sky)
    for shape in ((9, 1, 6), (1, 1, 6), (9, 4, 6), (5, 6)):
        x = torch.randn(shape)
        with mode():
            assert torch.equal(network(x.to(sky))[0].cpu(), twin(x)[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("options", [{}, {"proj_size": 3}, {"bias": False, "bidirectional": True}], ids=str)
def test_an_lstm_takes_the_kernel_of_the_cpu_in_every_dtype(
    options: dict[str, Any], onednn: bool, dtype: torch.dtype, sky: str
) -> None:
    torch.manual_seed(0)
    twin = nn.LSTM(6, 8, 2, **options).to(dtype)
    network = nn.LSTM(6, 8, 2, **options).to(dtype)
    network.load_state_dict(twin.state_dict())
    network.to(sky)
    x = torch.randn(5, 3, 6).to(dtype)
    with torch.backends.mkldnn.flags(enabled=onednn):
        with torch.no_grad():
            assert torch.equal(network(x.to(sky))[0].cpu(), twin(x)[0])
        for module, values in ((twin, x), (network, x.to(sky))):
            output, (_, cell) = module(values)
            (output.float().sin().sum() + cell.float().sum()).backward()
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_networks_wait_for_nothing_once_their_shapes_were_seen(mode: Any, kind: Any, sky: str) -> None:
    network, x = kind(6, 7, 2).to(sky), torch.randn(5, 3, 6).to(sky)
    with mode():
        network(x)
        before = torch.sky.stats()["round_trips"]
        network(x)
    assert torch.sky.stats()["round_trips"] == before


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda call, weights, x: grad(lambda w: call(w, x).square().sum())(weights),
    "vjp": lambda call, weights, x: vjp(lambda y: call(weights, y), x)[1](call(weights, x)),
    "jacrev": lambda call, weights, x: jacrev(lambda y: call(weights, y))(x),
    "second derivatives": lambda call, weights, x: grad(
        lambda y: grad(lambda z: call(weights, z).square().sum())(y).square().sum()
    )(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_function_transforms_give_the_bits_of_the_cpu(kind: Any, name: str, sky: str) -> None:
    torch.manual_seed(0)
    here = kind(4, 5)
    there = copy.deepcopy(here).to(sky)
    x = torch.randn(2, 4) if "Cell" in kind.__name__ else torch.randn(3, 2, 4)

    def run(module: nn.Module, device: str) -> list[torch.Tensor]:
        def call(weights: Any, y: torch.Tensor) -> torch.Tensor:
            found = functional_call(module, weights, (y,))
            return found[0] if isinstance(found, tuple) else found

        weights = {key: value.detach() for key, value in module.named_parameters()}
        leaves: list[torch.Tensor] = pytree.tree_leaves(TRANSFORMS[name](call, weights, x.to(device)))
        return leaves

    for ours, theirs in zip(run(there, sky), run(here, "cpu"), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_recurrent_networks_have_tangents(kind: Any, sky: str) -> None:
    torch.manual_seed(0)
    here = kind(4, 5).double()
    there = copy.deepcopy(here).to(sky)
    x = torch.randn((2, 4) if "Cell" in kind.__name__ else (3, 2, 4), dtype=torch.float64)

    def last(y: torch.Tensor) -> torch.Tensor:
        found = there(y)
        return found[0] if isinstance(found, tuple) else found

    _, tangent = jvp(last, (x.to(sky),), (x.to(sky),))
    step = 1e-6
    difference = (last((x * (1 + step)).to(sky)) - last((x * (1 - step)).to(sky))) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_differentiated_twice_as_on_the_cpu(kind: Any, sky: str) -> None:
    """The engine sums in the order of nodes, which is that of ATen's two products."""
    torch.manual_seed(0)
    here, step, states = kind(5, 7), torch.randn(4, 5), [torch.randn(4, 7) for _ in range(1 + (kind is nn.LSTMCell))]
    found: list[list[torch.Tensor]] = []
    for device in ("cpu", sky):
        cell = copy.deepcopy(here).to(device)
        inputs = [t.to(device).requires_grad_() for t in (step, *states)]
        results = cell(inputs[0], inputs[1] if len(states) == 1 else tuple(inputs[1:]))
        inputs += cell.parameters()
        loss = sum(t.pow(3).sum() for t in pytree.tree_leaves(results))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
        found.append([t.detach().cpu() for t in (*first, *second)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
