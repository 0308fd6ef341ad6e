"""The payloads that are on their way through this process, and what a client calls to have them passed on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from skyproxy.relays.edges import UnreachableError
from skyproxy.relays.relay import Relay
from skyproxy.runtime.calls import current_call

logger = logging.getLogger("skyproxy")

_MAX_RELAYS = 64
_REMEMBERED = 1024
"""Names of relays that have ended: what a client asked before it ended them may be heard later."""
UNREACHABLE = "unreachable"
FAILED = "failed"


class Relays:
    """The relays of this process, each known to the session that made it and to no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._relays: dict[tuple[str, str], Relay] = {}
        self._gone: OrderedDict[tuple[str, str], None] = OrderedDict()

    def get_or_make(self, session: str, name: str, size: int, digest: bytes) -> Relay:
        """The relay of this name.

        Raises:
            ValueError: it has ended, there are too many, or its payload is too large.
        """
        with self._lock:
            if (session, name) in self._gone:
                raise ValueError("nobody wants this payload any more")
            relay = self._relays.get((session, name))
            if relay is None:
                if len(self._relays) >= _MAX_RELAYS:
                    raise ValueError(f"{_MAX_RELAYS} payloads are passed on at this moment, and no more can be")
                relay = Relay(size, digest, lambda: self._drop(session, name))
                self._relays[session, name] = relay
            return relay

    @contextlib.contextmanager
    def claimed(self, session: str, name: str) -> Iterator[int]:
        """A descriptor of the payload of this name; see `Relay.claimed`.

        Raises:
            OSError: it is not here.
        """
        with self._lock:
            relay = self._relays.get((session, name))
        if relay is None:
            raise OSError("no payload of this name is here")
        with relay.claimed() as descriptor:
            yield descriptor

    def end(self, session: str, name: str) -> None:
        """End a relay, or see to it that there never is one."""
        with self._lock:
            relay = self._relays.get((session, name))
            self._note_end(session, name)
        if relay is not None:
            relay.end()

    def forget(self, session: str) -> None:
        """End those of a session that has ended."""
        with self._lock:
            relays = [relay for key, relay in self._relays.items() if key[0] == session]
        for relay in relays:
            relay.end()

    def _drop(self, session: str, name: str) -> None:
        with self._lock:
            self._relays.pop((session, name), None)
            self._note_end(session, name)

    def _note_end(self, session: str, name: str) -> None:
        self._gone[session, name] = None
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def __len__(self) -> int:
        return len(self._relays)


RELAYS = Relays()


# --- what a pool calls on its workers --------------------------------------------------------------------------------


def open_relay(
    name: str, size: int, digest: bytes, address: str, secrets: Sequence[tuple[bytes, bool]]
) -> tuple[int, str]:
    """Let other processes fetch a payload from here, once it has come; see `Relay.listen`.

    Raises:
        OSError, ImportError, ValueError: that cannot be.
    """
    relay = RELAYS.get_or_make(_session(), name, size, digest)
    return relay.listen(address, dict(secrets))


def hold_payload(name: str, size: int, digest: bytes, pieces: Sequence[bytes]) -> bool:
    """Take a payload from the client; true.

    Raises:
        OSError, ValueError: that cannot be.
    """
    RELAYS.get_or_make(_session(), name, size, digest).hold(list(pieces))
    return True


def fetch_payload(name: str, size: int, digest: bytes, host: str, port: int, fingerprint: str, secret: bytes) -> str:
    """Take a payload from another process, once that has it; what went wrong, or an empty text."""
    try:
        RELAYS.get_or_make(_session(), name, size, digest).fetch(host, port, fingerprint, secret)
    except UnreachableError as error:
        logger.info("skyproxy: a payload comes from the client itself: %s", error)
        return UNREACHABLE
    except (OSError, ValueError) as error:
        logger.info("skyproxy: a payload comes from the client itself: %s", error)
        return FAILED
    return ""


def end_relay(name: str) -> None:
    """Nobody wants this payload any more."""
    RELAYS.end(_session(), name)


def _session() -> str:
    call = current_call()
    return call.session if call is not None else ""
