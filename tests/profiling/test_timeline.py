"""Two traces become one: on one clock, in rows of their own, with sums that add up."""

from __future__ import annotations

import re
from typing import Any

import pytest

from skyproxy.profiling.clock import Clock, ClockReading
from skyproxy.profiling.timeline import Side, merge
from skyproxy.session.trace import SessionTrace, Span

START = 1_790_000_000_000_000_000
AHEAD = -7 * 3600 * 10**9
"""The worker's clock: seven hours behind."""
BASE = 1_789_000_000_000_000_000
THREAD = 77


def event(name: str, category: str, start_us: float, duration_us: float, base: int, **fields: Any) -> dict[str, Any]:
    """As the profiler writes it: microseconds after its own base; `start_us` counts from the block's beginning."""
    at = (START - base) / 1e3 + start_us
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 4711,
        "tid": THREAD,
        "ts": at,
        "dur": duration_us,
        **fields,
    }


def side(*events: dict[str, Any]) -> Side:
    """A worker that got batch 3 at 100 us and answered request 9 at 400 us, by its own clock hours before."""
    session = SessionTrace()
    session.spans = [
        Span("send", 3, START + 80_000, START + 90_000, THREAD),
        Span("wait", "fetch", START + 90_000, START + 500_000, THREAD),
        Span("upload", 5, START + 10_000, START + 60_000, 88, 1 << 20),
    ]
    session.replies = [(9, START + 450_000), (10, START + 460_000)]
    clock = Clock(ClockReading(START - 10**6, AHEAD, 5_000), ClockReading(START + 10**9, AHEAD, 4_000))
    batch = event("batch 3", "user_annotation", 100, 300, BASE - AHEAD)
    trace = {"baseTimeNanoseconds": BASE, "traceEvents": [batch, *events]}
    return Side("sky:0", trace, [[9, START + AHEAD + 400_000]], session, clock)


def on_worker(name: str, category: str, start_us: float, duration_us: float, **fields: Any) -> dict[str, Any]:
    # Its base is read on its own clock, so what began at START here began at START + AHEAD there.
    return event(name, category, start_us, duration_us, BASE - AHEAD, **fields)


OWN = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        event("aten::mm", "cpu_op", 20, 70, BASE),
        event("aten::item", "cpu_op", 90, 420, BASE),
        {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "Trace", "name": "the profiler itself", "pid": "Spans", "tid": "x", "ts": 1.0, "dur": 2.0},
    ],
}


def named(trace: dict[str, Any], name: str, phase: str = "X") -> dict[str, Any]:
    (found,) = [row for row in trace["traceEvents"] if row["name"] == name and row["ph"] == phase]
    return found  # type: ignore[no-any-return]


def merged(*events: dict[str, Any]) -> Any:
    return merge(OWN, [side(*events)], START, START + 1_000_000)


def test_a_worker_whose_clock_is_hours_behind_stands_where_it_belongs() -> None:
    trace = merged(on_worker("aten::mm", "cpu_op", 150, 100)).trace
    batch = named(trace, "batch 3")
    assert batch["ts"] == pytest.approx(100, abs=0.5)
    assert batch["dur"] == pytest.approx(300, abs=0.5)
    ops = sorted((row["pid"], round(row["ts"])) for row in trace["traceEvents"] if row["name"] == "aten::mm")
    assert ops == [(1, 20), (3, 150)]


def test_what_is_on_the_wire_leaves_and_comes() -> None:
    trace = merged().trace
    assert (named(trace, "batch 3", "b")["ts"], named(trace, "batch 3", "e")["ts"]) == (80, pytest.approx(100, abs=0.5))
    reply = named(trace, "reply 9", "b")["ts"], named(trace, "reply 9", "e")["ts"]
    assert reply == (pytest.approx(400, abs=0.5), 450)
    upload = named(trace, "upload 1,048,576 bytes", "b")["ts"], named(trace, "upload 1,048,576 bytes", "e")["ts"]
    assert upload == (10, 60)
    assert not any(row["name"] == "reply 10" for row in trace["traceEvents"])  # nobody knows when it left
    assert (named(trace, "batch", "s")["ts"], named(trace, "batch", "f")["ts"]) == (80, pytest.approx(100, abs=0.5))


def test_the_profilers_notes_on_itself_are_left_out_and_rows_have_names() -> None:
    trace = merged().trace
    assert not any(row["name"] == "the profiler itself" for row in trace["traceEvents"])
    names = [row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "process_name"]
    assert names == ["client (this process)", "wire to sky:0", "worker of sky:0"]


def test_the_clocks_error_stands_in_the_trace() -> None:
    (clock,) = merged().trace["otherData"]["clocks"]
    assert clock == {"worker": "sky:0", "offset_ns": AHEAD, "offset_at_end_ns": AHEAD, "error_bound_ns": 5000}


def share(summary: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} +([\d.]+) ms", summary, re.MULTILINE)
    assert found is not None, summary
    return float(found.group(1))


def test_the_sums_count_no_time_twice() -> None:
    overlapping = [on_worker("aten::linear", "cpu_op", 150, 100), on_worker("aten::mm", "cpu_op", 160, 50)]
    summary = merged(*overlapping).summary(10)
    assert share(summary, "in the block") == 1.0
    assert share(summary, "waiting for workers") == 0.41
    assert share(summary, "recording operations") == 0.08  # 20 to 510, without the wait from 90 to 500
    assert share(summary, "sky:0: computing") == 0.1
    assert share(summary, "sky:0: something is on the wire") == pytest.approx(0.12)  # 10-60, 80-100, 400-450


def test_a_gpu_is_busy_while_its_kernels_run() -> None:
    launch = on_worker("aten::mm", "cpu_op", 150, 100)
    kernels = [on_worker("gemm", "kernel", 260, 30, tid=7), on_worker("copy", "gpu_memcpy", 280, 20, tid=8)]
    summary = merged(launch, *kernels).summary(10)
    assert share(summary, "sky:0: computing") == 0.04
    assert "gemm" in summary
