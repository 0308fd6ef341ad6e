"""Named sessions: what a program puts under a name, another one finds, with the same token."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import (
    ConfigurationError,
    SessionHeldError,
    SessionLostError,
    UnknownNameError,
    UntrustedResultError,
)
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import ROOT, environment, wait_for, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")

Connect = Callable[..., skyproxy.Node]


PROCESSES = [pytest.mark.slow, pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")]


@pytest.fixture(scope="module", params=["one process", pytest.param("a process each", marks=PROCESSES)])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The url and the token of a worker."""
    folder = tmp_path_factory.mktemp("worker")
    options = [] if request.param == "one process" else ["--session-processes", "--snapshots", str(folder / "volume")]
    with worker(folder, *options) as found:
        yield found


@pytest.fixture
def connect(sky: str, served: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects to a session that has the name of the test; the devices of other tests keep their numbers."""
    made: list[skyproxy.Node] = []

    def connect(session: str | None = request.node.name, trust_worker: bool = True, **options: Any) -> skyproxy.Node:
        url, token = served
        made.append(skyproxy.connect(url, token=token, session=session, trust_worker=trust_worker, **options))
        return made[-1]

    yield connect
    for node in made:
        node.close()


class Tied(torch.nn.Module):
    """Two layers with one weight, and a buffer that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(12.0).view(3, 4))
        self.register_buffer("column", self.table[:, 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_later_program_finds_a_module_with_its_ties(connect: Connect) -> None:
    before = connect()
    torch.manual_seed(3)
    model = Tied()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before.put("model", model.to(before.devices[0]))
    before.close()
    after = connect()
    found = after.get("model")
    assert type(found) is Tied
    assert found.first.weight is found.second.weight
    assert isinstance(found.first.weight, torch.nn.Parameter)
    assert found.first.weight.device == after.devices[0]
    assert [p.requires_grad for p in found.parameters()] == [True, True, False]
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name])


def test_memory_that_is_shared_stays_shared(connect: Connect) -> None:
    before = connect()
    base = torch.zeros(4, 6, device=before.devices[0])
    before.put("both", {"row": base[2], "turned": base.t(), "base": base, "again": [base]})
    base[0, 0] = 5  # what is changed afterwards is changed there, too
    before.close()
    after = connect()
    found = after.get("both")
    assert found["again"][0] is found["base"]
    assert found["row"].untyped_storage()._cdata == found["base"].untyped_storage()._cdata
    found["row"].fill_(7)
    assert found["base"][2].tolist() == [7] * 6
    assert found["turned"].shape == (6, 4)
    assert found["turned"][:, 2].tolist() == [7] * 6
    assert found["base"][0, 0].item() == 5


def test_no_bytes_of_tensors_move(connect: Connect) -> None:
    before = connect()
    large = torch.ones(1 << 20, device=before.devices[0])
    assert large.sum().item() == 1 << 20
    moved = before._session.bytes_sent + before._session.bytes_received
    before.put("large", [large, large[5:]])
    assert before.get("large")[0] is large
    assert before._session.bytes_sent + before._session.bytes_received - moved < 64 << 10
    assert before.named()["large"][:2] == (2, 4 << 20)
    before.close()
    after = connect()
    found = after.get("large")
    assert after._session.bytes_sent + after._session.bytes_received < 64 << 10
    assert found[1].sum().item() == (1 << 20) - 5


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, count: int) -> None:
    for _ in range(count):
        loss = model(torch.linspace(-1, 1, 32, device=device).view(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_training_goes_on_with_a_model_and_an_optimizer_of_two_names(
    connect: Connect, kind: type[torch.optim.Optimizer]
) -> None:
    before = connect()
    finals = []
    for is_interrupted in (False, True):
        node = before
        torch.manual_seed(1)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        model.to(node.devices[0])
        optimizer: Any = kind(model.parameters(), lr=0.05)
        steps(model, optimizer, node.devices[0], 3)
        if is_interrupted:
            node.put("model", model)
            node.put("optimizer", optimizer)
            node.close()
            node = connect()
            model, optimizer = node.get("model"), node.get("optimizer")
            assert optimizer.param_groups[0]["params"][0] is model[0].weight
        steps(model, optimizer, node.devices[0], 3)
        finals.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_who_does_not_trust_the_worker_gets_plain_data_and_nothing_else(connect: Connect) -> None:
    before = connect()
    model = torch.nn.Linear(2, 2).to(before.devices[0])
    before.put("model", model)
    before.put("weights", model.state_dict())
    before.close()
    after = connect(trust_worker=False)
    with pytest.raises(UntrustedResultError, match="stays there"):
        after.get("model")
    weights = after.get("weights")
    assert list(weights) == ["weight", "bias"]
    fresh = torch.nn.Linear(2, 2, device="meta")
    fresh.load_state_dict(weights, assign=True)
    assert fresh.weight.device == after.devices[0]
    with pytest.raises(ConfigurationError, match="state_dict"):
        after.put("other", fresh)
    assert sorted(after.named()) == ["model", "weights"]


def test_a_session_in_use_is_taken_over_only_where_that_is_said(connect: Connect) -> None:
    first = connect()
    x = torch.full((3,), 2.0, device=first.devices[0])
    first.put("x", x)
    with pytest.raises(SessionHeldError, match="take=True"):
        connect()
    assert x.sum().item() == 6
    second = connect(take=True)
    with pytest.raises(SessionLostError, match="another client took the session"):
        x.sum().item()
    assert second.get("x").sum().item() == 6


def test_errors_name_what_is_there_and_what_to_do(connect: Connect, served: tuple[str, str]) -> None:
    node = connect()
    with pytest.raises(UnknownNameError, match="nothing yet"):
        node.get("model")
    node.put("weights", torch.ones(2, device=node.devices[0]))
    with pytest.raises(UnknownNameError, match="'weights'"):
        node.get("model")
    assert node.forget("weights")
    assert not node.forget("weights")
    assert node.named() == {}
    nameless = connect(session=None)
    for use in (lambda: nameless.put("x", 1), lambda: nameless.get("x"), nameless.named):
        with pytest.raises(ConfigurationError, match="session="):
            use()
    with pytest.raises(ConfigurationError, match="another worker"):
        node.put("x", torch.ones(2, device=nameless.devices[0]))
    with pytest.raises(ConfigurationError, match="not a name"):
        node.put("", 1)
    with pytest.raises(ConfigurationError, match="pickled"):
        node.put("generator", (number for number in range(3)))
    assert node.alive


def test_a_value_that_cannot_be_computed_is_not_kept(connect: Connect) -> None:
    node = connect()
    far = torch.full((1,), 7, device=node.devices[0])
    broken = torch.ones(3, device=node.devices[0]).index_select(0, far)
    with pytest.raises(RuntimeError, match="index"):
        node.put("broken", broken)
    assert node.named() == {}


def test_a_worker_whose_sessions_end_with_their_processes_needs_a_place_for_snapshots(sky: str, tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("session processes need Linux")
    with worker(tmp_path, "--session-processes") as (url, token):
        with pytest.raises(ConfigurationError, match="--snapshots"):
            skyproxy.connect(url, token=token, session="exp1")


KERNEL = """
import os, sys, torch, skyproxy
node = skyproxy.connect(sys.argv[1], session=sys.argv[2])
node.put("x", torch.arange(5.0, device=node.devices[0]))
print("put", flush=True)
sys.stdin.read()
"""


def test_a_program_that_was_killed_holds_nothing(
    connect: Connect, served: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    url, token = served
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL, url, request.node.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(SKYPROXY_TOKEN=token, SKYPROXY_RECONNECT="1"),
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "put\n"
        program.send_signal(signal.SIGKILL)

    def again() -> skyproxy.Node | None:
        try:
            return connect()
        except SessionHeldError:
            return None  # the worker has not noticed yet

    assert wait_for(again, "the worker notices").get("x").tolist() == [0, 1, 2, 3, 4]


BUSY = """
import os, sys, torch, skyproxy
node = skyproxy.connect(sys.argv[1], session=sys.argv[2])
count = torch.zeros((), device=node.devices[0])
node.put("count", count)
x = torch.full((1536, 1536), 1 / 1536, device=node.devices[0])
assert x[0, 0].item() > 0
for _ in range(int(sys.argv[3])):
    x = x @ x
    count.add_(1)
print("queued", flush=True)
sys.stdin.read()
"""
_QUEUED = 400
"""Products that keep any CPU busy for much longer than a client needs to connect."""


@contextlib.contextmanager
def busy_program(served: tuple[str, str], name: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has queued much; what it counts under a name tells how much of that was executed."""
    url, token = served
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, url, name, str(_QUEUED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(SKYPROXY_TOKEN=token, **extra),
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "queued\n"
            yield program
        finally:
            program.kill()


@pytest.mark.parametrize("reconnects", ["1", "0"])
def test_what_a_killed_program_had_queued_is_dropped_for_the_next_client(
    connect: Connect, served: tuple[str, str], request: pytest.FixtureRequest, reconnects: str
) -> None:
    with busy_program(served, request.node.name, SKYPROXY_RECONNECT=reconnects) as program:
        with pytest.raises(SessionHeldError):
            connect()
        program.send_signal(signal.SIGKILL)

    def again() -> skyproxy.Node | None:
        try:
            return connect()
        except SessionHeldError:
            return None  # the end of its connection is on its way

    count = wait_for(again, "the worker notices").get("count")
    done = count.item()
    assert 0 <= done < _QUEUED, "the session was free only when all was done"
    assert done == int(done)
    assert count.item() == done, "what was queued still runs"


def test_taking_over_drops_what_the_other_client_had_queued(
    connect: Connect, served: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    with busy_program(served, request.node.name) as program:
        count = connect(take=True).get("count")
        assert 0 <= count.item() < _QUEUED
        assert program.poll() is None
