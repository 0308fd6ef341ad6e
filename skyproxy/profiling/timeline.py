"""The traces of a program and of its workers as one, in Chrome's format.

Chrome's format: a list of events; `ph` says what an event is ("X" a span, "b" and "e" the ends of one that may overlap
others, "s" and "f" the ends of an arrow, "M" a name), `ts` and `dur` are microseconds, `pid` and `tid` choose the row.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from skyproxy.profiling.clock import Clock
from skyproxy.session.trace import SessionTrace

CLIENT = 1
"""The program's row; the rows of a worker's wire and of the worker itself come behind it, two each."""
_BATCH = re.compile(r"batch (\d{1,18})")
_OPS = frozenset({"cpu_op"})
_SPANS = frozenset({"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
TraceEvent = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Side:
    """A timeline's knowledge of one worker.

    Attributes:
        name: its devices, "sky:0".
        trace: what its profiler saw, in Chrome's format.
        replies: requests, and when their answers left, on its clock.
        session: what happened on our side of the session.
        clock: its clock.
    """

    name: str
    trace: dict[str, Any]
    replies: list[list[int]]
    session: SessionTrace
    clock: Clock


def merge(own: dict[str, object], sides: list[Side], started_ns: int, ended_ns: int) -> Timeline:
    """One trace of all; zero is the beginning of the block.

    Args:
        own: what the profiler of this process saw, in Chrome's format.
        sides: the workers.
        started_ns, ended_ns: the block, on our clock.
    """
    timeline = Timeline((ended_ns - started_ns) / 1e3)
    timeline.add_client(own, started_ns)
    for number, side in enumerate(sides):
        timeline.add_worker(side, started_ns, CLIENT + 1 + 2 * number)
    return timeline


class Timeline:
    """A trace of several machines.

    Attributes:
        trace: in Chrome's format, with the clocks under "otherData".
    """

    def __init__(self, total_microseconds: float) -> None:
        self._events: list[TraceEvent] = []
        self._clocks: list[dict[str, Any]] = []
        self._total = total_microseconds
        self._recording: list[Interval] = []
        self._waiting: list[Interval] = []
        self._busy: dict[str, list[Interval]] = {}
        self._flying: dict[str, list[Interval]] = {}
        self._ops: defaultdict[str, list[float]] = defaultdict(list)
        self.trace: dict[str, Any] = {
            "displayTimeUnit": "ms",
            "otherData": {"made_by": "skyproxy.profile", "clocks": self._clocks},
            "traceEvents": self._events,
        }

    def add_client(self, own: dict[str, Any], started_ns: int) -> None:
        """Add what this process's profiler saw."""
        base = own.get("baseTimeNanoseconds", 0) - started_ns
        self._name(CLIENT, "client (this process)")
        for event in self._measure(own, CLIENT, lambda ts: ts + base / 1e3):
            if event.get("cat") in _OPS:
                self._recording.append(_interval(event))

    def add_worker(self, side: Side, started_ns: int, wire: int) -> None:
        """Add what happened on the wire to a worker, and there.

        Args:
            side: what is known.
            started_ns: what is zero in the trace.
            wire: the number of the wire's row; the worker's is the next one.
        """
        worker, clock = wire + 1, side.clock
        self._name(wire, f"wire to {side.name}")
        self._name(worker, f"worker of {side.name}")
        self._clocks.append(
            {
                "worker": side.name,
                "offset_ns": clock.first.offset_ns,
                "offset_at_end_ns": clock.last.offset_ns,
                "error_bound_ns": clock.error_ns,
            }
        )
        zero = (clock.first.at_ns - started_ns) / 1e3

        def on_our_clock(worker_ns: float) -> float:
            return zero + clock.to_client(worker_ns) / 1e3

        base = side.trace.get("baseTimeNanoseconds", 0)
        batches: dict[int, TraceEvent] = {}
        on_host: list[Interval] = []
        on_device: list[Interval] = []
        for event in self._measure(side.trace, worker, lambda ts: on_our_clock(base + ts * 1e3)):
            match = _BATCH.fullmatch(event["name"])
            if match:
                batches[int(match.group(1))] = event
            elif event.get("cat") in _OPS | _GPU:
                (on_device if event["cat"] in _GPU else on_host).append(_interval(event))
                self._ops[event["name"]].append(event["dur"])
        # Where there is a GPU, the host's operations only start its kernels.
        self._busy[side.name] = on_device or on_host
        self._add_wire(side, wire, batches, started_ns, on_our_clock)

    def _add_wire(
        self,
        side: Side,
        wire: int,
        batches: dict[int, TraceEvent],
        started_ns: int,
        on_our_clock: Callable[[float], float],
    ) -> None:
        flying = self._flying.setdefault(side.name, [])
        for span in side.session.spans:
            start, end = (span.start_ns - started_ns) / 1e3, (span.end_ns - started_ns) / 1e3
            row = {"pid": CLIENT, "tid": span.thread, "cat": "skyproxy"}
            if span.name == "send":
                self._events.append({**row, "ph": "X", "name": f"send {span.key}", "ts": start, "dur": end - start})
                arrived = batches.get(int(span.key))
                if arrived is not None:
                    name = f"batch {span.key}"
                    # A busy worker takes a batch later than it came: that is on its way too.
                    self._overlapping(wire, 1, name, start, max(arrived["ts"], start))
                    self._arrow(f"{side.name} {name}", row, start, arrived)
                    flying.append((start, arrived["ts"]))
            elif span.name == "wait":
                self._events.append({**row, "ph": "X", "name": f"wait for {span.key}", "ts": start, "dur": end - start})
                self._waiting.append((start, end))
            else:
                name = f"{span.name} {span.byte_count:,} bytes"
                self._overlapping(wire, 3 if span.name == "upload" else 4, name, start, end)
                flying.append((start, end))
        left: dict[int, int] = {request: at_ns for request, at_ns in side.replies}  # noqa: C416
        for request, came_ns in side.session.replies:
            if request in left:
                start, end = on_our_clock(left[request]), (came_ns - started_ns) / 1e3
                self._overlapping(wire, 2, f"reply {request}", start, max(end, start))
                flying.append((start, end))
        for row_number, name in enumerate(("batches out", "replies in", "uploads", "downloads"), 1):
            self._name(wire, name, row_number)

    def _measure(self, trace: dict[str, Any], pid: int, on_our_clock: Callable[[float], float]) -> Iterable[TraceEvent]:
        """A profiler's events, on our clock and in the row `pid`; gives the spans."""
        for event in trace["traceEvents"]:
            if not isinstance(event.get("pid"), int) or not isinstance(event.get("ts"), int | float):
                continue  # the profiler's own notes on itself
            if event["ph"] == "M" and event["name"].startswith("process_"):
                continue
            moved = {**event, "pid": pid, "ts": on_our_clock(event["ts"])}
            if "dur" in event:
                moved["dur"] = on_our_clock(event["ts"] + event["dur"]) - moved["ts"]
            if event["ph"] in "sft":
                moved["id"] = f"{pid}.{event.get('id')}"
            self._events.append(moved)
            if event["ph"] == "X" and event.get("cat") in _SPANS:
                yield moved

    def _name(self, pid: int, name: str, tid: int | None = None) -> None:
        what = "process_name" if tid is None else "thread_name"
        self._events.append({"ph": "M", "pid": pid, "tid": tid or 0, "ts": 0, "name": what, "args": {"name": name}})
        if tid is None:
            order = {
                "ph": "M",
                "pid": pid,
                "tid": 0,
                "ts": 0,
                "name": "process_sort_index",
                "args": {"sort_index": pid},
            }
            self._events.append(order)

    def _overlapping(self, pid: int, tid: int, name: str, start: float, end: float) -> None:
        both = {"pid": pid, "tid": tid, "cat": "wire", "name": name, "id": f"{pid}.{tid}.{name}.{start}"}
        self._events += [{**both, "ph": "b", "ts": start}, {**both, "ph": "e", "ts": end}]

    def _arrow(self, name: str, source: TraceEvent, start: float, target: TraceEvent) -> None:
        both = {"cat": "wire", "name": "batch", "id": name}
        self._events.append({**both, "ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": start})
        place = {"pid": target["pid"], "tid": target["tid"], "ts": max(target["ts"], start)}
        self._events.append({**both, "ph": "f", "bp": "e", **place})

    def summary(self, rows: int) -> str:
        """Return where the time went, as a table."""

        def line(name: str, microseconds: float) -> str:
            share = 100 * microseconds / self._total if self._total else 0.0
            return f"{name:<44}{microseconds / 1e3:>12.2f} ms {share:>6.1f} %"

        waiting = _union(self._waiting)
        lines = [line("in the block", self._total)]
        lines.append(
            line("recording operations", _length(_union(self._recording)) - _overlap(self._recording, waiting))
        )
        lines.append(line("waiting for workers", _length(waiting)))
        for name, busy in self._busy.items():
            lines.append(line(f"{name}: computing", _length(_union(busy))))
            lines.append(line(f"{name}: something is on the wire", _length(_union(self._flying.get(name, [])))))
        lines += [
            f"{clock['worker']}: its clock is known to {clock['error_bound_ns'] / 1e3:.0f} us" for clock in self._clocks
        ]
        heaviest = sorted(self._ops.items(), key=lambda item: -sum(item[1]))[:rows]
        if heaviest:
            lines += ["", f"{'on the workers, with what they call':<44}{'total':>12}    {'calls':>8}"]
            lines += [f"{name[:43]:<44}{sum(each) / 1e3:>12.2f} ms {len(each):>8}" for name, each in heaviest]
        return "\n".join(lines)


def _interval(event: TraceEvent) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, without overlaps."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(some: list[Interval], others: list[Interval]) -> float:
    """Return the time that is in both."""
    both = _length(_union([*some, *others]))
    return _length(_union(some)) + _length(_union(others)) - both
