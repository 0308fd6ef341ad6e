"""The grammar of the flat stream of commands, and the loop that runs it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands

STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
WIDTHS = commands.width_table({32 + width: width for width in range(6)})
"""The built-in commands, and an op of each number of operands."""

# Operands that look like commands must not be taken for some.
operands = st.one_of(
    st.integers(0, 40), st.none(), st.floats(allow_nan=False), st.lists(st.integers(0, 40), max_size=3)
)


@st.composite
def one_command(draw: st.DrawFn) -> list[Any]:
    number = draw(st.sampled_from(sorted(WIDTHS)))
    return [number, *(draw(operands) for _ in range(WIDTHS[number]))]


streams = st.lists(one_command(), max_size=30)


def stepping(visited: list[int], fails_at: int | None = None) -> list[Any]:
    """Handlers of all commands that note where they stand and know their own widths, as those of a worker do."""

    def handler_of(width: int) -> commands.Handler:
        def handler(slots: dict[int, Any], stream: list[Any], position: int) -> int:
            if position == fails_at:
                raise RuntimeError("this command fails")
            visited.append(position)
            return position + 1 + width

        return handler

    return [handler_of(WIDTHS[n]) if n in WIDTHS else None for n in range(max(WIDTHS) + 1)]


@STEADY
@given(streams)
def test_a_walk_finds_the_commands_that_were_written(written: list[list[Any]]) -> None:
    stream = [item for command in written for item in command]
    positions = commands.walk(stream, WIDTHS)
    ends = [*positions[1:], len(stream)]
    assert [stream[at:end] for at, end in zip(positions, ends, strict=bool(positions))] == written


@STEADY
@given(streams, st.data())
def test_the_loop_takes_the_steps_of_the_walk(written: list[list[Any]], data: st.DataObject) -> None:
    stream = [item for command in written for item in command]
    positions = commands.walk(stream, WIDTHS)
    visited: list[int] = []
    fails_at = data.draw(st.sampled_from(positions)) if positions and data.draw(st.booleans()) else None
    position, done, error = commands.execute(stream, 0, stepping(visited, fails_at), {}, False)
    expected = positions if fails_at is None else positions[: positions.index(fails_at)]
    assert visited == expected
    assert done == len(expected)
    assert position == (len(stream) if fails_at is None else fails_at)
    assert (error is None) == (fails_at is None)


@STEADY
@given(st.lists(one_command(), min_size=1, max_size=30))
def test_a_loop_that_pauses_goes_on_where_it_stopped(written: list[list[Any]]) -> None:
    stream = [item for command in written for item in command]
    visited: list[int] = []
    position = steps = 0
    while position < len(stream):
        position, done, _ = commands.execute(stream, position, stepping(visited), {}, True)
        steps += done
    assert steps == len(written)
    assert visited == commands.walk(stream, WIDTHS)


@STEADY
@given(streams, one_command().filter(lambda command: len(command) > 1), st.data())
def test_a_stream_that_ends_inside_a_command_is_refused(
    written: list[list[Any]], last: list[Any], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(last) - 1))
    stream = [*(item for command in written for item in command), *last[:cut]]
    with pytest.raises(ProtocolError, match="ends in the middle of the command at"):
        commands.walk(stream, WIDTHS)


@pytest.mark.parametrize("number", [0, 11, 31, 99, -1, None, [1], "a"])
def test_a_number_that_means_nothing_is_refused(number: Any) -> None:
    with pytest.raises(ProtocolError, match="at 2 was never defined"):
        commands.walk([commands.RELEASE, [1], number], WIDTHS)


def test_a_walk_ends_where_it_is_told_to() -> None:
    assert commands.walk([32, 32, 99], WIDTHS, 2) == [0, 1]


def test_an_expect_speaks_of_the_command_behind_it() -> None:
    assert commands.op_at([commands.EXPECT, [], 32], 0) == 2
    assert commands.op_at([32], 0) == 0


def test_ops_are_added_to_a_table_of_widths_without_changing_the_built_in_ones() -> None:
    table = commands.width_table({32: 1})
    assert table[32] == 1
    assert commands.OPERANDS.items() <= table.items()
    assert 32 not in commands.OPERANDS


@pytest.mark.parametrize(
    ("templates", "count"),
    [
        (["t", "T", "v", "n", "N"], 5),
        ([("k", "float32"), ["k", "int64"]], 2),
        ([("c", "plain", 1), ["c", "dtype", "float32"], "x"], 0),
    ],
)
def test_each_template_but_constants_and_aliases_takes_one_operand(templates: list[Any], count: int) -> None:
    assert commands.operand_count(templates) == count
