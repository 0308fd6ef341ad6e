"""Sessions whose connections break at any byte: nothing is lost, nothing is done twice."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import trustme

import skyproxy
from skyproxy import nodes
from skyproxy.errors import SessionLostError
from skyproxy.session import outage
from skyproxy.settings import SETTINGS
from tests.integration.broken_connections import check_same, move, train
from tests.integration.chaos_proxy import ChaosProxy, chaos_proxy
from tests.integration.programs import wait_for, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")

LASTING = dataclasses.replace(SETTINGS, reconnect=True, reconnect_seconds=60.0, chunk_bytes=64 << 10)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The port and the token of a worker."""
    with worker(tmp_path_factory.mktemp("worker")) as (url, token):
        yield int(url.rpartition(":")[2]), token


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", LASTING)


Connect = Callable[..., skyproxy.Node]


@pytest.fixture
def connect(sky: str, served: tuple[int, str], lasting: None) -> Iterator[Connect]:
    """Connects through a proxy; the devices of other tests come first and keep their numbers."""
    made: list[skyproxy.Node] = []

    def through(proxy: ChaosProxy, **options: bool) -> skyproxy.Node:
        made.append(skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=served[1], **options))
        return made[-1]

    yield through
    for node in made:
        node.close()


def check_training(connect: Connect, port: int, seed: int, steps: int, **options: bool) -> None:
    with chaos_proxy(port, seed) as proxy:
        node = connect(proxy, **options)
        expected = train(node.devices[0], steps)
        proxy.cut_after(1, 200_000, cuts=20)
        proxy.cut()
        assert proxy.cuts >= 2
        check_same(expected, train(node.devices[0], steps))
        assert node.alive


@pytest.mark.parametrize("seed", range(2))
def test_training_over_a_connection_that_breaks_is_exact(connect: Connect, served: tuple[int, str], seed: int) -> None:
    check_training(connect, served[0], seed, steps=12)


def test_training_on_threads_that_sessions_share_is_exact(connect: Connect, served: tuple[int, str]) -> None:
    check_training(connect, served[0], 3, steps=12, shares_threads=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_long_training_over_a_connection_that_breaks_is_exact(
    connect: Connect, served: tuple[int, str], seed: int
) -> None:
    check_training(connect, served[0], seed, steps=60)


@contextlib.contextmanager
def tls_worker(folder: Path, authority: trustme.CA) -> Iterator[tuple[int, str]]:
    """The port and a token of a worker with a certificate."""
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(item.bytes() for item in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    key.chmod(0o600)
    with worker(folder, "--tls-cert", str(chain), "--tls-key", str(key)) as (url, token):
        yield int(url.rpartition(":")[2]), token


@pytest.mark.parametrize("piece_bytes", [61, 1449])
def test_training_over_a_connection_that_drips_and_breaks_is_exact(
    connect: Connect, served: tuple[int, str], piece_bytes: int
) -> None:
    with chaos_proxy(served[0], piece_bytes) as proxy, connect(proxy) as node:
        expected = train(node.devices[0], steps=3)
        proxy.drip(piece_bytes)
        proxy.cut_after(1, 100_000, cuts=4)
        proxy.cut()
        check_same(expected, train(node.devices[0], steps=3))
        assert proxy.cuts >= 2


def test_training_over_tls_with_a_token_of_its_own(
    sky: str, lasting: None, tmp_path: Path, authority: trustme.CA
) -> None:
    with tls_worker(tmp_path, authority) as (port, token), chaos_proxy(port, 7) as proxy:
        certificate = authority.cert_pem.bytes().decode()
        with skyproxy.connect(f"wss://127.0.0.1:{proxy.port}", token=token, certificate=certificate) as node:
            expected = train(node.devices[0], steps=12)
            proxy.cut_after(5_000, 200_000, cuts=6)
            proxy.cut()
            check_same(expected, train(node.devices[0], steps=12))
            assert proxy.cuts >= 2


def test_each_operation_is_executed_once(connect: Connect, served: tuple[int, str]) -> None:
    with chaos_proxy(served[0], 11) as proxy:
        device = connect(proxy).devices[0]
        total = torch.zeros((), device=device)
        proxy.cut_after(1, 3_000, cuts=12)
        for number in range(10):
            proxy.cut()
            for _ in range(300):
                total.add_(1)
            assert total.item() == 300 * (number + 1)
        assert proxy.cuts >= 2


def test_large_transfers_arrive_whole(connect: Connect, served: tuple[int, str]) -> None:
    with chaos_proxy(served[0], 5) as proxy:
        node = connect(proxy)
        torch.ones(2, device=node.devices[0]).cpu()
        proxy.cut_after(1 << 20, 6 << 20, cuts=6)
        proxy.cut()
        move(node.devices[0], 24 << 20, seed=3)
        assert proxy.cuts >= 3


def test_a_function_goes_on_over_a_broken_connection(connect: Connect, served: tuple[int, str], tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    def wait(path: str) -> int:
        import pathlib
        import time

        while not pathlib.Path(path).exists():
            time.sleep(0.01)
        return 7

    with chaos_proxy(served[0]) as proxy:
        node = connect(proxy)
        x = torch.ones(3, device=node.devices[0])
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(node.run(wait, str(go_on))))
        thread.start()
        assert (x + 1).tolist() == [2, 2, 2]
        proxy.cut()
        go_on.touch()
        thread.join(60)
        assert results == [7]
        assert (x + 1).tolist() == [2, 2, 2]


def test_a_connection_that_says_nothing_any_more_is_replaced(
    connect: Connect, served: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cable is pulled out: no side is told."""
    monkeypatch.setattr(nodes, "SETTINGS", dataclasses.replace(LASTING, ping_interval_seconds=0.1, silence_seconds=0.5))
    with chaos_proxy(served[0]) as proxy:
        node = connect(proxy)
        x = torch.ones(3, device=node.devices[0])
        assert x.sum().item() == 3
        proxy.stall()
        assert (x + 1).sum().item() == 6
        assert node.alive


def test_a_welcome_that_does_not_come_costs_an_attempt_and_no_session(
    connect: Connect, served: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has taken the client for back already, which gives up that attempt."""
    monkeypatch.setattr(nodes, "SETTINGS", dataclasses.replace(LASTING, handshake_timeout_seconds=0.3))
    with chaos_proxy(served[0]) as proxy:
        x = torch.ones(3, device=connect(proxy).devices[0])
        assert x.sum().item() == 3
        proxy.silence(connections=3)  # of both kinds
        proxy.cut()
        assert (x + 1).sum().item() == 6
        y = torch.rand(1 << 16)
        assert torch.equal((y.to(x.device) * 2).cpu(), y * 2)


def test_a_connection_for_functions_that_says_nothing_any_more_is_replaced(
    connect: Connect, served: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", dataclasses.replace(LASTING, silence_seconds=0.5))
    with chaos_proxy(served[0]) as proxy:
        node = connect(proxy)
        assert node.run(abs, -6) == 6
        proxy.stall_newest()
        assert node.run(abs, -7) == 7
        proxy.stall()  # all of them
        assert node.run(abs, -8) == 8


def test_the_first_call_of_a_function_outlives_connections_that_break(
    connect: Connect, served: tuple[int, str]
) -> None:
    with chaos_proxy(served[0]) as proxy:
        node = connect(proxy)
        proxy.cut_after(1, 200, cuts=2)
        assert node.run(abs, -7) == 7
        assert proxy.cuts == 2


def test_a_session_is_saved_and_restored_over_connections_that_break(sky: str, lasting: None, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    with worker(tmp_path, "--snapshots", str(snapshots)) as (url, token):
        with chaos_proxy(int(url.rpartition(":")[2]), 3) as proxy:
            with skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=token) as node:
                x = torch.arange(100_000.0)
                y = x.to(node.devices[0])
                proxy.cut_after(1, 200, cuts=2)
                node.save(tmp_path / "saved", x=y)
                assert proxy.cuts == 2
                proxy.cut_after(1, 200, cuts=2)
                skyproxy.restore(tmp_path / "saved", node)
                assert torch.equal(node.get("x").cpu(), x)
                assert proxy.cuts == 4
                assert not [path for path in snapshots.rglob("*") if path.is_file()]  # it was on its way there only


def test_waiting_says_why_and_goes_on(
    connect: Connect, served: tuple[int, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_QUIET_SECONDS", 0.01)
    with chaos_proxy(served[0]) as proxy:
        node = connect(proxy)
        x = torch.ones(3, device=node.devices[0])
        assert x.sum().item() == 3
        proxy.turn_away(True)
        proxy.cut()
        text = ""

        def told() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return "is broken" in text

        wait_for(told, "the line")
        assert f"ws://127.0.0.1:{proxy.port}" in text
        assert "up to 60 s" in text
        assert served[1] not in text
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            x.sum().item()
        timer.join()
        proxy.turn_away(False)
        assert (x + 1).sum().item() == 6

        def told_again() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return "nothing was lost" in text  # once the last of the connections is back

        wait_for(told_again, "the second line")
        assert text.count("skyproxy:") == 2


def test_without_the_setting_a_broken_connection_ends_the_session(
    sky: str, served: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", dataclasses.replace(SETTINGS, reconnect=False))
    with chaos_proxy(served[0]) as proxy:
        with skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=served[1]) as node:
            x = torch.ones(3, device=node.devices[0])
            assert x.sum().item() == 3
            proxy.cut()
            with pytest.raises(SessionLostError):
                x.sum().item()


def test_a_worker_that_was_killed_ends_the_session_at_once(sky: str, lasting: None, tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token), skyproxy.connect(url, token=token) as node:
        x = torch.ones(3, device=node.devices[0])
        os.kill(node.run(os.getpid), signal.SIGKILL)
        with pytest.raises(SessionLostError):
            while True:  # it may answer once more before it dies
                x.sum().item()


@pytest.mark.parametrize("shares_threads", [False, True], ids=["own threads", "shared threads"])
def test_nothing_is_left_behind(connect: Connect, served: tuple[int, str], shares_threads: bool) -> None:
    with chaos_proxy(served[0]) as proxy:
        node = connect(proxy, shares_threads=shares_threads)
        x = torch.ones(3, device=node.devices[0])

        def cut_and_use() -> None:
            proxy.cut()
            assert (x + 1).sum().item() == 6
            assert node._session._reconnector is not None
            outage = node._session._reconnector.outage
            wait_for(lambda: not outage.is_going_on, "the connections are back")

        def own_threads() -> list[str]:
            return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("skyproxy"))

        assert (x + 1).sum().item() == 6
        threads, handles = own_threads(), node._session.recorder.live_slots
        for _ in range(10):
            cut_and_use()
        wait_for(lambda: own_threads() == threads, "the threads of broken connections end")
        # Housekeeping may just be sending what was released, and count it in two places for a moment.
        wait_for(lambda: node._session.recorder.live_slots == handles, "no handle is left")
