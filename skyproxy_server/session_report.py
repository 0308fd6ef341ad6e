"""The report on one session for the web view: counters read from outside, never from the path of the ops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from skyproxy.protocol import commands
from skyproxy_server.failures import Failed
from skyproxy_server.session_state import SessionState
from skyproxy_server.status import MAX_CALLS, MAX_FAILURES, MAX_TEXT

_MEASURED_SHARE = 200
"""Memory is measured again after this many times what it took: the sessions lose half a percent to it, at most."""
_MAX_MEASURED_SLOTS = 200_000
_MAX_COUNTED_COMMANDS = 100_000


class MemoryGauge:
    """A gauge of the bytes that a session's tensors take, measured now and then.

    One tensor is held at a time, so that none lives longer for being counted. What a session changes meanwhile may be
    missing in the sum.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._due = -1.0
        self._bytes = 0

    def read(self, slots: Mapping[int, object]) -> int:
        """Return the bytes of the storages in these slots, each counted once; those of before where that is soon."""
        began = self._clock()
        if began >= self._due:
            self._bytes = _storage_bytes(slots)
            ended = self._clock()
            self._due = ended + _MEASURED_SHARE * (ended - began)
        return self._bytes


def _storage_bytes(slots: Mapping[int, object]) -> int:
    sizes: dict[int, int] = {}
    for slot in _keys(slots)[:_MAX_MEASURED_SLOTS]:
        value = slots.get(slot)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            try:
                storage = value.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # one without a storage
                continue
    return sum(sizes.values())


def _keys(slots: Mapping[int, object]) -> list[int]:
    """Return the keys of a dictionary that another thread changes."""
    for _ in range(3):
        try:
            return list(slots)
        except RuntimeError:  # it grew in the middle
            continue
    return []


def running_place(thread_id: int | None) -> tuple[list[Any], int] | None:
    """Return the stream that a thread executes and the position where it is; None where it executes none.

    It looks at the thread's stack, as a sampling profiler does, so that executing costs nothing more.
    """
    frame = sys._current_frames().get(thread_id or -1)
    while frame is not None:
        if frame.f_code is commands.execute.__code__:
            seen = frame.f_locals
            stream, position = seen.get("stream"), seen.get("position")
            return (stream, position) if isinstance(stream, list) and isinstance(position, int) else None
        frame = frame.f_back
    return None


def queued_operations(state: SessionState, place: tuple[list[Any], int] | None) -> int:
    """Return how many operations of the batch that runs have not begun."""
    if place is None:
        return 0
    stream, position = place
    widths, count = state.ops.widths, 0
    try:
        position = commands.op_at(stream, position)
        for _ in range(_MAX_COUNTED_COMMANDS):
            position += 1 + widths[stream[position]]
            if position >= len(stream):
                break
            count += stream[position] >= commands.FIRST_SIGNATURE
    except (KeyError, IndexError, TypeError):  # malformed, or replaced by now
        return 0
    return count


def running_op(state: SessionState, place: tuple[list[Any], int] | None) -> dict[str, object]:
    """Return what a session executes at its place: "op", and its "sequence" and "position"; empty for nothing."""
    if place is None:
        return {}
    stream, position = place
    try:
        number = stream[commands.op_at(stream, position)]
    except (IndexError, TypeError):
        return {}
    signature = state.ops.signatures.get(number)
    name = signature.name if signature is not None else _BUILT_IN.get(number, "")
    found = {"op": _text(name), "sequence": state.reports.sequence, "position": position}
    return found if state.reports.graph is None else {**found, "graph": state.reports.graph}


_BUILT_IN = {
    commands.FETCH: "fetch",
    commands.CALL: "control",
    commands.DO: "control",
    commands.REPLAY: "replay of a graph",
    commands.RECEIVE: "upload",
    commands.UPLOAD: "upload",
}


def _text(text: str) -> str:
    """Return the beginning of a text, without halves of characters, which no message can carry."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


def failure_rows(recent: Iterable[tuple[float, Failed]]) -> list[dict[str, Any]]:
    """Return the latest failures of a session as plain data, the newest last."""
    return [
        {
            "at": at,
            "type": _text(failed.record["type"]),
            "message": _text(failed.record["message"]),
            "op": _text(failed.record["op"]),
            "sequence": failed.record["sequence"],
            "position": failed.record["position"],
            "graph": failed.record.get("graph"),
        }
        for at, failed in list(recent)[-MAX_FAILURES:]
    ]


def call_rows(running: Iterable[tuple[str, float]], now: float) -> list[dict[str, object]]:
    """Return the functions that run as plain data.

    Args:
        running: their names, and when they began.
        now: on the same clock.
    """
    return [{"name": _text(name), "seconds": round(max(now - at, 0.0), 1)} for name, at in list(running)[:MAX_CALLS]]
