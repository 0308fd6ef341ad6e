"""Requests of `Calls` about calls that other processes of this worker run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from skyproxy.protocol.messages import Message
from skyproxy_server.functions.events import EventListener


class RemoteListener(EventListener, Protocol):
    """A client's functions connection, as whoever speaks for another process's call uses it."""

    def forward(self, message: Message) -> None:
        """Send a message as it is.

        Raises:
            SessionLostError: the connection is gone.
        """


class Elsewhere(Protocol):
    """Calls in other processes."""

    def has(self, identity: str) -> bool:
        """Return whether this call is spoken for here."""

    def attach(self, listener: RemoteListener, identity: str, number: int) -> bool:
        """Look for a call, and send its events behind `number` to `listener`; False where nobody can look now."""

    def detach(self, listener: RemoteListener) -> None:
        """A connection is gone: its calls go on."""

    def ack(self, identity: str, outputs: int, items: int) -> None:
        """The caller has seen that much."""

    def cancel(self, identity: str, reason: str, or_else: Callable[[], None]) -> None:
        """The caller gives a call up; `or_else` is called if it turns out to be nowhere else."""

    def take(self, identity: str, number: int) -> list[Any] | None:
        """Fetch the tensors of one of a call's events; None if they are gone."""

    def forget(self, identity: str) -> None:
        """The caller has all that it wants of a call."""
