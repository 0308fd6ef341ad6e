"""One payload on its way through this process: it comes from the client or from another process, and goes to others."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from skyproxy.relays import edges
from skyproxy.relays.content import Content, Writer
from skyproxy.relays.encryption import own_certificate
from skyproxy.transport.addresses import is_loopback

logger = logging.getLogger("skyproxy")

MAX_BYTES = 2 << 30
"""Of a payload: beside what the function gets, it takes this once more on each machine, until the function begins."""
LIFETIME_SECONDS = 3600.0
_MAX_STRANGERS = 32
"""Connections that have not shown a secret yet, beyond those that are waited for; of more, the oldest ends."""
_LOOK_SECONDS = 0.5


class Relay:
    """A payload that is on its way through this process, or here."""

    def __init__(self, size: int, digest: bytes, on_end: Callable[[], object] = lambda: None) -> None:
        """Nothing is here yet, and nobody can connect.

        Args:
            size, digest: of the payload, as the client says.
            on_end: called when nothing is left of it here.

        Raises:
            ValueError: such a payload is not passed on.
        """
        if not 0 < size <= MAX_BYTES or len(digest) != 32:
            raise ValueError(f"a payload of {size:,} bytes is not passed on")
        self._size, self._digest = size, digest
        self._on_end = on_end
        self._until = time.monotonic() + LIFETIME_SECONDS
        self._changed = threading.Condition()
        self._content: Content | None = None
        self._ended = self._claimed = False
        self._listening: socket.socket | None = None
        self._expected: dict[bytes, bool] = {}
        """Secrets of processes that have not come, and whether each may be on this machine."""
        self._serving = 0
        self._strangers: deque[ssl.SSLSocket] = deque()

    # --- how it comes -------------------------------------------------------------------------------------------------

    def hold(self, pieces: list[bytes | memoryview]) -> None:
        """Take it from the client.

        Raises:
            OSError: it is not what was announced, or there is no memory for it.
        """
        with Writer(self._size, self._digest) as writer:
            for piece in pieces:
                writer.write(piece)
            self._take(writer.finish())

    def fetch(self, host: str, port: int, fingerprint: str, secret: bytes) -> None:
        """Take it from another process; see `edges.receive`.

        Raises:
            OSError: it does not come from there.
        """
        self._take(edges.receive(host, port, fingerprint, secret, self._size, self._digest, self._is_over))

    def _take(self, content: Content) -> None:
        with self._changed:
            if self._content is None and not self._ended:
                self._content = content
                self._changed.notify_all()
                return
        content.close()

    def _is_over(self) -> bool:
        return self._ended or time.monotonic() > self._until

    # --- where it goes ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claimed(self) -> Iterator[int]:
        """A descriptor of the payload for the call that it is meant for; afterwards only others may need it.

        Raises:
            OSError: it is not here.
        """
        with self._changed:
            content = self._content
        if content is None:
            raise OSError("the payload is not here")
        with content.opened() as descriptor:
            yield descriptor
        self._claimed = True
        self._end_if_done()

    def listen(self, address: str, secrets: Mapping[bytes, bool]) -> tuple[int, str]:
        """Let others fetch it.

        Args:
            address: of this machine, as they know it.
            secrets: one for each of them, and whether it may be on this machine.

        Returns:
            The port, and the fingerprint of the certificate that they find there.

        Raises:
            OSError, ImportError: nobody can listen here.
        """
        context, fingerprint = own_certificate()
        listening = _listen(address)
        listening.settimeout(_LOOK_SECONDS)
        with self._changed:
            if self._ended or self._listening is not None:
                listening.close()
                raise OSError("this has ended, or listens already")
            self._listening = listening
            self._expected.update(secrets)
        port = int(listening.getsockname()[1])
        threading.Thread(target=self._accept, args=(listening, context), name="skyproxy-relay", daemon=True).start()
        return port, fingerprint

    def _accept(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        while not self._is_over() and self._expected:
            try:
                peer, _ = listening.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                break
            try:
                peer.settimeout(edges.STALL_SECONDS)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tls = context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
            except OSError:  # it has left already
                peer.close()
                continue
            with self._changed:
                self._strangers.append(tls)
                if len(self._strangers) > len(self._expected) + _MAX_STRANGERS:
                    # Not the new one: who only connects, and again and again, would keep out those that are expected.
                    _shut_down(self._strangers.popleft())
            threading.Thread(target=self._serve, args=(tls,), name="skyproxy-relay-child", daemon=True).start()
        listening.close()
        if time.monotonic() > self._until:
            self.end()

    def _serve(self, peer: ssl.SSLSocket) -> None:
        is_expected = False
        try:
            with peer:
                peer.do_handshake()
                near = self._admit(edges.read_secret(peer), peer)
                if near is not None:
                    is_expected = True
                    edges.send(peer, self._wait, near=near)
        except OSError as error:
            logger.debug("skyproxy: a payload was not passed on: %s", error)
        finally:
            with self._changed:
                self._know(peer)
                self._serving -= is_expected
            self._end_if_done()

    def _know(self, peer: ssl.SSLSocket) -> bool:
        """Return whether it was a stranger until now; the lock is held."""
        before = len(self._strangers)
        self._strangers = deque(one for one in self._strangers if one is not peer)
        return len(self._strangers) < before

    def _admit(self, secret: bytes, peer: ssl.SSLSocket) -> bool | None:
        """Return whether the process that shows this may be on this machine; None for one that is not waited for."""
        with self._changed:
            for expected in self._expected:
                if hmac.compare_digest(expected, secret):
                    if not self._know(peer):
                        return None  # it was too slow, and was shut down: its secret is good for another time
                    self._serving += 1
                    return self._expected.pop(expected)
        return None

    def _wait(self, seconds: float) -> Content | None:
        with self._changed:
            self._changed.wait_for(lambda: self._content is not None or self._ended, seconds)
            if self._is_over():
                raise LookupError("there is no such payload here any more")
            return self._content

    # --- its end ------------------------------------------------------------------------------------------------------

    def _end_if_done(self) -> None:
        with self._changed:
            if not self._claimed or self._expected or self._serving:
                return
        self.end()

    def end(self) -> None:
        """Let go of it, and of those that wait for it; idempotent."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._expected.clear()
            listening, content = self._listening, self._content
            self._changed.notify_all()
        if listening is not None:
            listening.close()
        if content is not None:
            content.close()
        self._on_end()


def _shut_down(peer: ssl.SSLSocket) -> None:
    """End a connection that a thread of ours waits for; the thread closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(peer, socket.SHUT_RDWR)  # that of TLS would change what its thread is reading with


def _listen(address: str) -> socket.socket:
    """Listen where the others look for this machine: on that address alone, unless it is one of a translation."""
    host = "127.0.0.1" if address.lower() == "localhost" else address
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        if is_loopback(host):
            raise
        return socket.create_server(("", 0))
