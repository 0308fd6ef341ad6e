"""What the worker tells over HTTP: to anyone whether it lives and takes sessions, to those with the token more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

LIVE_PATH = "/healthz"
READY_PATH = "/readyz"
ACTIVITY_PATH = "/activity"


def answer(path: str, *, ready: bool) -> bytes | None:
    """The response to a health question; None when `path` is none.

    Args:
        path: the request's path.
        ready: whether the worker takes new sessions.
    """
    path = path.partition("?")[0]
    if path == LIVE_PATH:
        return http_response(HTTPStatus.OK, "alive")
    if path == READY_PATH:
        return http_response(HTTPStatus.OK, "ready") if ready else http_response(UNAVAILABLE, "not taking sessions")
    return None


UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE


def is_activity(path: str) -> bool:
    """Whether a request asks for the worker's activity; only those with the token may be told."""
    return path.partition("?")[0] == ACTIVITY_PATH


def activity_response(report: Mapping[str, Any]) -> bytes:
    """The answer to a question for the worker's activity, as JSON."""
    return http_response(HTTPStatus.OK, json.dumps(report), {"Content-Type": "application/json"})


def http_response(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> bytes:
    """A whole HTTP response with a line of text, after which the connection is closed."""
    body = text.encode() + b"\n"
    lines = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "Connection": "close",
        **(headers or {}),
    }
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in lines.items()
    )
    return head.encode("ascii") + b"\r\n" + body
