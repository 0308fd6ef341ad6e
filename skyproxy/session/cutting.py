"""The place where a long recording is cut into batches."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from skyproxy.protocol import commands

Place = tuple[int, int, int]
"""A number of items of the stream, one of items of the lines, and one of buffers."""


def find_cut(stream: list[Any], positions: list[int], limit: int, recorded: Place) -> Place:
    """Return how much of a stream to send.

    The command with the smallest hash in the second half of the limit starts the next batch. So the cuts follow
    the content, and the steps of a loop are cut in the same places, wherever the first one happened to be cut.
    Where lines and ops are out of step, because Ctrl-C struck between the two, all of it goes: what is recorded
    next is in step again, and no error names a wrong line.

    Args:
        stream: commands.
        positions: where each of them begins, see `commands.walk`.
        limit: the length of stream from which a batch is sent.
        recorded: all that there is.
    """
    numbers = [stream[position] for position in positions]
    if 2 * _count_ops(numbers) != recorded[1]:
        return recorded
    best, smallest = len(positions), 1 << 32
    for index in range(bisect_left(positions, limit // 2), bisect_left(positions, limit)):
        if index and numbers[index - 1] == commands.EXPECT:  # which belongs to the command behind it
            continue
        operand = stream[positions[index] + 1]
        mixed = (numbers[index] * 0x9E3779B1 + (operand * 0x85EBCA6B if type(operand) is int else 0)) & 0xFFFFFFFF
        if mixed < smallest:
            best, smallest = index, mixed
    if best == len(positions):
        return recorded
    before = numbers[:best]
    return positions[best], 2 * _count_ops(before), before.count(commands.UPLOAD)


def _count_ops(numbers: list[int]) -> int:
    return sum(map(commands.FIRST_SIGNATURE.__le__, numbers))
