"""Many clients at once against every bound of a worker: none is passed, and everything is given back in the end."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import SkyproxyError
from skyproxy.protocol.messages import BULK, OPERATIONS, Hello
from skyproxy.settings import Settings
from skyproxy.transport.websocket import WebSocketTransport, connect_websocket
from skyproxy_server.blobs import BlobStore
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.limits import are_sessions_separable
from skyproxy_server.listener import Listener, serve
from skyproxy_server.tokens import Tokens
from skyproxy_server.worker_host import WorkerHost
from tests.integration.programs import wait_for
from tests.server.isolation.workers import Worker

ALICE = "alice-0123456789abcdef0123456789"
BOB = "bob-0123456789abcdef01234567890123"
CPU: DeviceRow = {"type": "cpu", "index": 0, "name": "cpu"}
SESSIONS = {ALICE: 3, BOB: 2}
CONNECTIONS = {ALICE: 6, BOB: 3}
BLOB_BYTES, BOBS_BLOB_BYTES = 600_000, 200_000
DETACHED = 2
CLIENTS = 8
SETTINGS = Settings(
    close_timeout_seconds=0.5,
    connect_timeout_seconds=10.0,
    handshake_timeout_seconds=10.0,
    max_detached_sessions=DETACHED,
    max_kept_calls=3,
    min_blob_bytes=1000,
    token_poll_seconds=0.05,
)
SECONDS = 120


class Counted:
    """Connections and sessions that clients hold: no more than the worker gave, for they are counted from its welcome
    until before the client leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now: Counter[tuple[str, str]] = Counter()
        self.most: Counter[tuple[str, str]] = Counter()
        self.refused = 0
        self.errors: list[str] = []

    @contextlib.contextmanager
    def holding(self, token: str, kind: str) -> Iterator[None]:
        with self._lock:
            self.now[token, kind] += 1
            self.most[token, kind] = max(self.most[token, kind], self.now[token, kind])
        try:
            yield
        finally:
            with self._lock:
                self.now[token, kind] -= 1

    def note_refusal(self) -> None:
        with self._lock:
            self.refused += 1


def tokens_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, token, more in (("alice", ALICE, ""), ("bob", BOB, f"uploads: {BOBS_BLOB_BYTES}\n")):
        path = folder / name
        path.touch(mode=0o600)
        bounds = f"sessions: {SESSIONS[token]}\nconnections: {CONNECTIONS[token]}\n{more}"
        path.write_text(f"{token}\nscopes: operations, functions\n{bounds}")
    return folder


def raw_session(url: str, token: str, chance: random.Random, counted: Counted) -> None:
    """Open a session, join it, break it, take it up again or leave it, as chance says."""
    grace = chance.choice((0, 600)) if token == ALICE else 0

    def greet(hello: Hello) -> WebSocketTransport:
        return connect_websocket(url, token, hello, settings=SETTINGS)[0]

    transport, welcome = connect_websocket(url, token, Hello([1], OPERATIONS, "", {}, grace), settings=SETTINGS)
    with counted.holding(token, "connections"), counted.holding(token, "sessions"):
        for _ in range(chance.choice((0, 1, 2))):
            with contextlib.suppress(SkyproxyError):
                bulk = greet(Hello([1], BULK, welcome.session, {}))
                with counted.holding(token, "connections"):
                    pass
                bulk.cut()
        if chance.random() < 0.5:
            transport.close()
            return
    transport.cut()
    if grace and chance.random() < 0.7:
        again = greet(Hello([1], OPERATIONS, welcome.session, {}, grace, welcome.secret))
        with counted.holding(token, "connections"):
            pass
        if chance.random() < 0.5:
            again.cut()
        else:
            again.close()


def uploading_session(url: str, token: str, chance: random.Random, counted: Counted) -> None:
    """Upload something that nobody has, use it, leave a call behind."""
    with skyproxy.connect(url, token=token) as node, counted.holding(token, "sessions"):
        values = torch.full((chance.randrange(500, 40_000),), chance.random())
        assert torch.equal(values.to(str(node.devices[0])).cpu(), values)
        if chance.random() < 0.5:
            node.submit(divmod, 7, 2)


def storm(url: str, counted: Counted, rounds: int) -> None:
    """All clients at once, with both tokens, so many times; returns when all are done."""

    def be_client(number: int) -> None:
        chance = random.Random(number)
        for _ in range(rounds):
            act = chance.choice((raw_session, raw_session, uploading_session))
            try:
                act(url, chance.choice((ALICE, BOB)), chance, counted)
            except SkyproxyError:
                counted.note_refusal()
            except Exception as error:
                counted.errors.append(f"client {number}: {error!r:.300}")
                return

    threads = [threading.Thread(target=be_client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a client waits for ever"


def assert_bounds_held(counted: Counted) -> None:
    assert counted.errors == []
    assert counted.refused, "so many at once are more than there may be"
    for token in (ALICE, BOB):
        assert 0 < counted.most[token, "connections"] <= CONNECTIONS[token]
        # A session that its client takes up again was let in before; of those without a connection there are a few.
        slack = DETACHED if token == ALICE else 0
        assert 0 < counted.most[token, "sessions"] <= SESSIONS[token] + slack


@contextlib.contextmanager
def sampled(look: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Look again and again meanwhile; what a look raised first."""
    over, problems = threading.Event(), list[BaseException]()

    def run() -> None:
        while not over.wait(0.002) and not problems:
            try:
                look()
            except BaseException as error:
                problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield problems
    finally:
        over.set()
        thread.join()


@pytest.fixture
def blobs() -> BlobStore:
    return BlobStore(BLOB_BYTES, least_bytes=1000)


@pytest.fixture
def host(blobs: BlobStore) -> WorkerHost:
    return WorkerHost([CPU], SETTINGS, blobs=blobs, functions=True)


@pytest.fixture
def listener(host: WorkerHost, tmp_path: Path) -> Iterator[Listener]:
    made = serve("127.0.0.1", 0, Tokens(tokens_in(tmp_path / "tokens"), 600.0), host, settings=SETTINGS)
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_many_clients_at_once_pass_no_bound_and_leave_nothing(
    host: WorkerHost, listener: Listener, blobs: BlobStore
) -> None:
    counted = Counted()

    def look() -> None:
        held, of_bob = blobs._held_bytes, blobs._held_by["bob"]
        assert 0 <= held <= BLOB_BYTES
        assert 0 <= of_bob <= BOBS_BLOB_BYTES

    with sampled(look) as problems:
        storm(f"ws://127.0.0.1:{listener.port}", counted, 10)
    assert problems == []
    assert_bounds_held(counted)
    wait_for(lambda: len(host._sessions) == host.detached() <= DETACHED, "sessions end with their connections", 30)
    host.end_lasting()
    wait_for(lambda: not host._sessions, "those without a connection end", 30)
    wait_for(lambda: not (listener._transports or listener._pending or listener._sockets), "connections end", 30)
    wait_for(lambda: not listener._threads, "threads end", 30)
    wait_for(lambda: host.activity()["calls_running"] == 0, "calls end with the sessions that made them", 30)
    assert host.calls is not None
    assert len(host.calls._calls) <= SETTINGS.max_kept_calls
    wait_for(lambda: blobs.stats()["unhashed"] == 0, "all uploads are hashed", 30)
    with blobs._lock:
        assert blobs._held_bytes == sum(blob.byte_count for blob in blobs._blobs.values())
        assert sum(blobs._held_by.values()) == blobs._held_bytes
    # And nobody is kept out now.
    with contextlib.ExitStack() as stack:
        for token, most in SESSIONS.items():
            for _ in range(most):
                transport, _ = connect_websocket(
                    f"ws://127.0.0.1:{listener.port}", token, Hello([1], OPERATIONS, "", {}), settings=SETTINGS
                )
                stack.callback(transport.close)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")
def test_many_clients_at_once_of_session_processes_pass_no_bound_and_leave_none(tmp_path: Path) -> None:
    extra = {
        "SKYPROXY_MAX_DETACHED_SESSIONS": str(DETACHED),
        "SKYPROXY_CALL_GRACE_SECONDS": "1",
        "SKYPROXY_SESSION_GRACE_SECONDS": "2",
        "SKYPROXY_CLOSE_TIMEOUT_SECONDS": "0.5",
        "SKYPROXY_MIN_BLOB_BYTES": "1000",
    }
    worker = Worker(tmp_path, "--blob-bytes", str(BLOB_BYTES), **extra)
    try:
        tokens_in(worker.tokens)
        wait_for(lambda: _is_known(worker), "the worker knows the tokens", 30)
        counted = Counted()
        storm(worker.url, counted, 4)
        assert_bounds_held(counted)
        wait_for(
            lambda: (
                (worker.activity()["sessions"], worker.activity()["detached"], worker.activity()["processes"])
                == (0, 0, 0)
            ),
            "all sessions and their processes end",
            90,
        )
        assert len(worker.children()) == 1, "the template"
        assert "Traceback" not in worker.log
    finally:
        worker.end()


def _is_known(worker: Worker) -> bool:
    try:
        worker.connect(token=BOB).close()
    except SkyproxyError:
        return False
    return True
