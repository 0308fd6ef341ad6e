"""One payload to many processes elsewhere, of which the client sends it to one; they pass it on among themselves.

Nothing is lost where that fails, at whatever place: whoever does not get it is sent it by the client.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import queue
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from skyproxy.functions.payload_file import PassedPayload
from skyproxy.payloads.pieces import flat_size
from skyproxy.pools.passing import plan_ways
from skyproxy.relays.edges import SECRET_BYTES, longest_seconds
from skyproxy.relays.relay import MAX_BYTES
from skyproxy.relays.relays import UNREACHABLE, end_relay, fetch_payload, hold_payload, open_relay

if TYPE_CHECKING:
    from skyproxy.functions import Payload
    from skyproxy.functions.call import Call
    from skyproxy.node import Node

logger = logging.getLogger("skyproxy")

_AT_A_TIME = 16
_ANSWER_SECONDS = 10.0
"""For which a process may take no notice, before others are sent the payload that it was to pass on."""
_LOOK_SECONDS = 1.0
_WORTH_BYTES = 4 << 20
"""Bytes that need not be sent: a fraction of a second on a laptop's uplink; asking processes takes some round trips."""
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_ALONE: WeakSet[Node] = WeakSet()
"""Those that could not reach another one; the client sends to them."""

Begin = Callable[[int, PassedPayload | None], "Call"]


class Relaying:
    """One payload on its way to many processes. What happens is decided on the thread that calls `run`."""

    def __init__(
        self, members: Mapping[int, Node], addresses: Mapping[int, str], payload: Payload, ranks: Sequence[int]
    ) -> None:
        """Plan the ways; nothing is sent yet.

        Args:
            members: the connections, by rank.
            addresses: as the processes know one another, by rank.
            payload: what they are sent.
            ranks: those that are to get it.
        """
        self._members = members
        self._ranks = list(ranks)
        self._pieces = payload.pieces(with_code=True)
        self._size = sum(map(flat_size, self._pieces))
        fit = [rank for rank in ranks if members[rank]._runner.passes_payloads] if self._size <= MAX_BYTES else []
        self._addresses = {rank: addresses[rank] for rank in fit if rank in addresses}
        self._places = plan_ways(self._addresses, [rank for rank in fit if members[rank] in _ALONE])
        self._children: dict[int, list[int]] = {}
        for rank, place in self._places.items():
            if place.parent is not None:
                self._children.setdefault(place.parent, []).append(rank)
        self._secrets = {rank: secrets.token_bytes(SECRET_BYTES) for rank in self._places}
        self._name = secrets.token_hex(16)
        self._passed = PassedPayload(self._name, [flat_size(piece) for piece in self._pieces])
        self._digest = b""
        self._events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._asked: dict[tuple[int, str], float] = {}
        """The questions that processes have not answered, and when they were asked."""
        self._going: set[tuple[int, str]] = set()
        self._there: dict[int, float] = {}
        """Those that have it, and since when."""
        self._troubled = self._abandoned = False

    def __bool__(self) -> bool:
        return self._size * sum(map(len, self._children.values())) >= _WORTH_BYTES

    def run(self, begin: Begin, calls: dict[int, Call]) -> None:
        """Begin a call on each process, as soon as that has the payload.

        Args:
            begin: begins it on one of them: with what was passed on to it, or sending it all.
            calls: gets the calls, by rank; those that were begun, where this raises.

        Raises:
            SkyproxyError: whatever `begin` raises.
        """
        self._digest = _digest(self._pieces)
        self._begin = begin
        self._threads = ThreadPoolExecutor(min(len(self._ranks), _AT_A_TIME), "skyproxy-broadcast")
        try:
            self._start()
            left = len(self._ranks)
            while left:
                try:
                    rank, step, answer = self._events.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    self._give_up_the_late()
                    continue
                if step == "begin":
                    if isinstance(answer, BaseException):
                        raise answer
                    calls[rank] = answer
                    left -= 1
                elif (rank, step) in self._going:  # else it was given up
                    self._going.discard((rank, step))
                    self._asked.pop((rank, step), None)
                    self._on_answer(rank, step, answer)
                self._give_up_the_late()
            if self._troubled:
                self._end_relays()  # else they end by themselves
        except BaseException:
            self._abandon()
            raise
        finally:
            self._threads.shutdown(wait=False)

    def _start(self) -> None:
        for rank, place in self._places.items():
            if place.parent is None:
                self._hold(rank)
        for rank, children in self._children.items():
            expected = [(self._secrets[child], self._places[child].near) for child in children]
            self._ask(rank, "open", open_relay, self._addresses[rank], expected)
        for rank in self._ranks:
            if rank not in self._places:
                self._begin_call(rank, None)

    # --- what processes answer ----------------------------------------------------------------------------------------

    def _on_answer(self, rank: int, step: str, answer: object) -> None:
        if step == "open":
            where = _checked_place(answer)
            for child in self._children[rank]:
                if where is None:
                    self._send_it(child)
                else:
                    self._fetch(child, self._addresses[rank], *where)
            if rank in self._there:
                self._begin_call(rank, self._passed)
        elif step == "fetch":
            if answer == "":
                self._has_it(rank)
                return
            if answer == UNREACHABLE:
                _ALONE.add(self._members[rank])
                parent = self._places[rank].parent
                logger.info("skyproxy: rank %d cannot reach rank %s, and is sent broadcasts by itself", rank, parent)
            self._send_it(rank)
        elif step == "hold":
            if answer is True:
                self._has_it(rank)
                return
            self._troubled = True
            self._ask(rank, "end", end_relay)  # those that wait for it need not
            self._begin_call(rank, None)

    def _fetch(self, rank: int, host: str, port: int, fingerprint: str) -> None:
        self._ask(rank, "fetch", fetch_payload, host, port, fingerprint, self._secrets[rank])

    def _has_it(self, rank: int) -> None:
        self._there[rank] = time.monotonic()
        # A process lets go of it when its own call has begun, and nobody else is expected: first it expects them.
        if (rank, "open") not in self._going:
            self._begin_call(rank, self._passed)

    def _send_it(self, rank: int) -> None:
        """Send it from here to a process that does not get it otherwise, and to those that wait for that by this."""
        self._troubled = True
        if rank in self._children:
            self._hold(rank)
        else:
            self._begin_call(rank, None)

    def _hold(self, rank: int) -> None:
        pieces = [pickle.PickleBuffer(piece) for piece in self._pieces if flat_size(piece)]
        self._ask(rank, "hold", hold_payload, pieces)

    def _give_up_the_late(self) -> None:
        now = time.monotonic()
        for (rank, step), since in list(self._asked.items()):
            if now > self._limit(rank, step, since) and (rank, step) in self._going:
                self._going.discard((rank, step))
                del self._asked[rank, step]
                logger.info("skyproxy: rank %d did not pass a payload on (%s)", rank, step)
                self._on_answer(rank, step, None)

    def _limit(self, rank: int, step: str, since: float) -> float:
        """Until when a process has to answer. Who waits for another one waits for as long as that does."""
        if step == "open":
            return since + _ANSWER_SECONDS
        parent = self._places[rank].parent
        there = self._there.get(parent) if step == "fetch" and parent is not None else None
        return float("inf") if there is None else max(since, there) + _ANSWER_SECONDS + longest_seconds(self._size)

    # --- what is sent, on threads of their own ------------------------------------------------------------------------

    def _ask(self, rank: int, step: str, function: Callable[..., object], *args: object) -> None:
        from skyproxy.functions import Payload

        self._going.add((rank, step))
        beside = () if function is end_relay else (self._size, self._digest)

        def ask() -> None:
            if self._abandoned and step != "end":
                return
            try:
                asked = Payload.of(function, (self._name, *beside, *args))
                call = self._members[rank].submit_payload(asked, results="value", debug=False)
                self._asked[rank, step] = time.monotonic()
                call.add_done_callback(lambda ended: self._events.put((rank, step, _answer_of(ended))))
            except BaseException as error:  # whatever it is: somebody waits for an answer
                logger.debug("skyproxy: rank %d cannot be asked to pass a payload on: %s", rank, error)
                self._events.put((rank, step, None))

        self._threads.submit(ask)

    def _begin_call(self, rank: int, passed: PassedPayload | None) -> None:
        def begin() -> None:
            try:
                call = self._begin(rank, passed)
            except BaseException as error:
                self._events.put((rank, "begin", error))
                return
            self._events.put((rank, "begin", call))
            if self._abandoned:
                call.cancel()

        self._threads.submit(begin)

    # --- its end ------------------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        self._abandoned = True
        while True:
            try:
                _, step, answer = self._events.get_nowait()
            except queue.Empty:
                break
            if step == "begin" and not isinstance(answer, BaseException):
                answer.cancel()
        self._end_relays()  # by which what they were asked ends, too: that needs no interrupt in the midst of it

    def _end_relays(self) -> None:
        for rank in self._places:
            self._ask(rank, "end", end_relay)


def _answer_of(call: Call) -> object:
    try:
        return call.result(0)
    except Exception as error:
        logger.debug("skyproxy: a payload was not passed on: %s", error)
        return None


def _checked_place(answer: object) -> tuple[int, str] | None:
    """A port and a fingerprint, if that is what a process said."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return None
    port, fingerprint = answer
    if type(port) is not int or not 0 < port < 1 << 16 or type(fingerprint) is not str:
        return None
    return (port, fingerprint) if _FINGERPRINT.fullmatch(fingerprint) else None


def _digest(pieces: Sequence[Any]) -> bytes:
    found = hashlib.sha256()
    for piece in pieces:
        if flat_size(piece):
            found.update(memoryview(piece).cast("B"))
    return found.digest()
