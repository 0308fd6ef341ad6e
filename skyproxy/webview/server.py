"""The page and its data over HTTP, on loopback only, to whoever has the link; nothing can be changed through it."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket

from skyproxy.webpage import page_file, security_headers

logger = logging.getLogger("skyproxy")

_Request = socket | tuple[bytes, socket]
"""A connection, as socketserver has it."""
_HOST = "127.0.0.1"
_OWN_HOST = re.compile(r"(?:127\.0\.0\.1|localhost)(?::\d{1,5})?")
"""Names by which a browser calls us; another name came from a hostile DNS server. A forwarded port may be any."""
_FRAMES = "'self' http://127.0.0.1:* http://localhost:*"
"""Origins that may show the page in a frame: notebooks on this machine. It has no button to steal a click for."""
_MAX_KEYS = 16
_MAX_CONNECTIONS = 32
_TIMEOUT_SECONDS = 10.0


class PageServer(ThreadingHTTPServer):
    """Serves the page to browsers of this machine.

    A link holds a secret in its fragment, which no server and no log sees. The page exchanges it, once, for a key that
    the tab keeps and sends in a header. Not in a cookie: cookies know no ports, so that every other server on this
    machine would be sent it, and a browser adds them to requests of foreign pages.

    Attributes:
        url: where the page is, without a secret.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False
    request_queue_size = 64

    def __init__(
        self, status: Callable[[], dict[str, object]], port: int = 0, on_used: Callable[[], object] = lambda: None
    ) -> None:
        """Listen.

        Args:
            status: what the page shows, for JSON.
            port: to listen on; 0: a free one.
            on_used: called when a link was used.

        Raises:
            OSError: the port is taken.
        """
        super().__init__((_HOST, port), _Handler)
        self.url = f"http://{_HOST}:{self.server_address[1]}/"
        self.status = status
        self._on_used = on_used
        self._secrets: deque[str] = deque(maxlen=_MAX_KEYS)
        self._keys: deque[str] = deque(maxlen=_MAX_KEYS)
        self._lock = threading.Lock()
        self._open: deque[_Request] = deque()
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.2}, name="skyproxy-web-view-http", daemon=True
        )

    def start(self) -> None:
        """Serve from now on, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Serve no more. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join(_TIMEOUT_SECONDS)
        self.server_close()

    def link(self) -> str:
        """Return a fresh link. It opens one tab; of those that nobody used, the latest sixteen are known."""
        secret = secrets.token_urlsafe(24)
        with self._lock:
            self._secrets.append(secret)
        return f"{self.url}#{secret}"

    def exchange(self, secret: str) -> str | None:
        """Return a key for the secret of a link, which ends with that; None for a wrong or a used one."""
        with self._lock:
            known = [one for one in self._secrets if hmac.compare_digest(one.encode(), secret.encode())]
            if not known:
                return None
            self._secrets.remove(known[0])
            key = secrets.token_urlsafe(32)
            self._keys.append(key)
        self._on_used()
        return key

    def knows(self, key: str) -> bool:
        """Return whether a tab has this key."""
        with self._lock:
            return bool([one for one in self._keys if hmac.compare_digest(one.encode(), key.encode())])

    # --- connections -------------------------------------------------------------------------------------------------

    def process_request(self, request: _Request, client_address: object) -> None:
        """Serve a connection on a thread of its own; of too many, the one that takes the longest ends.

        Another user of this machine, who says a byte every few seconds, would keep the new ones out else.
        """
        with self._lock:
            self._open.append(request)
            oldest = self._open.popleft() if len(self._open) > _MAX_CONNECTIONS else None
        if isinstance(oldest, socket):
            with contextlib.suppress(OSError):  # its thread closes it
                oldest.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Request) -> None:
        """Close a connection."""
        with self._lock, contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Note an error; a browser that leaves in the middle is none to speak of."""
        logger.debug("a request to the web view failed: %r", sys.exception())


class _Handler(BaseHTTPRequestHandler):
    """One request a connection."""

    server: PageServer
    server_version = "skyproxy"
    sys_version = ""
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Answer with a file of the page, or with the status."""
        path = self.path.partition("?")[0].removeprefix("/")
        if not self._is_from_here():
            return
        found = page_file(path)
        if found is not None:
            self._send(HTTPStatus.OK, found.text, found.headers(_FRAMES))
        elif path != "status":
            self._send(HTTPStatus.NOT_FOUND, "there is no such page\n")
        elif self.server.knows(self._bearer()):
            body = json.dumps(self.server.status())
            self._send(HTTPStatus.OK, body, {"Content-Type": "application/json", **security_headers()})
        else:
            self._refuse(HTTPStatus.UNAUTHORIZED, "this needs a key; open a link that skyproxy ui has printed")

    def do_POST(self) -> None:
        """Exchange the secret of a link for a key; nothing else can be posted."""
        if not self._is_from_here():
            return
        if self.path != "/enter":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this view is read-only")
            return
        key = self.server.exchange(self._bearer())
        if key is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "this link was already used, or is not valid")
            return
        body = json.dumps({"key": key})
        self._send(HTTPStatus.OK, body, {"Content-Type": "application/json", **security_headers()})

    def _is_from_here(self) -> bool:
        """Return whether the request is the own page's, or a person's; answer it otherwise."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _OWN_HOST.fullmatch(hosts[0]):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this is the web view of skyproxy on this machine")
            return False
        origins = self.headers.get_all("Origin") or []
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            self._refuse(HTTPStatus.FORBIDDEN, "other pages may not ask")
            return False
        return True

    def _bearer(self) -> str:
        values = self.headers.get_all("Authorization") or []
        kind, _, value = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        return value.strip() if kind.lower() == "bearer" else ""

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, text + "\n")

    def _send(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        given = {"Content-Type": "text/plain; charset=utf-8", **security_headers(), **(headers or {})}
        for name, value in {**given, "Cache-Control": "no-store", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request, or a verb that nobody has: without a page that repeats what was asked."""
        self._refuse(HTTPStatus(code), "this is no request that the view answers")

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing by default: what is asked for says little, and a terminal would be full of it."""
        logger.debug("web view: %s", format % arguments)
