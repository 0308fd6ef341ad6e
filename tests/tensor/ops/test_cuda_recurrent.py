"""Recurrent networks of a CUDA worker: what is sent. cuDNN is played by functions on a worker with a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import skyproxy
from skyproxy.node import Node
from skyproxy.tensor.core.devices import DEVICES


def play_cudnn() -> None:
    """On the worker: cuDNN's operators for its CPU, which take what those take, and compute layer by layer."""
    import concurrent.futures

    import torch

    if hasattr(torch._C, "_skyproxy_cudnn"):
        return
    library = torch.library.Library("aten", "IMPL")
    played: dict[str, Any] = {"library": library, "calls": [], "seeds": [], "dtypes": set()}
    kinds = [torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru]

    def network(x, weights, width, hx, cx, mode, layers, batch_first, ways, sizes, p, seed):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(seed)
        final = []
        for layer in range(layers):
            rows = slice(layer * ways, (layer + 1) * ways)
            states = [hx[rows], cx[rows]] if mode == 2 else hx[rows]
            own = weights[layer * ways * width : (layer + 1) * ways * width]
            options = (width >= 4, 1, 0.0, True, ways == 2)
            with torch.backends.mkldnn.flags(enabled=False):
                if sizes:
                    x, *found = kinds[mode](x, torch.tensor(sizes), states, own, *options)
                else:
                    x, *found = kinds[mode](x, states, own, *options, batch_first)
            final.append(found)
            if p and layer < layers - 1:
                x = x * torch.empty(x.shape).bernoulli_(1 - p, generator=generator).div_(1 - p).to(x.dtype)
        return (x, *(torch.cat(parts) for parts in zip(*final, strict=True)))

    def forward(  # type: ignore[no-untyped-def]
        x, weights, width, buffer, hx, cx, mode, hidden, projected, layers, batch_first, p, train, two, sizes, state
    ):
        assert buffer is None
        assert hx.is_contiguous() and (cx is None or cx.is_contiguous())  # noqa: PT018
        assert (cx is not None) == (mode == 2)
        assert {x.dtype} == {t.dtype for t in (*weights, hx, *([] if cx is None else [cx]))}
        played["calls"].append("forward")
        played["dtypes"].add(x.dtype)
        seed = 0
        if p and train:
            seed = int(state[:8].view(torch.int64))
            state[:8].view(torch.int64).add_(1)
        found = network(x, weights, width, hx, cx, mode, layers, batch_first, two + 1, sizes, p if train else 0, seed)
        # As long as the library wants it; and the seed that its masks are drawn with.
        reserve = torch.zeros(8 * (1 + x.numel()) if train else 0, dtype=torch.uint8)
        if train:
            reserve[:8].view(torch.int64).fill_(seed)
        flat = torch.cat([w.flatten() for w in weights])
        output = found[0].transpose(0, 1).contiguous().transpose(0, 1) if batch_first and not sizes else found[0]
        return output, found[1], found[2] if mode == 2 else hx.new_empty(0), reserve, flat

    def backward(  # type: ignore[no-untyped-def]
        *args,
    ):
        x, weights, width, buffer, hx, cx, _output, g, gh, gc, mode, _hidden, _projected = args[:13]
        layers, batch_first, p, train, two, sizes, _state, reserve, mask = args[13:]
        assert train
        assert buffer.numel() == sum(w.numel() for w in weights)
        assert reserve.numel() == 8 * (1 + x.numel())
        played["calls"].append("backward")
        results: list[Any] = []

        def differentiate() -> None:  # in a thread of its own, for in this one gradients are the dispatcher's
            with torch.enable_grad():
                places = [t.detach().clone().requires_grad_() for t in (x, hx, *([] if cx is None else [cx]), *weights)]
                own = places[3 if cx is not None else 2 :]
                seed = int(reserve[:8].view(torch.int64))
                cells = None if cx is None else places[2]
                found = network(
                    places[0], own, width, places[1], cells, mode, layers, batch_first, two + 1, sizes, p, seed
                )
                wanted = [(y, grad) for y, grad in zip(found, (g, gh, gc), strict=False) if grad is not None]
                outputs, gradients = zip(*wanted, strict=True)
                results.extend(torch.autograd.grad(outputs, places, gradients, allow_unused=True))

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(differentiate).result()
        dx, dhx = results[:2]
        dhx = torch.zeros_like(hx) if dhx is None else dhx
        rest = results[3 if cx is not None else 2 :]
        joined = torch.cat([grad.flatten() for grad in rest])
        parts = joined.split([w.numel() for w in weights])  # views of one buffer
        return dx, dhx, None if cx is None else results[2], [a.view(w.shape) for a, w in zip(parts, weights)] * mask[3]

    def state(p, train, seed, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
        played["seeds"].append(seed)
        made = torch.zeros(64, dtype=dtype)
        made[:8].view(torch.int64).fill_(seed % 1000)
        return made

    library.impl("_cudnn_rnn", forward, "CPU")
    library.impl("_cudnn_rnn_backward", backward, "CPU")
    library.impl("_cudnn_init_dropout_state", state, "BackendSelect")
    torch._C._skyproxy_cudnn = played  # type: ignore[attr-defined]  # a place that outlives this call


def told() -> dict[str, Any]:
    """On the worker: what was asked of it since the last time."""
    import torch

    played = torch._C._skyproxy_cudnn  # type: ignore[attr-defined]
    found = {name: played[name].copy() for name in ("calls", "seeds", "dtypes")}
    for name in found:
        played[name].clear()
    return found


@pytest.fixture(scope="module")
def worker(sky_devices: tuple[str, str]) -> Iterator[Node]:
    with skyproxy.launch_local("cpu") as made, pytest.MonkeyPatch.context() as patch:
        made.run(play_cudnn)
        row = DEVICES.of(made.devices[0]).row
        # Only the choice of kernels looks at this; tensors are placed where the worker has a device.
        patch.setitem(row, "type", "cuda")
        patch.setitem(row, "cudnn", True)
        yield made


@pytest.fixture
def node(worker: Node) -> Node:
    worker.run(told)
    return worker


NETWORKS = {
    "lstm": lambda **options: nn.LSTM(3, 4, **options),
    "lstm with a projection": lambda **options: nn.LSTM(3, 4, proj_size=2, **options),
    "gru": lambda **options: nn.GRU(3, 4, **options),
    "tanh": lambda **options: nn.RNN(3, 4, **options),
    "relu": lambda **options: nn.RNN(3, 4, nonlinearity="relu", **options),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bias": False},
]


def results(network: nn.Module, inputs: Any, device: Any, **state: torch.Tensor) -> list[torch.Tensor]:
    """The outputs, the final states, and the gradients of everything."""
    network.zero_grad()
    network.to(device)
    if isinstance(inputs, PackedSequence):
        leaf = inputs.data.detach().to(device).requires_grad_()
        given: Any = PackedSequence(leaf, inputs.batch_sizes)
    else:
        given = leaf = inputs.detach().to(device).requires_grad_()
    output, final = network(given)
    found = [output.data, *(final if isinstance(final, tuple) else [final])]
    sum((x.square().sum() * (number + 1) for number, x in enumerate(found)), torch.zeros((), device=device)).backward()
    found += [leaf.grad, *(p.grad for p in network.parameters())]
    return [x.detach().cpu() for x in found]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_network_is_one_operation_each_way(node: Node, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network, inputs = NETWORKS[kind](**options), torch.randn(5, 2, 3)
    wanted = results(network, inputs, "cpu")
    torch.testing.assert_close(results(network, inputs, node.devices[0]), wanted, rtol=1e-4, atol=1e-5)
    assert node.run(told)["calls"] == ["forward", "backward"]


@pytest.mark.parametrize("kind", NETWORKS)
def test_packed_sequences_are_one_operation_each_way(node: Node, kind: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[kind](num_layers=2, bidirectional=True)
    inputs = pack_padded_sequence(torch.randn(5, 3, 3), [5, 3, 2])
    wanted = results(network, inputs, "cpu")
    torch.testing.assert_close(results(network, inputs, node.devices[0]), wanted, rtol=1e-4, atol=1e-5)
    assert node.run(told)["calls"] == ["forward", "backward"]


def test_a_step_of_known_sizes_waits_for_nothing(node: Node) -> None:
    network, inputs = nn.LSTM(3, 4, 2).to(node.devices[0]), torch.randn(5, 2, 3, device=node.devices[0])
    for _ in range(3):
        before = torch.sky.stats()["round_trips"]
        network(inputs)[0].sum().backward()
        waited = torch.sky.stats()["round_trips"] - before
    assert waited == 0


def test_without_gradients_and_in_inference_mode_it_is_the_same(node: Node) -> None:
    torch.manual_seed(0)
    network, inputs = nn.GRU(3, 4).eval(), torch.randn(5, 2, 3)
    wanted = network(inputs)[0]
    network.to(node.devices[0])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(network(inputs.to(node.devices[0]))[0].cpu(), wanted)
    assert node.run(told)["calls"] == ["forward", "forward"]


def test_dropout_is_seeded_by_the_devices_generator_once_it_was_seeded(node: Node) -> None:
    device = node.devices[0]
    network, inputs = nn.LSTM(3, 4, 2, dropout=0.5), torch.randn(5, 2, 3)
    network.to(device)
    placed = inputs.to(device)
    drawn = []
    for seed in (7, None, 7, 8):
        if seed is not None:
            torch.manual_seed(seed)
        drawn.append(network(placed)[0].detach().cpu())
    seeds = [
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(n)).item() for n in (7, 8)
    ]
    assert node.run(told)["seeds"] == [seeds[0], seeds[0], seeds[1]]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    state = torch.sky.get_rng_state(device)
    network(placed)
    torch.sky.set_rng_state(state, device)
    network.eval()(placed)  # draws nothing
    assert node.run(told)["seeds"] == []
    network.train()(placed)
    assert len(node.run(told)["seeds"]) == 1


def test_gradients_see_the_numbers_that_were_dropped(node: Node) -> None:
    network, inputs = nn.GRU(3, 4, 2, dropout=0.5).double().to(node.devices[0]), torch.randn(3, 2, 3).double()

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        found: torch.Tensor = network(x)[0]
        return found

    # What is played cannot give undefined tensors in a list, as the real one does where no gradient came.
    placed = inputs.to(node.devices[0]).requires_grad_()
    assert torch.autograd.gradcheck(function, placed, fast_mode=True, check_undefined_grad=False)


def test_second_derivatives_are_refused_as_on_cuda(node: Node) -> None:
    network, inputs = nn.LSTM(3, 4).to(node.devices[0]), torch.randn(5, 2, 3, device=node.devices[0]).requires_grad_()
    (first,) = torch.autograd.grad(network(inputs)[0].square().sum(), inputs, create_graph=True)
    with pytest.raises(
        (RuntimeError, NotImplementedError), match=r"[Dd]ouble backwards? is not supported for CuDNN RNNs"
    ):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_it_in_float16_whatever_its_dtype_is(node: Node, dtype: torch.dtype) -> None:
    network, inputs = nn.LSTM(3, 4).to(node.devices[0]), torch.randn(5, 2, 3, device=node.devices[0])
    with torch.autocast("sky", dtype):
        output = network(inputs)[0]
    output.sum().backward()
    assert output.dtype is torch.float16
    assert {p.grad.dtype for p in network.parameters() if p.grad is not None} == {torch.float32}
    assert node.run(told)["dtypes"] == {torch.float16}


def test_where_cudnn_is_not_to_be_used_cells_are_sent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    network, inputs = nn.LSTM(3, 4).to(node.devices[0]), torch.randn(5, 2, 3, device=node.devices[0])
    wanted = network(inputs)[0]
    assert node.run(told)["calls"] == ["forward"]
    with torch.backends.cudnn.flags(enabled=False):
        torch.testing.assert_close(network(inputs)[0], wanted)
    monkeypatch.delitem(DEVICES.of(node.devices[0]).row, "cudnn")
    torch.testing.assert_close(network(inputs)[0], wanted)
    assert node.run(told)["calls"] == []


def test_nobody_is_told_that_the_weights_are_no_buffer(node: Node, recwarn: pytest.WarningsRecorder) -> None:
    nn.LSTM(3, 4).to(node.devices[0])(torch.randn(6, 2, 3, device=node.devices[0]))
    torch.sky.synchronize()
    assert [str(warning.message) for warning in recwarn if "contiguous" in str(warning.message)] == []
