"""Clients that say nothing: a worker asks them, and lets go of their connections, not of their sessions."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from skyproxy.protocol.messages import WORKER
from skyproxy.settings import Settings
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server import incoming_transfer, silence
from skyproxy_server.incoming_transfer import IncomingTransfer
from skyproxy_server.silence import SilenceWatch, has_hung_up


class FakeClient:
    """A client that answers what it is asked, while it is there."""

    def __init__(self) -> None:
        self.heard: int | None = 0
        self.is_there = True
        self.asked = self.given_up = 0

    def ask(self) -> None:
        self.asked += 1
        if self.is_there and self.heard is not None:
            self.heard += 6

    def give_up(self) -> None:
        self.given_up += 1
        self.heard = None


class Watched:
    def __init__(self, seconds: float = 15.0) -> None:
        self.now = 0.0
        self.clients = {"quiet": FakeClient(), "gone": FakeClient()}
        self.watch = SilenceWatch(seconds, self.clients.items, lambda: self.now)

    def pass_time(self, seconds: float, step: float = 1.0) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += step
            self.watch.look()


def test_who_answers_is_kept_and_who_does_not_is_let_go_of_in_time() -> None:
    watched = Watched()
    quiet, gone = watched.clients.values()
    watched.pass_time(4)
    assert (quiet.asked, gone.asked) == (0, 0), "who spoke a moment ago is not asked"
    gone.is_there = False
    watched.pass_time(13)
    assert (quiet.given_up, gone.given_up) == (0, 1)
    watched.pass_time(300)
    assert (quiet.given_up, gone.given_up) == (0, 1), "it has no connection now"
    gone.heard, gone.is_there = 1000, True  # it is back
    watched.pass_time(300)
    assert gone.given_up == 1


def test_a_worker_that_was_stopped_itself_lets_go_of_nobody() -> None:
    watched = Watched()
    for client in watched.clients.values():
        client.is_there = False
    watched.pass_time(10)
    watched.now += 3600
    watched.watch.look()
    for client in watched.clients.values():
        client.is_there = True
    watched.pass_time(60)
    assert [client.given_up for client in watched.clients.values()] == [0, 0]


def test_the_thread_ends_with_the_last_session_and_begins_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = {"one": FakeClient()}
    ended, begun = threading.Event(), threading.Event()

    def pause(seconds: float) -> None:
        begun.set()
        ended.wait(20)

    monkeypatch.setattr(silence.time, "sleep", pause)
    watch = SilenceWatch(15.0, clients.items)
    watch.begin()
    watch.begin()
    (thread,) = [one for one in threading.enumerate() if one.name == "skyproxy-silence"]
    assert begun.wait(20)
    clients.clear()
    ended.set()
    thread.join(20)
    assert not thread.is_alive()
    SilenceWatch(0.0, clients.items).begin()  # switched off
    assert not [one for one in threading.enumerate() if one.name == "skyproxy-silence"]


def test_who_waits_for_an_upload_sees_that_the_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_transfer, "LOOK_SECONDS", 0.01)
    arrival = IncomingTransfer(8, lambda: True)
    with pytest.raises(RuntimeError, match="in the middle of an upload"):
        arrival.wait()
    looks: list[bool] = []

    def comes_meanwhile() -> bool:
        looks.append(False)
        arrival.pieces.append((0, 8))
        arrival.count(8)
        return False

    arrival = IncomingTransfer(8, comes_meanwhile)
    assert arrival.wait().numel() == 8
    assert looks


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_a_connection_that_nobody_reads_tells_its_end() -> None:
    ours, theirs = socket.socketpair()
    worker = WebSocketTransport(PlainStream(ours), WORKER, Settings(close_timeout_seconds=0.1))
    assert not has_hung_up(worker)
    theirs.close()
    assert has_hung_up(worker)
    worker.close()
    assert has_hung_up(worker)
