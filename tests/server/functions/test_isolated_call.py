"""The worker's side of an isolated call, against processes that say what no process of ours says, or nothing more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from skyproxy.errors import FunctionCrashedError
from skyproxy.settings import Settings
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.endings import ProcessEnding
from skyproxy_server.functions.events import Events, OutgoingEvent
from skyproxy_server.functions.isolated_call import IsolatedCall
from skyproxy_server.functions.lent_tensors import LentTensors
from skyproxy_server.functions.memory_files import make_memory_file, write_pieces
from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("processes of functions need Linux", allow_module_level=True)

TASK: dict[str, Any] = {"tensors": [], "bases": []}
SETTINGS = Settings(max_payload_bytes=1 << 20)
Peer = Callable[[ControlChannel], None]


class FakeProcess:
    """A process that is a thread of this one; it ends when its function has."""

    def __init__(self, peer: Peer) -> None:
        self.channel, theirs = ControlChannel.pair()
        self.out, self._out = os.pipe()
        self.err, self._err = os.pipe()
        self.killed = self.given_back = False
        self._theirs = ControlChannel(theirs)
        self._thread = threading.Thread(target=self._run, args=(peer,), daemon=True)
        self._thread.start()

    def _run(self, peer: Peer) -> None:
        try:
            peer(self._theirs)
        except ChannelClosedError:
            pass
        finally:
            self._theirs.close()

    def kill(self) -> None:
        self.killed = True
        self._theirs.close()

    def ending(self) -> ProcessEnding:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return ProcessEnding(signal_number=9)

    def close(self) -> None:
        self.channel.close()
        for descriptor in (self.out, self._out, self.err, self._err):
            os.close(descriptor)


class FakeNursery:
    def __init__(self, peer: Peer) -> None:
        self.process = FakeProcess(peer)

    def take(self, session: str) -> FakeProcess:
        return self.process

    def give_back(self, process: FakeProcess) -> None:
        process.given_back = True
        process.close()


class FakeLoan:
    """Lends one tensor."""

    def __init__(self) -> None:
        self.given = torch.zeros(4)
        self.tensors = LentTensors([self.given], [self.given])

    def random_states(self) -> list[list[object]]:
        return []

    def take_random_states(self, states: object) -> None:
        pass


class FakeCaller:
    identity, session, name = "i" * 32, "s" * 32, "work"

    def __init__(self) -> None:
        self.events = Events(self.identity, SETTINGS)
        self.told: list[OutgoingEvent] = []
        self.events.attach(self, 0)

    def send_event(self, call: str, event: OutgoingEvent) -> None:
        self.told.append(event)

    def has_run(self) -> None:
        pass

    def print_from_process(self, stream: str, text: str) -> None:
        self.events.add("output", {"stream": stream, "text": text})

    def wait_for_room(self) -> bool:
        return not self.events.ended


def heard(channel: ControlChannel) -> None:
    """Read what begins the call."""
    message, files = channel.receive()
    for _ in range(message["files"]):
        files += channel.receive()[1]
    for file in files:
        os.close(file)


def say(channel: ControlChannel, kind: str = "result", pieces: tuple[bytes, ...] = (b"x",), **head: object) -> None:
    told = {"value": {}, "count": len(pieces), "sizes": [len(piece) for piece in pieces], "random": [], **head}
    packed = msgpack.packb(told, use_bin_type=True)
    file = write_pieces([packed, *pieces])
    channel.send({"kind": kind, "number": 1, "head": len(packed)}, [file])
    os.close(file)


def run(peer: Peer) -> tuple[FakeCaller, FakeNursery, FakeLoan]:
    caller, nursery, loan = FakeCaller(), FakeNursery(peer), FakeLoan()
    call = IsolatedCall(nursery, [], SETTINGS, loan)  # type: ignore[arg-type]
    try:
        call.run(caller, TASK, [b"payload"], None)
    finally:
        assert nursery.process.given_back
    return caller, nursery, loan


def test_a_result_is_passed_on_as_the_bytes_that_it_is() -> None:
    def peer(channel: ControlChannel) -> None:
        heard(channel)
        say(channel, pieces=(b"one", b"two"))
        channel.receive()

    [event] = run(peer)[0].told
    assert (event.kind, [bytes(piece) for piece in event.pieces or ()]) == ("result", [b"one", b"two"])


def test_a_process_that_cannot_open_the_memory_of_a_gpu_is_told_again_with_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def peer(channel: ControlChannel) -> None:
        heard(channel)
        channel.send({"kind": "refused", "why": "invalid resource handle\nof a GPU"})
        heard(channel)
        say(channel)
        channel.receive()

    [event] = run(peer)[0].told
    assert event.kind == "result"
    assert r"invalid resource handle\nof a GPU" in caplog.text


def leaves_before_it_hears(channel: ControlChannel) -> None:
    channel.close()


def leaves_when_it_has_heard(channel: ControlChannel) -> None:
    heard(channel)


def leaves_while_it_speaks(channel: ControlChannel) -> None:
    heard(channel)
    channel.send({"kind": "stream", "number": 1, "head": 9})


def speaks_nonsense(channel: ControlChannel) -> None:
    heard(channel)
    channel.send({"kind": "take-over"})
    channel.receive()


def says(**head: object) -> Peer:
    def peer(channel: ControlChannel) -> None:
        heard(channel)
        say(channel, **head)  # type: ignore[arg-type]
        while True:
            channel.receive()

    return peer


def sends_a_short_file(channel: ControlChannel) -> None:
    heard(channel)
    file = make_memory_file(4)
    channel.send({"kind": "result", "number": 1, "head": 4000}, [file])
    os.close(file)
    channel.receive()


def sends_too_much(channel: ControlChannel) -> None:
    heard(channel)
    file = make_memory_file(SETTINGS.max_payload_bytes + 1)
    channel.send({"kind": "result", "number": 1, "head": 4}, [file])
    os.close(file)
    channel.receive()


def prints_no_text(channel: ControlChannel) -> None:
    heard(channel)
    channel.send({"kind": "output", "stream": "stdout", "text": 3})
    channel.receive()


def refuses_twice(channel: ControlChannel) -> None:
    for _ in range(2):
        heard(channel)
        channel.send({"kind": "refused", "why": "invalid resource handle"})
    channel.receive()


@pytest.mark.parametrize(
    "peer",
    [
        leaves_before_it_hears,
        leaves_when_it_has_heard,
        leaves_while_it_speaks,
        speaks_nonsense,
        sends_a_short_file,
        sends_too_much,
        prints_no_text,
        says(kind="started"),
        says(value=3),
        says(sizes=[2]),
        says(sizes=[-1, 2]),
        says(count=7),
        says(count="1"),
        says(value={"changed": [5]}),
        says(storages=[["argument", 3]], kept=[[0, ["float32", [1], [1], 0]]]),
        says(storages=[["argument", 0]], kept=[[0, ["float32", [1 << 40], [1], 0]]]),
        says(storages=[["argument", 0]], kept=[[0, ["object", [1], [1], 0]]]),
        says(storages=[["piece", 0]], kept=[[0, ["uint8", [1], [1], 0]]]),
        says(storages=[["file", 4]], kept=[[0, ["uint8", [1], [1], 0]]]),
        says(storages=[], kept=[[0, ["uint8", [1], [1], 0]]]),
        says(storages=3),
        says(storages=[["copy", [0, 0]]]),
        says(storages=[["copy", [9, 0]]]),
        says(storages=[["copy", 0]]),
        says(storages=[["empty", "meta"]]),
        refuses_twice,
    ],
)
def test_a_process_that_leaves_or_lies_ends_its_call_and_nothing_else(peer: Peer) -> None:
    with pytest.raises(FunctionCrashedError, match="the process of work was killed by signal 9"):
        run(peer)


def test_a_process_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyproxy_server.functions.isolated_call._STOP_SECONDS", 0.05)
    here = threading.Event()

    def peer(channel: ControlChannel) -> None:
        heard(channel)
        here.set()
        while True:
            channel.receive()

    caller, nursery, loan = FakeCaller(), FakeNursery(peer), FakeLoan()
    call = IsolatedCall(nursery, [], SETTINGS, loan)  # type: ignore[arg-type]
    thread = threading.Thread(target=call.run, args=(caller, TASK, [b"payload"], None), daemon=True)
    thread.start()
    assert here.wait(60)
    call.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert nursery.process.killed
    assert caller.told == []


def test_output_without_end_does_not_keep_a_call_from_its_end() -> None:
    has_said = threading.Event()

    def peer(channel: ControlChannel) -> None:
        heard(channel)
        say(channel)
        has_said.set()
        channel.receive()

    caller, nursery = FakeCaller(), FakeNursery(peer)
    os.write(nursery.process._out, b"y")
    printed = printed_late = 0

    def print_again(stream: str, text: str) -> None:
        nonlocal printed, printed_late
        printed += len(text)
        printed_late += len(text) if has_said.is_set() else 0  # until then, as much as comes while the peer has no turn
        os.write(nursery.process._out, b"y" * 4096)  # as a process that the function has left behind does

    caller.print_from_process = print_again  # type: ignore[method-assign]
    IsolatedCall(nursery, [], SETTINGS, FakeLoan()).run(caller, TASK, [b"payload"], None)  # type: ignore[arg-type]
    assert [event.kind for event in caller.told] == ["result"]
    assert printed >= 1
    assert printed_late < 1 << 22


def test_a_call_that_was_given_up_before_it_began_says_nothing_to_its_process() -> None:
    def peer(channel: ControlChannel) -> None:
        with pytest.raises(ChannelClosedError):
            channel.receive()

    nursery = FakeNursery(peer)
    call = IsolatedCall(nursery, [], SETTINGS, FakeLoan())  # type: ignore[arg-type]
    call.stop()
    call.run(FakeCaller(), TASK, [b"payload"], None)
    assert nursery.process.given_back
