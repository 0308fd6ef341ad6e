"""Functions whose operations are noted once, and recorded again without running the function.

A layer such as an RMS norm is a function of tensors alone: called with tensors that look the same, it records the same
operations on other slots. `MemoizedCall` runs it the first times, notes what it recorded, and from then on fills other
slots into that. The worker gets the very same operations; only the way through PyTorch's dispatcher for each of them is
saved. It is for functions that are known to be such, see `skyproxy.integrations.layers`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.session.recorder import Recorder
from skyproxy.tensor.core.devices import SkyDevice
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.core.torch_private import (
    OpOverload,
    count_function_modes,
    has_modes_or_transforms,
)
from skyproxy.tensor.dispatch.op_info import info_of

_CONSTANTS = (int, float, bool, str, torch.dtype, type(None))
_MAX_REPLAYS = 4096
_RUNS_BEFORE = 2
"""Runs of a call before it is noted: the first times ask and define what later ones know."""
_ATTEMPTS = 8
"""Attempts to note a call; a batch may be cut in the middle of one."""
_in_inference_mode = torch.is_inference_mode_enabled


class _NotReplayableError(Exception):
    """Raised where what was recorded cannot be recorded again in this way."""


class Replay(NamedTuple):
    """The operations of one call.

    Attributes:
        places: how many slots they fill.
        commands: makes the commands of the slots of the inputs, and of those that are filled.
        lines: for each operation, a code object and an instruction offset.
        results: for each result, what it looks like and which place it fills.
        left_over: the places that hold no result.
        several: whether the function gives a tuple.
    """

    places: int
    commands: Callable[[Sequence[int], Sequence[int]], tuple[object, ...]]
    lines: tuple[object, ...]
    results: tuple[tuple[Meta, int], ...]
    left_over: tuple[int, ...]
    several: bool


@shielded
def _replay(replay: Replay, device: SkyDevice, inputs: Sequence[int]) -> object:
    """Records the operations; the result, or None if there are too few free slots."""
    recorder = device.recorder
    slots = recorder.take_free_slots(replay.places)
    if not slots:
        return None
    recorder.emit(replay.commands(inputs, slots))
    recorder.emit_line(replay.lines)
    results = []
    for meta, place in replay.results:
        handle = device.handle_type()
        handle.meta = meta
        handle.root = None
        handle.slot = slots[place]
        results.append(make_tensor(meta, handle))
    for place in replay.left_over:
        recorder.drop_slot(slots[place])
    return tuple(results) if replay.several else results[0]


class _CallWatcher:
    """Watches the operations that this thread records, while one call is run. One thread at a time can.

    Attributes:
        begins: for each operation, where in the stream it begins.
        usable: whether what was seen can be made a replay of.
    """

    _in_use = threading.Lock()

    def __init__(self, device: SkyDevice) -> None:
        self._recorder = device.recorder
        self._thread = threading.get_ident()
        self._before = vars(RemoteTensor)["__torch_dispatch__"]
        self._dispatch = self._before.__func__
        self.begins: list[int] = []
        self.usable = False
        self.batches = self._recorder.batches
        self.start = self.end = self._recorder.unsent
        self.first_line = self._recorder.unsent_lines

    @shielded
    def __enter__(self) -> _CallWatcher:
        if _CallWatcher._in_use.acquire(blocking=False):
            self.usable = True
            RemoteTensor.__torch_dispatch__ = classmethod(self._watch)  # type: ignore[method-assign,assignment]
        return self

    @shielded
    def __exit__(self, *unused: object) -> None:
        if vars(RemoteTensor)["__torch_dispatch__"].__func__ == self._watch:
            RemoteTensor.__torch_dispatch__ = self._before  # type: ignore[method-assign]
            _CallWatcher._in_use.release()

    def _watch(
        self,
        cls: object,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if threading.get_ident() != self._thread:
            return self._dispatch(cls, func, types, args, kwargs)
        info = info_of(func)
        self.usable &= self._recorder.unsent == self.end and not info.writes and not info.synchronizes
        self.begins.append(self.end)
        result = self._dispatch(cls, func, types, args, kwargs)
        self.end = self._recorder.unsent
        return result


def _build_replay(device: SkyDevice, notes: _CallWatcher, inputs: Sequence[int], result: object) -> Replay:
    """Build the replay of what was just recorded.

    Raises:
        _NotReplayableError: there is none.
    """
    recorder = device.recorder
    stream, lines = recorder.recorded(notes.start, notes.end, notes.first_line)
    whole = notes.usable and recorder.batches == notes.batches and recorder.unsent == notes.end
    if not whole or len(lines) != 2 * len(notes.begins):
        raise _NotReplayableError
    structures = device.session.structures()
    places: dict[int, int] = {}
    sources = {slot: f"i[{number}]" for number, slot in enumerate(inputs)}
    parts: list[str] = []
    begins = commands.walk(stream, recorder.widths)
    if begins != [begin - notes.start for begin in notes.begins]:
        raise _NotReplayableError
    for begin, end in pairwise([*begins, len(stream)]):
        structure = structures.get(stream[begin])
        if structure is None:
            raise _NotReplayableError
        _, arguments, keywords, outputs = structure
        given = (*arguments, *(template for _, template in keywords), *outputs)
        templates, operands = list(filter(commands.takes_operand, given)), stream[begin + 1 : end]
        if len(templates) != len(operands):
            raise _NotReplayableError
        parts.append(str(stream[begin]))
        for template, operand in zip(templates, operands, strict=True):
            parts.append(_operand(template, operand, sources, places))
    results = result if isinstance(result, tuple) else (result,)
    filled = []
    for tensor in results:
        handle = tensor._sky if type(tensor) is RemoteTensor else None
        if handle is None or handle.root is not None or handle.slot not in places or not handle.meta.plain:
            raise _NotReplayableError
        filled.append((handle.meta, places[handle.slot]))
    kept = {place for _, place in filled}
    if len(kept) != len(filled) or any(getattr(tensor._sky, "is_shared", False) for tensor in results):
        raise _NotReplayableError
    make = eval(f"lambda i, p: ({', '.join(parts)},)", {"inf": float("inf"), "nan": float("nan")})
    left_over = tuple(place for place in places.values() if place not in kept)
    return Replay(len(places), make, tuple(lines), tuple(filled), left_over, isinstance(result, tuple))


def _operand(template: object, operand: Any, sources: dict[int, str], places: dict[int, int]) -> str:
    """The source text of an operand; a place for every slot that is filled."""
    if template == commands.VALUE:
        return repr(operand)
    if template == commands.TENSORS:
        return f"[{', '.join(_operand(commands.TENSOR, slot, sources, places) for slot in operand)}]"
    if template == commands.TENSOR:
        source = "0" if operand == 0 else sources.get(operand)
        if source is None:
            raise _NotReplayableError  # it reads a tensor that it was not given
        return source
    if template != commands.NEW or (operand in sources and operand not in places):
        raise _NotReplayableError
    place = places.setdefault(operand, len(places))
    sources[operand] = f"p[{place}]"
    return sources[operand]


class MemoizedCall:
    """A function of tensors and constants that is run until its operations are known."""

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
                key.append(handle.meta)
                slots.append(handle.slot)
            elif type(a) in _CONSTANTS:
                key.append((type(a), a))
            else:
                return run()
        if device is None or len(set(slots)) != len(slots) or type(device.recorder) is not Recorder or _is_watched():
            return run()
        place = tuple(key)
        replay = device.replays.get(place, 0)
        if type(replay) is not Replay:
            return run() if replay is None else _run_and_memoize(place, replay, device, slots, run)
        result = _replay(replay, device, slots)
        if result is None:
            return run()
        device.recorder.send_if_due()
        return result


def _run_and_memoize(
    place: object, runs: int, device: SkyDevice, slots: list[int], run: Callable[[], object]
) -> object:
    """Runs a call that has no replay, and tries to make one of it if it came often enough."""
    replays = device.replays
    if len(replays) >= _MAX_REPLAYS:
        replays.clear()
    replays[place] = runs + 1 if runs < _RUNS_BEFORE + _ATTEMPTS else None
    if runs < _RUNS_BEFORE:
        return run()
    with _CallWatcher(device) as notes:
        result = run()
    with contextlib.suppress(_NotReplayableError):  # the result is correct in any case
        replays[place] = _build_replay(device, notes, slots, result)
    return result


def _is_watched() -> bool:
    """Return whether somebody else looks at every operation, or changes it."""
    return has_modes_or_transforms() or count_function_modes() > 0 or torch.is_autocast_enabled("sky")


def _applies(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    if torch.compiler.is_compiling():  # checked first, so that nothing else in here is traced
        return False
    return not kwargs and len(args) > 0 and type(args[0]) is RemoteTensor and not torch.is_grad_enabled()


def memoized_function(function: Callable[..., object]) -> Callable[..., object]:
    """The same function; on remote tensors, where nothing is differentiated, its operations are noted once."""
    memoized = MemoizedCall()

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if not _applies(args, kwargs):
            return function(*args, **kwargs)
        return memoized.call(lambda: function(*args), args, None)

    return call


def memoized_method(method: Callable[..., object]) -> Callable[..., object]:
    """The same for the `forward` of modules, which depend on their parameters, buffers, and attributes too."""
    memoized = MemoizedCall()
    names: dict[type, tuple[str, ...] | None] = {}

    @functools.wraps(method)
    def call(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        if not _applies(args, kwargs) or self._modules:
            return method(self, *args, **kwargs)
        kind = type(self)
        if kind not in names:
            names[kind] = constants_used(self)
        used = names[kind]
        if used is None:
            return method(self, *args)
        own = vars(self)
        values = (*args, *own["_parameters"].values(), *own["_buffers"].values(), *[own.get(name) for name in used])
        return memoized.call(lambda: method(self, *args), values, kind)

    return call


def constants_used(module: torch.nn.Module) -> tuple[str, ...] | None:
    """The attributes of a module that its `forward` may read, but for parameters and buffers.

    Returns:
        Their names, or None if one of them is not a constant.
    """
    found: dict[str, None] = {}
    pending, seen = ["forward"], {"forward"}
    while pending:
        attribute = getattr(type(module), pending.pop(), None)
        code = getattr(inspect.unwrap(attribute), "__code__", None) if callable(attribute) else None
        for name in _names_in(code) - seen if code is not None else ():
            seen.add(name)
            if name in vars(module):
                found[name] = None
            elif isinstance(vars(type(module)).get(name), FunctionType):
                pending.append(name)
            elif type(getattr(type(module), name, None)) in (int, float, bool, str):
                return None  # an attribute of the class, whose changes nobody reports
    return tuple(found) if all(type(vars(module)[name]) in _CONSTANTS for name in found) else None


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


__all__ = ["memoized_function", "memoized_method"]
