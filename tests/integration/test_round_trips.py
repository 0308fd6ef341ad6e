"""How often programs wait: a table of programs and the number of round trips that one of their steps may take.

Each wait costs the network's delay. What a step asks for by nature (`item()` of what was just computed) is in the
table; nothing else is allowed.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization.observer import HistogramObserver
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZERS: list[tuple[str, dict[str, Any], int]] = [
    ("Adadelta", {}, 0),
    ("Adadelta", {"foreach": False}, 0),
    ("Adadelta", {"capturable": True}, 0),
    ("Adafactor", {}, 8),  # the norms of each parameter and of its update
    ("Adagrad", {}, 0),
    ("Adagrad", {"foreach": False}, 0),
    ("Adam", {}, 0),
    ("Adam", {"foreach": False, "amsgrad": True}, 0),
    ("Adam", {"foreach": False, "lr": torch.tensor(1e-3)}, 0),
    ("Adam", {"fused": True}, 0),
    ("Adam", {"capturable": True, "lr": torch.tensor(1e-3)}, 0),
    ("AdamW", {}, 0),
    ("AdamW", {"foreach": False}, 0),
    ("AdamW", {"capturable": True, "foreach": False}, 0),
    ("Adamax", {}, 0),
    ("Adamax", {"foreach": False}, 0),
    ("ASGD", {}, 0),
    ("ASGD", {"foreach": False}, 0),
    ("ASGD", {"capturable": True}, 0),
    ("NAdam", {}, 0),
    ("NAdam", {"foreach": False}, 0),
    ("NAdam", {"capturable": True}, 0),
    ("RAdam", {}, 0),
    ("RAdam", {"foreach": False}, 0),
    ("RAdam", {"capturable": True}, 0),
    ("RMSprop", {"momentum": 0.9}, 0),
    ("RMSprop", {"foreach": False}, 0),
    ("Rprop", {}, 0),
    ("Rprop", {"foreach": False}, 0),
    ("SGD", {"momentum": 0.9}, 0),
    ("SGD", {"fused": True}, 0),
]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _resumed(name: str, options: dict[str, Any], device: str, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Trains, saves, loads onto the device, and trains on: the round trips of each later step, and the weights."""
    options = {"lr": 1e-3, **options}
    model = _model().to(device)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(device)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    first = getattr(torch.optim, name)(model.parameters(), **options)
    for _ in range(2):
        step(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = getattr(torch.optim, name)(model.parameters(), **options)
    second.load_state_dict(torch.load(file, map_location=device))
    found = []
    for _ in range(steps):
        before = torch.sky.stats()["round_trips"]
        step(second)
        found.append(torch.sky.stats()["round_trips"] - before)
    return found, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(("name", "options", "most"), OPTIMIZERS)
def test_a_resumed_optimizer_waits_for_nothing_it_could_know(
    name: str, options: dict[str, Any], most: int, sky: str
) -> None:
    found, weights = _resumed(name, options, sky, 8)
    assert found == [most] * 8
    if not options.get("capturable"):  # the CPU does not take it
        _, expected = _resumed(name, options, "cpu", 8)
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class _Asked(TorchDispatchMode):
    """Counts how often PyTorch's own code makes a number of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_waits_as_often_as_it_asks(search: str | None, sky: str) -> None:
    def run(device: str, count: Callable[[Callable[[], Any]], int]) -> int:
        model = _model().to(device)
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=search)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return sum(count(lambda: optimizer.step(closure)) for _ in range(3))

    def asked(step: Callable[[], Any]) -> int:
        with _Asked() as mode:
            step()
        return mode.count

    def waited(step: Callable[[], Any]) -> int:
        before = int(torch.sky.stats()["round_trips"])
        step()
        return int(torch.sky.stats()["round_trips"]) - before

    assert 0 < run(sky, waited) <= run("cpu", asked)


INDICES: dict[str, Callable[[], Any]] = {
    "positions": lambda: torch.tensor([2, 0, 2]),
    "pairs": lambda: (torch.tensor([0, 1]), torch.tensor([1, 1])),
    "a part": lambda: (slice(1, None), torch.tensor([[0, 1], [2, 0]])),
    "rows": lambda: torch.tensor([True, False, True, True]),
    "elements": lambda: torch.arange(12).reshape(4, 3) % 2 == 0,
    "columns": lambda: (slice(None), torch.tensor([True, False, True])),
    "a mask and positions": lambda: (torch.tensor([True, False, True, False]), torch.tensor([1, 2])),
    "nothing": lambda: torch.zeros(4, dtype=torch.bool),
}


def _indexed(index: Any, place: str) -> list[torch.Tensor]:
    x = torch.arange(12.0).reshape(4, 3).to(place).requires_grad_()
    chosen = (x * 2)[index]
    chosen.square().sum().backward()
    filled = x.detach().clone()
    filled[index] = -1.0
    taken = x.detach().clone()
    taken[index] += taken[index]
    added = x.detach().clone()
    if isinstance(index, torch.Tensor):
        added.index_put_((index,), torch.ones((), device=place), accumulate=True)
    assert x.grad is not None
    return [chosen, x.grad, filled, taken, added]


@pytest.mark.parametrize("name", INDICES)
def test_indices_and_masks_of_the_cpu_wait_for_nothing(name: str, sky: str) -> None:
    expected = _indexed(INDICES[name](), "cpu")
    before = torch.sky.stats()["round_trips"]
    found = _indexed(INDICES[name](), sky)
    assert torch.sky.stats()["round_trips"] == before
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("mask", [[True, False, True], [True] * 5, [[True] * 3] * 3])
def test_a_mask_of_the_cpu_that_does_not_fit_is_refused_as_locally(mask: Any, sky: str) -> None:
    x = torch.zeros(4, 3)
    with pytest.raises(IndexError) as expected:
        x[torch.tensor(mask)]
    with pytest.raises(IndexError, match="mask") as found:
        x.to(sky)[torch.tensor(mask)]
    assert str(expected.value) in str(found.value)


def _network(device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).to(device)
    return model, torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


def _averaging(**options: Any) -> Callable[[str], Callable[[], object]]:
    def prepare(device: str) -> Callable[[], object]:
        model, _ = _network(device)
        averaged = torch.optim.swa_utils.AveragedModel(model, **options)
        return lambda: averaged.update_parameters(model)

    return prepare


def _checkpointed(**options: Any) -> Callable[[str], Callable[[], object]]:
    def prepare(device: str) -> Callable[[], object]:
        model, x = _network(device)
        return lambda: torch.utils.checkpoint.checkpoint(model, x, **options).sum().backward()

    return prepare


def _scaled(device: str) -> Callable[[], object]:
    model, x = _network(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("sky")

    def step() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _labelled(device: str) -> Callable[[], object]:
    chances = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1)).to(device)
    targets, lengths = torch.tensor([[1, 2], [3, 1]]).to(device), (torch.tensor([6, 5]), torch.tensor([2, 1]))
    return lambda: nn.functional.ctc_loss(chances.requires_grad_().log_softmax(-1), targets, *lengths).backward()


def _forked(device: str) -> Callable[[], object]:
    def draw() -> None:
        with torch.random.fork_rng([device], device_type="sky"):
            torch.rand(3, device=device)

    return draw


def _cells(kind: str) -> Callable[[str], Callable[[], object]]:
    def prepare(device: str) -> Callable[[], object]:
        cell = getattr(nn, kind)(8, 16).to(device)
        optimizer = torch.optim.AdamW(cell.parameters())
        rows = torch.randn(6, 4, 8).to(device)

        def step() -> None:
            state = None
            for row in rows:
                state = cell(row, state)
            optimizer.zero_grad()
            (state[0] if kind == "LSTMCell" else state).sum().backward()
            optimizer.step()

        return step

    return prepare


STEPS: dict[str, Callable[[str], Callable[[], object]]] = {
    "averaged weights": _averaging(),
    "averaged weights and buffers": _averaging(use_buffers=True),
    "an average by a function for all": _averaging(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)),
    "an average by a function for each": _averaging(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9)),
    "a checkpointed block": _checkpointed(use_reentrant=False),
    "a checkpointed block, reentrant": _checkpointed(use_reentrant=True),
    "a checkpointed block whose state is not kept": _checkpointed(use_reentrant=False, preserve_rng_state=False),
    "a scaler with a fused optimizer": _scaled,
    "CTC with lengths of the CPU": _labelled,
    "a forked generator": _forked,
    "cells of a GRU": _cells("GRUCell"),
    "cells of an LSTM": _cells("LSTMCell"),
    "cells of a plain network": _cells("RNNCell"),
}


@pytest.mark.parametrize("name", STEPS)
def test_tools_of_training_wait_for_nothing(name: str, sky: str) -> None:
    step = STEPS[name](sky)
    for _ in range(3):
        step()
    before = torch.sky.stats()
    for _ in range(4):
        step()
    assert torch.sky.stats()["round_trips"] == before["round_trips"]
    assert torch.sky.stats()["cache_misses"] == before["cache_misses"]


@pytest.mark.parametrize(("kind", "most_misses"), [("GRU", 60), ("LSTM", 20), ("RNN", 12)])
def test_packed_sequences_of_lengths_that_vary_wait_for_nothing(kind: str, most_misses: int, sky: str) -> None:
    network = getattr(nn, kind)(8, 16, batch_first=True, bidirectional=True).to(sky)
    optimizer = torch.optim.AdamW(network.parameters())

    def step(lengths: list[int]) -> None:
        rows = torch.randn(len(lengths), max(lengths), 8).to(sky)
        packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor(lengths), batch_first=True)
        output, _ = nn.utils.rnn.pad_packed_sequence(network(packed)[0], batch_first=True)
        optimizer.zero_grad()
        output.sum().backward()
        optimizer.step()

    before = torch.sky.stats()
    step([7, 5, 2, 1])
    for lengths in ([9, 6, 6, 3], [8, 8, 4, 2], [5, 4, 3, 2], [11, 10, 1, 1]):
        misses = torch.sky.stats()["cache_misses"]
        step(lengths)
        assert torch.sky.stats()["cache_misses"] - misses <= most_misses
    assert torch.sky.stats()["round_trips"] == before["round_trips"]


def test_limits_of_a_histogram_are_searched_without_a_wait_for_each_of_its_sums(sky: str) -> None:
    sample = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", sky):
        observer = HistogramObserver(bins=512).to(device)
        observer(sample.to(device))
        before = torch.sky.stats()
        found.append([part.tolist() for part in observer.calculate_qparams()])
        after = torch.sky.stats()
    assert found[0] == found[1]
    assert after["ops"] - before["ops"] > 500  # comparisons of one sum each
    assert after["round_trips"] - before["round_trips"] <= 16


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_drops_the_same_values_again(reentrant: bool, sky: str) -> None:
    model, x = _network(sky)
    torch.manual_seed(3)
    model(x).sum().backward()
    after = torch.rand(3, device=sky).cpu()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(3)
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    assert torch.equal(torch.rand(3, device=sky).cpu(), after)
    y.sum().backward()
    assert all(torch.equal(p.grad.cpu(), q.cpu()) for p, q in zip(model.parameters(), expected, strict=True))


def test_a_generator_that_was_forked_goes_on_as_before(sky: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3, device=sky).cpu()
    torch.manual_seed(5)
    with torch.random.fork_rng([sky], device_type="sky"):
        torch.manual_seed(7)
        torch.rand(3, device=sky)
    assert torch.equal(torch.rand(3, device=sky).cpu(), expected)
    assert torch.sky.get_rng_state(sky).dtype is torch.uint8  # who looks at it gets it
