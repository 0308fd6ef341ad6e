"""One task on several ranks: its results, or the errors of all ranks when one has failed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

from skyproxy.errors import RankErrors, add_note, text_of
from skyproxy.interrupts import raised_by_handler
from skyproxy.releasing_future import ReleasingFuture
from skyproxy.runtime.instance import InstanceInfo

if TYPE_CHECKING:
    from skyproxy.functions.call import Call
    from skyproxy.node import Node

SETTLE_SECONDS = 0.3
"""The time that ranks have to fail by themselves after the first one did, and then to stop by themselves."""
ANSWER_SECONDS = 1.0
"""The time that a rank may take to say that it has stopped."""
_CANCELLED = -1
_STARTED = -2


class GatheredRanks(Protocol):
    """The ranks, as a task on them sees them. `RankGroup` is one."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The connections to the ranks' processes, by rank."""

    @property
    def stop_timeout_seconds(self) -> float:
        """The time that a rank may go on after another one failed."""

    def stop(self, calls: Mapping[int, Call]) -> set[int]:
        """End these calls, by rank; return the ranks that did not stop."""

    def expect_stop(self) -> None:
        """Have tasks that come now wait until `stop_ended`."""

    def stop_ended(self) -> None:
        """Let them go on."""


class Gathering:
    """One task on several ranks, until all have ended. Results are taken on a thread of its own: that may take long."""

    def __init__(
        self,
        group: GatheredRanks,
        infos: Sequence[InstanceInfo],
        calls: dict[int, Call],
        timeout_seconds: float | None,
        what: str,
    ) -> None:
        """See `RankGroup.gather`.

        Args:
            group: ends what has to be ended.
            infos: where each rank is.
            calls: by rank.
            timeout_seconds: for all; none by default.
            what: names the task in errors.
        """
        self.future: Future[list[object]] = ReleasingFuture()
        self._group = group
        self._infos = infos
        self._stop_expected = False
        self._calls = calls
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.future.add_done_callback(self._on_cancel)
        self._waiting_to_start = 0
        if timeout_seconds is not None:
            # Calls that are on their way, or wait for tensors, use none of the time.
            self._waiting_to_start = len(calls)
            for call in calls.values():
                when_started = getattr(call, "add_started_callback", _call_now)
                when_started(partial(self._ended.put, _STARTED))
        for rank, call in calls.items():
            call.add_done_callback(partial(self._has_ended, rank))
        threading.Thread(target=self._run, name="skyproxy-ranks", daemon=True).start()

    def _has_ended(self, rank: int, call: Call) -> None:
        self._ended.put(rank)

    def _on_cancel(self, future: Future[list[object]]) -> None:
        if future.cancelled():
            # At once: whoever cancels may start the next task in the same breath.
            self._group.expect_stop()
            self._stop_expected = True
            self._ended.put(_CANCELLED)

    def _run(self) -> None:
        try:
            results = self._results()
        except BaseException as error:
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)
        else:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(results)
        finally:
            if self._stop_expected:
                self._group.stop_ended()

    def _results(self) -> list[object]:
        end: float | None = None
        left = len(self._calls)
        while left:
            try:
                rank = self._ended.get(timeout=None if end is None else max(0.01, end - time.monotonic()))
            except queue.Empty:
                if all(call.done() for call in self._calls.values()):
                    continue  # at the last moment
                raise self._name_missing_ranks() from None
            if rank == _STARTED:
                self._waiting_to_start -= 1
                if not self._waiting_to_start and self._timeout_seconds is not None:
                    end = time.monotonic() + self._timeout_seconds
                continue
            left -= 1
            if rank == _CANCELLED:
                self._group.stop(self._calls)
                raise CancelledError
            if _failure(self._calls[rank]) is not None:
                raise self._collect_errors(rank)
        return [self._calls[rank].result() for rank in sorted(self._calls)]

    def _collect_errors(self, first: int) -> RankErrors:
        """After the first failure: ends the others and reports them all."""
        # A rank that has failed by now failed by itself. Ranks that lost a peer may say so before we learn of that.
        _wait(self._calls.values(), SETTLE_SECONDS)
        failed = {rank for rank, call in self._calls.items() if call.done() and _failure(call) is not None}
        stuck = self._group.stop(self._calls)
        _wait(self._calls.values(), ANSWER_SECONDS)
        dead = {
            rank
            for rank, call in self._calls.items()
            if not self._group.nodes[rank].alive and call.done() and _failure(call) is not None
        }
        failed |= dead
        first = min(dead, default=first)
        errors: dict[int, Exception] = {}
        for rank in sorted(self._calls):
            error = _failure(self._calls[rank])
            if error is None:
                continue
            info = self._infos[rank]
            add_note(error, f"On rank {rank} of {info.world_size}, node {info.node} ({_address(info)}).")
            if rank not in failed:
                add_note(error, f"Rank {rank} was stopped because rank {first} had failed.")
            if rank in stuck:
                add_note(
                    error,
                    f"Rank {rank} did not stop within {self._group.stop_timeout_seconds:g} s: it is in "
                    "code that Python cannot interrupt. Its process is restarted before the next task, if it holds "
                    "a process group.",
                )
            errors[rank] = error
        return RankErrors.of(self._summary(first, failed, errors), errors, first)

    def _summary(self, first: int, failed: set[int], errors: Mapping[int, Exception]) -> str:
        cause = errors[first]
        others = sorted(failed - {first})
        stopped = sorted(set(errors) - failed)
        line = (text_of(cause).splitlines() or [""])[0]
        text = f"{self._what} failed on rank {first}: {type(cause).__name__}: {line}"
        if others:
            text += f"; also on rank {_list_ranks(others)}"
        if stopped:
            text += f"; rank {_list_ranks(stopped)} stopped because of it"
        return text

    def _name_missing_ranks(self) -> RankErrors:
        """The time is over: whoever is not done is missing."""
        missing = [rank for rank, call in self._calls.items() if not call.done()]
        infos = self._infos
        where = ", ".join(f"{rank} (node {infos[rank].node}, {_address(infos[rank])})" for rank in missing)
        text = f"{self._what} did not end on rank {where} within {self._timeout_seconds:g} s"
        self._group.stop(self._calls)
        return RankErrors.of(text, {rank: TimeoutError(f"rank {rank}: {text}") for rank in missing}, min(missing))


def _call_now(callback: Callable[[], object]) -> None:
    callback()


def _failure(call: Call) -> Exception | None:
    """Return why a call that is done has no result; None where it has one."""
    try:
        error = call.exception(0)
    except CancelledError:
        return RuntimeError("the call was cancelled")
    except TimeoutError:
        return RuntimeError("the call did not end")
    if error is None or isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {text_of(error)}")  # a group of exceptions holds no SystemExit


def _wait(calls: Iterable[Call], timeout_seconds: float) -> None:
    """Until all calls have ended, or the time is over."""
    end = time.monotonic() + timeout_seconds
    for call in calls:
        try:
            call.exception(max(0.0, end - time.monotonic()))
        except (CancelledError, TimeoutError) as error:
            if raised_by_handler(error):
                raise


def _address(info: InstanceInfo) -> str:
    return next((peer.address for peer in info.peers if peer.rank == info.rank), "address unknown")


def _list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
