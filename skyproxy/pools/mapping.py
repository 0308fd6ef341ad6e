"""A pool's `map`: single calls at first, groups of them as soon as they turn out to be short."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.interrupts import raised_by_handler
from skyproxy.pools.call_options import CallOptions, is_stream
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.tasks import as_task
from skyproxy.runtime.call_groups import GroupTask, give_back, is_constant, is_simple, take

if TYPE_CHECKING:
    from skyproxy.functions.call import Call
    from skyproxy.pools.scheduler import Scheduler

Arguments = tuple[object, ...]

_GROUP_SECONDS = 0.01
"""The time that the calls of a group should take together."""
_MAX_CALLS = 64
_GROWTH = 4
_PATIENCE_SECONDS = 0.05
"""The time after which a group that is waited for gives back what it has not begun."""
_LONGEST_PATIENCE_SECONDS = 5.0
_LOOK_AGAIN = 32
"""Single calls, after which it is looked at again how long they take."""


class _Part:
    """One call or a group of them.

    Attributes:
        calls: the arguments of each.
        future: of the call, or of the group.
        key: of the group; empty for a single call.
        early: how many results of the group came before its end.
        question: asks the group to begin no more, and was not answered yet.
        rest: the calls that it gave back.
    """

    def __init__(self, calls: list[Arguments], future: PoolFuture[Any], key: str = "") -> None:
        self.calls = calls
        self.future = future
        self.key = key
        self.early = 0
        self.question: Call | None = None
        self.rest: list[Arguments] = []


class GroupingMap:
    """The calls of one `map`, whose results come in the order of the items.

    Args:
        scheduler: makes the calls.
        make: makes a call of the arguments.
        items: the arguments of each call.
        ahead: how many calls or groups are under way at a time.
        processes: how many calls run at a time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        make: Callable[[Arguments], PendingCompute[Any]],
        items: Iterator[Arguments],
        ahead: int,
        processes: int,
    ) -> None:
        self._scheduler = scheduler
        self._make = make
        self._items = items
        self._ahead = ahead
        self._processes = processes
        self._groups = False
        self._size = 1
        self._task: GroupTask | None = None
        self._template: PendingCompute[Any] | None = None
        self._parts: deque[_Part] = deque()
        self._left_over: deque[Arguments] = deque()
        self._singles = 0
        self._since = time.monotonic()

    def begin(self) -> Iterator[object]:
        """Make the first calls, and return the iterator over all results."""
        self._fill()
        return self._results()

    # --- making calls ------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while len(self._parts) < self._ahead:
            calls = self._next_calls()
            if not calls:
                return
            self._parts.append(self._submit(calls))

    def _next_calls(self) -> list[Arguments]:
        """The next arguments: those of a group, where all of them are simple."""
        calls = list(itertools.islice(self._items, 1)) if not self._left_over else [self._left_over.popleft()]
        while calls and len(calls) < self._size and is_constant(calls[-1]):
            more = list(itertools.islice(self._items, 1)) if not self._left_over else [self._left_over.popleft()]
            if not more:
                break
            if not is_constant(more[0]):
                self._left_over.appendleft(more[0])
                break
            calls += more
        return calls

    def _submit(self, calls: list[Arguments]) -> _Part:
        if len(calls) == 1:
            call = self._make(calls[0])
            if self._template is None:
                self._template, self._groups = call, may_group(call, self._scheduler.retries)
            return _Part(calls, self._scheduler.submit(call))
        template = self._template
        assert template is not None
        if self._task is None:
            self._task = GroupTask(self._scheduler.task(as_task(template.function)))
        for arguments in calls:
            self._make(arguments)  # which raises where they do not fit the function
        key = secrets.token_hex(16)
        group: PendingCompute[Any] = PendingCompute(self._task, (key, calls), {}, template.options, template.name)
        return _Part(calls, self._scheduler.submit(group), key)

    # --- taking results ----------------------------------------------------------------------------------------------

    def _results(self) -> Iterator[object]:
        try:
            while self._parts:
                part = self._parts[0]
                if part.key:
                    yield from self._group_results(part)
                else:
                    value = part.future.wait()
                    self._parts.popleft()
                    self._note_single(value)
                    self._fill()
                    yield value
        finally:
            for part in self._parts:
                part.future.cancel()
            # The traceback of an error holds our frames, and a future its error: no circle, which would wait for the
            # collector with all that the error holds.
            self._parts.clear()
            part = None  # type: ignore[assignment]

    def _group_results(self, part: _Part) -> Iterator[object]:
        yield from self._yield_while_running(part)
        try:
            yield from self._rest_of_group(part)
        finally:
            part = None  # type: ignore[assignment]  # as in `_results`

    def _rest_of_group(self, part: _Part) -> Iterator[object]:
        error = part.future.exception()
        if isinstance(error, SessionLostError):
            raise error
        if part.question is not None or error is not None:
            # What it gave back at the last moment; those before one that failed have results.
            values = self._settle(part, self._ask(part).result())
            if error is None:
                self._give_out(part)
            yield from values
        if error is not None:
            try:
                raise error.with_traceback(None)
            finally:
                part = error = None  # type: ignore[assignment]
        reply = part.future.wait()
        values, begun, has_more, seconds = _check_reply(reply, part)
        self._parts.popleft()
        self._insert(part.calls[begun:])
        self._resize(seconds, begun)
        self._fill()
        yield from values
        if has_more:
            assert part.future.rank is not None
            yield self._scheduler.ask(part.future.rank, take, part.key).result()

    def _yield_while_running(self, part: _Part) -> Iterator[object]:
        """Wait for a group; where it takes long, yield what it has by then, and make the rest of its calls
        elsewhere.
        """
        patience = _PATIENCE_SECONDS
        while not _is_done(part.future, patience):
            part.future.check_wait()
            if part.future.rank is None:
                continue  # it waits for a process
            question = self._ask(part)
            if not _is_done(question, patience):
                continue
            values = self._settle(part, question.result())
            part.question = None
            self._give_out(part)
            yield from values
            patience = min(2 * patience, _LONGEST_PATIENCE_SECONDS)

    def _ask(self, part: _Part) -> Call:
        """Have a group begin no more calls, and say what it has; the same question until it was answered."""
        if part.question is None:
            assert part.future.rank is not None
            part.question = self._scheduler.ask(part.future.rank, give_back, part.key)
        return part.question

    @staticmethod
    def _settle(part: _Part, answer: Any) -> list[object]:
        """Take note of what a group gave back; return the results that it had."""
        if answer is None:
            return []
        values, begun = _check_part(answer, part)
        part.early += len(values)
        part.rest, part.calls = part.calls[begun:], part.calls[:begun]
        return values

    def _give_out(self, part: _Part) -> None:
        """Make by single calls what a group gave back, the first of the parts."""
        if part.rest:
            self._size = 1
            self._parts.popleft()
            try:
                self._insert(part.rest)
            finally:
                self._parts.appendleft(part)
            part.rest = []

    def _insert(self, calls: list[Arguments]) -> None:
        """Make calls one by one whose results come next."""
        made: list[_Part] = []
        try:
            for arguments in calls:
                made.append(self._submit([arguments]))
        finally:
            self._parts.extendleft(reversed(made))

    # --- how many travel together ------------------------------------------------------------------------------------

    def _note_single(self, value: object) -> None:
        self._singles += 1
        if not self._groups:
            return
        if not is_simple(value):
            self._singles = 0
            self._since = time.monotonic()
        elif self._singles >= (self._ahead if self._size == 1 and self._task is None else _LOOK_AGAIN):
            now = time.monotonic()
            each = (now - self._since) * self._processes / self._singles
            self._size = 2 if each < 2 * _GROUP_SECONDS else 1
            self._singles, self._since = 0, now

    def _resize(self, seconds: float, count: int) -> None:
        fitting = int(_GROUP_SECONDS * count / max(seconds, 1e-6))
        self._size = max(1, min(fitting, self._size * _GROWTH, _MAX_CALLS))
        self._singles, self._since = 0, time.monotonic()


def may_group(call: PendingCompute[Any], retries: int) -> bool:
    """Return whether calls like this one may travel together.

    Not where each is watched by itself: by its timeout, its retries, as an actor's, or as a stream.
    """
    options = call.options
    plain = CallOptions(retry=options.retry)
    return (
        options == plain
        and not (options.retry.times if options.retry is not None else retries)
        and not call.kwargs
        and not hasattr(call.function, "__skyproxy_calls__")
        and not is_stream(call.function)
    )


def _is_done(future: PoolFuture[Any] | Call, timeout_seconds: float) -> bool:
    """Return whether a call has ended, or does within some time."""
    try:
        future.exception(timeout_seconds)
    except TimeoutError as error:
        if raised_by_handler(error):
            raise
        return future.done()
    except CancelledError:
        pass
    return True


def _check_reply(reply: Any, part: _Part) -> tuple[list[object], int, bool, float]:
    """The reply of a group, which may come from a worker that nobody trusts.

    Raises:
        ProtocolError: it cannot be.
    """
    if type(reply) is not list or [type(field) for field in reply] != [list, int, bool, float]:
        raise ProtocolError(f"the worker sent a malformed reply of {part.future.name}")
    values, begun, has_more, seconds = reply
    _check_count(part, len(values) + has_more, begun)
    return values, begun, has_more, seconds


def _check_part(answer: Any, part: _Part) -> tuple[list[object], int]:
    if type(answer) is not list or [type(field) for field in answer] != [list, int]:
        raise ProtocolError(f"the worker sent a malformed part of {part.future.name}")
    values, begun = answer
    if not 0 <= begun <= len(part.calls) or part.early + len(values) > begun:
        raise ProtocolError(f"the worker sent {len(values)} results of {begun} calls of {part.future.name}")
    return values, begun


def _check_count(part: _Part, count: int, begun: int) -> None:
    if not 0 < begun <= len(part.calls) or part.early + count != begun:
        raise ProtocolError(f"the worker sent {count} results of {begun} calls of {part.future.name}")
