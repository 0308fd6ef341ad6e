"""From a fresh connection to a WebSocket: health and activity, the token, the upgrade. One request a connection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Origin

from skyproxy.errors import ProtocolError
from skyproxy.transport.http_head import SILENT_LOGGER, read_head
from skyproxy.transport.stream import ByteStream, remaining, write_all
from skyproxy_server import audit
from skyproxy_server.auth import ADMIN, OPERATIONS, Authenticator, Identity
from skyproxy_server.health import (
    activity_response,
    answer,
    http_response,
    is_activity,
    is_ending,
    is_status,
    page_response,
    status_response,
)

logger = logging.getLogger("skyproxy.server")

_REFUSAL_SECONDS = 0.3
"""The time for which a wrong token waits for its answer: guessing stays slow, and a connection is not held for long."""
_LINGER_SECONDS = 1.0


class Upgrader:
    """Decides what becomes of a connection's first and only HTTP request."""

    def __init__(
        self,
        token: Authenticator,
        allowed_origins: Sequence[str],
        *,
        is_ready: Callable[[], bool],
        activity: Callable[[], Mapping[str, object]],
        pause: Callable[[float], object],
        status: Callable[[Identity], Mapping[str, object]] = lambda client: {},
        has_page: bool = False,
        on_ending: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the upgrader of one listener.

        Args:
            token: who may connect.
            allowed_origins: the web pages that may.
            is_ready: whether new sessions are taken.
            activity: what the worker is doing.
            pause: waits that many seconds, or less when the listener ends.
            status: what the web view shows to a client.
            has_page: whether the page of the web view is served here.
            on_ending: called when whoever started this worker says that it is ended for good.
        """
        self._token = token
        # None stands for a request without Origin, which no browser sends.
        self._origins: list[Origin | None] = [None, *map(Origin, allowed_origins)]
        self._is_ready = is_ready
        self._activity = activity
        self._pause = pause
        self._status = status
        self._has_page = has_page
        self._on_ending = on_ending

    def upgrade(
        self,
        stream: ByteStream,
        peer: str,
        deadline: float,
        admit: Callable[[Identity], object] = lambda identity: None,
    ) -> bytes | None:
        """Reads the request and answers it.

        Args:
            stream: the fresh stream.
            peer: who it is, for the log.
            deadline: when the request must be there, in the time of `time.monotonic`.
            admit: told who it is, once the request has become a WebSocket.

        Returns:
            What came in behind the request when it is a WebSocket now, None when the connection is over.

        Raises:
            TimeoutError, EOFError, OSError: the request did not come.
        """
        try:
            head, received = read_head(stream, deadline, b"GET ")
        except ProtocolError as exc:
            logger.warning("%s: %s", peer, exc)
            _end(stream, http_response(HTTPStatus.BAD_REQUEST, "this is a skyproxy worker"), deadline)
            return None
        protocol = ServerProtocol(origins=self._origins, max_size=None, logger=SILENT_LOGGER)
        protocol.receive_data(head)
        request = next((event for event in protocol.events_received() if isinstance(event, Request)), None)
        if request is None:
            logger.warning("%s: malformed HTTP request", peer)
            _end(stream, http_response(HTTPStatus.BAD_REQUEST, "malformed request"), deadline)
            return None
        identity: Identity | None = None
        response = answer(request.path, ready=self._is_ready())
        if response is None and self._has_page:
            response = page_response(request.path)
        if response is None:
            identity = self._token.identify(request.headers.get_all("Authorization"))
            response = self._answer(request, peer, identity)
        if response is not None:
            _end(stream, response, deadline)
            return None
        accepted = protocol.accept(request)
        protocol.send_response(accepted)
        data = b"".join(protocol.data_to_send())
        if accepted.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            logger.warning("%s: not a WebSocket request (HTTP %d)", peer, accepted.status_code)
            _end(stream, data, deadline)
            return None
        assert identity is not None
        admit(identity)
        write_all(stream, data)
        return received

    def _answer(self, request: Request, peer: str, identity: Identity | None) -> bytes | None:
        """The response to a request that becomes no WebSocket: one without the token, say; None for the others."""
        if identity is None:
            logger.warning("%s was refused: no token or a wrong one", peer)
            self._pause(_REFUSAL_SECONDS)
            return http_response(HTTPStatus.UNAUTHORIZED, "wrong token", {"WWW-Authenticate": "Bearer"})
        if is_status(request.path):  # with any scope: it decides what is told
            return status_response(self._status(identity))
        if is_ending(request.path) and self._token.several:  # none may end it for the others
            audit.note(identity, "refused", peer=peer, reason="only the worker's own token says that it is ended")
            return http_response(HTTPStatus.FORBIDDEN, f"the token {identity.name} is one of several")
        scope = ADMIN if is_activity(request.path) or is_ending(request.path) else OPERATIONS
        if not identity.may(scope):
            audit.note(identity, "refused", peer=peer, reason=f"the token has no scope {scope}")
            return http_response(HTTPStatus.FORBIDDEN, f"the token {identity.name} does not have the scope {scope!r}")
        if is_ending(request.path):
            logger.info("%s says that this worker is ended for good", peer)
            self._on_ending()
        if scope == ADMIN:
            return activity_response(self._activity(), request.path)
        if not self._is_ready():
            logger.warning("%s was refused: no new sessions", peer)
            return http_response(HTTPStatus.SERVICE_UNAVAILABLE, "not taking sessions")
        return None


def _end(stream: ByteStream, response: bytes, deadline: float) -> None:
    """Answers and waits a little for the client to read it: closing over unread bytes would take it back."""
    write_all(stream, response)
    stream.shutdown_write()
    trash = memoryview(bytearray(4096))
    for _ in range(64):
        if stream.recv_into(trash, min(_LINGER_SECONDS, remaining(deadline))) <= 0:
            break
    stream.shutdown()
