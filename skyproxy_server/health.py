"""The worker's answers over HTTP: to anyone whether it lives and takes sessions, to those with the token more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from skyproxy.webpage import page_file

LIVE_PATH = "/healthz"
READY_PATH = "/readyz"
ACTIVITY_PATH = "/activity"
METRICS_PATH = "/metrics"
ENDING_PATH = "/ending"
STATUS_PATH = "/status"
PAGE_FOLDER = "ui"


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
    """Return whether a request asks for the worker's activity; only those with the token may be told."""
    return path.partition("?")[0] in (ACTIVITY_PATH, METRICS_PATH)


def is_ending(path: str) -> bool:
    """Tell requests that say that this worker ends for good; they are answered as those for its activity."""
    return path.partition("?")[0] == ENDING_PATH


def activity_response(report: Mapping[str, object], path: str = ACTIVITY_PATH) -> bytes:
    """The answer to a question for the worker's activity: as JSON, or for Prometheus where `path` asks so."""
    if path.partition("?")[0] == METRICS_PATH:
        return http_response(HTTPStatus.OK, metrics(report), {"Content-Type": "text/plain; version=0.0.4"})
    return http_response(HTTPStatus.OK, json.dumps(report), {"Content-Type": "application/json"})


def is_status(path: str) -> bool:
    """Tell the requests for what the web view shows; whoever has a token may be told of its own sessions."""
    return path.partition("?")[0] == STATUS_PATH


def status_response(report: Mapping[str, object]) -> bytes:
    """Return the answer to a request for what the web view shows."""
    return http_response(HTTPStatus.OK, json.dumps(report), {"Content-Type": "application/json"})


def page_response(path: str) -> bytes | None:
    """Return the page of the web view, or a file of it; None for another path.

    It holds nothing of the worker's. What it shows it asks for with a token, which whoever reads it must enter.
    """
    folder, _, name = path.partition("?")[0].removeprefix("/").partition("/")
    if folder != PAGE_FOLDER:
        return None
    if path.partition("?")[0] == f"/{PAGE_FOLDER}":  # so that the page finds its files beside itself
        return http_response(HTTPStatus.MOVED_PERMANENTLY, "", {"Location": f"/{PAGE_FOLDER}/"})
    found = page_file(name)
    return None if found is None else http_response(HTTPStatus.OK, found.text, found.headers("'none'"))


_METRICS = (
    ("sessions", "gauge", "Open sessions."),
    ("processes", "gauge", "Processes of sessions, including those that ended sessions left behind."),
    ("memory_bytes", "gauge", "Anonymous memory of all processes of the worker."),
    ("calls_running", "gauge", "Functions that are running."),
    ("idle_seconds", "gauge", "Seconds since the worker last did something."),
    ("commands", "counter", "Executed operations."),
)
_DEVICE_METRICS = (
    ("used_memory_bytes", "Used memory of a device."),
    ("total_memory_bytes", "Total memory of a device."),
)


def metrics(report: Mapping[str, Any]) -> str:
    """A worker's activity in the text format of Prometheus; what a report does not have is left out."""
    lines: list[str] = []
    for name, kind, text in _METRICS:
        if name in report:
            full = f"skyproxy_worker_{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {report[name]}"]
    for name, text in _DEVICE_METRICS:
        rows = [row for row in report.get("devices", ()) if name in row]
        if rows:
            full = f"skyproxy_worker_device_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
            lines += [f'{full}{{device="{row["type"]}:{row["index"]}"}} {row[name]}' for row in rows]
    return "\n".join(lines)


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
