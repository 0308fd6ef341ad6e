"""Events on a worker, by which tests hold functions there and let them go. Sent along with the functions."""

from __future__ import annotations

import threading

PATIENCE_SECONDS = 60.0


def gate(name: str) -> threading.Event:
    """The worker's event of this name."""
    gates: dict[str, threading.Event] = threading.__dict__.setdefault("_gates_of_tests", {})
    return gates.setdefault(name, threading.Event())


def hold(name: str) -> None:
    """Waits until somebody opens the gate."""
    assert gate(name).wait(PATIENCE_SECONDS), name


def open_gate(name: str) -> None:
    gate(name).set()


def count(name: str) -> int:
    """How often this was called on this worker, with this call."""
    counts: dict[str, int] = threading.__dict__.setdefault("_counts_of_tests", {})
    counts[name] = counts.get(name, 0) + 1
    return counts[name]
