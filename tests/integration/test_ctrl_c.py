"""Ctrl-C ends every wait at once, and harms nothing, however often it strikes."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import skyproxy
from skyproxy import interrupts
from tests.integration.busy_workers import keep_busy, kill, later, within

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")


@pytest.fixture
def node(sky: str) -> Iterator[skyproxy.Node]:
    """A worker that may be killed. The devices of other tests come first and keep their numbers."""
    with skyproxy.launch_local("cpu") as fresh:
        yield fresh


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_wait_at_once_and_harms_nothing(node: skyproxy.Node) -> None:
    device = node.devices[0]
    result = keep_busy(device, 3)
    with later(0.3, interrupt), within(1.5), pytest.raises(KeyboardInterrupt):
        result.item()
    assert node.alive
    assert result.item() == pytest.approx(1 / 768, rel=1e-3)
    assert (torch.arange(3.0, device=device) + 1).tolist() == [1, 2, 3]


def test_ctrl_c_ends_synchronize_and_a_large_download(node: skyproxy.Node) -> None:
    device = node.devices[0]
    large = torch.arange(8 << 20, device=device)
    keep_busy(device, 2)
    with later(0.3, interrupt), within(1.5), pytest.raises(KeyboardInterrupt):
        torch.sky.synchronize(device)
    with later(0.1, interrupt), pytest.raises(KeyboardInterrupt):
        large.cpu()
    assert torch.equal(large.cpu(), torch.arange(8 << 20))


def test_ctrl_c_ends_an_upload_whose_worker_is_slow(node: skyproxy.Node) -> None:
    device = node.devices[0]
    data = torch.arange(32 << 20)
    torch.ones(2, device=device).cpu()
    kill(node, signal.SIGSTOP)
    with later(0.3, interrupt), within(1.5), pytest.raises(KeyboardInterrupt):
        data.to(device)
    kill(node, signal.SIGCONT)
    assert torch.equal((data[: 1 << 20].to(device) + 1).cpu(), data[: 1 << 20] + 1)
    torch.sky.synchronize(device)  # the upload that was given up is nobody's error
    assert node.alive


def test_ctrl_c_ends_a_wait_for_room(node: skyproxy.Node) -> None:
    """A program that runs far ahead of its worker waits inside of recording."""
    device = node.devices[0]
    x = torch.zeros(3, device=device)
    x.cpu()
    kill(node, signal.SIGSTOP)
    with later(1.0, interrupt), within(60), pytest.raises(KeyboardInterrupt):
        while True:
            x = x + 1
            torch.sky.current_device()
    kill(node, signal.SIGCONT)
    y = x + 1
    assert (y - x).tolist() == [1, 1, 1]


class Storm:
    """Presses Ctrl-C at random times: a thread sends SIGINT, and whoever is in an `attempt` is struck by it."""

    def __init__(self) -> None:
        self.strikes = 0
        self._raging = False
        self._over = threading.Event()
        self._random = random.Random(1)
        self._thread = threading.Thread(target=self._rage)

    def start(self) -> None:
        self._thread.start()

    def _rage(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._over.wait(self._random.choice((1e-4, 1e-3, 1e-2)) * self._random.random()):
            signal.pthread_kill(main, signal.SIGINT)

    def strike(self, *_: object) -> None:
        if self._raging:
            self._raging = False
            self.strikes += 1
            raise KeyboardInterrupt

    def attempt(self, action: Callable[[], object]) -> bool:
        """Whether `action` came to its end."""
        try:
            self._raging = True
            action()
            self._raging = False
        except KeyboardInterrupt:
            return False
        finally:
            self._raging = False
        return True

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        while interrupts.deferred:  # a strike that is still to come would hit somebody else
            time.sleep(0.001)


@pytest.fixture
def storm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storm]:
    # A strike inside a destructor cannot be raised, only reported; that is no failure here.
    monkeypatch.setattr(sys, "unraisablehook", lambda info: None)
    made = Storm()
    before = signal.signal(signal.SIGINT, made.strike)
    made.start()
    yield made
    made.end()
    signal.signal(signal.SIGINT, before)


def test_a_storm_of_interrupts_never_changes_a_result(node: skyproxy.Node, storm: Storm) -> None:
    device = node.devices[0]
    small, large = torch.arange(5.0), torch.arange(40_000.0)
    remote = torch.arange(7.0, device=device)
    results: dict[str, torch.Tensor] = {}

    def record() -> None:
        y = remote
        for i in range(5):
            y = y * 2 + i
        results["record"] = y

    def new_signatures() -> None:
        shape = [1 + int(time.monotonic() * 1e6) % 50, 3]
        results["new"] = torch.ones(shape, device=device).sum(0)

    def upload() -> None:
        results["upload"] = small.to(device) + 1

    def upload_large() -> None:
        results["upload_large"] = large.to(device) + 1

    def download() -> None:
        results["download"] = (remote + 1).cpu()

    def download_large() -> None:
        results["download_large"] = (torch.zeros(40_000, device=device) + 3).cpu()

    def grow() -> None:
        x = torch.ones(3, device=device, requires_grad=True)
        (x * x * remote[:3]).sum().backward()
        assert x.grad is not None
        results["backward"] = x.grad

    actions = [record, new_signatures, upload, upload_large, download, download_large, grow]
    expected = {
        "record": ((((remote.cpu() * 2 * 2 + 1) * 2 + 2) * 2 + 3) * 2 + 4),
        "upload": small + 1,
        "upload_large": large + 1,
        "download": torch.arange(7.0) + 1,
        "download_large": torch.full((40_000,), 3.0),
        "backward": 2 * torch.arange(3.0),
    }
    end = time.monotonic() + 6
    counts = dict.fromkeys(expected, 0)
    while time.monotonic() < end:
        for action in actions:
            if not any(storm.attempt(action) for _ in range(1000)):
                continue
            for name in list(results):
                if name == "new":
                    value = results.pop(name).cpu()
                    assert torch.equal(value, torch.full((3,), value[0].item()))
                    continue
                assert torch.equal(results.pop(name).cpu(), expected[name]), name
                counts[name] += 1
    assert storm.strikes > 100
    assert min(counts.values()) > 0, counts
    torch.sky.synchronize(device)  # no error was left behind
    assert remote.tolist() == list(range(7))
    check_nothing_leaks(node)


def check_nothing_leaks(node: skyproxy.Node) -> None:
    """Whatever a strike interrupts gives its slots back."""
    session = node._session
    node.synchronize()
    node.synchronize()
    held = session.call("stats")["handles"]
    assert held < 20
    assert len(session._waiters) < 5


def test_in_place_changes_happen_once_or_not_at_all(node: skyproxy.Node, storm: Storm) -> None:
    counter = torch.zeros((), device=node.devices[0])
    done = attempts = 0
    end = time.monotonic() + 2
    while time.monotonic() < end:
        attempts += 1
        done += storm.attempt(lambda: counter.add_(1))
    assert storm.strikes > 50
    assert done <= counter.item() <= attempts
