"""A profile's trace, cut down to what a page can draw. No torch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_MAX_ROWS = 12
_MAX_SPANS = 200
_MAX_NAME = 80


def bounded_spans(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a trace in Chrome's format with their longest spans.

    Returns:
        "total": of the whole, in microseconds; "rows": each a "name" and "spans", `[start, length, name]`; "shown" and
        "all": how many spans.
    """
    processes: dict[object, str] = {}
    spans: defaultdict[tuple[object, object], list[list[Any]]] = defaultdict(list)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event["pid"]] = str(event["args"]["name"])
        elif event.get("ph") == "X" and event.get("dur", 0) > 0:
            row = [round(event["ts"], 1), round(event["dur"], 1), str(event["name"])[:_MAX_NAME]]
            spans[event["pid"], event.get("tid")].append(row)
    busiest = sorted(spans, key=lambda key: -sum(span[1] for span in spans[key]))[:_MAX_ROWS]
    rows = []
    for pid, tid in sorted(busiest, key=lambda key: (str(key[0]), str(key[1]))):
        longest = sorted(spans[pid, tid], key=lambda span: -span[1])[:_MAX_SPANS]
        name = f"{processes.get(pid, pid)}, thread {tid}"[:_MAX_NAME]
        # The long ones first, so that those inside them are drawn on top.
        rows.append({"name": name, "spans": longest})
    ends = [span[0] + span[1] for row in rows for span in row["spans"]]
    return {
        "total": max(ends, default=0.0),
        "rows": rows,
        "shown": sum(len(row["spans"]) for row in rows),
        "all": sum(map(len, spans.values())),
    }
