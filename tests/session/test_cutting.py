"""Where a long recording is cut."""

from __future__ import annotations

from skyproxy.protocol import commands
from skyproxy.session.cutting import find_cut

OP = commands.FIRST_SIGNATURE
WIDTHS = commands.width_table({OP: 2})
LIMIT = 30


def ops(first: int, count: int) -> list[int]:
    return [item for operand in range(first, first + count) for item in (OP, operand, 0)]


def cut(stream: list[int], *, lines: int | None = None) -> tuple[int, int, int]:
    count = stream.count(OP) * 2 if lines is None else lines
    return find_cut(list(stream), commands.walk(list(stream), WIDTHS), LIMIT, (len(stream), count, 0))


def test_a_cut_lies_between_two_commands_in_the_second_half_of_the_limit() -> None:
    items, lines, buffers = cut(ops(0, 12))
    assert LIMIT // 2 <= items < LIMIT
    assert items % 3 == 0
    assert (lines, buffers) == (items // 3 * 2, 0)


def test_a_cut_follows_what_was_recorded_and_not_where_it_began() -> None:
    places = {ops(0, 40)[start * 3 + cut(ops(start, 12))[0] + 1] for start in range(4)}
    assert len(places) < 4  # several beginnings, one command that starts the next batch


def test_an_op_stays_with_what_is_expected_of_it() -> None:
    stream = [item for number in range(8) for item in (commands.EXPECT, [], OP, number, 0)]
    items, _, _ = find_cut(list(stream), commands.walk(list(stream), WIDTHS), LIMIT, (len(stream), 16, 0))
    assert stream[items] == commands.EXPECT


def test_all_of_it_goes_where_a_line_is_missing() -> None:
    stream = ops(0, 12)
    assert cut(stream, lines=22) == (len(stream), 22, 0)
