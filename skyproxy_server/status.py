"""The report for the web view: on all sessions with the scope `admin`, else on one's own. Bounded; no torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from skyproxy_server.auth import ADMIN, FUNCTIONS, Identity
from skyproxy_server.program_log import LOG_TAIL

MAX_SESSIONS = 100
MAX_FAILURES = 10
MAX_CALLS = 20
MAX_TEXT = 300
_NUMBERS = (
    "seconds",
    "commands",
    "tensors",
    "tensor_bytes",
    "bytes_received",
    "bytes_sent",
    "queued_operations",
    "queued_bytes",
)
_STATES = ("idle", "running", "detached", "busy")
_RUNNING = {"op": str, "sequence": int, "position": int, "graph": int}
_FAILURE = {"at": float, "type": str, "message": str, "op": str, "sequence": int, "position": int, "graph": int}
_CALL = {"name": str, "seconds": float}


def status_report(
    client: Identity,
    activity: Callable[[], Mapping[str, object]],
    session_rows: Callable[[Identity | None], list[dict[str, object]]],
    job_rows: Callable[[Identity | None], list[dict[str, object]]] = lambda client: [],
) -> dict[str, object]:
    """Return what a client may know.

    Args:
        client: who asks. Without the scope `ADMIN` it is told of the sessions of its own token, and of nothing else.
        activity: the worker's report of itself.
        session_rows: the rows of a client's sessions; of all for None.
        job_rows: the same of its jobs, with the ends of their logs.
    """
    if not client.may(ADMIN):
        own = {"sessions": session_rows(client), "jobs": job_rows(client) if client.may(FUNCTIONS) else []}
        return {"client": client.name, "is_admin": False, "worker": {}, **own, "log": []}
    return {
        "client": client.name,
        "is_admin": True,
        "worker": dict(activity()),
        "sessions": session_rows(None),
        "jobs": job_rows(None),
        "log": list(LOG_TAIL),
    }


def checked_row(row: object, session: str, client: Identity) -> dict[str, object]:
    """Return the row of a session from what its own process says, of which nothing is trusted.

    Args:
        row: what it says; None where it says nothing.
        session: its name, as the supervisor knows it.
        client: whose it is, likewise.
    """
    said = row if isinstance(row, Mapping) else {}
    state = said.get("state")
    return {
        "session": session[:8],
        "client": client.name,
        "address": client.address,
        "state": state if state in _STATES else "busy",
        **{name: _number(said.get(name)) for name in _NUMBERS},
        "is_profiled": said.get("is_profiled") is True,
        "running": _plain_fields(said.get("running"), _RUNNING),
        "calls": _rows(said.get("calls"), _CALL, MAX_CALLS),
        "failures": _rows(said.get("failures"), _FAILURE, MAX_FAILURES),
    }


def _number(value: object) -> int | float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return value if 0 <= value < 1 << 63 else 0


def _plain_fields(said: object, kinds: Mapping[str, type]) -> dict[str, object]:
    row = said if isinstance(said, Mapping) else {}
    known = ((name, kind, row.get(name)) for name, kind in kinds.items() if row.get(name) is not None)
    return {name: str(value)[:MAX_TEXT] if kind is str else _number(value) for name, kind, value in known}


def _rows(said: object, kinds: Mapping[str, type], most: int) -> list[dict[str, object]]:
    rows: Iterable[object] = said[-most:] if isinstance(said, list) else ()
    return [_plain_fields(row, kinds) for row in rows]
