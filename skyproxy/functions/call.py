"""A call: what a caller holds while its function runs on a worker, and afterwards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, SupportsIndex

from skyproxy.errors import (
    ConfigurationError,
    FunctionCrashedError,
    LimitExceededError,
    ProtocolError,
    RemoteFunctionError,
    UntrustedResultError,
    tell_origin,
    visible,
)
from skyproxy.functions.caller_streams import CallerStreams
from skyproxy.functions.items import Ahead, ItemIterator, Items
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads.pickling import PLAIN, Unpickler
from skyproxy.payloads.plain_reading import from_plain
from skyproxy.releasing_future import ReleasingFuture
from skyproxy.runtime import breakpoints

if TYPE_CHECKING:
    from skyproxy.functions.adoption import Adopter
    from skyproxy.functions.payload import Payload
    from skyproxy.functions.payload_file import PassedPayload, PayloadFile
    from skyproxy.session.session import Session

logger = logging.getLogger("skyproxy")

OnOutput = Callable[[str, str], object]
_ACK_OUTPUT_CHARACTERS = 128 << 10
"""Of output, after which the worker is told that it was seen; far below `max_waiting_output_bytes`."""
_EVENT_CHARACTERS = 64
"""Characters that each piece of output counts beside its text, as the worker counts it."""
_CANCELLED = "cancelled"
_OVER = "over"
LIGHT_BYTES = 64 << 10
"""Bytes of a result, up to which it may wait on the worker for a moment until it is said that it came."""


class ReceivedEvent(NamedTuple):
    """Something that came from the worker: an item, a result, an error, or the news that items follow ("stream")."""

    kind: str
    number: int = 0
    value: dict[str, Any] = {}
    pieces: list[Any] = []
    size: int = 0


class CallChannel(Protocol):
    """The connection that a call runs over, as far as the call uses it; see `channel.Channel`."""

    session: Session

    def ack(self, call: Call, outputs: int, items: int) -> None: ...

    def cancel(self, call: Call) -> None: ...

    def post(self, job: Callable[[], object]) -> None: ...

    def remove(self, call: Call) -> None: ...

    def forget(self, call: Call) -> None: ...


class Call(ReleasingFuture[Any]):
    """A function that runs on a worker, or ran.

    It is a `concurrent.futures.Future`, which `wait` and `as_completed` know, and can be awaited. If the function is a
    generator, the result is an iterator, and `for item in call` and `async for item in call` take the items as they
    come; the worker runs ahead by a bounded number of items only. Whoever stops early cancels the call.

    A call that nobody holds any more runs to its end; its result is then dropped on the worker.

    Attributes:
        id: names the call on its worker, see `Node.reattach`. It is a secret: whoever knows it can fetch the result.
        name: the function's name.
        on_wait: called where the function waits at a breakpoint.
        on_question: called where the function calls an actor elsewhere.
        is_light: whether it has a result, of a few bytes of plain data: taking it takes no time and runs no code of
            the user's.
    """

    def __init__(
        self, identity: str, name: str, channel: CallChannel, adopter: Adopter, on_output: OnOutput | None
    ) -> None:
        super().__init__()
        self.id = identity
        self.name = name
        self.payload: Payload | None = None
        self.file: PayloadFile | PassedPayload | None = None
        self.task: dict[str, Any] = {}
        self.received = 0
        self.attempts = 0
        self.on_wait: Callable[[Call, breakpoints.Place], None] | None = None
        self.on_question: Callable[[Call, ReceivedEvent], None] | None = None
        self._channel = channel
        self._adopter = adopter
        self._on_output = on_output or CallerStreams()
        # The caller's context, by which Jupyter knows the cell that output belongs to.
        self._context = contextvars.copy_context()
        self._has_begun = False
        self._on_begin: list[Callable[[], object]] = []
        self._items, self.ahead = Items(), Ahead(name)
        self.is_light = False
        self._ended = False
        self._conclusion = threading.Lock()  # held from the last event on: several threads may have one
        self._forgotten = False
        self._unacked = self._shown = 0
        self._value: object = None
        self._error: BaseException | None = None
        self._taken = self._is_stream = False
        self._taking = threading.RLock()

    # --- the future --------------------------------------------------------------------------------------------------

    def _first_event(self, timeout: float | None = None) -> ReceivedEvent:
        """Wait for what the call's end is told by, or the news that items follow."""
        event: ReceivedEvent = super().result(timeout)
        return event

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the function, and return what it returned. For a generator function, an iterator over its items.

        Args:
            timeout: seconds to wait. The call goes on when they are over.

        Raises:
            TimeoutError: the call did not end in time, by this wait's timeout or by the call's own.
            concurrent.futures.CancelledError: the call was cancelled.
            SessionLostError: the worker is gone.
            UntrustedResultError: it returned more than plain data, and the worker is not trusted. See `trust_worker`.
            Exception: whatever the function raised; `__cause__` holds the worker's traceback.
        """
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error.with_traceback(None)
            finally:
                del error, self  # else its traceback would hold this frame, and the frame would hold it
        return ItemIterator(self) if self._is_stream else self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the function's end, and return what it raised, None if it returned.

        Raises:
            TimeoutError, concurrent.futures.CancelledError, UntrustedResultError: as `result`.
        """
        if not self.done():
            self._channel.session.count_wait("call")
        came = self._first_event(timeout)
        with self._taking:
            if not self._taken:
                self._is_stream = came.kind == "stream"
                if not self._is_stream:
                    try:
                        self._value = self._make_result(came)
                    except UntrustedResultError:
                        raise  # nothing is taken: it can be asked for again
                    except BaseException as error:
                        self._error = error.with_traceback(None)  # whose frames hold us
                    came.pieces.clear()  # what the value needs of them, it holds itself
                    self.forget()
                    self._adopter.release()
                self._taken = True
        return self._error

    def trust_worker(self) -> None:
        """Let the worker send any object from now on: a pickle, which may run any code in this process.

        For a worker that you would let do so anyway. `result()` then gives what it had refused.
        """
        self._adopter.trusted = True

    def cancel(self) -> bool:
        """Gives the call up; whoever waits for it is told at once.

        The function is interrupted at its next step in Python. Code that does not return to Python, a long kernel or
        `time.sleep`, runs to its end first; its result is dropped.

        Returns:
            Whether there was anything to cancel.
        """
        if self._ended:
            return False
        self._ended = True
        super().cancel()
        self._items.put(ReceivedEvent(_CANCELLED))
        self._channel.cancel(self)
        return True

    @property
    def failure(self) -> str:
        """One word for what a call that is done ended with; empty for a result. Nothing of the result is read."""
        if self.cancelled():
            return "CancelledError"
        return "RemoteFunctionError" if self._first_event().kind == "error" else ""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with this call once it is done, on a thread of the session; at once if it is."""
        super().add_done_callback(fn)

    def add_started_callback(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the function has begun on the worker, or will not; at once if that is so already."""
        self._on_begin.append(callback)
        if self._has_begun:
            self._tell_of_beginning()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_for_value().__await__()

    async def _wait_for_value(self) -> Any:
        if not self.done():
            self._channel.session.count_wait("call")
        try:
            await self.wait_in_loop()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not self._taken:
            # Unpickling may take long, and adopting tensors may wait for a slow connection. Not `result`: of some
            # errors asyncio makes others.
            await asyncio.to_thread(self.exception)
        return self.result()

    # --- items -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        iterator = self.result()
        if not isinstance(iterator, ItemIterator):
            raise TypeError(f"{self.name} returned a {type(iterator).__name__}; only generators can be iterated over")
        return iterator

    def next_item(self) -> Any:
        """The next item; waits for it.

        Raises:
            StopIteration: there are no more; with the generator's return value.
        """
        came = self._items.get().result()
        if came.kind == "item":
            return self._item(came)
        raise StopIteration(self._final_value(came))

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            await self.wait_in_loop()
            if self._first_event().kind != "stream":
                await self
                raise TypeError(f"{self.name} did not return a generator; only those can be iterated over")
            while (came := await asyncio.wrap_future(self._items.get())).kind == "item":
                yield self._item(came)
            self._final_value(came)
        except UntrustedResultError:
            raise  # the item waits until the worker is trusted
        except BaseException:
            self.cancel()
            raise
        else:
            self.cancel()

    def give_up(self) -> None:
        """`cancel`, from a destructor: left to another thread."""
        if not self._ended:
            self._channel.post(self.cancel)

    def _item(self, came: ReceivedEvent) -> Any:
        try:
            value = self._value_of(came)
        except UntrustedResultError:
            self._items.put_back(came)
            raise
        except BaseException:
            self._take_note_of(came)
            raise
        self._take_note_of(came)
        return value

    def _take_note_of(self, came: ReceivedEvent) -> None:
        self.ahead.items_taken += 1
        self._channel.ack(self, 0, came.number)

    def _final_value(self, came: ReceivedEvent) -> Any:
        if came.kind == _OVER:
            return None
        if came.kind == _CANCELLED:
            self._items.end_with(came)
            raise concurrent.futures.CancelledError
        try:
            value = self._make_result(came)
        except UntrustedResultError:
            self._items.put_back(came)
            raise
        except BaseException:
            self._end_items()
            raise
        self._end_items()
        return value

    def _end_items(self) -> None:
        self._items.end_with(ReceivedEvent(_OVER))
        self.forget()

    # --- what comes, on the channel's delivering thread --------------------------------------------------------------

    def deliver(self, came: ReceivedEvent) -> None:
        """Takes note of an event: on the delivering thread, or on the reading one where nothing waits for that."""
        if came.kind in ("result", "error") and not self._conclusion.acquire(blocking=False):
            return
        if came.kind in ("item", "result", "error"):
            self._channel.session.recorder.hidden_writes += 1  # the function wrote until now
        if came.kind in ("started", "result", "error"):
            self._has_begun = True
            if self._on_begin:
                self._tell_of_beginning()
        if came.kind == "started":
            self.payload = None
        elif came.kind == "output":
            self._print(came)
        elif came.kind == "ask":
            self._note_shown(came.number, 0)
            if self.on_question is not None and not self._ended:
                self.on_question(self, came)
        elif self._ended:
            pass  # cancelled
        elif came.kind == "stream":
            self._settle(came)
        elif came.kind == "item":
            self._items.put(came)
        else:
            self._ended = True
            self.is_light = came.kind == "result" and _is_light(came)
            self._channel.remove(self)  # before anybody learns of it, who may make the next call in the same breath
            if not self._settle(came):
                self._items.put(came)
        if came.kind in ("result", "error"):
            self._ended = True
            self.payload = None
            self._channel.remove(self)
            if self.cancelled():
                self.forget()

    def _tell_of_beginning(self) -> None:
        while self._on_begin:
            with contextlib.suppress(IndexError):  # another thread had the last one
                self._on_begin.pop()()

    def _settle(self, came: ReceivedEvent) -> bool:
        """Return whether nobody had settled the future before."""
        try:
            self.set_result(came)
        except concurrent.futures.InvalidStateError:  # it has a result, or was cancelled
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Nothing more comes, for this reason."""
        self.deliver(ReceivedEvent("error", 0, {"exception": error}))

    def _print(self, came: ReceivedEvent) -> None:
        text = came.value["text"]
        if came.value.get("lost"):
            text = f"[{came.value['lost']} characters of output were lost while the connection was down]\n" + text
        try:
            if text:
                self._context.run(self._on_output, came.value["stream"], text)
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.exception("skyproxy: on_output of %s failed; the call goes on", self.name)
        if self.on_wait is not None and not self._ended and "waits" in came.value:
            self.on_wait(self, came.value["waits"])
        self._note_shown(came.number, len(text))

    def _note_shown(self, number: int, characters: int) -> None:
        self._shown = number
        self._unacked += characters + _EVENT_CHARACTERS
        if self._unacked >= _ACK_OUTPUT_CHARACTERS:
            self.ack_output()

    def ack_output(self) -> None:
        """Tells the worker what was shown; asked for also when nothing more is there to be shown."""
        if self._unacked:
            self._unacked = 0
            self._channel.ack(self, self._shown, 0)

    # --- values and errors -------------------------------------------------------------------------------------------

    def _make_result(self, came: ReceivedEvent) -> object:
        if came.kind == "error":
            raise self._error_of(came)
        try:
            return self._value_of(came)
        except (ImportError, AttributeError) as error:
            error.add_note(
                f"{self.name} returned an object of a class that cannot be imported here. Install its package, or "
                "return plain data."
            )
            raise

    def _value_of(self, came: ReceivedEvent) -> object:
        try:
            return self._adopter.value(came.number, came.value, came.pieces)
        except UntrustedResultError as refused:
            error = UntrustedResultError(
                f"{self.name} {refused}, and its worker is not trusted with more than plain data: tensors, numbers, "
                "text, bytes, arrays, containers, and dataclasses of this program. Return such data; or, if you would "
                "let that worker run any code here, connect with skyproxy.connect(url, trust_worker=True). Nothing is "
                "lost: `error.call.trust_worker()` on this error, then `error.call.result()`, return this result."
            )
            error.call = self
            raise error from refused.__cause__

    def _error_of(self, came: ReceivedEvent) -> BaseException:
        words = came.value
        if "exception" in words:
            known: BaseException = words["exception"]
            return known
        if words.get("failed"):
            return self._channel.session.failure(words)
        name, message, traceback = (visible(words.get(key) or "") for key in ("type", "message", "traceback"))
        for own in (LimitExceededError, FunctionCrashedError):
            if name == own.__name__:
                return own(message)
        if came.pieces and (error := self._rebuild_error(came, traceback)) is not None:
            return error
        told = RemoteFunctionError(f"{name}: {message}")
        told.remote_traceback = traceback
        return tell_origin(told, self.name, traceback)

    def _rebuild_error(self, came: ReceivedEvent, traceback: str) -> BaseException | None:
        """The exception that the function raised, as an object; None where it cannot be made here, or told of."""
        try:
            if came.value.get("form") == PLAIN:
                error = from_plain(came.pieces, came.value, _no_reference)
                return tell_origin(error, self.name, traceback) if isinstance(error, Exception) else None
            if self._adopter.trusted:
                error = Unpickler(came.pieces, came.value, _no_reference).unpickle()
                return tell_origin(error, self.name, traceback) if isinstance(error, BaseException) else None
        except Exception as problem:
            if raised_by_handler(problem):
                raise
            logger.debug("skyproxy: the exception of %s cannot be rebuilt here: %s", self.name, visible(repr(problem)))
        return None

    # --- its end -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The worker need not keep anything of this call. Safe in a destructor: appends to a list, and does no more."""
        if not self._forgotten:
            self._forgotten = True
            self._channel.forget(self)

    def __del__(self) -> None:  # an interrupt may have struck before all attributes were there
        if getattr(self, "_forgotten", True) is False and sys is not None:
            self.forget()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigurationError(
            f"the call of {self.name} belongs to this program, and cannot be sent to a worker. Pass its result: "
            "call.result(), or await it."
        )

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "running"
        return f"<Call {self.id[:8]} of {self.name}: {state}>"


def _is_light(came: ReceivedEvent) -> bool:
    """Return whether a result is plain data of a few bytes, without a tensor."""
    words = came.value
    if (words.get("form") != PLAIN and words.get("simple") is not True) or words.get("tensors") or words.get("changed"):
        return False
    return sum(map(len, came.pieces)) <= LIGHT_BYTES


def _no_reference(row: object, number: int) -> Any:
    raise ProtocolError("an exception with a remote tensor")
