"""Workers' answers to the question for their status, as the page takes them: nothing of it is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from skyproxy.errors import SkyproxyError

Ask = Callable[[], dict[str, object]]

_MAX_TEXT = 1000
_MAX_ITEMS = 200
_MAX_DEPTH = 6


def workers_status(title: str, workers: Mapping[str, Ask]) -> dict[str, Any]:
    """Return what the page shows of workers, without a program of its own.

    Args:
        title: for people.
        workers: how to ask each, by name.
    """
    return {"title": title, "workers": [ask_worker_status(name, ask) for name, ask in workers.items()], "program": None}


def ask_worker_status(name: str, ask: Ask) -> dict[str, Any]:
    """Return a worker's answer with its name; where there is none, why, under "problem"."""
    try:
        answer = ask()
    except (SkyproxyError, OSError) as error:
        return {"name": name, "problem": str(error), "worker": {}, "sessions": [], "jobs": [], "log": []}
    return {**normalize(answer), "name": name}


def normalize(answer: object) -> dict[str, Any]:
    """Return a worker's answer with the parts that the page reads, of the right kinds and bounded in size."""
    plain = _truncate(answer, _MAX_DEPTH)
    given = plain if isinstance(plain, dict) else {}
    worker = given.get("worker") if isinstance(given.get("worker"), dict) else {}
    assert isinstance(worker, dict)
    return {
        "is_admin": given.get("is_admin") is True,
        "worker": {**worker, "devices": _rows(worker.get("devices")), "software": _table(worker.get("software"))},
        "sessions": [
            {
                **row,
                "running": _table(row.get("running")),
                "calls": _rows(row.get("calls")),
                "failures": _rows(row.get("failures")),
            }
            for row in _rows(given.get("sessions"))
        ],
        "jobs": [{**row, "tail": _lines(row.get("tail"))} for row in _rows(given.get("jobs"))],
        "log": _lines(given.get("log")),
    }


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _lines(value: object) -> list[str]:
    return [line for line in _items(value) if isinstance(line, str)]


def _rows(value: object) -> list[dict[str, object]]:
    return [row for row in _items(value) if isinstance(row, dict)]


def _table(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _truncate(value: object, depth: int) -> Any:
    """Return plain data without what is too long, too deep, or no number that JSON has."""
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.0
    if value is None or isinstance(value, bool | int):
        return value
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_truncate(item, depth - 1) for item in value[:_MAX_ITEMS]]
    if isinstance(value, dict):
        return {str(key)[:_MAX_TEXT]: _truncate(item, depth - 1) for key, item in list(value.items())[:_MAX_ITEMS]}
    return None
