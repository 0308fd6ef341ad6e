"""What a protected program sees of cancellations, failures and warnings, and of an end at a bad moment."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import CancelledOperationError, RemoteError
from skyproxy.session.restoring import NewSession
from tests.integration import protected_programs as programs
from tests.integration.programs import wait_for, worker
from tests.integration.protected_programs import Served

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with programs.served(tmp_path_factory.mktemp("worker")) as made:
        yield made


@pytest.fixture
def node(sky: str, served: Served) -> Iterator[skyproxy.Node]:
    with skyproxy.connect(served.url, token=served.token) as made:
        yield made


def protection_of(node: skyproxy.Node) -> skyproxy.session.protection.Protection:
    protection = node._session.protection
    assert protection is not None
    return protection


def test_operations_that_were_cancelled_stay_so(served: Served, node: skyproxy.Node) -> None:
    protected, device = skyproxy.protect(every="1h", node=node), node.devices[0]
    kept = torch.ones(3, device=device)
    slow = torch.rand(700, 700, device=device)
    node.synchronize()
    for _ in range(200):
        slow = slow @ slow
    assert node._session.cancelling.cancel()
    with pytest.raises(CancelledOperationError):
        slow.sum().item()
    kept += 1
    assert kept.tolist() == [2, 2, 2]
    log = protection_of(node).log
    wait_for(lambda: log.hole_after(log.durable or 0) is None, "a snapshot has the outcome of the cancellation")
    served.kill_session()
    with pytest.raises(CancelledOperationError):
        (slow + 1).sum().item()
    kept += 1
    assert kept.tolist() == [3, 3, 3]
    assert protected.recoveries == 1


def test_a_failure_and_a_warning_are_told_once(served: Served, node: skyproxy.Node) -> None:
    protected, device = skyproxy.protect(every="1h", node=node), node.devices[0]
    table, wrong = torch.rand(4, 2, device=device), torch.full((1,), 9, device=device)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        failed = torch.nn.functional.embedding(wrong, table)
        with pytest.raises(RemoteError, match="index out of range"):
            node.synchronize()
        torch.linspace(0, 1, 5, device=device).to(torch.complex64).to(torch.float32).sum().item()
        before = [str(warning.message) for warning in shown]
        served.kill_session()
        node.synchronize()  # not raised again
        assert table.shape == (4, 2)
        assert table.sum().isfinite().item()
        assert [str(warning.message) for warning in shown] == before
    with pytest.raises(RemoteError, match="index out of range"):
        failed.sum().item()
    assert protected.recoveries == 1


def test_an_end_of_the_protection_does_not_end_a_session_that_another_worker_takes_over(
    served: Served, node: skyproxy.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected = skyproxy.protect(node=node)
    protection, opening, goes_on = protection_of(node), threading.Event(), threading.Event()
    open_anew = protection._open_anew

    def slow(reason: str, stop: threading.Event) -> NewSession:
        opening.set()
        assert goes_on.wait(WAIT_SECONDS)
        return open_anew(reason, stop)

    monkeypatch.setattr(protection, "_open_anew", slow)
    total = torch.ones(3, device=node.devices[0])
    node.synchronize()
    served.kill_session()
    assert opening.wait(WAIT_SECONDS)
    ending = threading.Thread(target=protected.stop, daemon=True)
    ending.start()
    goes_on.set()
    ending.join(WAIT_SECONDS)
    assert not ending.is_alive()
    assert node._session.protection is None
    total += 1
    assert total.tolist() == [2, 2, 2]


def test_a_node_is_closed_at_once_while_another_worker_takes_over(sky: str, tmp_path: Path) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def never() -> str:
        asked.set()
        assert goes_on.wait(WAIT_SECONDS)
        raise skyproxy.errors.ConnectError("none")

    others = set(programs.children(os.getpid()))
    with worker(tmp_path, "--snapshots", str(tmp_path / "snapshots")) as (url, token):
        (process,) = set(programs.children(os.getpid())) - others
        node = skyproxy.connect(url, token=token)
        skyproxy.protect(node=node, new_worker=never)
        os.kill(process, signal.SIGKILL)  # where it has time to say goodbye, the session is suspended
        try:
            assert asked.wait(WAIT_SECONDS)
            node.close()
            assert not node.alive
        finally:
            goes_on.set()
