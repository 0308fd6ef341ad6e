"""The shapes of what a worker's controls answer; each answer is held against its own before anything is made of it.

What has structure of its own (documents, rows of snapshots and named values) is read by whoever asked for it, with the
checks of that format; here it has the outer shape that the reader takes for granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from skyproxy.errors import ProtocolError, visible
from skyproxy.interrupts import raised_by_handler

Items = list[Any]
Entries = dict[str, Any]
Shape = Callable[[object], object]
"""Returns an answer, its words without control characters; raises ValueError where it is another thing."""

MOST_CHARACTERS = 1 << 20
_MOST = 1 << 63
MOST_DIMENSIONS = 64
"""Those of a tensor that a worker is sent."""
_MOST_TOLD_DIMENSIONS = 1 << 10
"""Those of a tensor that a worker computed: PyTorch knows no bound for what it makes or computes element by element."""
_MOST_INPUTS = 1 << 20
_MOST_DEPTH = 4
_SCALARS = frozenset({bool, int, float})


def scalar(value: object) -> object:
    """A number, or a truth value; whole ones fit into 64 bits."""
    if type(value) not in _SCALARS or (type(value) is int and not -_MOST <= value < 2 * _MOST):
        raise ValueError("a number")
    return value


def flag(value: object) -> bool:
    """A truth value."""
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def integer(value: object) -> int:
    """A whole number that fits into 64 bits with its sign, or without."""
    if type(value) is not int or not -_MOST <= value < 2 * _MOST:
        raise ValueError("a whole number")
    return value


def size(value: object) -> int:
    """A number of bytes or things."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("a number of bytes or things")
    return value


def seconds(value: object) -> float:
    """A finite time."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not -1e18 < value < 1e18:
        raise ValueError("a time")
    return float(value)


def text(value: object) -> str:
    """Words for people."""
    if type(value) is not str or len(value) > MOST_CHARACTERS:
        raise ValueError("a text")
    return visible(value)


def data(value: object) -> bytes:
    """Bytes, as many as a message holds."""
    if type(value) is not bytes:
        raise ValueError("bytes")
    return value


def state(value: object) -> bytes:
    """The state of a generator, which is never empty."""
    if not data(value):
        raise ValueError("a state")
    return data(value)


def plain(value: object, depth: int = _MOST_DEPTH) -> object:
    """Numbers, words, bytes, None, and a few levels of lists and tables of them."""
    if value is None or type(value) in _SCALARS or type(value) is bytes:
        return value
    if type(value) is str:
        return text(value)
    if depth and type(value) is list:
        return [plain(item, depth - 1) for item in value]
    if depth and type(value) is dict:
        return {text(key): plain(item, depth - 1) for key, item in value.items()}
    raise ValueError("numbers and words")


def table(value: object) -> Entries:
    """A table by words, whose entries are read by whoever asked."""
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise ValueError("a table")
    return value


def ignored(value: object) -> None:
    """Nothing is made of this answer, whatever it is."""


def optional(shape: Shape) -> Shape:
    """The shape, or None."""
    return lambda value: None if value is None else shape(value)


def rows(shape: Shape) -> Callable[[object], Items]:
    """A list of it."""

    def check(value: object) -> Items:
        if type(value) is not list:
            raise ValueError("a list")
        return [shape(item) for item in value]

    return check


def row(*shapes: Shape) -> Callable[[object], Items]:
    """A list of just these."""

    def check(value: object) -> Items:
        if type(value) is not list or len(value) != len(shapes):
            raise ValueError(f"a list of {len(shapes)}")
        return [shape(item) for shape, item in zip(shapes, value, strict=True)]

    return check


def fields(required: dict[str, Shape], may_have: dict[str, Shape] | None = None) -> Callable[[object], Entries]:
    """A table with these entries; others are left out."""
    known = {**required, **(may_have or {})}

    def check(value: object) -> Entries:
        found = table(value)
        missing = required.keys() - found.keys()
        if missing:
            raise ValueError(f"a table with {min(missing)}")
        return {key: shape(found[key]) for key, shape in known.items() if key in found}

    return check


def name(value: object) -> str:
    """A name that a client gave, as it is: it is what is asked for again."""
    if type(value) is not str or len(value) > MOST_CHARACTERS:
        raise ValueError("a name")
    return value


def _whole_numbers(value: object, most_items: int = 1 << 20) -> list[int]:
    if type(value) is not list or len(value) > most_items:
        raise ValueError("a list of whole numbers")
    return [integer(item) for item in value]


def description(value: object) -> Items:
    """The look of a tensor: dtype, sizes, strides, offset, and three fields more where it is not strided."""
    if type(value) is not list or len(value) not in (4, 7) or type(value[0]) is not str:
        raise ValueError("what a tensor looks like")
    sizes, strides = (_whole_numbers(numbers, _MOST_TOLD_DIMENSIONS) for numbers in value[1:3])
    if min(sizes, default=0) < 0 or math.prod(sizes) >= _MOST or len(strides) not in (0, len(sizes)):
        raise ValueError("sizes and strides of a tensor")
    integer(value[3])
    plain(value[4:])
    return value


def _nested_description(value: Items) -> Items:
    _, _, sizes, strides, offsets = row(name, name, *[rows(_whole_numbers)] * 2, _whole_numbers)(value)
    if not len(sizes) == len(strides) == len(offsets):
        raise ValueError("as many sizes as strides and offsets")
    if len({len(one) for one in (*sizes, *strides)}) > 1 or any(number < 0 for one in sizes for number in one):
        raise ValueError("sizes of as many dimensions each")
    return value


def described(value: object, depth: int = 2) -> Items:
    """The state of a slot: what a tensor looks like, and which input it is a view of, or -1; or "list" and a row for
    each; or None and a plain value.
    """
    if type(value) is not list or len(value) != 2:
        raise ValueError("a description of a value")
    fields_, alias = value
    if fields_ is None:
        return [None, plain(alias)]
    if fields_ == "list" and depth:
        return ["list", rows(lambda part: described(part, depth - 1))(alias)]
    if type(alias) is not int or not -1 <= alias < _MOST_INPUTS:
        raise ValueError("the number of an input")
    is_nested = type(fields_) is list and fields_[:1] == ["nested"]
    return [_nested_description(fields_) if is_nested else description(fields_), alias]


_MEMORY = ("allocated", "max_allocated", "reserved", "max_reserved", "free", "total")
ANSWERS: dict[str, Shape] = {
    # values
    "item": scalar,
    "numbers": rows(optional(scalar)),
    "equal": flag,
    "storage_bytes": size,
    "synchronize": ignored,
    "differentiated": ignored,
    "differentiate": ignored,
    "wait_event": ignored,
    "query_event": flag,
    "elapsed_milliseconds": seconds,
    # random numbers and modes
    "initial_seed": integer,
    "generator_seed": integer,
    "random_state": state,
    "generator_state": state,
    "modes_in_force": lambda value: plain(table(value)),
    # what the session has
    "stats": fields({"handles": size, "bytes": size}),
    "blob_stats": optional(fields({"blobs": size, "bytes": size, "max_bytes": size}, {"unhashed": size})),
    "memory_stats": fields(dict.fromkeys(_MEMORY, size)),
    "memory_summary": text,
    # graphs and profiles
    "compiler_trouble": text,
    "compile_report": fields({"graphs": size, "eager": size, "inductor": size, "troubles": rows(text)}),
    "graph_report": fields({"graphs": size, "cuda_graphs": size}),
    "clock": integer,
    "profile_start": ignored,
    "profile_stop": size,
    # calls, which are told of elsewhere
    "forget_call": ignored,
    # names
    "hold_named": fields({}, {"refused": text, "moved": text, "elsewhere": text, "held_seconds": seconds}),
    "put_named": rows(size),
    "named_value": fields({}, {"names": rows(name), "version": integer, "document": data, "rows": data}),
    "adopt_named": flag,
    "list_named": rows(row(name, size, size, seconds)),
    "forget_named": flag,
    "named_sessions": rows(table),
    "end_named": flag,
    "leave_named": flag,
    # snapshots
    "save_snapshot": fields({"snapshot": name, "sequence": size, "bytes": size, "written_bytes": size}),
    "open_snapshot": table,
    "adopt_snapshot": ignored,
    "list_snapshots": rows(table),  # those that cannot be read have other entries
    "load_snapshot": fields({"sequence": size}),
    "read_snapshot": fields({"total_bytes": size, "part": data}),
    "read_snapshot_piece": data,
    "begin_snapshot": ignored,
    "write_snapshot_piece": data,
    "write_snapshot": ignored,
    "delete_snapshot": flag,
}
"""By the control's name. A control that is not here is asked by no client."""


def _output_text(value: object) -> str:
    """The output of a function, which may draw; whoever shows it sees to the rest."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _stream_name(value: object) -> str:
    if value not in ("stdout", "stderr"):
        raise ValueError("stdout or stderr")
    return str(value)


def _place(value: object) -> Entries:
    """Short words and numbers of the place where a function waits for a debugger, whatever else there is."""
    kept = {key: entry for key, entry in table(value).items() if key in _PLACE_KEYS}
    return {key: entry[:_MOST_NAME_CHARACTERS] if type(entry) is str else integer(entry) for key, entry in kept.items()}


_PLACE_KEYS = frozenset({"kind", "file", "line", "function", "rank", "world_size", "pool", "debugger"})
_MOST_NAME_CHARACTERS = 4096
_WITHOUT_MORE = frozenset({"started", "stream", "output"})
"""Events of which nothing is kept but what their shape has: they wait for a caller who may be slow."""
_VALUE = fields(
    {"tensors": rows(rows(lambda value: value)), "bases": rows(size)},
    {"form": name, "not_plain": text, "changed": rows(size), "simple": flag},
)
EVENTS: dict[str, Shape] = {
    "started": fields({}),
    "stream": fields({}),
    "output": fields({"text": _output_text, "stream": _stream_name}, {"lost": size, "waits": _place}),
    "ask": fields({"actor": name, "method": name, "asker": name, "number": size}),
    "item": _VALUE,
    "result": _VALUE,
    "error": fields({}, {"tensors": rows(rows(lambda value: value)), "bases": rows(size), "form": name}),
    "unknown": fields({}, {"reason": text}),
}
"""The values of a call's events, by their kinds."""
_SIMPLE_RESULT: Entries = {"tensors": [], "bases": [], "form": "pickle", "simple": True, "changed": []}
"""The value of a result of a few numbers or words, by far the most of all."""
_OURS = "exception"
"""The entry in which a call has an error of this program's own; no worker has one."""


def checked_event(kind: str, value: Entries) -> Entries:
    """Return the value of a call's event, if it has its shape.

    Raises:
        ProtocolError: it has not.
    """
    if kind == "result" and value == _SIMPLE_RESULT and value["simple"] is True:
        return value
    shape = EVENTS[kind]
    try:
        checked_entries = table(shape(value))
    except ValueError as error:
        if raised_by_handler(error):
            raise
        raise _impossible_answer(f"a call ({kind})", value, error) from None
    more = {} if kind in _WITHOUT_MORE else value
    return {key: entry for key, entry in {**more, **checked_entries}.items() if key != _OURS}


def checked(control: str, answer: object) -> Any:
    """Return what a control answered, if it has its shape.

    Raises:
        ProtocolError: it has not.
    """
    shape = ANSWERS[control]
    try:
        return shape(answer)
    except ValueError as error:
        if raised_by_handler(error):
            raise
        raise _impossible_answer(control, answer, error) from None


def checked_rows(purpose: str, answer: object, count: int) -> Items:
    """Return what a worker tells of so many slots, if that can be.

    Raises:
        ProtocolError: it cannot.
    """
    try:
        found: Items = rows(described)(answer)
        if len(found) != count:
            raise ValueError(f"{count} descriptions")
    except ValueError as error:
        if raised_by_handler(error):
            raise
        raise _impossible_answer(purpose, answer, error) from None
    return found


def _impossible_answer(question: str, answer: object, error: ValueError) -> ProtocolError:
    return ProtocolError(
        f"the worker answered {answer!r:.80} to {question}, which should have been {error}. Is it of another version?"
    )
