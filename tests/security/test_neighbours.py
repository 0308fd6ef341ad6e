"""Two clients of one worker with session processes: what a hostile one does, an honest one's numbers do not show."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import SessionLostError
from skyproxy_server.limits import are_sessions_separable
from tests.server.isolation.workers import Worker, hold_the_interpreter

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]


def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
    """A short training with dropout; its losses, each waited for, and its weights."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
    ).to(device)
    inputs, targets = torch.randn(64, 16).to(device), torch.randint(4, (64,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


class Hostile:
    """A client that does what it can, session after session, until it is told to stop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stopping = threading.Event()
        self.deeds: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._go_on, args=(deed,)) for deed in (_crash, _hog, _allocate, _flood)
        ]
        for thread in self._threads:
            thread.start()

    def _go_on(self, deed: object) -> None:
        while not self._stopping.is_set():
            try:
                with self._worker.connect() as node:
                    deed(node)  # type: ignore[operator]
            except (SessionLostError, RuntimeError, MemoryError):
                pass
            name = deed.__name__  # type: ignore[attr-defined]
            self.deeds[name] = self.deeds.get(name, 0) + 1

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


def _crash(node: skyproxy.Node) -> None:
    node.run(lambda: ctypes.string_at(0))


def _hog(node: skyproxy.Node) -> None:
    node.run(lambda: bool(torch.manual_seed(99)))  # there, and not here: in this process it would be everybody's
    node.run(torch.set_default_dtype, torch.float64)
    node.submit(hold_the_interpreter)
    torch.rand(8, device=str(node.devices[0])).sum()


def _allocate(node: skyproxy.Node) -> None:
    for size in (1 << 34, 1 << 30):
        try:
            torch.zeros(size, device=str(node.devices[0])).sum().item()
        except RuntimeError:
            continue


def _flood(node: skyproxy.Node) -> None:
    values = torch.ones(1 << 20)
    for _ in range(20):
        values.to(str(node.devices[0]))
    node.synchronize()


def test_training_beside_a_hostile_client_is_bit_identical(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--session-memory", str(1 << 30))
    try:
        with worker.connect() as node:
            alone = train(str(node.devices[0]))
        with worker.connect() as node:
            hostile = Hostile(worker)
            try:
                beside = [train(str(node.devices[0])) for _ in range(2)]
            finally:
                hostile.stop()
            assert hostile.deeds.keys() == {"_crash", "_hog", "_allocate", "_flood"}
            for losses, weights in beside:
                assert losses == alone[0]
                assert all(map(torch.equal, weights, alone[1]))
            assert torch.ones(3, device=str(node.devices[0])).sum().item() == 3
    finally:
        worker.end()
