"""Named sessions whose worker is told to end: what was put under names is there again, for whoever comes first."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import SessionHeldError, SessionLostError, SkyproxyError
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import wait_for
from tests.integration.test_named_sessions import Tied
from tests.integration.test_suspending import Worker

ONLY_WITH_PROCESSES = pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking them")


BOTH = ["--sessions-in-process", pytest.param("--session-processes", marks=ONLY_WITH_PROCESSES)]


@pytest.fixture(
    params=["--sessions-in-process", pytest.param("--session-processes", marks=[ONLY_WITH_PROCESSES, pytest.mark.slow])]
)
def worker(sky: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(tmp_path, request.param)
    yield made
    made.close()


def connect(worker: Worker, **options: bool) -> skyproxy.Node:
    return skyproxy.connect(worker.url, token=worker.token, session="exp1", trust_worker=True, **options)


def wait_until_left(worker: Worker) -> None:
    """Wait until the worker has heard that its clients are gone."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{worker.port}/activity", headers={"Authorization": f"Bearer {worker.token}"}
    )

    def is_left() -> bool:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["sessions"] == 0

    wait_for(is_left, "the session is over")


def end_with_one_saved(worker: Worker) -> None:
    """End the worker: what is under a name is on the volume now, if not before, as where its process has ended."""
    if "--session-processes" in worker.options:
        wait_for(lambda: snapshots_of(worker), "it is saved when its process ends")
        assert "lost" not in worker.end()
    else:
        assert "1 saved by name" in worker.end()


def snapshots_of(worker: Worker) -> list[Path]:
    return list(worker.folder.glob("snapshots/**/snapshot-*"))


def suspend(worker: Worker, node: skyproxy.Node) -> None:
    assert "1 session is suspended" in worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")


def test_the_program_that_holds_it_goes_on_and_a_later_one_finds_it(worker: Worker) -> None:
    torch.manual_seed(3)
    made = Tied()
    expected = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    with connect(worker) as node:
        model = made.to(node.devices[0])
        other = torch.arange(6.0, device=node.devices[0])
        node.put("model", model)
        node.put("parts", [other[2:], other])
        node.put("weight", model.first.weight)
        suspend(worker, node)
        other[2] = 9  # while it is suspended
        worker.start()
        assert other.tolist() == [0, 1, 9, 3, 4, 5]
        assert sorted(node.named()) == ["model", "parts", "weight"]
        assert node.get("weight") is model.first.weight
        assert node.get("parts")[1] is other
        node.put("later", other)
        wait_for(lambda: node._session.protection is None, "it is as before")
    wait_for(lambda: not snapshots_of(worker), "nothing is left of it on the volume")
    with connect(worker) as later:
        found = later.get("model")
        assert found.first.weight is found.second.weight
        assert found.first.weight is later.get("weight")
        assert [p.requires_grad for p in found.parameters()] == [True, True, False]
        part, whole = later.get("parts")
        part[0] = 7
        assert later.get("later").tolist() == whole.tolist() == [0, 1, 7, 3, 4, 5]
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("worker", BOTH, indirect=True)
def test_what_no_program_uses_is_saved_and_found_by_the_next_one(worker: Worker) -> None:
    with connect(worker) as node:
        model = Tied().to(node.devices[0])
        node.put("model", model)
        kept = model.first.weight.detach().cpu()
    wait_until_left(worker)
    end_with_one_saved(worker)
    assert snapshots_of(worker)
    worker.start()
    assert "1 saved by name" not in worker.end()  # nobody came: it stays where it is
    worker.start()
    with connect(worker) as later:
        found = later.get("model")
        assert found.first.weight is found.second.weight
        assert torch.equal(found.first.weight.detach().cpu(), kept)
        assert not snapshots_of(worker)
        with pytest.raises(SessionHeldError):
            connect(worker)


@pytest.mark.slow
def test_who_takes_it_meanwhile_has_it_and_the_other_program_is_told(worker: Worker) -> None:
    with connect(worker) as node, skyproxy.connect(worker.url, token=worker.token) as unnamed:
        x = torch.arange(3.0, device=node.devices[0])
        y = torch.ones(3, device=unnamed.devices[0])
        node.put("x", x)
        assert x.sum().item() == y.sum().item() == 3
        assert "2 sessions are suspended" in worker.end()
        wait_for(lambda: node._session.is_suspended and unnamed._session.is_suspended, "both have taken leave")
        worker.start()
        with connect(worker) as later:
            found = later.get("x")
            found += 1
            with pytest.raises(SessionLostError, match="no snapshot of this session"):
                x.sum().item()
            assert (y + 1).tolist() == [2, 2, 2]
            assert later.get("x").tolist() == [1, 2, 3]


def test_a_program_that_only_lost_its_worker_s_word_uses_its_names_again(worker: Worker) -> None:
    from skyproxy.protocol.messages import Pong

    with connect(worker) as node:
        x = torch.arange(3.0, device=node.devices[0])
        node.put("x", x)
        assert x.sum().item() == 3
        node._session._housekeeping.on_pong(Pong(0, {"leaving": 60000}))
        wait_for(lambda: node._session.is_suspended, "it was believed")
        assert (x + 1).tolist() == [1, 2, 3]  # there is a worker at its address, with the session of before
        assert node.get("x") is x


@pytest.mark.slow
def test_a_saved_one_can_be_ended_by_name_and_its_size_is_bounded(worker: Worker) -> None:
    with connect(worker) as node:
        node.put("x", [torch.arange(3.0, device=node.devices[0]), os.urandom(1 << 20)])
    wait_until_left(worker)
    end_with_one_saved(worker)
    worker.variables = {"SKYPROXY_MAX_NAMED_BYTES": str(1 << 16)}
    worker.start()
    with pytest.raises(SkyproxyError, match="structure of a named value"):
        connect(worker)
    assert snapshots_of(worker)
    with skyproxy.connect(worker.url, token=worker.token) as unnamed:
        assert unnamed._session.call("end_named", "exp1")
        assert not unnamed._session.call("end_named", "exp1")
    assert not snapshots_of(worker)
    with connect(worker) as node:
        assert node.named() == {}


@pytest.fixture
def other(worker: Worker, tmp_path: Path) -> Iterator[Worker]:
    """A worker that sees another volume."""
    (tmp_path / "other").mkdir()
    made = Worker(tmp_path / "other", worker.options[-1])
    yield made
    made.close()


def train(node: skyproxy.Node, steps: int, at: int, disturb: Callable[[], object]) -> list[torch.Tensor]:
    """Train a model that is found by its name in every step; the weights in the end."""
    torch.manual_seed(5)
    model = Tied().to(node.devices[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    node.put("model", model)
    for step in range(steps):
        if step == at:
            disturb()
        loss = node.get("model")(torch.randn(4, 8).to(node.devices[0])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        node.put("optimizer", optimizer)
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.slow
def test_a_protected_program_goes_on_under_its_name_where_its_worker_is_killed(worker: Worker) -> None:
    def kill() -> None:
        worker.end(signal.SIGKILL)
        worker.start()
        with pytest.raises(SessionHeldError, match="take=True"):  # it is not robbed before it comes back, nor after
            connect(worker)

    with connect(worker) as node:
        expected = train(node, 8, -1, lambda: None)
    with connect(worker) as node, skyproxy.protect(every="1h", node=node) as protected:
        protected.snapshot()
        found = train(node, 8, 5, kill)
        assert all(map(torch.equal, found, expected))
        assert protected.recoveries == 1
        assert sorted(node.named()) == ["model", "optimizer"]
    with connect(worker) as later:
        model = later.get("model")
        assert model.first.weight is model.second.weight
        assert all(map(torch.equal, (p.detach().cpu() for p in model.parameters()), expected))


@pytest.mark.slow
def test_a_named_session_moves_with_its_names_and_is_found_where_it_is(worker: Worker, other: Worker) -> None:
    with connect(worker) as node:
        expected = train(node, 8, -1, lambda: None)
    with connect(worker) as node:
        found = train(node, 8, 4, lambda: node.move_to(other.url, token=other.token))
        assert all(map(torch.equal, found, expected))
        assert (node.url, sorted(node.named())) == (other.url, ["model", "optimizer"])
        with pytest.raises(SessionHeldError, match=other.url):
            connect(worker)
        with pytest.raises(SessionHeldError, match="in use by another client"):
            connect(other)
    wait_until_left(other)
    with connect(other) as later:
        model = later.get("model")
        assert model.first.weight is model.second.weight
        assert all(map(torch.equal, (p.detach().cpu() for p in model.parameters()), expected))
        later.move_to(worker.url, token=worker.token)
        assert torch.equal(later.get("model").first.weight.detach().cpu(), model.first.weight.detach().cpu())
    assert not snapshots_of(other)


@pytest.mark.slow
def test_a_name_that_another_program_uses_there_keeps_a_session_where_it_is(worker: Worker, other: Worker) -> None:
    with connect(worker) as node, connect(other) as there:
        x = torch.arange(3.0, device=node.devices[0])
        node.put("x", x)
        there.put("x", torch.zeros(1, device=there.devices[0]))
        with pytest.raises(SkyproxyError, match="It goes on where it was"):
            node.move_to(other.url, token=other.token)
        x += 1
        assert (node.url, node.get("x").tolist()) == (worker.url, [1, 2, 3])
        assert there.get("x").tolist() == [0]


@pytest.fixture
def neighbour(worker: Worker, tmp_path: Path) -> Iterator[Worker]:
    """A worker that sees the same volume, as a program of its own."""
    (tmp_path / "neighbour").mkdir()
    made = Worker(tmp_path / "neighbour", worker.options[-1], "--snapshots", str(worker.folder / "snapshots"))
    yield made
    made.close()


def test_two_workers_of_one_volume_give_each_other_a_named_session(worker: Worker, neighbour: Worker) -> None:
    with connect(worker) as node:
        node.put("x", torch.arange(3.0, device=node.devices[0]))
        with pytest.raises(SessionHeldError):
            connect(neighbour)
        assert node.get("x").tolist() == [0, 1, 2]
    with connect(neighbour) as node:  # nobody uses it there: that worker saves it, if it has not
        node.put("x", node.get("x") + 1)
        with connect(worker, take=True) as taker:
            assert taker.get("x").tolist() == [1, 2, 3]
            taker.put("x", taker.get("x") + 1)
            with pytest.raises(SessionLostError, match="another client took the session 'exp1' over"):
                while True:  # it may answer once more before it hears of it
                    node.get("x").tolist()
    with connect(neighbour) as node:
        assert node.get("x").tolist() == [2, 3, 4]
        wait_until_left(worker)


def test_a_worker_that_was_killed_keeps_no_named_session_from_another_one(worker: Worker, neighbour: Worker) -> None:
    with connect(worker) as node:
        node.put("x", torch.arange(3.0, device=node.devices[0]))
    wait_until_left(worker)
    with connect(neighbour) as node:
        assert node.get("x").tolist() == [0, 1, 2]
        node.put("x", node.get("x") + 1)
        neighbour.end(signal.SIGKILL)
        with connect(worker) as later:  # the kernel tells at once who lives
            assert later.named() == {}, "what only that worker's memory had is gone"
