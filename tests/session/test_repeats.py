"""Batches that come again travel by name, and the worker runs the very same commands."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import MAX_NAMES, Batch, NamedBatch, Repeat, Sequence
from skyproxy.session.recorder import Recorder
from skyproxy.session.repeats import Repeats, changes, holes_of
from skyproxy.settings import Settings
from skyproxy_server.named_batches import NamedBatches

ADD, SCALE = 32, 33
WIDTHS = commands.width_table({ADD: 3, SCALE: 3})
NUMBER_PLACES = {SCALE: (2,)}


def new_repeats() -> Repeats:
    """A memory that knows both ops."""
    repeats = Repeats(WIDTHS)
    repeats.number_places.update(NUMBER_PLACES)
    return repeats


def define_ops(recorder: Recorder) -> None:
    """Make both ops known to a recorder."""
    recorder.widths.update(WIDTHS)
    recorder.repeats.number_places.update(NUMBER_PLACES)


def step(rate: float, request: int = 0, ops: int = 10) -> list[Any]:
    """A training step: additions, one scaling by a rate, perhaps a question."""
    stream: list[Any] = []
    for i in range(ops):
        stream += [ADD, i + 1, i + 2, i + 3]
    stream += [SCALE, 1, rate, 2]
    return stream + ([commands.FETCH, request, 2, 0] if request else [])


def sent(repeats: Repeats, streams: list[list[Any]]) -> list[Any]:
    messages = []
    for number, stream in enumerate(streams, 1):
        message, key, known = repeats.choose(Sequence(number), stream, ())
        repeats.seen[key] = known
        messages.append(message)
    return messages


def test_third_time_travels_by_name_and_runs_the_same_commands() -> None:
    streams = [step(0.1 * i, request=i + 7) for i in range(1, 6)]
    messages = sent(new_repeats(), [list(stream) for stream in streams])
    assert [type(m) for m in messages] == [Batch, NamedBatch, Repeat, Repeat, Repeat]
    named = NamedBatches()
    for message, stream in zip(messages, streams, strict=True):
        batch = named.resolve(message)
        assert batch is not None
        assert batch.stream == stream


def test_what_stands_in_the_holes_as_before_does_not_travel() -> None:
    assert changes([0.0, 0.1, [0.0, 1.0], -0.0], [0.0, 0.1, [0.0, 1.0], -0.0]) == []


@pytest.mark.parametrize(
    ("before", "now"), [(0.0, -0.0), (-0.0, 0.0), ([1.0, 0.0], [1.0, -0.0]), (1.0, 1), (float("nan"), float("nan"))]
)
def test_signs_of_zeros_and_types_travel(before: Any, now: Any) -> None:
    assert len(changes([5.0, before], [5.0, now])) == 2


def test_other_slots_are_another_batch() -> None:
    other = [ADD, 1, 1, 1, *step(0.5)]
    messages = sent(new_repeats(), [step(0.5), other, step(0.5), other])
    assert [type(m) for m in messages] == [Batch, Batch, NamedBatch, NamedBatch]
    assert messages[2].name != messages[3].name


def test_none_and_a_hole_are_not_taken_for_each_other() -> None:
    with_none = step(0.5)
    with_none[with_none.index(0.5)] = None
    messages = sent(new_repeats(), [step(0.5), step(0.5), with_none])
    assert [type(m) for m in messages] == [Batch, NamedBatch, Batch]


def test_holes_are_fractions_lists_of_them_and_request_numbers() -> None:
    stream = [ADD, 1, 2, 3, SCALE, 1, [0.5, 0.5], 2, commands.FETCH, 99, 2, 99, SCALE, 1, 0.25, 2]
    positions = commands.walk(stream, WIDTHS)
    assert holes_of(stream, positions, [stream[at] for at in positions], NUMBER_PLACES) == [6, 9, 11, 14]


SERIES = [
    [0.5, [1.5] * 12, 7],
    [0.5, [1.5] * 12, 8],
    [0.25, [1.5] * 11 + [2.0], 8],
    [float("inf"), [float("nan")] * 3, 8],
    [-0.0, [0.0, -0.0], 8],
    [0.0, [-0.0, -0.0], 8],
    [1, [2.0], 8],
    [1.0, [], 8],
]


def test_what_stands_in_the_holes_arrives_exactly() -> None:
    holes = [1, 5, 9]
    stream: list[Any] = list(range(10))
    for hole, value in zip(holes, SERIES[0], strict=True):
        stream[hole] = value
    named = NamedBatches()
    named.resolve(NamedBatch(Sequence(1), stream, 1, holes))
    for sequence, (before, now) in enumerate(itertools.pairwise(SERIES), 2):
        batch = named.resolve(Repeat(Sequence(sequence), 1, changes(before, now)))
        assert batch is not None
        assert repr([batch.stream[hole] for hole in holes]) == repr(now)


def test_what_stayed_the_same_does_not_travel() -> None:
    assert changes([0.5, [1.5, 1.5], 7], [0.5, [2.5, 2.5], 7]) == [1, [[2, 2.5]]]


def test_names_are_bounded_and_used_again() -> None:
    repeats = new_repeats()
    streams = [step(0.5, ops=8) + [ADD, i + 1, 1, 1] for i in range(MAX_NAMES + 50) for _ in range(3)]
    messages = sent(repeats, streams)
    assert len(repeats.seen) <= MAX_NAMES
    named = NamedBatches()
    for message, stream in zip(messages, streams, strict=True):
        batch = named.resolve(message)
        assert batch is not None
        assert batch.stream == stream


@pytest.mark.parametrize(
    "message",
    [
        Repeat(Sequence(1), 5, []),
        Repeat(Sequence(1), 5, [0, 1.0]),
        NamedBatch(Sequence(1), [1], 0, []),
        NamedBatch(Sequence(1), [1], MAX_NAMES + 2, []),
        NamedBatch(Sequence(1), [1], 1, [1]),
    ],
)
def test_bad_names_and_holes_are_refused(message: Any) -> None:
    with pytest.raises(ProtocolError):
        NamedBatches().resolve(message)


@pytest.mark.parametrize("bad", [[1, 0.5], [-1, 0.5], ["0", 0.5], [True, 0.5]])
def test_a_change_that_fits_no_hole_is_refused(bad: list[Any]) -> None:
    named = NamedBatches()
    named.resolve(NamedBatch(Sequence(1), [ADD, 1, 2, 3], 1, [2]))
    with pytest.raises(ProtocolError, match="1 holes, none is numbered"):
        named.resolve(Repeat(Sequence(2), 1, bad))


def record(recorder: Recorder, stream: list[Any]) -> None:
    """Records commands one by one, as the dispatcher does."""
    position = 0
    while position < len(stream):
        width = commands.OPERANDS.get(stream[position])
        if width is None:
            width = WIDTHS[stream[position]]
            recorder.lines.extend((None, 0))
        recorder.stream.extend(stream[position : position + 1 + width])
        position += 1 + width
        if len(recorder.stream) > recorder.limit:
            recorder.send_some()


def test_a_loop_settles_to_repeats_whatever_its_length_and_its_beginning() -> None:
    for ops in (7, 61, 163, 700):
        for before in (0, 5, 50):
            sent_messages: list[Any] = []
            recorder = Recorder(sent_messages.append, lambda: (0, 0), Settings())
            define_ops(recorder)
            record(recorder, [ADD, 9, 9, 9] * before)
            # Slots differ from op to op, as they do in a program; the rate differs from step to step.
            for number in range(max(60, 15_000 // ops)):
                record(recorder, step(0.001 * number, ops=ops))
            late = sent_messages[-len(sent_messages) // 4 :]
            assert late, (ops, before)
            assert all(type(message) is Repeat for message in late), (ops, before, [type(m) for m in late])


def test_an_expectation_is_not_cut_from_its_op() -> None:
    sent_messages: list[Any] = []
    recorder = Recorder(sent_messages.append, lambda: (0, 0), Settings())
    define_ops(recorder)
    record(recorder, [item for n in range(2000) for item in (commands.EXPECT, [n], ADD, n, n + 1, n + 2)])
    ends = [NamedBatches().resolve(message).stream[-4] for message in sent_messages]  # type: ignore[union-attr]
    assert len(ends) > 5
    assert set(ends) == {ADD}


def test_a_batch_with_many_new_ops_is_not_remembered_and_one_with_a_few_is() -> None:
    repeats = new_repeats()
    new = [commands.EXPECT, ["look"], *step(0.5)]
    for _ in range(3):
        messages = sent(repeats, [new * 4 + step(0.5) * 40])
    assert isinstance(messages[-1], Repeat)
    assert [type(m) for m in sent(repeats, [new * 20] * 3)] == [Batch] * 3
    assert len(repeats.seen.keys() - {b""}) == 1


def test_no_command_is_lost_or_split_by_the_cuts() -> None:
    sent_messages: list[Any] = []
    recorder = Recorder(sent_messages.append, lambda: (0, 0), Settings())
    define_ops(recorder)
    stream = [item for number in range(300) for item in step(0.01 * number, ops=number % 90)]
    record(recorder, stream)
    recorder.flush()
    named = NamedBatches()
    batches = [named.resolve(message) for message in sent_messages]
    got: list[Any] = []
    for number, batch in enumerate(batches, 1):
        assert batch is not None
        assert batch.sequence == number
        got += batch.stream
    assert got == stream
