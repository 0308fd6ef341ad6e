"""The profile that a worker sent, read without trusting it: bounded, and with the events that a timeline can show."""

from __future__ import annotations

import json
import re
import zlib

from skyproxy.errors import ProtocolError, visible
from skyproxy.profiling.timeline import TraceEvent

MOST_PACKED_BYTES = 256 << 20
MOST_BYTES = 1 << 30
_GZIP = 16 + zlib.MAX_WBITS
_MOST_TIME = 4e18
"""Of nanoseconds since 1970: the year 2096."""
_MOST_NAME = 1000
_PHASE = re.compile("[A-Za-z]")


def read_profile(packed: memoryview | bytes) -> tuple[TraceEvent, list[list[int]]]:
    """Return the trace, in Chrome's format, and the answers: requests, and when they left.

    Raises:
        ProtocolError: it is no profile, or too large.
    """
    try:
        expander = zlib.decompressobj(_GZIP)
        content = expander.decompress(packed, MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ProtocolError(f"the profile of a worker has more than {MOST_BYTES} bytes")
        seen = json.loads(content)
        trace, replies = seen["trace"], seen["replies"]
        base, events = trace.get("baseTimeNanoseconds", 0), trace["traceEvents"]
        if not (_is_time(base) and type(events) is list and type(replies) is list):
            raise ValueError("its parts are others")
        answers = [[number, at] for number, at in replies if type(number) is int and _is_time(at)]
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"what the worker sent is no profile: {error!r:.100}") from error
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [_without_controls(event) for event in events if _is_event(event)],
    }, answers


def _is_event(event: object) -> bool:
    if type(event) is not dict or type(event.get("name")) is not str:
        return False
    phase = event.get("ph")
    if type(phase) is not str or not _PHASE.fullmatch(phase):
        return False
    times = [event[key] for key in ("ts", "dur") if key in event]
    return all(map(_is_time, times)) and (phase != "X" or "dur" in event)


def _without_controls(event: TraceEvent) -> TraceEvent:
    category = event.get("cat")
    words = {"name": visible(event["name"][:_MOST_NAME])}
    return {**event, **words, **({} if category is None else {"cat": visible(str(category)[:_MOST_NAME])})}


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and -_MOST_TIME < value < _MOST_TIME  # type: ignore[operator]
