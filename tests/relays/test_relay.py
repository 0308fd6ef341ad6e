"""A payload on its way from one process to the next, over real sockets; and what hostile ones can do about it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from skyproxy.relays import edges
from skyproxy.relays.content import Content
from skyproxy.relays.edges import SECRET_BYTES, UnreachableError
from skyproxy.relays.encryption import own_certificate
from skyproxy.relays.relay import MAX_BYTES, Relay
from skyproxy.transport.trust import PinnedContext
from tests.integration.programs import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without a name are there on Linux only")
PATIENCE_SECONDS = 30
HERE = "127.0.0.1"
PAYLOAD = os.urandom(3 << 20)
DIGEST = hashlib.sha256(PAYLOAD).digest()
SECRET, OTHER = b"s" * SECRET_BYTES, b"o" * SECRET_BYTES


@pytest.fixture
def make() -> Iterator[Callable[[], Relay]]:
    made: list[Relay] = []

    def one() -> Relay:
        made.append(Relay(len(PAYLOAD), DIGEST))
        return made[-1]

    yield one
    for relay in made:
        relay.end()


def content_of(relay: Relay) -> bytes:
    with relay.claimed() as descriptor:
        return os.pread(descriptor, len(PAYLOAD), 0)


def relay_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("skyproxy-relay")]


@pytest.mark.parametrize("near", [True, False])
def test_it_is_passed_on_when_it_has_come_and_then_nothing_is_left(make: Callable[[], Relay], near: bool) -> None:
    ended = threading.Event()
    parent, child = Relay(len(PAYLOAD), DIGEST, ended.set), make()
    port, fingerprint = parent.listen(HERE, {SECRET: near})
    fetching = threading.Thread(target=child.fetch, args=(HERE, port, fingerprint, SECRET))
    fetching.start()
    parent.hold([PAYLOAD[:7], memoryview(PAYLOAD)[7:]])
    fetching.join(PATIENCE_SECONDS)
    assert not ended.is_set(), "the parent's own call has not begun"
    assert content_of(child) == content_of(parent) == PAYLOAD
    assert ended.wait(PATIENCE_SECONDS)
    wait_for(lambda: not relay_threads(), "its threads end")
    with pytest.raises(OSError):
        content_of(parent)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, port), 5).close()


def test_a_secret_is_good_once_and_a_wrong_one_for_nothing(make: Callable[[], Relay]) -> None:
    parent = make()
    parent.hold([PAYLOAD])
    port, fingerprint = parent.listen(HERE, {SECRET: False, OTHER: False})
    with pytest.raises(OSError):
        make().fetch(HERE, port, fingerprint, b"w" * SECRET_BYTES)
    make().fetch(HERE, port, fingerprint, SECRET)
    with pytest.raises(OSError):
        make().fetch(HERE, port, fingerprint, SECRET)
    child = make()
    child.fetch(HERE, port, fingerprint, OTHER)
    assert content_of(child) == PAYLOAD, "nobody keeps out who is waited for"


def test_another_certificate_is_not_shown_the_secret(make: Callable[[], Relay]) -> None:
    parent = make()
    parent.hold([PAYLOAD])
    port, fingerprint = parent.listen(HERE, {SECRET: False})
    with pytest.raises(UnreachableError, match="not the process"):
        make().fetch(HERE, port, "sha256:" + "0" * 64, SECRET)
    make().fetch(HERE, port, fingerprint, SECRET)  # so it was not used


def test_nothing_is_told_without_encryption(make: Callable[[], Relay]) -> None:
    parent = make()
    parent.hold([PAYLOAD])
    port, _ = parent.listen(HERE, {SECRET: False})
    with socket.create_connection((HERE, port), 5) as plain:
        plain.settimeout(PATIENCE_SECONDS)
        plain.sendall(SECRET)
        with contextlib.suppress(ConnectionResetError):
            assert PAYLOAD[:16] not in plain.recv(1 << 16)


def test_strangers_keep_nobody_out_and_are_bounded(make: Callable[[], Relay]) -> None:
    parent = make()
    parent.hold([PAYLOAD])
    port, fingerprint = parent.listen(HERE, {SECRET: False})
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection((HERE, port), 5))
        child = make()
        child.fetch(HERE, port, fingerprint, SECRET)
        for _ in range(40):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((HERE, port), 5))
        wait_for(lambda: len(relay_threads()) <= 36, "threads end")
    assert content_of(child) == PAYLOAD


def test_those_that_wait_learn_that_there_will_be_none(make: Callable[[], Relay]) -> None:
    parent, errors = make(), []
    port, fingerprint = parent.listen(HERE, {SECRET: False})

    def fetch() -> None:
        try:
            make().fetch(HERE, port, fingerprint, SECRET)
        except OSError as error:
            errors.append(str(error))

    fetching = threading.Thread(target=fetch)
    fetching.start()
    wait_for(lambda: parent._serving == 1, "one is served")
    parent.end()
    fetching.join(PATIENCE_SECONDS)
    assert errors == ["the other process has not got it"]


def test_nobody_there_is_an_error_of_its_own(make: Callable[[], Relay]) -> None:
    with socket.create_server((HERE, 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(UnreachableError, match="cannot be reached"):
        make().fetch(HERE, port, own_certificate()[1], SECRET)


@contextlib.contextmanager
def parent_that(says: Callable[[ssl.SSLSocket], object]) -> Iterator[tuple[int, str]]:
    """A process with the right certificate, which does as it likes."""
    context, fingerprint = own_certificate()

    def serve() -> None:
        peer, _ = listening.accept()
        with contextlib.suppress(OSError), peer, context.wrap_socket(peer, server_side=True) as tls:
            tls.recv(SECRET_BYTES)
            says(tls)

    with socket.create_server((HERE, 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1], fingerprint
        thread.join(PATIENCE_SECONDS)


def other_path() -> bytes:
    path = f"/proc/{os.getpid()}/fd/0".encode()
    return b"p" + bytes([len(path)]) + path


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"b" + PAYLOAD[:-1] + bytes([PAYLOAD[-1] ^ 1]) + b"!", "announced"),
        (b"b" + PAYLOAD[:1000], "gone"),
        (b"....", "gone"),
        (b"\0", "has not got it"),
        (b"p\x06/etc/x", "gone"),
        (other_path() + b"x", "has not got it"),
        (b"", "gone"),
    ],
    ids=["wrong bytes", "too few", "only beats", "nonsense", "a path and no more", "a wrong path", "nothing"],
)
def test_what_a_hostile_parent_says_is_not_taken(make: Callable[[], Relay], said: bytes, error: str) -> None:
    child = make()
    with parent_that(lambda tls: tls.sendall(said)) as (port, fingerprint):
        with pytest.raises(OSError, match=error):
            child.fetch(HERE, port, fingerprint, SECRET)
    with pytest.raises(OSError, match="not here"):
        content_of(child)


def test_a_parent_that_is_too_slow_is_given_up(make: Callable[[], Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "longest_seconds", lambda size: 0.0)
    with parent_that(lambda tls: tls.sendall(b"b" + PAYLOAD)) as (port, fingerprint):
        with pytest.raises(TimeoutError, match="too slow"):
            make().fetch(HERE, port, fingerprint, SECRET)
    monkeypatch.setattr(edges, "STALL_SECONDS", 0.2)
    with parent_that(lambda tls: tls.recv(1)) as (port, fingerprint):
        with pytest.raises(TimeoutError):
            make().fetch(HERE, port, fingerprint, SECRET)


def test_beats_are_heard_for_as_long_as_somebody_wants_it(make: Callable[[], Relay]) -> None:
    child = make()

    def beat(tls: ssl.SSLSocket) -> None:
        child.end()
        tls.sendall(b"..")
        tls.recv(1)

    with parent_that(beat) as (port, fingerprint):
        with pytest.raises(OSError, match="nobody wants it"):
            child.fetch(HERE, port, fingerprint, SECRET)


def test_a_relay_has_an_end_even_if_its_client_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyproxy.relays.relay.LIFETIME_SECONDS", 0.0)
    ended = threading.Event()
    relay = Relay(len(PAYLOAD), DIGEST, ended.set)
    relay.listen(HERE, {SECRET: False})
    assert ended.wait(PATIENCE_SECONDS)
    wait_for(lambda: not relay_threads(), "its threads end")


def test_an_address_that_others_translate_is_listened_for_on_all(make: Callable[[], Relay]) -> None:
    parent, child = make(), make()
    parent.hold([PAYLOAD])
    port, fingerprint = parent.listen("192.0.2.1", {SECRET: False})
    child.fetch(HERE, port, fingerprint, SECRET)
    assert content_of(child) == PAYLOAD


@pytest.mark.parametrize(
    ("size", "digest"), [(0, DIGEST), (MAX_BYTES + 1, DIGEST), (1, b"short")], ids=["empty", "too large", "no hash"]
)
def test_what_is_too_large_or_has_no_hash_is_not_passed_on(size: int, digest: bytes) -> None:
    with pytest.raises(ValueError):
        Relay(size, digest)


def test_what_comes_twice_or_too_late_is_let_go(make: Callable[[], Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Content] = []
    close = Content.close
    monkeypatch.setattr(Content, "close", lambda content: (closed.append(content), close(content)))
    relay = make()
    relay.hold([PAYLOAD])
    relay.hold([PAYLOAD])
    assert len(closed) == 1
    relay.end()
    relay.hold([PAYLOAD])
    assert len(closed) == 3


def test_the_certificate_is_the_processes_own() -> None:
    context, fingerprint = own_certificate()
    assert own_certificate() == (context, fingerprint)
    assert PinnedContext(fingerprint).fingerprint == fingerprint
