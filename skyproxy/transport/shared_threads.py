"""Threads that many connections share: one waits for whatever comes on them, and a few do what may take a while.

A connection by itself has threads of its own, which is the shortest way. A pool has a connection or three to each of
its processes; these share the threads here, so that their number does not grow with the pool.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from operator import call
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger("skyproxy.transport")

_HELPERS = 4
_MOST_HELPERS = 64
_TICK_SECONDS = 0.05
"""The time that jobs wait for helpers that are all in something that takes long, until there is one more."""
_IDLE_SECONDS = 5.0
_TURN_MESSAGES = 32
_TURN_SECONDS = 0.02
"""Of one connection, until it is another one's turn."""

T = TypeVar("T")


class Receiver(Protocol):
    """A connection that the waiting thread reads."""

    def fileno(self) -> int:
        """The descriptor that is readable when something has come; -1 once it is closed."""

    def receive(self) -> bool:
        """Take what has come, without waiting; return False where that is all.

        Raises:
            Exception: nothing more can be read here: `broken` is next.
        """

    def broken(self) -> None:
        """Go on elsewhere: this is no longer read here. Must be short."""


class SharedThreads:
    """One thread that waits for all connections, and helpers.

    There are few helpers, and one more for each tick in which none of them took a job that waits: a peer that is slow
    holds up a helper, and never the other connections. Those that came in addition end when for a while there
    was no such tick. The thread sleeps until something is to do; it counts ticks only while all helpers have something
    in hand.

    Attributes:
        submit: has a helper call a function, soon. One call in C, so that neither Ctrl-C nor a destructor can find it
            half done.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.submit: Callable[[Callable[[], object]], None] = self._jobs.put
        self._poll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.EPOLLIN)
        self._receivers: dict[int, Receiver] = {}
        self._unread: dict[int, Receiver] = {}
        self._arrivals: queue.SimpleQueue[Receiver] = queue.SimpleQueue()
        self._appointments: queue.SimpleQueue[tuple[float, Callable[[], float | None]]] = queue.SimpleQueue()
        self._planned: list[tuple[float, int, Callable[[], float | None]]] = []
        self._numbers = itertools.count()
        self._sleeps_until = 0.0
        self._taken = 0
        self._taken_before = (0, 0.0)
        self._busy: set[threading.Thread] = set()
        self._were_all_busy = False
        self._all_needed_at = time.monotonic()
        helpers = [threading.Thread(target=self._help, name="skyproxy-helper", daemon=True) for _ in range(_HELPERS)]
        self._helpers = set(helpers)
        for thread in (threading.Thread(target=self._wait, name="skyproxy-shared", daemon=True), *helpers):
            thread.start()

    def watch(self, receiver: Receiver) -> None:
        """Read a connection, until it breaks."""
        self._arrivals.put(receiver)
        self._ring()

    def repeat(self, look: Callable[[], float | None]) -> None:
        """Have a helper call a function again and again: it returns the seconds until the next time, None for never."""
        self._plan(look, 0.0)

    def _plan(self, look: Callable[[], float | None], seconds: float) -> None:
        due = time.monotonic() + seconds
        if seconds >= _TICK_SECONDS:  # those that need not be exact come together: that is one waking for all
            due = math.ceil(due / _TICK_SECONDS) * _TICK_SECONDS
        self._appointments.put((due, look))
        if due < self._sleeps_until:
            self._ring()

    def look_around(self) -> None:
        """Notice receivers whose sockets were closed here, or are others now: no event tells of them."""
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    # --- the thread that waits ---------------------------------------------------------------------------------------

    def _wait(self) -> None:
        while True:
            try:
                if not self._arrivals.empty():
                    self._take_arrivals()
                if not self._appointments.empty() or (self._planned and self._planned[0][0] <= time.monotonic()):
                    self._keep_appointments()
                for descriptor in self._wait_for_events():
                    self._read(descriptor)
                self._relieve_helpers()
            except Exception:  # everybody else's connections are read here, too
                logger.exception("skyproxy: the thread that pools share failed, and goes on")
                time.sleep(_TICK_SECONDS)

    def _wait_for_events(self) -> list[int]:
        """Return the descriptors that can be read now."""
        self._sleeps_until = self._planned[0][0] if self._planned else math.inf
        # Asked after it was said: what comes behind this rings.
        if self._unread or not (self._arrivals.empty() and self._appointments.empty()):
            self._sleeps_until = 0.0
        elif self._were_all_busy or len(self._busy) >= len(self._helpers):
            self._were_all_busy = False
            self._sleeps_until = min(self._sleeps_until, time.monotonic() + _TICK_SECONDS)
        seconds = max(self._sleeps_until - time.monotonic(), 0.0)
        ready = dict.fromkeys(self._unread)
        # Rounded up: before its time is over, nothing is due.
        for descriptor, _ in self._poll.poll(None if seconds == math.inf else math.ceil(seconds * 1e3) / 1e3):
            if descriptor == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self._let_closed_go()
            else:
                ready[descriptor] = None
        self._sleeps_until = 0.0
        return list(ready)

    def _take_arrivals(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._arrivals.empty():
                receiver = self._arrivals.get_nowait()
                descriptor = receiver.fileno()
                before = self._receivers.get(descriptor)
                if before is not None:  # its socket was closed, and the number is another one's by now
                    self._let_go(descriptor, before)
                try:
                    self._poll.register(descriptor, select.EPOLLIN)
                except (OSError, ValueError):  # closed already
                    receiver.broken()
                    continue
                self._receivers[descriptor] = receiver
                self._unread[descriptor] = receiver  # what came with the handshake is read already, and waits

    def _keep_appointments(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._appointments.empty():
                due, look = self._appointments.get_nowait()
                heapq.heappush(self._planned, (due, next(self._numbers), look))
        now = time.monotonic()
        while self._planned and self._planned[0][0] <= now:
            self.submit(_Look(self, heapq.heappop(self._planned)[2]))

    def _read(self, descriptor: int) -> None:
        receiver = self._receivers.get(descriptor)
        if receiver is None:
            self._forget(descriptor)
            return
        self._unread.pop(descriptor, None)
        end = time.monotonic() + _TURN_SECONDS
        try:
            for _ in range(_TURN_MESSAGES):
                if not receiver.receive():
                    return
                if time.monotonic() > end:
                    break
        except Exception:
            self._let_go(descriptor, receiver)
            return
        self._unread[descriptor] = receiver

    def _let_go(self, descriptor: int, receiver: Receiver) -> None:
        self._receivers.pop(descriptor, None)
        self._unread.pop(descriptor, None)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(descriptor)
        receiver.broken()

    def _forget(self, descriptor: int) -> None:
        """Wait no more for a socket that nobody reads."""
        try:
            self._poll.unregister(descriptor)
        except OSError:
            # It was closed here, and a forked process still has it: only with all others can it be forgotten.
            self._poll.close()
            self._poll = select.epoll()
            for known in (self._bell, *self._receivers):
                with contextlib.suppress(OSError):
                    self._poll.register(known, select.EPOLLIN)

    def _let_closed_go(self) -> None:
        for descriptor, receiver in list(self._receivers.items()):
            if receiver.fileno() != descriptor:
                self._let_go(descriptor, receiver)

    def _relieve_helpers(self) -> None:
        """Note a tick in which all were busy and none took a job; where one waits, have a helper more."""
        taken, since = self._taken_before
        now = time.monotonic()
        if self._taken != taken or len(self._busy) < len(self._helpers):
            self._taken_before = self._taken, now
        elif now - since >= _TICK_SECONDS:
            self._all_needed_at = now
            if not self._jobs.qsize() or len(self._helpers) >= _MOST_HELPERS:
                return
            self._taken_before = taken, now
            helper = threading.Thread(target=self._help, args=(_IDLE_SECONDS,), name="skyproxy-helper", daemon=True)
            self._helpers.add(helper)
            helper.start()

    # --- the helpers -------------------------------------------------------------------------------------------------

    def _help(self, idle_seconds: float | None = None) -> None:
        me = threading.current_thread()
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get(timeout=idle_seconds)
                self._taken += 1
                self._busy.add(me)
                self._note_whether_all_are_busy()
                self._do(job)
                del job  # else the last one would live until the next
                self._busy.discard(me)
                # Helpers take turns: where jobs come regularly, each gets one before it has waited for long.
                if idle_seconds is not None and time.monotonic() - self._all_needed_at >= idle_seconds:
                    break
        self._helpers.discard(me)
        self._note_whether_all_are_busy()

    def _note_whether_all_are_busy(self) -> None:
        """Have the thread count ticks while nobody is there for the next job."""
        if len(self._busy) >= len(self._helpers):
            self._were_all_busy = True
            if self._sleeps_until > time.monotonic() + _TICK_SECONDS:
                self._ring()

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:
            logger.exception("skyproxy: a job of the threads that pools share failed")

    def look(self, look: Callable[[], float | None]) -> None:
        """Call a function of `repeat`, and plan the next time."""
        seconds = look()
        if seconds is not None:
            self._plan(look, seconds)


class _Look:
    """A job: it is time for a function of `repeat`."""

    __slots__ = ("_look", "_threads")

    def __init__(self, threads: SharedThreads, look: Callable[[], float | None]) -> None:
        self._threads = threads
        self._look = look

    def __call__(self) -> None:
        self._threads.look(self._look)


class Lane(Generic[T]):
    """Things that are attended to one after the other, in order: on a thread of its own, or by helpers."""

    def __init__(
        self,
        attend: Callable[[T], object],
        at_rest: Callable[[], object] = lambda: None,
        threads: SharedThreads | None = None,
    ) -> None:
        """Make an empty lane.

        Args:
            attend: what to do with each.
            at_rest: called when there are none left.
            threads: whose helpers do it; None: somebody runs `run` on a thread.
        """
        self._attend = attend
        self._at_rest = at_rest
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._threads = threads
        self._turn = threading.Lock()

    def put(self, item: T | None) -> None:
        """Add one; None ends `run`. Safe in destructors."""
        if self._threads is None:
            self._items.put(item)
        else:
            # No bytecode stands between the two calls: an interrupt would leave the item there, and nobody told.
            both: tuple[Callable[[Any], object], ...] = (self._items.put, self._threads.submit)
            deque(map(call, both, (item, self._attend_to_all)), 0)

    def run(self) -> None:
        """Attend to all, until the end."""
        while (item := self._items.get()) is not None:
            self._attend(item)
            del item  # else the last one would live until the next
            if self._items.empty():
                self._at_rest()

    def _attend_to_all(self) -> None:
        while not self._items.empty() and self._turn.acquire(blocking=False):
            try:
                self._attend_to_some()
            finally:
                self._turn.release()

    def _attend_to_some(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._items.get_nowait()
                if item is not None:
                    try:
                        self._attend(item)
                    except Exception:
                        logger.exception("skyproxy: a job of the threads that pools share failed")
                del item
        self._at_rest()


_lock = threading.Lock()
_current: tuple[int, SharedThreads] | None = None


def tell_of_closed_socket() -> None:
    """Have the threads of this process, where there are any, notice that a socket was closed."""
    current = _current
    if current is not None and current[0] == os.getpid():
        current[1].look_around()


def shared_threads() -> SharedThreads | None:
    """The threads of this process, which a forked child does not inherit; None where the system has no epoll."""
    global _current
    if not (hasattr(select, "epoll") and hasattr(os, "eventfd")):
        return None
    with _lock:
        if _current is None or _current[0] != os.getpid():
            _current = (os.getpid(), SharedThreads())
        return _current[1]


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # some thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
