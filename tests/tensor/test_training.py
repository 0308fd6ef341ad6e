"""Training through a worker gives local PyTorch's losses to the last bit, with nothing asked on the way."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import skyproxy

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Batch = tuple[torch.Tensor, torch.Tensor]


class Recurrent(nn.Module):
    """Two LSTM layers and a linear one: (N, 7, 8) to (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1)
        self.scores = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.lstm(x)[0][:, -1])


class Gated(nn.Module):
    """A bidirectional GRU and a simple network with ReLU: (N, 7, 8) to (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 6, 2, batch_first=True, bidirectional=True)
        self.simple = nn.RNN(12, 9, nonlinearity="relu", batch_first=True)
        self.projected = nn.LSTM(9, 8, proj_size=5, batch_first=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projected(self.simple(self.gru(x)[0])[0])[0][:, -1]


class Transformer(nn.Module):
    """Two encoder layers with dropout and a linear one: (N, 7, 8) to (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.encoder(x)[:, -1])


def digits_network() -> nn.Module:
    return runpy.run_path(str(EXAMPLES / "train_digits.py"))["DigitsNet"]()


def sequences(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 7, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def images(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(16, 1, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def losses(make: Callable[[], nn.Module], data: Callable[[int], Batch], device: str, steps: int = 8) -> list[float]:
    """The losses of some training steps from fixed seeds."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    logged = []
    for number in range(steps):
        x, y = (t.to(device) for t in data(number))
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        logged.append(loss.detach())
    return [loss.item() for loss in logged]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("make", "data"),
    [(digits_network, images), (Recurrent, sequences), (Gated, sequences), (Transformer, sequences)],
    ids=["digits", "lstm", "gru-rnn-projection", "transformer"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_losses_are_those_of_local_pytorch_to_the_last_bit(
    make: Callable[[], nn.Module], data: Callable[[int], Batch], number: int, sky_devices: tuple[str, str]
) -> None:
    expected = losses(make, data, "cpu")
    assert losses(make, data, sky_devices[number]) == expected
    assert expected[-1] != expected[0]


def test_a_training_step_asks_nothing(sky: str) -> None:
    torch.manual_seed(0)
    model = digits_network().to(sky)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> torch.Tensor:
        x, y = (t.to(sky) for t in images(0))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step()
    before = torch.sky.stats()
    with skyproxy.debug_syncs() as waits:
        loss = step()
    after = torch.sky.stats()
    assert after["round_trips"] == before["round_trips"]
    assert waits.count == 0
    assert after["cache_misses"] == before["cache_misses"]
    assert repr(loss).startswith("tensor(")
    assert torch.sky.stats()["round_trips"] == after["round_trips"] + 1


def test_the_demo_learns_digits(sky: str) -> None:
    train = runpy.run_path(str(EXAMPLES / "train_digits.py"))["train"]
    assert train(sky, epochs=8, quiet=True) > 0.97
