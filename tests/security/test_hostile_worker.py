"""A worker that says whatever it likes: whoever waits for it gets an error, and nothing waits for ever."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SessionLostError, SkyproxyError
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    BULK,
    OPERATIONS,
    WORKER,
    Challenge,
    Chunk,
    Failure,
    Goodbye,
    Known,
    Landed,
    Message,
    Pong,
    Reply,
    RequestId,
    Warned,
    Welcome,
)
from skyproxy.session.session import Session
from skyproxy.session.worker_warnings import WorkerWarnings
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.memory import memory_transport_pair

SETTINGS = Settings(close_timeout_seconds=0.2, ping_interval_seconds=0.01, liveness_timeout_seconds=20.0)
OSC = "\x1b]52;c;ZXZpbA==\x07"
TEXTS = ("", "m", OSC, "x" * 100_000, "ExceptionGroup", "SystemExit", "UserWarning", "aten::add", "float32", "\ud800")
NUMBERS = (0, 1, 2, 3, 4, 5, -1, 1 << 31, (1 << 63) - 1, -(1 << 63))
KEYS = (
    "type",
    "message",
    "traceback",
    "op",
    "sequence",
    "position",
    "graph",
    "executing",
    "kind",
    "dropped",
    "places",
    "leaving",
)
KINDS = [kind for kind in MESSAGES.values() if WORKER in kind.senders and kind is not Welcome and kind is not Goodbye]
QUESTIONS = (Reply, Failure, Warned, Pong, Known, Challenge, Chunk, Landed)
"""What does not end a session by itself."""


def anything(chance: random.Random, depth: int = 0) -> Any:
    match chance.randrange(8 if depth < 3 else 5):
        case 0:
            return chance.choice(NUMBERS)
        case 1:
            return chance.choice(TEXTS[:-1])
        case 2:
            return chance.choice((None, True, False, 1e308, float("nan"), float("inf")))
        case 3:
            return bytes(chance.randrange(20))
        case 4:
            return chance.choice((["float32", [2], [1], 0], ["sparse", [1 << 62], [1], -1], [], {}))
        case 5 | 6:
            return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(KEYS): anything(chance, depth + 1) for _ in range(chance.randrange(4))}


def field_value(annotation: str, chance: random.Random) -> Any:
    if annotation == "Any":
        return anything(chance)
    if annotation.startswith("dict[str, int]"):
        return {key: chance.choice(NUMBERS) for key in chance.sample(KEYS, 3)}
    if annotation.startswith("dict"):
        return {key: anything(chance) for key in chance.sample(KEYS, chance.randrange(len(KEYS)))}
    if annotation.startswith("tuple"):
        return tuple(bytes(chance.choice((0, 1, 8, 4000))) for _ in range(chance.choice((0, 1, 1, 2))))
    if annotation.startswith("list"):
        return [chance.choice(NUMBERS) for _ in range(chance.randrange(3))]
    if annotation in ("str", "bytes", "bool"):
        return {"str": chance.choice(TEXTS[:-1]), "bytes": bytes(chance.randrange(40)), "bool": chance.random() < 0.5}[
            annotation
        ]
    return chance.choice((1, 2, 3, 4, 5, 6, *NUMBERS))


def hostile_message(role: str, chance: random.Random) -> Message:
    known = QUESTIONS if chance.random() < 0.7 else KINDS
    kinds = [kind for kind in known if role in kind.roles or (role == OPERATIONS and not {BULK} & kind.roles)]
    kind = chance.choice(kinds)
    return kind(**{item.name: field_value(str(item.type), chance) for item in fields(kind)})


class Attack:
    """A session whose worker answers with random messages, and threads that ask it."""

    def __init__(self, seed: int, count: int = 60) -> None:
        self._chance, self._count = random.Random(seed), count
        self.operations, self._worker = memory_transport_pair(settings=SETTINGS)
        self.bulk, self._worker_bulk = memory_transport_pair("bulk", settings=SETTINGS)
        self.session = Session(self.operations, self.bulk, Welcome(1, "memory", {}, [], {}), SETTINGS)
        self.outcomes: list[BaseException | None] = []
        small, large = torch.ones(2), torch.ones(1 << 20)
        asks: list[Callable[[], object]] = [
            lambda: self.session.call("stats"),
            lambda: self.session.fetch(1, torch_codec.describe(small)),
            lambda: self.session.fetch(1, torch_codec.describe(large)),
            lambda: self.session.upload(2, large, ["cpu", None]),
            lambda: self.session.synchronize(),
            lambda: self.session.backlog(0.5),
        ]
        self.threads = [threading.Thread(target=self._ask, args=(ask,), daemon=True) for ask in asks]

    def _ask(self, ask: Callable[[], object]) -> None:
        try:
            ask()
        except BaseException as error:
            self.outcomes.append(error)
        else:
            self.outcomes.append(None)

    def _read(self, end: Transport) -> None:
        try:
            while True:
                end.recv(20)
        except (SkyproxyError, TimeoutError, ProtocolError):
            return

    def run(self) -> None:
        readers = [
            threading.Thread(target=self._read, args=(end,), daemon=True) for end in (self._worker, self._worker_bulk)
        ]
        for thread in (*readers, *self.threads):
            thread.start()
        try:
            for _ in range(self._count):
                end, role = self._chance.choice(((self._worker, OPERATIONS), (self._worker_bulk, BULK)))
                try:
                    end.repeat(hostile_message(role, self._chance))  # whatever our own rules would say
                except (ProtocolError, TypeError, ValueError):
                    continue  # not even we can encode it
        except SessionLostError:
            pass
        for end in (self._worker, self._worker_bulk):
            end.close()
        for thread in self.threads:
            thread.join(60)
        self.session.close()
        for reader in readers:
            reader.join(60)


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(16))
def test_whatever_a_worker_answers_nobody_waits_for_ever_and_errors_are_ours(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    attack = Attack(seed, 1 + seed % 4 * 10)
    attack.run()
    assert not [thread for thread in attack.threads if thread.is_alive()]
    strange = [error for error in attack.outcomes if error is not None and not isinstance(error, SkyproxyError)]
    assert strange == []
    for error in attack.outcomes:
        assert "\x1b" not in "".join([str(error), *getattr(error, "__notes__", [])])
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "answer", [lambda number: Reply(number, {"handles": 1, "bytes": 8}), lambda number: Failure(number, {})]
)
@pytest.mark.parametrize("number", [1 << 40, 2, -1])
def test_an_answer_under_another_number_ends_the_wait_and_names_it(
    number: int, answer: Callable[[RequestId], Message]
) -> None:
    attack = Attack(0)
    asking = threading.Thread(target=attack._ask, args=(lambda: attack.session.call("stats"),), daemon=True)
    asking.start()
    try:
        attack._worker.recv(20)
        attack._worker.repeat(answer(RequestId(number)))
        asking.join(20)
        assert not asking.is_alive()
        (error,) = attack.outcomes
        assert isinstance(error, SessionLostError)
        assert f"answered question {number}" in str(error)
    finally:
        attack.session.close()


def test_warnings_of_a_worker_have_bounds() -> None:
    kept = WorkerWarnings()
    kept.add("UserWarning", "x" * 1_000_000, None)
    assert len(kept.pending[0][1]) < 10_000
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for number in range(30_000):
            kept.add("UserWarning", f"{number}", None)
            kept.show()
    # Of the process's others, such as those of what the collector finds, there may be some.
    assert sum(one.category is UserWarning for one in shown) == 10_000
