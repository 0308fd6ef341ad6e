"""The lines of the user's code that recorded ops: remembered as cheaply as possible, looked up only for errors."""

from __future__ import annotations

from types import CodeType
from typing import Any

from skyproxy.cell_names import cell_name
from skyproxy.protocol import commands
from skyproxy.session.recorder import RecordedBatch


def describe_line(sent: RecordedBatch, position: int, widths: dict[int, int]) -> str:
    """Return "file:line in function" of the op at `position` of the batch's stream; empty where that is not known.

    A cell of a notebook is named as IPython names it, "Cell In[6], line 2": its file is a temporary one.
    """
    found = find_line(sent, position, widths)
    if found is None:
        return ""
    code, line = found
    cell = cell_name(code.co_filename)
    if cell is None:
        return f"{code.co_filename}:{line} in {code.co_name}"
    return f"{cell}, line {line}" + ("" if code.co_name == "<module>" else f" in {code.co_name}")


def find_line(sent: RecordedBatch, position: int, widths: dict[int, int]) -> tuple[CodeType, int] | None:
    """Return the code and the line that recorded the op at `position`; None where that is not known.

    `sent.lines` has one code object and one instruction offset an op, in order. Threads that record at the same time
    can leave the two out of step; then the answer is None, never a wrong line.

    Args:
        sent: the batch.
        position: where in its stream the op's number stands.
        widths: how many operands each command takes, see `commands.width_table`.
    """
    stream, lines = sent.stream, sent.lines
    ordinals = op_ordinals(stream, widths)
    if len(lines) != 2 * len(ordinals) or position not in ordinals:
        return None
    ordinal = ordinals[position]
    code, offset = lines[2 * ordinal], lines[2 * ordinal + 1]
    return (code, line_of(code, offset)) if code is not None else None


def line_of(code: CodeType, offset: int) -> int:
    """The source line of an instruction offset."""
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


def op_ordinals(stream: list[Any], widths: dict[int, int]) -> dict[int, int]:
    """Return, for the position of each op in the stream, its number among the ops."""
    ops = [at for at in commands.walk(stream, widths) if stream[at] >= commands.FIRST_SIGNATURE]
    return {at: ordinal for ordinal, at in enumerate(ops)}
