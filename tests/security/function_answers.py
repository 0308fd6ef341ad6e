"""A worker that answers calls of functions with frames as no worker sends them, and a program that has made the calls.

`python -m tests.security.function_answers --rounds 2000` runs rounds until they are used up, and says what broke; `make
fuzz` runs it. A round is known by its number: `--seed 7 --rounds 1` repeats one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import torch

import skyproxy
from skyproxy.errors import SkyproxyError
from skyproxy.functions.project_sync import ProjectSync
from skyproxy.node import Node
from skyproxy.protocol.call_messages import CALL_EVENTS, CallData, CallEvent
from skyproxy.protocol.messages import JobAnswer, Message
from skyproxy.settings import Settings
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server.listener import Listener, serve
from skyproxy_server.worker_host import WorkerHost
from tests.security.hostile_messages import changed, odd_value
from tests.security.raw_client import frame_of, values_of

TOKEN = "a-token-that-nobody-should-see-anywhere"
SETTINGS = Settings(close_timeout_seconds=0.3, chunk_bytes=4096)
"""Small chunks: so that payloads come in parts."""
RAN = "SKYPROXY_TEST_RAN_A_PICKLE"
ANSWER_SECONDS = 0.5
"""The time that a call has which is not answered as it should be: an honest one takes milliseconds."""
_HONEST_SECONDS = 30.0
_OURS = ("did not return a generator", "the worker has no call")
"""Of documented errors of Python's own classes."""
_OF_FUNCTIONS = (CallEvent, CallData, JobAnswer)
_CODES = tuple(kind.code for kind in _OF_FUNCTIONS)
_COUNTS = (0, 1, 2, 3, 1 << 31, (1 << 63) - 1)


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.environ.__setitem__, (RAN, "yes")


class HostileWorker:
    """What a worker of this process sends on its connections for functions and jobs, changed while it `lies`."""

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.lies = False
        self.sent: Counter[str] = Counter()
        self._held: list[bytes] = []
        self._calls: list[str] = []
        self._send = WebSocketTransport.send

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have all transports of workers in this process send what this one says."""
        own = self._send

        def send(transport: WebSocketTransport, message: Message) -> None:
            if not self.lies or transport._masks or not isinstance(message, _OF_FUNCTIONS):
                return own(transport, message)
            for frame in self.frames(message):
                self.sent[type(message).__name__] += 1
                transport._outbox.post(transport._frame([frame]))
            return None

        WebSocketTransport.send = send  # type: ignore[method-assign]
        try:
            yield
        finally:
            WebSocketTransport.send = own  # type: ignore[method-assign]

    def frames(self, message: Message) -> list[bytes]:
        """Return what is sent in the place of a message."""
        chance = self.chance
        if isinstance(message, CallEvent):
            self._calls = [*self._calls, message.call][-8:]
        found = [self._frame(message) if chance.random() < 0.4 else frame_of(message.code, *values_of(message))]
        match chance.randrange(24):
            case 0:
                found *= 2
            case 1:
                self._held += found
                found = []
            case 2:
                found += self._held
                self._held = []
            case 3 | 4 | 6:
                found.insert(chance.randrange(2), self._invented())
            case 5:
                found += [self._invented() for _ in range(chance.randrange(8))]
        return found

    def _frame(self, message: Message) -> bytes:
        values, buffers = values_of(message)
        return self._changed(message.code, values, buffers)

    def _changed(self, code: int, values: list[Any], buffers: list[bytes]) -> bytes:
        chance = self.chance
        for _ in range(chance.choice((0, 0, 1, 1, 2)) if code in _CODES else 0):
            # Mostly what stands within: of the wrong type, a field ends at the frame.
            place = len(values) - 3 if chance.random() < 0.8 else chance.randrange(len(values))
            if type(values[place]) is dict or chance.random() < 0.3:
                values[place] = changed(values[place], chance)
            elif type(values[place]) is int:
                values[place] = chance.choice((min(values[place] + 1, 1 << 63), *_COUNTS))
        if buffers and chance.random() < 0.3:
            place = chance.randrange(len(buffers))
            buffers[place] = self._changed_bytes(buffers[place])
            if type(values[-1]) is list and chance.random() < 0.8:
                values[-1] = [len(item) for item in buffers]
        return frame_of(code, values, buffers)

    def _changed_bytes(self, data: bytes) -> bytes:
        chance, found = self.chance, bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            if found:
                found[chance.randrange(len(found))] = chance.randrange(256)
        return bytes(found) if chance.random() < 0.8 else bytes(found[: chance.randrange(len(found) + 1)])

    def _invented(self) -> bytes:
        """An event, or a part of one, of any call."""
        chance = self.chance
        call = chance.choice(self._calls) if self._calls else "x"
        number = chance.choice((*_COUNTS, 4, 5, 6, 7))
        buffers = [chance.choice((b"", b"x", b"\x93\x01\x02\x03", b"\x80\x04K\x01.", bytes(5000)))]
        if chance.random() < 0.4:
            values = [call, number, chance.choice(_COUNTS[:4]), chance.choice(_COUNTS)]
            return frame_of(CallData.code, [*values, [len(item) for item in buffers]], buffers)
        words: dict[str, Any] = {
            "type": "ValueError",
            "message": "m",
            "traceback": "t",
            "text": "x",
            "stream": "stdout",
        }
        words |= {"form": "plain", "tensors": [], "bases": [], "changed": [], "waits": {"kind": "x", "line": 3}}
        words = {key: value for key, value in words.items() if chance.random() < 0.8}
        for key in chance.sample(sorted(words), min(len(words), chance.randrange(3))):
            words[key] = odd_value(chance)
        kind = chance.choice(sorted(CALL_EVENTS))
        sizes = (
            [len(item) for item in buffers] if chance.random() < 0.7 else [chance.choice(_COUNTS)] * chance.randrange(4)
        )
        return self._changed(CallEvent.code, [call, number, kind, words, sizes, sizes], buffers)


# --- what the program asks for ----------------------------------------------------------------------------------------


def _prints(count: int) -> int:
    for number in range(count):
        print(f"line {number}")
    return count


def _yields(count: int) -> Iterator[Any]:
    for number in range(count):
        yield {"number": number, "data": bytes(number * 3000)}
    return


def _fails(text: str) -> None:
    raise ValueError(text)


def _takes(node: Node) -> object:
    call = node.submit(bytes, 20_000)
    try:
        return call.result(ANSWER_SECONDS)
    finally:
        call.cancel()


def _shows(node: Node) -> object:
    shown: list[str] = []
    call = node.submit(_prints, 5, on_output=lambda stream, text: shown.append(stream + text))
    try:
        return call.result(ANSWER_SECONDS), shown
    finally:
        call.cancel()


def _iterates(node: Node) -> object:
    call = node.submit(_yields, 4)
    iterator = call.result(ANSWER_SECONDS)
    timer = _cancel_later(call)
    try:
        return list(itertools.islice(iterator, 10)) if isinstance(iterator, Iterator) else iterator
    finally:
        timer()


def _cancel_later(call: Any) -> Callable[[], None]:
    import threading

    timer = threading.Timer(ANSWER_SECONDS, call.cancel)
    timer.start()

    def end() -> None:
        timer.cancel()
        call.cancel()

    return end


def _iterates_in_a_loop(node: Node) -> object:
    async def take() -> list[Any]:
        found: list[Any] = []
        items: AsyncIterator[Any] = node.submit(_yields, 4).__aiter__()
        async with asyncio.timeout(ANSWER_SECONDS):
            async for item in items:
                found.append(item)
                if len(found) > 10:
                    break
        return found

    return asyncio.run(take())


def _changes_tensors(node: Node) -> object:
    weights = torch.ones(4, device=node.device("cpu"))

    def work(tensor: torch.Tensor) -> Any:
        tensor += 1
        return {"same": tensor, "view": tensor[1:], "new": tensor.sum(), "here": torch.zeros(2000)}

    call = node.submit(work, weights)
    try:
        value = call.result(ANSWER_SECONDS)
        return (
            [item.cpu() for item in value.values() if isinstance(item, torch.Tensor)] if type(value) is dict else value
        )
    finally:
        call.cancel()


def _raises(node: Node) -> object:
    return node.submit(_fails, "no").result(ANSWER_SECONDS)


def _gets_a_bomb(node: Node) -> object:
    return node.submit(Bomb).result(ANSWER_SECONDS)


def _asks_for_what_ended(node: Node) -> object:
    call = node.submit(divmod, 7, 2)
    call.result(ANSWER_SECONDS)
    return node.reattach(call.id).result(ANSWER_SECONDS)


ASKS: tuple[Callable[[Node], object], ...] = (
    _takes,
    _shows,
    _iterates,
    _iterates_in_a_loop,
    _changes_tensors,
    _raises,
    _gets_a_bomb,
    _asks_for_what_ended,
)


class Siege:
    """A program, and its worker, which lies in each round and is honest behind it.

    Attributes:
        problems: what must not be.
        outcomes: how the rounds ended, by the class of the error.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.worker = HostileWorker()
        cpu = {"type": "cpu", "index": 0, "name": "cpu"}
        self._listener: Listener = serve(
            "127.0.0.1", 0, TOKEN, WorkerHost([cpu], SETTINGS, functions=True), settings=SETTINGS
        )
        self._node: Node | None = None

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
        self._listener.close()

    def _connected(self) -> Node:
        if self._node is None or not self._node.alive:
            if self._node is not None:
                self._node.close()
            self._node = skyproxy.connect(f"ws://127.0.0.1:{self._listener.port}", token=TOKEN)
            assert self._node.run(int) == 0
        return self._node

    def round(self, seed: int) -> None:
        """Make a call that is answered with lies, and one that is not."""
        node = self._connected()
        self.worker.chance = chance = random.Random(f"answers {seed}")
        ask = chance.choice(ASKS)
        self.worker.lies = True
        try:
            ask(node)
        except CancelledError:  # by this program, which waits no longer
            self.outcomes["CancelledError"] += 1
        except Exception as error:
            self._note(seed, ask, error)
        else:
            self.outcomes["a value"] += 1
        self.worker.lies = False
        if os.environ.pop(RAN, None):
            self.problems.append(f"round {seed}: code of the worker ran here ({ask.__name__})")
        started = time.monotonic()
        try:
            if node.alive and node.submit(divmod, 9, 2).result(_HONEST_SECONDS) != (4, 1):
                self.problems.append(f"round {seed}: an honest answer is another value ({ask.__name__})")
        except SkyproxyError:
            node.close()
        except TimeoutError:
            waited = time.monotonic() - started
            self.problems.append(f"round {seed}: an honest call waited for {waited:.0f} s ({ask.__name__})")
            node.close()

    def _note(self, seed: int, ask: Callable[..., object], error: Exception) -> None:
        self.outcomes[type(error).__name__] += 1
        text = "".join([str(error), *getattr(error, "__notes__", []), str(error.__cause__ or "")])
        ours = isinstance(error, SkyproxyError | TimeoutError)
        ours = ours or any(words in text for words in _OURS)
        if not ours and "on the worker" not in text:
            self.problems.append(f"round {seed}: {error!r:.300} ({ask.__name__})")
        if "\x1b" in text:
            self.problems.append(f"round {seed}: a control character in {text!r:.300}")


class _Complaints(logging.Handler):
    """What the log must not say."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.exc_info or "internal error" in text or "\x1b" in text:
            self._problems.append(f"the log says: {text[-1500:]}")


def besiege(seed: int, rounds: int) -> Siege:
    """Run so many rounds from this number on."""
    siege = Siege()
    complaints = _Complaints(siege.problems)
    loggers = [logging.getLogger(name) for name in ("skyproxy", "asyncio", "concurrent.futures")]
    update, ProjectSync.update = ProjectSync.update, lambda self, hurry=False: None  # type: ignore[method-assign]
    for logger in loggers:
        logger.addHandler(complaints)
    try:
        with siege.worker.in_place():
            for number in range(seed, seed + rounds):
                siege.round(number)
    finally:
        ProjectSync.update = update  # type: ignore[method-assign]
        for logger in loggers:
            logger.removeHandler(complaints)
        siege.close()
    return siege


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first round")
    arguments = parser.parse_args()
    siege = besiege(arguments.seed, arguments.rounds)
    print(f"{arguments.rounds} rounds, {dict(siege.worker.sent)} frames, outcomes {dict(siege.outcomes)}")
    print("\n".join(siege.problems))
    return 1 if siege.problems else 0


if __name__ == "__main__":
    sys.exit(main())
