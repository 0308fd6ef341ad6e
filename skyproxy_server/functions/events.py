"""Events that the caller of a function is told of, in order, and that are kept until it is sure to know them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from skyproxy.errors import SessionLostError
from skyproxy.payloads.pickling import Pickled
from skyproxy.payloads.pieces import flat_size
from skyproxy.protocol.messages import Buffer
from skyproxy.settings import Settings

_LAST = ("result", "error")
_EVENT_BYTES = 64
"""The bytes that an event takes beside its text, so that many short lines count, too."""
_SHED = (
    "this call has ended, and its result was dropped to make room for others. Fetch results sooner, or raise "
    "SKYPROXY_MAX_KEPT_RESULT_BYTES on the worker."
)


class OutgoingEvent:
    """One thing that the caller is told.

    Attributes:
        kept: the tensors in its payload that stay on the worker, until the client takes them.
        pieces: its payload; None once that was dropped.
        size: the bytes of text and payload.
    """

    __slots__ = ("keep", "kept", "kind", "number", "pieces", "size", "value")

    def __init__(
        self, number: int, kind: str, value: dict[str, Any], pickled: Pickled | None, kept: list[torch.Tensor]
    ) -> None:
        self.number, self.kind, self.value, self.kept = number, kind, value, kept
        self.pieces: Sequence[Buffer] | None = [] if pickled is None else pickled.pieces
        self.keep = pickled
        self.size = sum(map(flat_size, self.pieces or ())) + len(value.get("text", "")) + _EVENT_BYTES


class EventListener(Protocol):
    """The connection on which a call's events go."""

    def send_event(self, call: str, event: OutgoingEvent) -> None:
        """Send an event to the caller.

        Raises:
            SessionLostError: the connection is gone.
        """


class Events:
    """The events of one call.

    Attributes:
        lock: guards all of it, and its call. Re-entrant, because a destructor that prints may run anywhere. Taken as
            `with lock`, never by way of the condition, whose methods are Python: an interrupt of the call's thread
            that strikes in there would leave the lock held.
        changed: notified when there is room, or nobody listens any more, or the call has ended.
        ended: whether nothing more follows.
        told_end: whether somebody who listened was told so.
    """

    def __init__(self, call: str, settings: Settings) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.ended = False
        self.told_end = False
        self._call = call
        self._settings = settings
        self._listener: EventListener | None = None
        self._log: deque[OutgoingEvent] = deque()
        self._number = 0
        self._held = {"output": 0, "item": 0}
        """Bytes of output, and items, that the caller has not seen."""
        self._lost_bytes = 0

    def add(
        self,
        kind: str,
        value: dict[str, object],
        pickled: Pickled | None = None,
        kept: list[torch.Tensor] | None = None,
    ) -> None:
        """Tells the caller, now or when it is there again. Nothing follows the end of a call."""
        with self.lock:
            if self.ended:
                return
            if kind == "output" and self._lost_bytes:
                value["lost"], self._lost_bytes = self._lost_bytes, 0
            self._number += 1
            event = OutgoingEvent(self._number, kind, value, pickled, kept or [])
            self.ended = kind in _LAST
            self._log.append(event)
            self._count(event, 1)
            if self._listener is None and kind == "output":
                self._drop_output()
            self._send(event)

    def _count(self, event: OutgoingEvent, sign: int) -> None:
        if event.kind in self._held:
            self._held[event.kind] += sign * (event.size if event.kind == "output" else 1)

    def _send(self, event: OutgoingEvent) -> None:
        if self._listener is not None:
            try:
                self._listener.send_event(self._call, event)
                self.told_end = self.told_end or event.kind in _LAST
            except SessionLostError:
                self._listener = None
                self.changed.notify_all()

    def _drop_output(self) -> None:
        """Nobody listens: what is oldest of the output goes."""
        if self._held["output"] <= self._settings.max_waiting_output_bytes:
            return
        for event in [event for event in self._log if event.kind == "output"]:
            self._lost_bytes += event.size - _EVENT_BYTES
            self._log.remove(event)
            self._count(event, -1)
            # Down to half, so that not every line of output has to search for something to drop.
            if self._held["output"] <= self._settings.max_waiting_output_bytes // 2:
                return

    @property
    def output_must_wait(self) -> bool:
        """True if somebody listens and has not seen as much output as may wait."""
        full = self._held["output"] > self._settings.max_waiting_output_bytes
        return full and self._listener is not None and not self.ended

    @property
    def items_must_wait(self) -> bool:
        """True if as many items as may wait were not taken yet."""
        return self._held["item"] >= self._settings.max_waiting_items and not self.ended

    # --- the caller --------------------------------------------------------------------------------------------------

    def attach(self, listener: EventListener, number: int) -> None:
        """Events go to `listener` from now on, those behind `number` first."""
        with self.lock:
            self._listener = listener
            for event in [event for event in self._log if event.number > number]:
                if event.pieces is None:
                    words = {"type": "LimitExceededError", "traceback": "", "message": _SHED}
                    event = OutgoingEvent(event.number, "error", words, None, [])
                self._send(event)
            self.changed.notify_all()

    def detach(self, listener: EventListener) -> None:
        """Nobody listens any more, if it was this one who did.

        Whoever never listened does not wait for the lock: a call holds it while its own client is slow to read.
        """
        if self._listener is not listener:
            return
        with self.lock:
            if self._listener is listener:
                self._listener = None
                self.changed.notify_all()

    @property
    def attached(self) -> bool:
        """True if somebody listens."""
        return self._listener is not None

    def ack(self, outputs: int, items: int) -> None:
        """The caller has seen outputs and taken items up to these events."""
        with self.lock:
            seen = {"output": outputs, "item": items, "started": outputs, "ask": outputs}
            kept: deque[OutgoingEvent] = deque()
            for event in self._log:
                # An item is kept while its tensors are: the client takes those by an operation of their own.
                if event.number > seen.get(event.kind, 0) or (event.kind == "item" and event.kept):
                    kept.append(event)
                else:
                    self._count(event, -1)
            self._log = kept
            self.changed.notify_all()

    def take(self, number: int) -> list[torch.Tensor] | None:
        """The tensors of an event, which are the client's from now on; None if they are not here."""
        with self.lock:
            for event in self._log:
                if event.number == number and event.pieces is not None:
                    kept, event.kept = event.kept, []
                    if event.kind == "item":
                        self._log.remove(event)
                        self._count(event, -1)
                        self.changed.notify_all()
                    return kept
        return None

    # --- bounds ------------------------------------------------------------------------------------------------------

    @property
    def result_bytes(self) -> int:
        """The bytes of the last event, its tensors not counted; told without the lock, which may wait for a client."""
        try:
            last = self._log[-1]
        except IndexError:
            return 0
        return last.size if self.ended and last.pieces is not None else 0

    def shed(self) -> None:
        """Lets go of the last event's payload, which its caller has received, to make room."""
        with self.lock:
            if self._log and self.ended and self._log[-1].pieces and not self._log[-1].kept:
                self._log[-1].pieces = self._log[-1].keep = None

    def discard(self) -> None:
        """Nobody asks any more."""
        with self.lock:
            self.ended = True
            self._log.clear()
            self._held = dict.fromkeys(self._held, 0)
