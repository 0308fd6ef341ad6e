"""The web view of this program: its workers, and what only it knows: lines, queues, pools and profiles."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.node import Node
from skyproxy.nodes import list_nodes
from skyproxy.profiling import profiles
from skyproxy.webview.history import History
from skyproxy.webview.server import PageServer
from skyproxy.webview.spans import bounded_spans
from skyproxy.webview.workers import ask_worker_status

_INTERVAL_SECONDS = 2.0
_FRAME_HEIGHT = 640
_HIGHEST_PORT = 65535


class WebView:
    """The web view of this program, as `skyproxy.ui` starts it; in a notebook it shows itself.

    Use it as a context manager, or call `close`; it ends with the program.

    Attributes:
        url: where it is, without the secret that opens it.
    """

    def __init__(self, port: int) -> None:
        self._profile: dict[str, object] | None = None
        self._history = History(self._look, _INTERVAL_SECONDS)
        self._server = PageServer(self._history.status, port)
        self.url = self._server.url
        self.is_open = True
        profiles.AT_END.append(self._on_profile)
        self._history.start()
        self._server.start()

    def link(self) -> str:
        """Return a link that opens the view, in one tab of a browser on this machine."""
        return self._server.link()

    def close(self) -> None:
        """End the view. Idempotent."""
        if self.is_open:
            self.is_open = False
            profiles.AT_END.remove(self._on_profile)
            self._history.stop()
            self._server.close()

    def abandon_in_child(self) -> None:
        """Let go of the port after a fork, in the child."""
        self.is_open = False
        self._server.socket.close()

    def __enter__(self) -> WebView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WebView at {self.url}; .link() opens it>" if self.is_open else "<WebView, closed>"

    def _repr_html_(self) -> str:
        if not self.is_open:
            return f"<p>{html.escape(repr(self))}</p>"
        link = html.escape(self.link(), quote=True)
        return f'<iframe src="{link}" title="skyproxy" width="100%" height="{_FRAME_HEIGHT}" frameborder="0"></iframe>'

    def _on_profile(self, profile: profiles.Profile) -> None:
        self._profile = {"at": time.time(), **bounded_spans(profile.trace or {})}

    def _look(self) -> dict[str, object]:
        nodes = [node for node in list_nodes() if node.alive]
        workers = [ask_worker_status(_name_of(node), node.worker_status) for node in nodes]
        running = {str(row.get("session")): row["running"] for worker in workers for row in worker["sessions"]}
        program = {
            "sessions": [_session_row(node, running) for node in nodes],
            "errors": [row for node in nodes for row in _error_rows(node)],
            "pools": _pool_rows(),
            "profile": self._profile,
        }
        title = f"program {os.path.basename(sys.argv[0]) or 'python'}, process {os.getpid()}"
        return {"title": title, "workers": workers, "program": program}


def ui(port: int = 0) -> WebView:
    """Start the web view of this program, on this machine only: sessions, memory, operations, errors, pools, profiles.

    It looks at the workers every two seconds, beside the operations, and changes nothing. A second call returns the
    view that is open.

    Args:
        port: where to listen; 0: a free one.

    Raises:
        ConfigurationError: there is no such port.
        OSError: the port is taken.

    Example:
        ```python
        with skyproxy.ui() as view:
            print(view.link())
            torch.ones(8, device="sky:0").sum().item()
        ```
    """
    global _open
    if not 0 <= port <= _HIGHEST_PORT:
        raise ConfigurationError(f"there is no port {port}. Choose one up to {_HIGHEST_PORT}, or 0 for a free one.")
    with _opening:
        if _open is None or not _open.is_open:
            _open = WebView(port)
        return _open


_open: WebView | None = None
_opening = threading.Lock()


def _after_fork_in_child() -> None:
    global _open, _opening
    _opening = threading.Lock()
    view, _open = _open, None
    if view is not None:
        view.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _name_of(node: Node) -> str:
    return f"{', '.join(map(str, node.devices))} ({node.url})"


def _session_row(node: Node, running: dict[Any, dict[str, object]]) -> dict[str, object]:
    session = node._session
    name = session.welcome.session[:8]
    batches, byte_count = session.queue
    line = session.line_of(running[name]) if running.get(name) else ""
    return {"session": name, "queued_batches": batches, "queued_bytes": byte_count, "line": line}


def _error_rows(node: Node) -> list[dict[str, object]]:
    session = node._session
    return [{**row, "session": session.welcome.session[:8]} for row in session.recent_errors]


def _pool_rows() -> list[dict[str, object]]:
    pools = sys.modules.get("skyproxy.pools.running")  # whoever has a pool has loaded it
    rows = []
    for pool in pools.running_pools() if pools is not None else ():
        with contextlib.suppress(Exception):  # it is just ending
            rows.append(pool.status())
    return rows
