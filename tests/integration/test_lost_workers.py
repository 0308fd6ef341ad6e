"""What a program sees of a worker that dies, falls silent, or is only busy."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import skyproxy
from skyproxy.errors import SessionLostError
from tests.integration.busy_workers import keep_busy, kill, later, within
from tests.integration.programs import started, succeed, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")


LOST_WITHIN_SECONDS = 10.0
"""A worker that answers nothing is taken for lost after 30 s; machines are busy."""


@pytest.fixture
def node(sky: str) -> Iterator[skyproxy.Node]:
    """A worker that may be killed. The devices of other tests come first and keep their numbers."""
    with skyproxy.launch_local("cpu") as fresh:
        yield fresh


def test_a_killed_worker_is_noticed_at_the_next_wait(node: skyproxy.Node) -> None:
    x = torch.ones(3, device=node.devices[0])
    x.cpu()
    kill(node)
    with within(LOST_WITHIN_SECONDS), pytest.raises(SessionLostError, match="tensors on the CPU are unharmed"):
        (x + 1).cpu()
    with within(LOST_WITHIN_SECONDS), pytest.raises(SessionLostError) as caught:
        x.cpu()
    assert caught.value.process_ended
    assert caught.value.__cause__ is None, "the same text twice"
    with within(LOST_WITHIN_SECONDS), pytest.raises(ConnectionError):
        torch.sky.synchronize(node.devices[0])
    assert not node.alive
    assert [info.alive for info in skyproxy.devices() if info.device == node.devices[0]] == [False]


def test_a_killed_worker_ends_a_wait(node: skyproxy.Node) -> None:
    result = keep_busy(node.devices[0], 20)
    with later(0.3, lambda: kill(node)), within(0.3 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        result.item()


def test_a_killed_worker_ends_an_upload(node: skyproxy.Node) -> None:
    data = torch.zeros(64 << 20)
    torch.ones(2, device=node.devices[0]).cpu()
    kill(node, signal.SIGSTOP)  # so that the upload is surely under way when it dies
    with later(0.3, lambda: kill(node)), within(0.5 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        data.to(node.devices[0])


def test_a_killed_worker_ends_a_program_that_only_records(node: skyproxy.Node) -> None:
    x = torch.ones(3, device=node.devices[0])
    x.cpu()
    with later(0.2, lambda: kill(node)), within(0.2 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        while True:
            x = x + 1


def test_a_killed_worker_ends_a_large_download(node: skyproxy.Node) -> None:
    x = torch.zeros(64 << 20, device=node.devices[0])
    torch.sky.synchronize(node.devices[0])
    kill(node, signal.SIGSTOP)
    with later(0.3, lambda: kill(node)), within(0.5 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        x.cpu()


def test_a_process_that_a_function_forked_does_not_hide_the_end_of_its_worker(tmp_path: Path) -> None:
    def fork() -> tuple[int, int]:
        import multiprocessing

        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,))
        forked.start()
        assert forked.pid is not None
        return os.getpid(), forked.pid

    with worker(tmp_path) as (url, token), skyproxy.connect(url, token=token) as node:
        own, forked = (psutil.Process(number) for number in node.run(fork))
        try:
            own.kill()  # it alone, as the kernel does when memory runs out
            with within(LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
                node.run(abs, 1)
            assert forked.is_running()
            # A dying process closes its connections before its port; when all is closed, it can be reaped.
            os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
            port = int(url.rpartition(":")[2])
            with socket.create_server(("127.0.0.1", port), reuse_port=False):
                pass  # another worker can have the port
        finally:
            forked.kill()


def test_who_connects_again_finds_the_same_number(node: skyproxy.Node) -> None:
    (place,) = node.devices
    old = torch.ones(3, device=place)
    kill(node)
    with pytest.raises(SessionLostError, match=r"skyproxy.connect\(.*same sky:N.*skyproxy.reset\(\)"):
        old.cpu()
    with skyproxy.launch_local("cpu") as again:
        assert again.devices == [place]
        new = torch.ones(3, device=place)
        assert (new + 1).tolist() == [2, 2, 2]
        for mixed in (
            lambda: old + new,
            lambda: new.add_(old),
            lambda: new.copy_(old),
            lambda: torch.stack([new, old]),
        ):
            with pytest.raises(SessionLostError):
                mixed()
        assert new.tolist() == [1, 1, 1]
        assert [info.alive for info in skyproxy.devices() if info.device == place] == [True]


def test_a_compiled_function_goes_on_with_the_worker_that_took_the_number(node: skyproxy.Node) -> None:
    (place,) = node.devices
    double = torch.compile(lambda x: x * 2 + 1, backend="sky")
    assert double(torch.ones(3, device=place)).tolist() == [3, 3, 3]
    kill(node)
    with pytest.raises(SessionLostError):
        double(torch.ones(3, device=place)).cpu()
    with skyproxy.launch_local("cpu") as again:
        assert again.devices == [place]
        assert double(torch.ones(3, device=place)).tolist() == [3, 3, 3]


@pytest.mark.slow
def test_a_program_that_was_stopped_finds_its_worker_as_it_left_it(tmp_path: Path) -> None:
    """Its own standstill is no silence of the worker's: with a patience of one second it is stopped for five."""
    go_on = tmp_path / "go on"
    source = f"""
    import os, time, torch, skyproxy
    x = torch.ones(3, device="sky:0")
    print(x.sum().item(), flush=True)
    while not os.path.exists({str(go_on)!r}):
        time.sleep(0.01)
    for _ in range(200):
        x += 1
    print(x.sum().item(), flush=True)
    """
    patience = {"SKYPROXY_LIVENESS_TIMEOUT_SECONDS": "1", "SKYPROXY_PING_INTERVAL_SECONDS": "0.5"}
    with started(source, **patience) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "3.0\n"
        for _ in range(3):
            program.send_signal(signal.SIGSTOP)
            threading.Event().wait(5)
            program.send_signal(signal.SIGCONT)
            threading.Event().wait(0.2)
        go_on.touch()
        assert program.stdout.readline() == "603.0\n"
        assert program.wait(30) == 0


def test_other_workers_live_on(node: skyproxy.Node, sky: str) -> None:
    x = torch.ones(3, device=sky)
    kill(node)
    with pytest.raises(SessionLostError):
        torch.ones(3, device=node.devices[0]).cpu()
    assert (x + 1).tolist() == [2, 2, 2]


def test_a_silent_worker_is_given_up() -> None:
    """A worker that no longer answers but whose connection stands: a stopped process, a cut cable."""
    source = """
    import os, pathlib, signal, time, torch, skyproxy

    def stopped(process):
        tasks = pathlib.Path(f"/proc/{process}/task")
        return not tasks.exists() or all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] in "Tt" for task in tasks.iterdir()
        )

    def attempt(what, action):
        node = skyproxy.launch_local("cpu")
        device = node.devices[0]
        x = torch.ones(300, device=device)
        x.cpu()
        os.kill(node.process_id, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not stopped(node.process_id):  # its threads stop one by one, and could still answer
            assert time.monotonic() < deadline
        start = time.monotonic()
        try:
            action(device, x)
        except skyproxy.errors.SessionLostError as error:
            assert "answered nothing for 1 s" in str(error), error
            took = time.monotonic() - start
            assert 0.5 < took < 20, took  # not the usual 30
        else:
            raise AssertionError(what)
        node.close()

    def record(device, x):
        while True:
            x = x + 1

    attempt("waiting", lambda device, x: (x + 1).cpu())
    attempt("recording", record)
    attempt("uploading", lambda device, x: torch.zeros(64 << 20).to(device))
    """
    succeed(source, timeout=100.0, SKYPROXY_PING_INTERVAL_SECONDS="0.2", SKYPROXY_LIVENESS_TIMEOUT_SECONDS="1")


@pytest.mark.slow
def test_a_busy_worker_is_not_given_up() -> None:
    source = """
    import time, torch, skyproxy
    x = torch.full((2048, 2048), 1 / 2048, device="sky:0")
    start = time.monotonic()
    while time.monotonic() - start < 4:
        for _ in range(20):
            x = x @ x
        torch.sky.synchronize()
    print(x[0, 0].item() > 0)
    """
    extra = {"SKYPROXY_PING_INTERVAL_SECONDS": "0.2", "SKYPROXY_LIVENESS_TIMEOUT_SECONDS": "1"}
    assert succeed(source, **extra) == "True"
