"""Random numbers of several sessions in one worker process."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Chunk, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy_server.executor import Executor
from skyproxy_server.transfers import Transfers

CPU = ["cpu", None]
RAND = commands.FIRST_SIGNATURE


class Session:
    """One session's executor."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        devices = [{"type": "cpu", "index": 0, "name": "CPU"}]
        self.executor = Executor(devices, self.sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS)
        self._sequence = 0
        self._run(commands.DEFINE, RAND, ["aten::rand", ["v"], {}, ["n"]])

    def _run(self, *stream: Any) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream)))

    def draw(self, count: int = 3) -> list[float]:
        self._run(RAND, [count], 1)
        numbers: list[float] = self.executor.state.values.slots[1].tolist()
        return numbers

    def do(self, name: str, *arguments: Any) -> None:
        self._run(commands.DO, name, list(arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        self._run(commands.CALL, 5, name, list(arguments))
        answer = self.sent[-1]
        assert isinstance(answer, Reply), answer
        return answer.value


@pytest.fixture
def sessions() -> Iterator[tuple[Session, Session]]:
    before = torch.get_rng_state()
    pair = Session(), Session()
    yield pair
    for session in pair:
        session.executor.end()
    torch.set_rng_state(before)


def local(seed: int, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(count, generator=generator).tolist()
    return numbers


def test_sessions_draw_as_if_they_were_alone(sessions: tuple[Session, Session]) -> None:
    first, second = sessions
    first.do("manual_seed", CPU, 1)
    second.do("manual_seed", CPU, 2)
    drawn: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(4):
        drawn[1] += first.draw(3)
        drawn[2] += second.draw(2)
        drawn[2] += second.draw(1)
    assert drawn == {1: pytest.approx(local(1, 12)), 2: pytest.approx(local(2, 12))}


def test_seeding_one_leaves_the_other(sessions: tuple[Session, Session]) -> None:
    first, second = sessions
    second.do("manual_seed", CPU, 7)
    head = second.draw(2)
    first.do("manual_seed", CPU, 7)
    assert first.draw(4) == pytest.approx(local(7, 4))
    assert head + second.draw(2) == pytest.approx(local(7, 4))


def test_state_can_be_taken_and_put_back(sessions: tuple[Session, Session]) -> None:
    first, second = sessions
    first.do("manual_seed", CPU, 3)
    state = first.call("random_state", CPU)
    drawn = first.draw()
    second.draw()
    first.do("set_random_state", CPU, state)
    assert first.draw() == drawn
    assert first.call("initial_seed", CPU) == 3


def test_the_end_of_a_session_leaves_the_others(sessions: tuple[Session, Session]) -> None:
    first, second = sessions
    second.do("manual_seed", CPU, 5)
    head = second.draw(2)
    first.draw()
    first.executor.end()
    assert head + second.draw(2) == pytest.approx(local(5, 4))


def test_own_generators_are_independent_of_everything(sessions: tuple[Session, Session]) -> None:
    first, _ = sessions
    first.do("new_generator", 9, CPU)
    first.do("seed_generator", 9, 11)
    first.draw()
    state = first.call("generator_state", 9)
    assert state == bytes(torch.Generator().manual_seed(11).get_state().tolist())


def test_who_waits_for_an_upload_keeps_nobody_from_drawing(sessions: tuple[Session, Session]) -> None:
    waiting, other = sessions
    waiting.do("manual_seed", CPU, 5)
    other.do("manual_seed", CPU, 5)
    waiting._run(commands.DEFINE, RAND + 1, ["aten::rand_like", ["t"], {}, ["n"]])
    waiting._run(commands.RECEIVE, 2, ["float32", [3], [1], 0], CPU, 9)
    lent = threading.Event()
    idle = waiting.executor.state.modes.idle

    @contextmanager
    def noting() -> Iterator[None]:
        with idle():
            lent.set()
            yield

    waiting.executor.state.modes.idle = noting  # type: ignore[method-assign]
    thread = threading.Thread(target=waiting._run, args=(RAND + 1, 2, 3))
    thread.start()
    assert lent.wait(60)
    drawing = threading.Thread(target=other.draw, daemon=True)
    drawing.start()
    drawing.join(60)
    assert not drawing.is_alive()
    transfers = waiting.executor.state.transfers
    sink = transfers.sink(Chunk(9, 0, 12))
    assert sink is not None
    sink[:12] = bytes(12)
    transfers.on_chunk(Chunk(9, 0, 12, (sink[:12],)))
    thread.join(60)
    assert not thread.is_alive()
    # And each has the numbers of its own seed.
    assert (
        waiting.executor.state.values.slots[3].tolist() == other.executor.state.values.slots[1].tolist() == local(5, 3)
    )


@pytest.mark.parametrize(
    ("left", "place", "is_possible"),
    [(624, 0, True), (1, 0, True), (1, 624, True), (300, 325, True), (300, 326, False), (624, 624, False)],
)
def test_no_state_draws_from_the_memory_behind_a_generator(
    sessions: tuple[Session, Session], left: int, place: int, is_possible: bool
) -> None:
    session, _ = sessions
    session.do("new_generator", 9, CPU)
    state = struct.pack("=QiiQ", 5, left, 1, place) + session.call("random_state", CPU)[24:]
    session.do("set_random_state", CPU, state)
    session.do("set_generator_state", 9, state)
    assert (session.call("random_state", CPU) == state) is is_possible
    assert (session.call("generator_state", 9) == state) is is_possible


@pytest.mark.parametrize("state", [b"", bytes(24), bytes(1 << 16)])
def test_a_state_of_another_size_is_an_error_of_its_own(sessions: tuple[Session, Session], state: bytes) -> None:
    session, _ = sessions
    before = session.call("random_state", CPU)
    session.do("set_random_state", CPU, state)
    assert session.call("random_state", CPU) == before


@pytest.mark.parametrize("state", [1 << 40, [1, 2], "text"])
def test_a_state_that_is_no_bytes_takes_no_memory(sessions: tuple[Session, Session], state: object) -> None:
    session, _ = sessions
    with pytest.raises(ProtocolError, match="is bytes, not"):
        session.do("set_random_state", CPU, state)


def test_a_function_draws_up_to_states_that_a_generator_can_have(sessions: tuple[Session, Session]) -> None:
    session, _ = sessions
    random = session.executor.state.random
    session.draw()
    before = random.states()
    [(key, state)] = before.items()
    impossible = bytearray(state.numpy().tobytes())
    struct.pack_into("=QiiQ", impossible, 0, 5, 624, 1, 624)
    with pytest.raises(RuntimeError, match="no random generator has"):
        random.move_on(before, {key: torch.frombuffer(impossible, dtype=torch.uint8)})
    assert torch.equal(random.states()[key], state)
