"""The place where a long recording is cut into batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyproxy.protocol import commands

Place = tuple[int, int, int]
"""A number of items of the stream, one of items of the lines, and one of buffers."""


def find_cut(stream: list[Any], widths: Mapping[int, int], limit: int, recorded: Place) -> Place:
    """Return how much of a stream to send.

    The command with the smallest hash in the second half of the limit starts the next batch. So the cuts follow
    the content, and the steps of a loop are cut in the same places, wherever the first one happened to be cut.
    Where lines and ops are out of step, because Ctrl-C struck between the two, all of it goes: what is recorded
    next is in step again, and no error names a wrong line.

    Args:
        stream: commands.
        widths: how many operands each command takes.
        limit: the length of stream from which a batch is sent.
        recorded: all that there is.
    """
    earliest = limit // 2
    count, line_count, _ = recorded
    lines = buffers = number = 0
    best, smallest = recorded, 1 << 32
    for position in commands.walk(stream, widths, count):
        is_attached = number == commands.EXPECT  # which belongs to the command behind it
        number = stream[position]
        if earliest <= position < limit and not is_attached:
            operand = stream[position + 1]
            mixed = (number * 0x9E3779B1 + (operand * 0x85EBCA6B if type(operand) is int else 0)) & 0xFFFFFFFF
            if mixed < smallest:
                best, smallest = (position, lines, buffers), mixed
        if number >= commands.FIRST_SIGNATURE:
            lines += 2
        elif number == commands.UPLOAD:
            buffers += 1
    return best if lines == line_count else recorded
