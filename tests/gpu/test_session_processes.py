"""Sessions in processes of their own on a GPU: bounds of memory, ends that give it back, values that are kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import SessionLostError
from skyproxy_server.limits import are_sessions_separable
from tests.server.isolation.workers import Worker

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def worker(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    options = ["--session-gpu-fraction", "0.02"] if kind == "cuda" else []
    running = Worker(folder, "--device", kind, "--snapshots", str(folder / "snapshots"), *options)
    yield running
    running.end()


@pytest.fixture
def nodes(worker: Worker) -> Iterator[tuple[skyproxy.Node, skyproxy.Node]]:
    with worker.connect() as first, worker.connect() as second:
        yield first, second


def test_sessions_compute_side_by_side(kind: str, nodes: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    made = [x.to(node.device(kind)) for node in nodes]
    for _ in range(20):
        made = [(y @ y).tanh() for y in made]
    assert torch.equal(made[0].cpu(), made[1].cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
def test_a_session_has_its_share_of_the_memory_and_no_more(nodes: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    greedy, other = (node.device("cuda") for node in nodes)
    share = torch.sky.mem_get_info(other)[1] // 50
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(share + 64 * MIB, dtype=torch.uint8, device=greedy).fill_(1).sum().item()
    assert torch.ones(share // 2, dtype=torch.uint8, device=other).sum().item() == share // 2
    assert torch.ones(3, device=greedy).sum().item() == 3


def test_a_session_that_is_killed_takes_no_other_along(
    kind: str, worker: Worker, nodes: tuple[skyproxy.Node, skyproxy.Node]
) -> None:
    killed, other = nodes
    lost, kept = torch.ones(64 * MIB, device=killed.device(kind)), torch.ones(4, device=other.device(kind))
    process = killed.run(os.getpid)
    assert process != other.run(os.getpid)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(SessionLostError):
        for _ in range(5000):
            lost.add_(1).sum().item()
            time.sleep(0.01)
    assert kept.sum().item() == 4
    with worker.connect() as third:
        assert torch.ones(3, device=third.device(kind)).sum().item() == 3


def test_what_a_session_saved_another_one_restores(kind: str, worker: Worker, tmp_path: Path) -> None:
    source = torch.linspace(-1, 1, 300 * 300).view(300, 300)
    with worker.connect() as writer:
        weight = source.to(writer.device(kind))
        weight.mul_(2)  # on the session's stream, just before
        writer.save(tmp_path / "trained", weight=weight, table=weight[:, 1])
    with worker.connect() as reader:
        skyproxy.restore(tmp_path / "trained", reader)
        found, table = reader.get("weight"), reader.get("table")
        assert found.device == reader.device(kind)
        assert torch.equal(found.cpu(), source * 2)
        found.zero_()
        assert table.sum().item() == 0
