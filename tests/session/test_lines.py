"""Which line recorded an op: the right one, or none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Sequence
from skyproxy.session.lines import describe_line, line_of, op_ordinals
from skyproxy.session.recorder import RecordedBatch

A, B = commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 1
WIDTHS = commands.width_table({A: 2, B: 0})


def here() -> tuple[CodeType, int, int]:
    """The caller's code, instruction and line."""
    frame = sys._getframe(1)
    return frame.f_code, frame.f_lasti, frame.f_lineno


def sent(stream: list[Any], lines: list[Any]) -> RecordedBatch:
    return RecordedBatch(Sequence(1), stream, lines)


def test_ops_are_counted_past_every_built_in_command() -> None:
    stream: list[Any] = []
    for number, width in commands.OPERANDS.items():
        if number != commands.EXPECT:
            stream += [number, *[[B] * 3] * width]
    first = len(stream)
    stream += [A, B, B, commands.EXPECT, [[]], B, A, A, A]
    assert op_ordinals(stream, WIDTHS) == {first: 0, first + 5: 1, first + 6: 2}


def test_the_line_of_each_op_is_found() -> None:
    first, second = here(), here()
    stream = [commands.RELEASE, [1], A, 1, 2, commands.EXPECT, [], B]
    batch = sent(stream, [*first[:2], *second[:2]])
    name = Path(__file__).name
    assert describe_line(batch, 2, WIDTHS).endswith(f"{name}:{first[2]} in test_the_line_of_each_op_is_found")
    assert describe_line(batch, 7, WIDTHS).endswith(f"{name}:{second[2]} in test_the_line_of_each_op_is_found")


def test_a_position_that_is_no_op_has_no_line() -> None:
    batch = sent([commands.RELEASE, [1], B], [*here()[:2]])
    assert describe_line(batch, 0, WIDTHS) == ""
    assert describe_line(batch, 99, WIDTHS) == ""


def test_lines_out_of_step_give_none_rather_than_a_wrong_one() -> None:
    assert describe_line(sent([B, B], [*here()[:2]]), 0, WIDTHS) == ""
    assert describe_line(sent([B], [*here()[:2], *here()[:2]]), 0, WIDTHS) == ""


def test_an_op_that_was_recorded_without_a_line_has_none() -> None:
    assert describe_line(sent([B], [None, 0]), 0, WIDTHS) == ""


def test_an_instruction_without_a_line_belongs_to_the_function() -> None:
    code = here()[0]
    assert line_of(code, 10**6) == code.co_firstlineno
