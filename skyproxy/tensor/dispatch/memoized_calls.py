"""Functions whose operations are noted once, and recorded again without running the function.

A layer such as an RMS norm is a function of tensors alone: called with tensors that look the same, it records the same
operations on other slots. `MemoizedCall` runs it the first times, notes what it recorded, and from then on fills other
slots into that. The worker gets the very same operations; only the way through PyTorch's dispatcher for each of them is
saved. That it is such a function its bytecode tells, see `skyproxy.tensor.dispatch.dependencies`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import torch

from skyproxy.interrupts import raised_by_handler, shielded
from skyproxy.patching import PATCHES
from skyproxy.protocol import commands
from skyproxy.session.recorder import Recorder
from skyproxy.tensor.core.devices import SkyDevice
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.core.torch_private import (
    count_function_modes,
    has_modes_or_transforms,
    is_forward_ad_active,
)
from skyproxy.tensor.core.user_lines import user_frame
from skyproxy.tensor.dispatch.dependencies import CONSTANTS, Reader, reader_of
from skyproxy.tensor.dispatch.op_info import info_named

_MAX_REPLAYS = 4096
_ATTEMPTS = 8
"""Attempts to note a call; a batch may be cut in the middle of one."""
_DEFINITIONS = (commands.DEFINE, commands.EXPECT)
_DRAWS = torch.Tag.nondeterministic_seeded
_in_inference_mode = torch.is_inference_mode_enabled
_getframe = sys._getframe


class _NotReplayableError(Exception):
    """Raised where what was recorded cannot be recorded again in this way."""


class Replay(NamedTuple):
    """The operations of one call.

    Attributes:
        places: how many slots they fill.
        commands: makes the commands of the slots of the inputs, of those that are filled, and of `values`.
        values: numbers of ops, and operands that are no slots.
        lines: for each operation, a code object and an instruction offset.
        results: for each result, what it looks like and which place it fills, and the same for what it is a view of.
        left_over: the places that hold something else in the end.
        released: the places that hold nothing in the end, because the commands release what was large.
        several: whether the function gives a tuple.
    """

    places: int
    commands: Callable[[Sequence[int], Sequence[int], Sequence[object]], tuple[object, ...]]
    values: tuple[object, ...]
    lines: tuple[object, ...]
    results: tuple[tuple[tuple[Meta, int], tuple[Meta, int] | None], ...]
    left_over: tuple[int, ...]
    released: tuple[int, ...]
    several: bool


@shielded
def _replay(replay: Replay, device: SkyDevice, inputs: Sequence[int], lines: tuple[object, ...]) -> object:
    """Records the operations, with the lines that they are called from; the result, or None if there are too few free
    slots.
    """
    recorder = device.recorder
    slots = recorder.take_free_slots(replay.places)
    if not slots:
        return None
    recorder.emit(replay.commands(inputs, slots, replay.values))
    recorder.emit_line(lines)
    results = []
    for (meta, place), base in replay.results:
        root = None
        if base is not None:
            root = device.handle_type()
            root.meta, root.root, root.slot = base[0], None, slots[base[1]]
        handle = device.handle_type()
        handle.meta, handle.root, handle.slot = meta, root, slots[place]
        results.append(make_tensor(meta, handle))
    for place in replay.left_over:
        recorder.drop_slot(slots[place])
    for place in replay.released:
        recorder.give_back(slots[place])
    return tuple(results) if replay.several else results[0]


class _Mark(NamedTuple):
    """The place of a recorder before a call is run.

    Attributes:
        batches, start, first_line: batches that were cut, items that are unsent, and lines of these.
        values_read: how often values that are known here were read.
    """

    batches: int
    start: int
    first_line: int
    values_read: int


def _mark(device: SkyDevice) -> _Mark:
    recorder = device.recorder
    return _Mark(recorder.batches, recorder.unsent, recorder.unsent_lines, device.values_read)


def _build_replay(device: SkyDevice, before: _Mark, inputs: Sequence[int], result: object) -> Replay:
    """Build the replay of what was just recorded.

    What another thread may have recorded in between either reads what this call was not given, and there is no replay,
    or makes tensors that nobody takes.

    Raises:
        _NotReplayableError: there is none.
    """
    recorder = device.recorder
    stream, lines = recorder.recorded(before.start, recorder.unsent, before.first_line)
    if recorder.batches != before.batches or device.values_read != before.values_read:
        raise _NotReplayableError
    source = _Source(inputs)
    structures = device.session.structures
    begins = commands.walk(stream, recorder.widths)
    count = 0
    for begin, end in pairwise([*begins, len(stream)]):
        number = stream[begin]
        if number in _DEFINITIONS:  # they were made, and hold from now on
            continue
        if number == commands.RELEASE:
            source.release(stream[begin + 1])
            continue
        structure = structures.get(number)
        if structure is None or len(structure) != 4 or not _only_computes(structure[0]):
            raise _NotReplayableError
        _, arguments, keywords, outputs = structure
        given = (*arguments, *(template for _, template in keywords), *outputs)
        templates, operands = list(filter(commands.takes_operand, given)), stream[begin + 1 : end]
        if len(templates) != len(operands):
            raise _NotReplayableError
        source.parts.append(source.value(number))
        source.parts.extend(map(source.operand, templates, operands))
        count += 1
    results = result if type(result) is tuple else (result,)
    filled = [_place_of(tensor, source.places) for tensor in results]
    kept = [place for pair in filled for _, place in filter(None, pair)]
    if len(set(kept)) != len(kept) or len(lines) != 2 * count or not source.released.isdisjoint(kept):
        raise _NotReplayableError
    left_over = tuple(place for place in source.places.values() if place not in kept and place not in source.released)
    return Replay(
        len(source.places),
        _compile(", ".join(source.parts)),
        tuple(source.values),
        tuple(lines),
        tuple(filled),
        left_over,
        tuple(source.released),
        type(result) is tuple,
    )


@functools.lru_cache(maxsize=1024)
def _only_computes(name: object) -> bool:
    """Return whether what is called this on the wire is an op that gives the same for the same, and does no more."""
    info = info_named(name) if isinstance(name, str) else None
    return info is not None and not (info.changes or info.synchronizes or _DRAWS in info.func.tags)


def _place_of(tensor: object, places: dict[int, int]) -> tuple[tuple[Meta, int], tuple[Meta, int] | None]:
    """Return the look of a result and its place, and the same for what it is a view of.

    Raises:
        _NotReplayableError: it is more than that.
    """
    if type(tensor) is not RemoteTensor:
        raise _NotReplayableError
    handle = tensor._sky
    root = handle.root
    for each in (handle, root):
        if each is None:
            continue
        if each.slot not in places or not each.meta.plain or getattr(each, "is_shared", False):
            raise _NotReplayableError
    if root is None:
        return (handle.meta, places[handle.slot]), None
    if root.copied or root.root is not None:
        raise _NotReplayableError
    return (handle.meta, places[handle.slot]), (root.meta, places[root.slot])


class _Source:
    """The source text of what makes the commands: the same for calls that differ in shapes only.

    Attributes:
        parts: an expression for each item of the stream.
        places: for each slot that is filled, its place.
        released: the places that were released, and not filled again.
        values: what the text names `v`.
    """

    def __init__(self, inputs: Sequence[int]) -> None:
        self.parts: list[str] = []
        self.places: dict[int, int] = {}
        self.released: set[int] = set()
        self.values: list[object] = []
        self._slots = {slot: f"i[{number}]" for number, slot in enumerate(inputs)}

    def value(self, value: object) -> str:
        """Return the text of what is no slot."""
        self.values.append(value)
        return f"v[{len(self.values) - 1}]"

    def operand(self, template: object, operand: Any) -> str:
        """Return the text of an operand; there is a place for every slot that is filled.

        Raises:
            _NotReplayableError: it reads a tensor that it was not given, or writes to one.
        """
        if template == commands.VALUE:
            return self.value(operand)
        if template == commands.TENSORS:
            return f"[{', '.join([self.operand(commands.TENSOR, slot) for slot in operand])}]"
        if template == commands.TENSOR:
            text = "0" if operand == 0 else self._slots.get(operand)
            if text is None:
                raise _NotReplayableError
            return text
        if template != commands.NEW or (operand in self._slots and operand not in self.places):
            raise _NotReplayableError
        place = self.places.setdefault(operand, len(self.places))
        self.released.discard(place)
        self._slots[operand] = f"p[{place}]"
        return self._slots[operand]

    def release(self, slots: Collection[int]) -> None:
        """Add the command that releases these.

        Raises:
            _NotReplayableError: one of them was not filled here.
        """
        for slot in slots:
            if slot not in self.places:
                raise _NotReplayableError
            self.released.add(self.places[slot])
        self.parts.extend((str(commands.RELEASE), f"[{', '.join([self._slots[slot] for slot in slots])}]"))


@functools.lru_cache(maxsize=512)
def _compile(parts: str) -> Callable[[Sequence[int], Sequence[int], Sequence[object]], tuple[object, ...]]:
    make: Callable[[Sequence[int], Sequence[int], Sequence[object]], tuple[object, ...]]
    make = eval(f"lambda i, p, v: ({parts},)", {})
    return make


class MemoizedCall:
    """A function of tensors and constants that is run until its operations are known."""

    def __init__(self, *, follows_caller: bool = False) -> None:
        """Make a function of which nothing is known.

        Args:
            follows_caller: the function is ours, and errors of its operations name the line that it is called from.
        """
        self._follows_caller = follows_caller

    def call(self, run: Callable[[], object], arguments: Sequence[object], kind: object) -> object:
        """Return what `run()` gives, a fresh tensor or a tuple of them.

        Args:
            run: calls the function.
            arguments: all that it depends on: remote tensors and constants.
            kind: what else.
        """
        device = None
        key = [self, kind, _in_inference_mode()]
        slots: list[int] = []
        for a in arguments:
            if type(a) is RemoteTensor:
                handle = a._sky
                if handle.device is not device:
                    if device is not None:
                        return run()
                    device = handle.device
                meta = handle.meta
                if meta.known:
                    return run()
                key.append(meta)
                slots.append(handle.slot)
            elif type(a) in CONSTANTS:
                key.append((type(a), a) if a else (type(a), str(a)))  # -0.0 is another zero
            else:
                return run()
        if device is None or len(set(slots)) != len(slots) or type(device.recorder) is not Recorder or _is_watched():
            return run()
        place = tuple(key)
        replay = device.replays.get(place, 0)
        if type(replay) is not Replay:
            return run() if replay is None else _run_and_memoize(place, replay, device, slots, run)
        lines = replay.lines
        if self._follows_caller:
            frame = user_frame(_getframe(1))
            lines = (frame.f_code, frame.f_lasti) * (len(lines) // 2)
        result = _replay(replay, device, slots, lines)
        if result is None:
            return run()
        device.recorder.send_if_due()
        return result


def _run_and_memoize(
    place: object, attempts: int, device: SkyDevice, slots: list[int], run: Callable[[], object]
) -> object:
    """Runs a call that has no replay, and tries to make one of it."""
    replays = device.replays
    if len(replays) >= _MAX_REPLAYS:
        replays.clear()
    replays[place] = attempts + 1 if attempts < _ATTEMPTS else None
    before = _mark(device)
    result = run()
    with contextlib.suppress(_NotReplayableError):  # the result is correct in any case
        replays[place] = _build_replay(device, before, slots, result)
    return result


def _is_watched() -> bool:
    """Return whether somebody else looks at every operation, changes it, or wants its tangents."""
    if has_modes_or_transforms() or is_forward_ad_active():
        return True
    return count_function_modes() > 0 or torch.is_autocast_enabled("sky")


def memoized(function: Callable[..., Any], package: str, *, takes_module: bool) -> Callable[..., Any]:
    """The same function; on remote tensors, where nothing is differentiated, its operations are noted once.

    It is run each time where `reader_of` does not know what it depends on, and where a program has replaced any of it.

    Args:
        function: its first argument is a module, such as that of a method, and the second a tensor; or the first is.
        package: as in `reader_of`.
        takes_module: whether there is a module.
    """
    calls = MemoizedCall()
    readers: dict[tuple[type | None, int], tuple[Reader, tuple[object, ...]] | None] = {}
    first = 1 if takes_module else 0

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():  # checked first, so that nothing else in here is traced
            return function(*args, **kwargs)
        if torch.is_grad_enabled() or len(args) <= first or type(args[first]) is not RemoteTensor:
            return function(*args, **kwargs)
        kind = type(args[0]) if takes_module else None
        known = (kind, len(PATCHES))  # what we have replaced since, such as `Tensor.to`, is no program's doing
        if known not in readers:
            readers[known] = reader_of(function, package, kind)
        reader = readers[known]
        if reader is None:
            return function(*args, **kwargs)
        try:
            values, found = reader[0](*args, **kwargs)
        except (AttributeError, TypeError) as error:  # the function says it in its own words
            if raised_by_handler(error):
                raise
            return function(*args, **kwargs)
        if not all(map(is_, found, reader[1])):  # a program has replaced something, to be used each time
            return function(*args, **kwargs)
        return calls.call(lambda: function(*args, **kwargs), values, kind)

    return call


def memoized_choice(choose: Callable[..., Any], is_ours: Callable[[Any], bool], package: str) -> Callable[..., Any]:
    """The same function that gives functions; those of which `is_ours` is true are memoized.

    Args:
        choose: gives a function whose first argument is a module, and the second a tensor.
        is_ours: whether a function is nobody else's.
        package: as in `reader_of`.
    """
    known: dict[object, Any] = {}

    @functools.wraps(choose)
    def get(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        if torch.compiler.is_compiling() or not is_ours(chosen):
            return chosen
        found = known.get(chosen)
        if found is None:
            found = known[chosen] = memoized(chosen, package, takes_module=True)
        return found

    return get


__all__ = ["memoized", "memoized_choice"]
