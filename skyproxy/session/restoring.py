"""Questions to a worker that is to go on with another one's session, before anybody else reads the connection."""

from __future__ import annotations

import time
from typing import Any

from skyproxy.errors import RemoteError, SessionLostError, visible
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Reply, Sequence
from skyproxy.transport.base import Transport

_ANSWER_SECONDS = 600.0
"""The longest wait for a worker to load a snapshot."""


class WorkerEndedError(SessionLostError):
    """A worker ended that was asked to go on with a session."""


def ask_first(link: Transport, sequence: Sequence, name: str, arguments: list[object]) -> Any:
    """Ask a control of a worker on a connection that nobody reads yet; return its answer.

    Raises:
        RemoteError: the control failed.
        SessionLostError: the worker ended, or said nothing.
    """
    until = time.monotonic() + _ANSWER_SECONDS
    try:
        link.send(Batch(sequence, [commands.CALL, int(sequence), name, arguments]))
    except SessionLostError as error:
        raise WorkerEndedError(str(error)) from error
    while True:
        try:
            message = link.recv(max(until - time.monotonic(), 0.0))
        except SessionLostError as error:
            raise WorkerEndedError(str(error)) from error
        except TimeoutError:
            raise WorkerEndedError(f"no answer to {name} within {_ANSWER_SECONDS:g} s") from None
        if isinstance(message, Reply):
            return message.value
        if isinstance(message, Failure):
            raise RemoteError(visible(message.error.get("message") or "it failed"))
