"""Clients that keep no rule, against a worker: right handshakes, and behind them any messages in any form and order.

`python -m tests.security.hostile_messages --seconds 240` attacks workers of each kind and reports what broke; `make
fuzz` runs it. An attack is known by its number: `--only in-process --seed 7 --attacks 1` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgpack

from skyproxy.errors import ProtocolError
from skyproxy.protocol import framing
from skyproxy.protocol.call_messages import CallStart
from skyproxy.protocol.framing import PREFIX
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    BULK,
    CLIENT,
    FUNCTIONS,
    JOBS,
    OPERATIONS,
    Batch,
    Goodbye,
    Hello,
    Message,
    NamedBatch,
    Proof,
    Repeat,
)
from skyproxy.settings import SETTINGS
from skyproxy.transport.websocket_frames import frame_header
from tests.security.message_samples import (
    CONTROL_SAMPLES,
    FIRST_BUFFERS,
    FIRST_COMMANDS,
    MESSAGE_SAMPLES,
    Place,
    control,
    hello,
    some_command,
    stream_of,
)
from tests.security.raw_client import RawClient, frame_of, values_of

_DEEP = 300
"""Lists within lists; what is deeper is refused before it is decoded, and `hostile_frame` has it, too."""
_INTEGERS = (
    -1,
    0,
    1,
    2,
    7,
    8,
    255,
    4096,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
    2**64 - 1,
)
_FLOATS = (0.0, -0.0, 1.5, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "x",
    "__class__",
    "a\n2026-01-01 ERROR forged\x1b]52;c;eA==\x07",
    "\ud800",
    "é" * 300,
    "%s%n{0}",
    "x" * 70_000,
)
_TOKENS = (
    "float32",
    "float64",
    "complex128",
    "qint8",
    "cpu",
    "cuda",
    "meta",
    "sparse",
    "nested",
    "stats",
    "t",
    "T",
    "n",
    "c",
)


def odd_value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that msgpack can say."""
    match chance.randrange(12 if depth < 3 else 6):
        case 0 | 1:
            return chance.choice(_INTEGERS)
        case 2:
            return chance.choice(_FLOATS)
        case 3:
            return chance.choice(_TEXTS)
        case 4:
            return chance.choice((None, True, False, b"", b"\x00" * 16, bytes(32), bytes(70_000)))
        case 5:
            return chance.choice(_TOKENS)
        case 6 | 7:
            return [odd_value(chance, depth + 1) for _ in range(chance.randrange(5))]
        case 8:
            return {chance.choice((*_TOKENS, 1, -1)): odd_value(chance, depth + 1) for _ in range(chance.randrange(4))}
        case 9:
            return nested(chance.choice((2, 20, _DEEP)), chance.choice((1, "x", None)))
        case 10 if chance.random() < 0.9:
            return [chance.choice(_INTEGERS)] * chance.choice((3, 100, 20_000))
    return msgpack.ExtType(chance.choice((1, 1, 1, 2, 127)), bytes(chance.choice((16, 16, 16, 0, 3))))


def nested(depth: int, core: Any) -> Any:
    for _ in range(depth):
        core = [core]
    return core


def changed(value: Any, chance: random.Random) -> Any:
    """A value that differs from this one in one place."""
    if isinstance(value, str) and chance.random() < 0.5:
        return chance.choice(_TEXTS)  # of the right type: what is not ends at the frame
    if isinstance(value, list) and value and chance.random() < 0.85:
        items = list(value)
        place = chance.randrange(len(items))
        match chance.randrange(9):
            case 0:
                del items[place]
            case 1:
                items.insert(place, items[place])
            case 2:
                items.insert(place, odd_value(chance))
            case 3:
                other = chance.randrange(len(items))
                items[place], items[other] = items[other], items[place]
            case _:
                items[place] = changed(items[place], chance)
        return items
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        return rest if chance.random() < 0.3 else {**rest, key: changed(value[key], chance)}
    if type(value) is int and chance.random() < 0.6:
        return min(max(chance.choice((value + 1, value - 1, -value, *_INTEGERS)), -(1 << 63)), 2**64 - 1)
    if isinstance(value, bytes) and chance.random() < 0.5:
        return chance.choice((value[:-1], value + b"x", value[::-1], b""))
    return odd_value(chance)


def hostile_stream(place: Place) -> tuple[list[Any], tuple[bytes, ...]]:
    """A few commands, most of them changed in one place."""
    chance = place.chance
    found = [some_command(place) for _ in range(chance.randrange(1, 7))]
    found = [changed(command, chance) if chance.random() < 0.5 else command for command in found]
    if chance.random() < 0.3:  # a control with arguments that are its own but for one
        found.append(_hostile_control(place))
    found = [command if isinstance(command, list) else [command] for command in found]
    stream, buffers = stream_of(found)
    if chance.random() < 0.05:
        stream = changed(stream, chance)
    return stream if isinstance(stream, list) else [stream], buffers


def _hostile_control(place: Place) -> list[Any]:
    command = control(place, place.chance.choice(sorted(CONTROL_SAMPLES)))
    return [*command[:-1], changed(command[-1], place.chance)]


def hostile_message(kinds: list[type[Message]], place: Place) -> tuple[type[Message], bytes]:
    """A frame of one of these classes, or of one that no client sends."""
    chance = place.chance
    if chance.random() < 0.02:
        return Message, hostile_frame(chance)
    kind = chance.choice(kinds if chance.random() < 0.98 else sorted(MESSAGES.values(), key=lambda one: one.code))
    if kind not in MESSAGE_SAMPLES:
        odd = [odd_value(chance) for _ in fields(kind)]
        return kind, frame_of(kind.code, odd)
    sample = MESSAGE_SAMPLES[kind](place)
    kind = type(sample)
    values, buffers = values_of(sample)
    if kind is Batch or (chance.random() < 0.4 and kind in (NamedBatch, Repeat)):
        stream, uploads = hostile_stream(place)
        values[2 if kind is Repeat else 1] = stream
        values[-1], buffers = [len(item) for item in uploads], list(uploads)
    elif chance.random() < 0.4:
        number = chance.randrange(len(values))
        if not (number == 0 and values and kind in (NamedBatch, Repeat)):  # sequences have attacks enough
            values[number] = changed(values[number], chance)
    if buffers and chance.random() < 0.05:
        buffers = chance.choice((buffers[:-1], [*buffers, b"x"], [item + b"x" for item in buffers]))
    return kind, frame_of(kind.code, values, buffers)


def hostile_frame(chance: random.Random) -> bytes:
    """Bytes that are hardly a frame."""
    code = chance.choice((0, 1, 4, 8, 15, 30, 31, 255))
    match chance.randrange(5):
        case 0:
            return bytes(chance.getrandbits(8) for _ in range(chance.randrange(64)))
        case 1:
            return PREFIX.pack(code, chance.choice(((1 << 32) - 1, 1 << 25, 5))) + b"\x91\x01"
        case 2:
            header = b"\x91" * 5000 + b"\x01"
            return PREFIX.pack(code, len(header)) + header
        case 3:
            header = b"\xdf\xff\xff\xff\xff" + bytes(10)
            return PREFIX.pack(code, len(header)) + header
    return frame_of(code, nested(_DEEP, 1))


def decode_frames(count: int, seed: int) -> int:
    """Decode so many frames as a worker does; return how many were messages. The others were refused in our words."""
    place, kinds = Place(random.Random(f"frames {seed}")), list(MESSAGE_SAMPLES)
    decoded = 0
    for _ in range(count):
        with contextlib.suppress(ProtocolError):
            framing.decode(hostile_message(kinds, place)[1], SETTINGS.max_frame_bytes)
            decoded += 1
    return decoded


# --- one attack ------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What the attacks sent, and how far they came.

    Attributes:
        sent: messages, by class.
        survived: those after which the connection was still there, when the next one was sent.
        sessions: sessions that were opened.
        resumed: sessions that were taken up again.
    """

    sent: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    resumed: int = 0
    refused: int = 0


class Attack:
    """One hostile client: a session of up to three connections, that break, are taken up again, and end in any way.

    Args:
        port, token: the worker's.
        seed: the number of the attack.
        tasks: recorded calls of functions; none where the token may run none.
        is_apart: whether the session has a process of its own.
        tally: what is counted.
        secret_bytes: what must never come back.
    """

    def __init__(
        self,
        port: int,
        token: str,
        seed: int,
        tally: Tally,
        forbidden: bytes,
        tasks: tuple[CallStart, ...] = (),
        is_apart: bool = False,
    ) -> None:
        self._port, self._token, self._tally, self._forbidden = port, token, tally, forbidden
        self.chance = random.Random(f"messages {seed}")
        self.place = Place(self.chance, tasks=tasks, is_apart=is_apart)
        self._links: dict[str, RawClient] = {}
        self._broken: list[RawClient] = []
        self._messages = self.chance.choice((10, 60, 200))
        self.leaks: list[str] = []

    def run(self) -> None:
        """Attack, until the messages are used up or the session is over."""
        try:
            if self._open():
                for _ in range(self._messages):
                    if not self._step():
                        break
        finally:
            self._leave()

    def _connect(self) -> RawClient:
        return RawClient(self._port, self._token)

    def _open(self) -> bool:
        chance = self.chance
        first = self._links[OPERATIONS] = self._connect()
        if chance.random() < 0.05:  # a greeting that is none
            first.send(hostile_message([Hello], self.place)[1])
            first.listen(0.2)
            return False
        grace = chance.choice((0, 0, 600, 1, 2**63 - 1))
        if not first.greet(hello(OPERATIONS, grace_seconds=grace)):
            self._tally.refused += 1
            return False
        self._tally.sessions += 1
        self.place.session = first.session
        stream, _ = stream_of(FIRST_COMMANDS)
        first.say(Batch(self.place.next_sequence(), stream, tuple(FIRST_BUFFERS)))
        if chance.random() < 0.85:
            self._join(BULK)
        if chance.random() < (0.8 if self.place.tasks else 0.1):
            self._join(FUNCTIONS)
        if chance.random() < 0.3:
            self._join(JOBS)
        return True

    def _join(self, role: str, secret: bytes = b"") -> None:
        link = self._connect()
        session = "" if role == JOBS else self.place.session
        if link.greet(hello(role, session, 0, secret)):
            self._retire(role)
            self._links[role] = link
        else:
            link.cut()

    def _retire(self, role: str) -> None:
        if role in self._links:
            self._broken.append(self._links.pop(role))

    def _step(self) -> bool:
        chance = self.chance
        alive = [role for role, link in self._links.items() if not link.is_over]
        if OPERATIONS not in alive and not self._take_up():
            return False
        role = chance.choice([*alive, OPERATIONS])
        link = self._links[role]
        match chance.randrange(60):
            case 0:
                link.cut()
            case 1:
                return self._take_up()
            case 2:
                self._join(chance.choice((BULK, FUNCTIONS, JOBS)), chance.choice((b"", link.secret, bytes(32))))
            case 3:
                link.send_raw(self._websocket_nonsense())
            case _:
                self._send(link, role)
        for other in list(self._links.values()):
            other.listen(0)
        return True

    def _send(self, link: RawClient, role: str) -> None:
        kinds = [kind for kind in MESSAGE_SAMPLES if CLIENT in kind.senders and role in kind.roles]
        if self.chance.random() < 0.9:
            kinds = [kind for kind in kinds if kind not in (Hello, Goodbye, Proof)]  # they end it, as a rule
        kinds += [kind for kind in kinds if kind is Batch] * 3  # most is said in commands
        kind, frame = hostile_message(kinds, self.place)
        for _ in range(2 if self.chance.random() < 0.03 else 1):
            self._tally.sent[kind.__name__] += 1
            link.send(frame)
            link.listen(0.002)
        self._tally.survived[kind.__name__] += not link.is_over

    def _websocket_nonsense(self) -> bytes:
        chance = self.chance
        opcode, size = chance.choice((0, 1, 2, 3, 8, 9, 10, 15)), chance.choice((0, 5, 125, 126, 70_000))
        header = frame_header(opcode, size, chance.choice((bytes(4), b"")))
        return header + bytes(chance.choice((size, size // 2)))

    def _take_up(self) -> bool:
        """Take the session up as its client would, or as one that lies."""
        before = self._links[OPERATIONS]
        if not before.secret:
            return False
        chance = self.chance
        secret = before.secret if chance.random() < 0.8 else changed(before.secret, chance)
        received = chance.choice((0, 0, 1, 1 << 62, -1))
        again = self._connect()
        if again.greet(
            hello(OPERATIONS, self.place.session, 600, secret if isinstance(secret, bytes) else b"", received)
        ):
            self._tally.resumed += 1
            again.welcome[5:6] = [before.secret]
            self.place.sequence = int(again.welcome[6]) if len(again.welcome) > 6 else self.place.sequence
            self._retire(OPERATIONS)
            self._links[OPERATIONS] = again
            return True
        again.cut()
        return not before.is_over

    def _leave(self) -> None:
        for link in (*self._links.values(), *self._broken):
            while self.chance.random() < 0.5 and link.listen(0.01):
                pass
            if self._forbidden in link.received:
                self.leaks.append("bytes of a neighbour came back")
            link.cut()


def main() -> int:
    from tests.security.besieged_worker import KINDS, besiege

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all kinds of workers together")
    parser.add_argument("--only", choices=sorted(KINDS), action="append", help="a kind of worker; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first attack")
    parser.add_argument("--attacks", type=int, default=1 << 30, help="the most attacks on each worker")
    parser.add_argument("--frames", type=int, default=850_000, help="frames to decode first, without a worker")
    arguments = parser.parse_args()
    kinds = arguments.only or sorted(KINDS)
    broken: list[str] = []
    print(f"{decode_frames(arguments.frames, arguments.seed)} of {arguments.frames} frames are messages", flush=True)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            seconds = arguments.seconds / len(kinds)
            report = besiege(kind, Path(folder), seconds, arguments.seed, arguments.attacks)
        print(f"{kind}: {report.words()}", flush=True)
        broken += [f"{kind}: {problem}" for problem in report.problems]
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
