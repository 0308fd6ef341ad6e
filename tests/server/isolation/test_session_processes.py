"""Session processes, with the real program: what one session does to itself, the others do not notice."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import AuthenticationError, ConfigurationError, ConnectError, SessionLostError
from skyproxy.protocol.messages import BULK, Hello, Ping, Pong
from skyproxy.settings import Settings
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import environment, wait_for
from tests.server.isolation.workers import TOKEN, Worker, hold_the_interpreter

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]

FAST = Settings(close_timeout_seconds=0.3, handshake_timeout_seconds=10.0)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"), "--log-level", "info")
    yield made
    made.end()


@pytest.fixture
def sessions(worker: Worker) -> Iterator[Callable[[], skyproxy.Node]]:
    """Makes sessions that end with the test."""
    made: list[skyproxy.Node] = []

    def make() -> skyproxy.Node:
        made.append(worker.connect())
        return made[-1]

    yield make
    for node in made:
        node.close()
    wait_for(lambda: worker.activity()["sessions"] == 0 and len(worker.children()) == 1, "all sessions end")


def ones(node: skyproxy.Node, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=str(node.devices[0]))


def crash(number: int) -> None:
    if number == signal.SIGSEGV:
        ctypes.string_at(0)
    signal.raise_signal(number)


# --- what a session has ----------------------------------------------------------------------------------------------


def test_each_session_has_a_process_of_its_own(worker: Worker, sessions) -> None:
    first, second = sessions(), sessions()
    pids = {first.run(os.getpid), second.run(os.getpid), worker.process.pid}
    assert len(pids) == 3
    assert first.run(os.getppid) == worker.process.pid
    assert (ones(first, 3) + 1).tolist() == [2, 2, 2]
    assert (ones(second, 3) + 2).tolist() == [3, 3, 3]


def test_operations_bulk_and_functions_of_a_session_reach_the_same_process(worker: Worker, sessions) -> None:
    node = sessions()
    large = torch.arange(3 << 18, dtype=torch.float32)
    sent = large.to(str(node.devices[0]))
    total = node.run(lambda tensor: (float(tensor.double().sum()), os.getpid()), sent)
    assert total == (float(large.double().sum()), node.run(os.getpid))
    assert torch.equal((sent * 2).cpu(), large * 2)


def test_random_state_and_default_dtype_belong_to_one_session(worker: Worker, sessions) -> None:
    first, second = sessions(), sessions()
    first.run(torch.set_default_dtype, torch.float64)
    assert second.run(torch.get_default_dtype) == torch.float32
    assert first.run(torch.get_default_dtype) == torch.float64
    drawn = second.run(lambda: torch.rand(4).tolist())
    first.run(lambda: bool(torch.manual_seed(7)))
    second.run(lambda: bool(torch.manual_seed(8)))
    assert first.run(torch.initial_seed) == 7
    assert drawn != second.run(lambda: torch.rand(4).tolist())


def test_numbers_drawn_by_functions_differ_between_sessions(worker: Worker, sessions) -> None:
    def draw() -> tuple[float, float]:
        import random

        import numpy

        return random.random(), float(numpy.random.rand())

    first, second = sessions().run(draw), sessions().run(draw)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_lines_of_the_log_name_their_session(worker: Worker, sessions) -> None:
    node = sessions()
    node.run(abs, -1)
    identity = node._session.welcome.session
    wait_for(lambda: f"\n[{identity[:8]}] " in worker.log, "the line comes")


# --- what a session does to itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_ends_one_session_and_its_client_is_told_how(worker: Worker, sessions, number: int) -> None:
    honest, other = sessions(), sessions()
    kept, lost = ones(honest, 3), ones(other, 3)
    name = signal.Signals(number).name
    with pytest.raises(SessionLostError, match=rf"killed by signal {int(number)} \({name}\).*Other sessions"):
        other.run(crash, number)
    with pytest.raises(SessionLostError, match=rf"{name}"):
        lost.sum().item()
    assert kept.sum().item() == 3
    assert f"killed by signal {int(number)} ({name})" in worker.log


def test_an_exit_is_told_with_its_status(worker: Worker, sessions) -> None:
    with pytest.raises(SessionLostError, match="exited with status 5"):
        sessions().run(os._exit, 5)


def test_a_crash_has_no_call_to_come_back_to(worker: Worker, sessions) -> None:
    with pytest.raises(SessionLostError) as caught:
        sessions().run(crash, signal.SIGABRT)
    assert "reattach" not in str(caught.value)


def test_a_session_that_holds_its_interpreter_stops_nobody(worker: Worker, sessions) -> None:
    honest, hog = sessions(), sessions()
    tensor, pid = ones(honest, 3), hog.run(os.getpid)
    hog.submit(hold_the_interpreter)
    try:
        for _ in range(20):
            assert (tensor + 1).sum().item() == 6
            assert worker.get("/healthz") == "alive\n"
        report = worker.activity()
        assert report["sessions"] == 2
        assert report["idle_seconds"] == 0
        assert sessions().run(abs, -2) == 2
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_a_session_leaves_behind_ends_with_it(worker: Worker, sessions) -> None:
    def leave() -> list[int]:
        children = [subprocess.Popen(["sleep", "1000"], start_new_session=detached) for detached in (False, True)]
        return [child.pid for child in children]

    node = sessions()
    pids = node.run(leave)
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    node.close()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "what it started ends")


def test_a_function_that_forks_does_not_keep_the_session_open(worker: Worker, sessions) -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    node = sessions()
    node.run(fork)
    with pytest.raises(SessionLostError, match="SIGABRT"):
        node.run(crash, signal.SIGABRT)


def test_the_token_is_nowhere_in_a_session(worker: Worker, sessions) -> None:
    def is_shown() -> bool:
        try:
            return b"SKYPROXY_TOKEN" in Path("/proc/self/environ").read_bytes()
        except PermissionError:  # a hidden process of a user that is not root does not see it itself
            return False

    node = sessions()
    assert "SKYPROXY_TOKEN" not in node.run(lambda: dict(os.environ))
    assert node.run(is_shown) is False


def test_what_a_session_starts_gains_no_privileges(worker: Worker, sessions) -> None:
    def flags() -> list[str]:
        child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True)
        texts = (Path("/proc/self/status").read_text(), child.stdout)
        return [line for text in texts for line in text.splitlines() if line.startswith("NoNewPrivs")]

    assert sessions().run(flags) == ["NoNewPrivs:\t1"] * 2


def test_a_process_that_hides_its_memory_leaves_no_core_dump() -> None:
    code = """
import resource
from skyproxy_server import limits
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
limits.hide_memory()
print(resource.getrlimit(resource.RLIMIT_CORE)[0])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


# --- the supervisor --------------------------------------------------------------------------------------------------


def test_the_supervisor_loads_no_torch() -> None:
    program = "import sys, skyproxy_server.__main__; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_the_supervisor_stays_small_whatever_sessions_hold(worker: Worker, sessions) -> None:
    node = sessions()
    held = ones(node, 1 << 24)
    held.sum().item()
    maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    assert resident < 120 << 10  # KiB; a session that has loaded torch has more than 200 MiB
    (row,) = worker.activity()["devices"]
    assert row["used_memory_bytes"] >= 1 << 26


def test_commands_of_sessions_that_are_over_are_counted(worker: Worker, sessions) -> None:
    before = worker.activity()["commands"]
    node = sessions()
    (ones(node, 3) + 1).sum().item()
    node.close()
    wait_for(lambda: worker.activity()["sessions"] == 0, "the session ends")
    assert worker.activity()["commands"] >= before + 3


def test_nobody_joins_a_session_that_does_not_exist_or_has_its_bulk_connection(worker: Worker, sessions) -> None:
    node = sessions()
    for identity in ("nope", node._session.welcome.session):
        with pytest.raises(ConnectError, match="no such session"):
            connect_websocket(worker.url, TOKEN, Hello([1], BULK, identity, {}), settings=FAST)


def test_a_client_that_says_hello_and_nothing_more_holds_nobody(worker: Worker, sessions) -> None:
    silent, welcome = connect_websocket(worker.url, TOKEN, Hello([1], "operations", "", {}), settings=FAST)
    raw = socket.create_connection(("127.0.0.1", worker.port))
    try:
        node = sessions()
        assert ones(node, 2).sum().item() == 2
        bulk, _ = connect_websocket(worker.url, TOKEN, Hello([1], BULK, welcome.session, {}), settings=FAST)
        bulk.send(Ping(5))
        answer = bulk.recv(20)
        assert isinstance(answer, Pong)
        assert answer.number == 5
        bulk.close()
    finally:
        silent.close()
        raw.close()


def test_what_came_with_the_hello_reaches_the_session(worker: Worker) -> None:
    from skyproxy.protocol import framing
    from skyproxy.transport import websocket_frames as ws
    from skyproxy.transport.masking import mask

    def frame(opcode: int, payload: bytes) -> bytes:
        key = b"abcd"
        return ws.frame_header(opcode, len(payload), key) + bytes(mask(payload, key))

    hello = b"".join(bytes(part) for part in framing.encode(Hello([1], "operations", "", {}), 1 << 20))
    upgrade = (
        f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", worker.port), 20) as sock:
        sock.sendall(upgrade + frame(ws.BINARY, hello) + frame(ws.PING, b"what came early"))
        received = b""
        while b"what came early" not in received:
            piece = sock.recv(4096)
            assert piece, received
            received += piece
    wait_for(lambda: worker.activity()["sessions"] == 0, "the session ends")


# --- encryption ------------------------------------------------------------------------------------------------------


def test_over_tls_a_session_works_and_a_crash_is_told(tmp_path: Path, authority, tls_contexts) -> None:
    certificate = tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    worker = Worker(tmp_path, "--tls-cert", str(certificate))
    try:
        with worker.connect(tls_contexts[0]) as node, worker.connect(tls_contexts[0]) as other:
            large = torch.randn(3 << 20)
            sent = large.to(str(node.devices[0]))
            assert torch.equal(sent.cpu(), large)
            assert node.run(lambda tensor: tensor.shape, sent) == large.shape
            with pytest.raises(SessionLostError, match="SIGSEGV"):
                other.run(crash, signal.SIGSEGV)
            assert torch.equal(sent.cpu(), large)
    finally:
        worker.end()


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_sessions_and_their_memory_are_bounded(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--session-memory", str(600 << 20), SKYPROXY_MAX_SESSIONS="2")
    try:
        with worker.connect() as first, worker.connect() as second:
            with pytest.raises(ConnectError, match="already serves 2 sessions"):
                worker.connect()
            fits = ones(first, 1 << 20)
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                ones(first, 1 << 30).sum().item()
            assert fits.sum().item() == 1 << 20
            with pytest.raises(MemoryError):
                second.run(bytearray, 1 << 30)
        wait_for(lambda: worker.activity()["sessions"] == 0 and len(worker.children()) == 1, "both end")
        with worker.connect() as again:
            assert ones(again, 2).sum().item() == 2
    finally:
        worker.end()


def test_a_token_bounds_its_sessions_and_its_end_ends_them_whatever_they_do(tmp_path: Path) -> None:
    small, owner = "a-token-of-a-stranger", TOKEN
    worker = Worker(tmp_path, SKYPROXY_TOKEN_POLL_SECONDS="0.1")
    file = worker.tokens / "stranger"
    try:
        for text in (f"{small}\nscopes: operations\nmemory: 300MiB\n", f"{small}\nscopes: operations, functions\n"):
            draft = worker.tokens / ".draft"
            draft.write_text(text, encoding="ascii")
            draft.chmod(0o600)
            draft.rename(file)
            may_run = int("functions" in text)
            wait_for(lambda wanted=may_run: _functions(worker, small) == wanted, "the token is known")
            if not may_run:
                with worker.connect(token=small) as node:
                    with pytest.raises(RuntimeError, match="can't allocate memory"):
                        ones(node, 1 << 27).sum().item()
                    with pytest.raises(ConfigurationError, match=r"runs no functions|--no-functions"):
                        node.run(os.getpid)
        with worker.connect(token=owner) as honest:
            hog = worker.connect(token=small)
            hog.submit(hold_the_interpreter)
            waits, _ = connect_websocket(worker.url, small, Hello([1], "operations", "", {}, 600), settings=FAST)
            waits.cut()
            with worker.connect(token=small) as left:
                left.submit(signal.pause)
                assert left.run(abs, -3) == 3  # the other one has begun
            wait_for(lambda: _counts(worker) == (2, 4), "one waits for its client, and one has a function running")
            file.unlink()
            wait_for(lambda: _counts(worker) == (1, 1), "all that the revoked token has ends")
            assert ones(honest, 2).sum().item() == 2
            hog.close()
    finally:
        worker.end()


def _counts(worker: Worker) -> tuple[object, object]:
    """Sessions with a connection, and processes of sessions."""
    activity = worker.activity()
    return activity["sessions"], activity["processes"]


def _functions(worker: Worker, token: str) -> int | None:
    """Whether a new session with this token may run functions; None where it cannot even begin."""
    try:
        transport, welcome = connect_websocket(worker.url, token, Hello([1], "operations", "", {}), settings=FAST)
    except AuthenticationError:
        return None
    transport.close()
    return welcome.limits["functions"]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        with worker.connect() as node, worker.connect() as hog:
            pids = [node.run(os.getpid), hog.run(os.getpid), *worker.children()]
            hog.submit(hold_the_interpreter)
            worker.process.kill()
            worker.process.wait()
            wait_for(lambda: not any(map(_runs, pids)), "all of its processes end")
    finally:
        worker.end()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sigterm_says_goodbye_and_ends_everything(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        transport, _ = connect_websocket(worker.url, TOKEN, Hello([1], "operations", "", {}), settings=FAST)
        pids = worker.children()
        assert len(pids) == 2
        worker.process.terminate()
        with pytest.raises(SessionLostError, match="shutting down"):
            transport.recv(30)
        transport.close()
        assert worker.process.wait(30) == 0
        assert not any(map(_runs, pids))
        assert "Traceback" not in worker.log
    finally:
        worker.end()


def test_a_choice_of_devices_that_cannot_be_met_is_told(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has what is asked for")
    done = subprocess.run(
        [sys.executable, "-m", "skyproxy_server", "--session-processes", "--device", "cuda", "--port", "0"],
        env=environment(SKYPROXY_TOKEN=TOKEN),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "--device cuda was asked for" in done.stderr


def test_nothing_is_left_of_many_sessions(worker: Worker, sessions) -> None:
    def open_and_close() -> None:
        for _ in range(5):
            transport, _ = connect_websocket(worker.url, TOKEN, Hello([1], "operations", "", {}), settings=FAST)
            transport.close()
        wait_for(lambda: worker.activity()["sessions"] == 0 and len(worker.children()) == 1, "sessions end")

    def counts() -> tuple[int, int]:
        folder = Path(f"/proc/{worker.process.pid}")
        return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))

    open_and_close()
    before = wait_for(counts, "they are counted")
    open_and_close()
    wait_for(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), "descriptors and threads")


def test_the_web_view_is_told_of_sessions_by_their_own_processes(worker: Worker, sessions) -> None:
    first, second = sessions(), sessions()
    for node in (first, second):
        ones(node, 1000).sum().item()
    names = {node._session.welcome.session[:8] for node in (first, second)}

    def told() -> bool:
        rows = [row for row in json.loads(worker.get("/status"))["sessions"] if row["session"] in names]
        return len(rows) == 2 and all(row["state"] == "idle" and row["commands"] > 0 for row in rows)

    wait_for(told, "both processes tell of their sessions")
    assert {row["client"] for row in json.loads(worker.get("/status"))["sessions"]} == {"owner"}
    assert second.worker_status()["worker"]["sessions"] >= 2
