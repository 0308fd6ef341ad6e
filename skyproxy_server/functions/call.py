"""One call: its beginning, its thread, what it prints, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from skyproxy.errors import ConfigurationError, FunctionCrashedError, LimitExceededError, add_note
from skyproxy.payloads.pickling import PLAIN, Unpickler
from skyproxy.payloads.tensors import Row, as_leaf
from skyproxy.runtime.breakpoints import DEBUGGERS, Debugger, Place, describe, is_quit, stop_tracing
from skyproxy.runtime.calls import CallContext, entered_call
from skyproxy.runtime.project_code import PROJECT_CODE
from skyproxy.runtime.questions import begin_to_ask, end_questions
from skyproxy.runtime.thread_exceptions import raise_in, take_back
from skyproxy.settings import Settings
from skyproxy_server.activity import Activity
from skyproxy_server.cuda_staging import on_streams
from skyproxy_server.functions import output
from skyproxy_server.functions.call_errors import CallInterrupt, describe_failure
from skyproxy_server.functions.call_threads import CallThreads
from skyproxy_server.functions.events import Events
from skyproxy_server.functions.isolated_call import IsolatedCall, Loan, Said
from skyproxy_server.functions.known_functions import KnownFunction
from skyproxy_server.functions.nursery import Nursery
from skyproxy_server.functions.questions import CallQuestions
from skyproxy_server.functions.results import REMOTE, ResultWriter
from skyproxy_server.functions.shared_globals import named_device
from skyproxy_server.global_modes import wait_for_rest
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.lost_context import CONTEXT

_OUTPUT_PIECE = 8192
"""Characters of one output event; a line is sent when it is whole, a longer one in parts."""


class FunctionCall:
    """A call on the worker's side.

    Attributes:
        identity: its name, the client's secret.
        session: the session that began it.
        events: what its caller is told.
        running: whether its thread runs; it may, after the caller was told the end.
        has_tensors: whether it was given tensors of a session, which it may change.
        began_at: when that began, on the clock of `time.monotonic`.
        debugger: what its breakpoints wait in; None where nobody asked for that.
    """

    def __init__(
        self,
        identity: str,
        session: str,
        devices: list[DeviceRow],
        settings: Settings,
        activity: Activity,
        nursery: Nursery | None = None,
        threads: CallThreads | None = None,
        settle: Callable[[], object] = lambda: None,
        check_kept: Callable[[Sequence[torch.Tensor]], object] = lambda kept: None,
    ) -> None:
        self.identity = identity
        self.session = session
        self.running = self.has_tensors = False
        self.name = ""
        self.began_at = 0.0
        self._plain = False
        self._devices = devices
        self._settings = settings
        self._nursery = nursery
        self._loan: Loan | None = None
        self.debugger: Debugger | None = None
        self.events = Events(identity, settings)
        self._activity = activity
        self._task: Said | None = None
        self._pieces: Sequence[object] = ()
        self._function: KnownFunction | None = None
        self._arguments: list[object] | None = None
        self._streams: Sequence[torch.cuda.Stream] = ()
        self._counted = False
        self._count: Callable[[bool], None] = lambda begins: None
        self._on_end: Callable[[], None] = lambda: None
        self._pending: dict[str, str] = {}
        self._begun_lines: dict[str, bool] = {}
        self._threads = threads or CallThreads()
        self._settle = settle
        """Waits until what the function has made is computed, where whoever reads it would not."""
        self._check_kept = check_kept
        """Raises where tensors of a result cannot stay on the worker."""
        self._thread: threading.Thread | None = None
        self._is_in_thread = False
        """True when something may be raised in that thread: it is this call's, until `_leave`."""
        self._timer: threading.Timer | None = None
        self._interrupts: list[Callable[[], object]] = []
        self._interrupted = False
        self._may_strike = False
        self._sleeping = False
        self._questions = CallQuestions(self.events)  # none in a process of its own, where nobody gives it threads
        self._ask: Callable[[dict[str, Any], bytes], Callable[[], bytes]] | None = None if threads is None else self.ask
        self._lock = self.events.lock

    @property
    def ended(self) -> bool:
        """True if its caller was told the end."""
        return self.events.ended

    @property
    def is_active(self) -> bool:
        """True if it runs, or will as soon as its tensor arguments are here."""
        return self._counted or (self._task is not None and not self.ended)

    @property
    def has_payload(self) -> bool:
        """True if the function and its arguments came, or are no longer needed."""
        return self._task is not None or self.ended

    # --- its beginning -----------------------------------------------------------------------------------------------

    def start(
        self,
        task: Said,
        pieces: Sequence[object],
        count: Callable[[bool], None],
        on_end: Callable[[], None],
        function: KnownFunction | None = None,
    ) -> None:
        """The payload is here; the function runs as soon as its tensor arguments are, too.

        Args:
            task: as in `CallStart`.
            pieces: the payload.
            count: told when the function begins (True), and when it has run (False): before its caller learns that, who
                may make the next call in the same breath. Told twice where an interrupt may have kept it from hearing.
            on_end: called at the end of its thread.
            function: what it runs, where that is not in the payload.
        """
        with self._lock:
            if self._task is None and not self.ended:
                self._task, self._pieces, self.name = task, pieces, task["name"]
                self._plain = task.get("wants") == PLAIN
                self._count, self._on_end, self._function = count, on_end, function
                self._begin()

    def bind(self, arguments: list[Any], streams: Sequence[torch.cuda.Stream], loan: Loan | None = None) -> None:
        """The tensor arguments are here.

        Args:
            arguments: one for each reference in the payload.
            streams: the CUDA streams that their values are computed on.
            loan: the same for a process of its own, if the call is to have one.
        """
        with self._lock:
            if self._arguments is None and not self.ended:
                self._arguments, self._streams, self._loan = arguments, streams, loan
                self.has_tensors = bool(arguments)
                self._begin()

    def _begin(self) -> None:
        if self._task is None or self._arguments is None or self._thread is not None:
            return
        self.running = True
        self.began_at = time.monotonic()
        timeout = self._task["timeout"]
        if timeout is not None:
            text = f"{self.name} did not finish within {timeout:g} s, the timeout of this call."
            self._timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), self.interrupt, (TimeoutError(text),))
            self._timer.daemon = True
            self._timer.start()
        self._counted = True
        self._count(True)
        tells = not self._task.get("quiet")
        self._thread = self._threads.start(self._run, f"skyproxy-call-{self.identity[:8]}")
        # Before any event of the function, because we hold the lock; but the function need not wait until this is sent.
        # Not where the caller wants to know of the end alone.
        if tells:
            self.events.add("started", {})

    # --- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        task, pieces, arguments = self._task, self._pieces, self._arguments or []
        assert task is not None
        self._task, self._pieces, self._arguments = {}, (), []
        try:
            try:
                if not task.get("isolate"):
                    wait_for_rest()
                with self._lock:
                    self._is_in_thread = True
                if self.ended:
                    raise CallInterrupt  # its caller has given it up before this thread could be told
                values = pickle.loads(task["context"]) if task["context"] else {}
                used = self._activity.running()
                with used, on_streams(self._streams), entered_call(self._context(values)):
                    if task.get("isolate"):
                        self._execute_apart(task, pieces)
                        return
                    with output.printing_to(self):
                        self._execute_debugged(task, pieces, arguments)
            except BaseException as error:
                if not self.ended:
                    self._flush()
                    self.has_run()
                    self._fail(error)
                if words := self._explain_lost_context(error):
                    CONTEXT.lose(words)
                # If a function bound the error that it raised to a name, its frame holds itself, and all its variables.
                traceback.clear_frames(error.__traceback__)
            finally:
                self._leave()
        except CallInterrupt:
            self.running = False  # it struck after the function had ended
        finally:
            end_questions(self.session, self.identity)
            self.has_run()
            self._on_end()

    def _context(self, values: dict[str, Any]) -> CallContext:
        return CallContext(self.identity, self.name, values, self.session, self.tell_wait, self._ask)

    def has_run(self) -> None:
        """The function has ended. May be called again: an interrupt may strike in here."""
        self._counted = False
        self._count(False)

    def _leave(self) -> None:
        """From now on, nothing is raised in this thread from outside."""
        with self._lock:
            self.running = False
            self._streams = ()
            self._take_back_interrupt()
            if self._timer is not None:
                self._timer.cancel()
            self.events.changed.notify_all()

    def _execute_debugged(self, task: Said, pieces: Sequence[object], arguments: list[Any]) -> None:
        seconds = task.get("debug")
        if seconds is None:
            self._execute(task, pieces, arguments)
            return
        debugger = DEBUGGERS.begin(self.identity, min(seconds, threading.TIMEOUT_MAX), self.tell_wait)
        self.debugger = debugger
        try:
            self._execute(task, pieces, arguments)
        except Exception as error:
            if is_quit(error):
                error.args = (debugger.explain(),)
            elif not self.ended:
                debugger.look_at(error)
            raise
        finally:
            stop_tracing()
            DEBUGGERS.end(debugger)

    def tell_wait(self, place: Place) -> None:
        """Tell the caller where the function waits for a debugger, or that a process of it waits no more."""
        self._flush()
        self.events.add("output", {"stream": "stderr", "text": describe(place), "waits": place})

    def ask(self, words: dict[str, Any], content: bytes) -> Callable[[], bytes]:
        """Ask the caller to call an actor; return what waits for the answer. On any thread of the function."""
        begin_to_ask(self.session, self.identity, self._questions.answer)
        return partial(self._wait_for_answer, self._questions.ask(words, content))

    def _wait_for_answer(self, number: int) -> bytes:
        with self._lock:
            while not self._questions.has_answer(number) and not self.ended:
                self._sleep()
            answer = self._questions.take(number)
            return self._leave_interrupted() if answer is None else answer

    def _execute(self, task: dict[str, object], pieces: Sequence[object], arguments: list[Any]) -> None:
        given: dict[int, torch.Tensor] = {}

        def referred(row: Row, number: int) -> torch.Tensor:
            # An alias of its own: an ordinary tensor for the function, and metadata of its own for the client.
            given[number] = as_leaf(arguments[number].detach(), row)
            return given[number]

        PROJECT_CODE.enter(self.session)
        try:
            function, args, kwargs = Unpickler(pieces, task, referred, named_device).unpickle()
            known, self._function = self._function, None
            if known is not None:
                function, _use = known.make()  # held while the function runs
        except (ImportError, AttributeError) as error:
            error.add_note(f"{self.name} could not be loaded on the worker.")
            raise
        del pieces
        returning = ResultWriter(self._devices, task["results"] == REMOTE, given, self._plain)
        result = function(*args, **kwargs)
        del args, kwargs, known
        if isinstance(result, types.CoroutineType):
            result = self._await(result)
        if isinstance(result, types.GeneratorType):
            self.events.add("stream", {})
            while True:
                try:
                    item = next(result)
                except StopIteration as stop:
                    result = stop.value
                    break
                self._emit_value("item", item, returning)
        elif isinstance(result, types.AsyncGeneratorType):
            self.events.add("stream", {})
            result = self._await(self._drain(result, returning))
        self._flush()
        self._emit_value("result", result, returning)

    def _execute_apart(self, task: Said, pieces: Sequence[object]) -> None:
        loan, self._loan = self._loan, None
        function, self._function = self._function, None
        if loan is None or self._nursery is None:
            raise ConfigurationError(f"this worker cannot run {self.name} in a process of its own")
        apart = IsolatedCall(self._nursery, self._devices, self._settings, loan)
        self._interrupts.append(apart.stop)
        try:
            if not self.ended:  # else it was cancelled before it could be told
                apart.run(self, task, pieces, function)
        except (FunctionCrashedError, LimitExceededError) as error:
            self.has_run()
            self.fail({"type": type(error).__name__, "message": str(error), "traceback": ""})
        finally:
            loan.tensors.release()

    async def _drain(self, generator: Any, returning: ResultWriter) -> None:
        async for item in generator:
            # On this very thread: one call has one sequence of events.
            self._emit_value("item", item, returning)

    def _await(self, coroutine: Any) -> object:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            task = loop.create_task(coroutine)
            stop = lambda: loop.call_soon_threadsafe(task.cancel)  # noqa: E731
            self._interrupts.append(stop)
            try:
                return loop.run_until_complete(task)
            finally:
                self._interrupts.remove(stop)

    def _emit_value(self, kind: str, value: object, returning: ResultWriter) -> None:
        try:
            pickled, kept = returning.pickle(value)
        except Exception as error:
            raise TypeError(returning.explain(kind, value, self.name, error)) from error
        self._check_kept(kept)
        self._settle()
        if kind == "item":
            self._wait_for_items()
        else:
            self.has_run()
        self.events.add(kind, {**pickled.tables, "changed": returning.changed_arguments()}, pickled, kept)

    def _fail(self, error: BaseException) -> None:
        if words := self._explain_lost_context(error):
            add_note(error, f"The session ends with this: {words}.")
        folders = PROJECT_CODE.folders(self.session)
        self.events.add("error", *describe_failure(error, self.name, folders, self._plain))

    @staticmethod
    def _explain_lost_context(error: BaseException) -> str:
        """Return how the worker lost its CUDA context with this error, whatever the error's own code does; else ""."""
        try:
            return CONTEXT.explain(error) if CONTEXT.on_lost is not None else ""  # None in a process of the call's own
        except CallInterrupt:
            raise
        except BaseException:
            return ""

    # --- what it prints ----------------------------------------------------------------------------------------------

    def write(self, stream: str, text: str) -> None:
        """A call to `write` of `sys.stdout` or `sys.stderr`."""
        with self._lock:
            if text:
                self._begun_lines[stream] = text[-1] not in "\r\n"
            text = self._pending.pop(stream, "") + text
            end = max(text.rfind("\n"), text.rfind("\r")) + 1
            if len(text) - end > _OUTPUT_PIECE:
                end = len(text)
            whole, rest = text[:end], text[end:]
            if rest:
                self._pending[stream] = rest
        for start in range(0, len(whole), _OUTPUT_PIECE):
            self._print(stream, whole[start : start + _OUTPUT_PIECE])

    def has_begun_line(self, stream: str) -> bool:
        """Return whether a line was begun there, and not ended."""
        return self._begun_lines.get(stream, False)

    def flush(self, stream: str) -> None:
        with self._lock:
            text = self._pending.pop(stream, "")
        if text:
            self._print(stream, text)

    def _flush(self) -> None:
        if self._pending:
            for stream in ("stdout", "stderr"):
                self.flush(stream)

    def _print(self, stream: str, text: str) -> None:
        with self._lock:
            while self.events.output_must_wait:
                self._sleep()
            if self.ended and self._interrupted:
                self._leave_interrupted()
            self.events.add("output", {"stream": stream, "text": text})

    def print_from_process(self, stream: str, text: str) -> None:
        """Pass on what a process of the function has printed, once there is room."""
        with self._lock:
            while self.events.output_must_wait:
                self._sleep()
            self.events.add("output", {"stream": stream, "text": text})

    def wait_for_room(self) -> bool:
        """Wait until one more item may be ahead of the caller; return whether anybody wants it."""
        with self._lock:
            while self.events.items_must_wait:
                self._sleep()
            return not self.ended

    def _wait_for_items(self) -> None:
        with self._lock:
            while self.events.items_must_wait:
                self._sleep()
            if self.ended:
                raise CallInterrupt

    def _leave_interrupted(self) -> NoReturn:
        if self._thread is threading.current_thread():
            self._take_back_interrupt()  # else it strikes once more, in a `finally` of the function
        raise CallInterrupt

    def _take_back_interrupt(self) -> None:
        if self._may_strike:
            self._may_strike = False
            take_back(CallInterrupt)

    def _sleep(self) -> None:
        """Waits for news; the lock is held. No interrupt strikes meanwhile: whoever wakes looks at `ended`."""
        if self._thread is not threading.current_thread():
            self.events.changed.wait()
            return
        self._sleeping = True
        try:
            self.events.changed.wait()
        finally:
            self._sleeping = False

    # --- its end -----------------------------------------------------------------------------------------------------

    def fail(self, words: dict[str, object]) -> None:
        """The call ends with an error before its function began."""
        self.events.add("error", words)

    def interrupt(self, error: BaseException) -> None:
        """Ends the call with `error`, at once for the caller; the function is interrupted where Python can do that."""
        with self._lock:
            if self.ended:
                return
            self._fail(error)
            self._stop_thread()

    def discard(self) -> None:
        """Nobody will ask for this call again: an end is of no interest, and a function that runs is interrupted."""
        with self._lock:
            self.events.discard()
            self._task, self._pieces, self._arguments, self._loan = {}, (), [], None
            self._stop_thread()

    def _stop_thread(self) -> None:
        self.events.changed.notify_all()
        if self._thread is None or self._thread.ident is None or not self.running or self._interrupted:
            return
        if not self._is_in_thread:
            return  # it looks whether it has ended before it runs anything
        self._interrupted = True
        for stop in self._interrupts:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                stop()
        if not self._interrupts and not self._sleeping:
            self._may_strike = True
            raise_in(self._thread.ident, CallInterrupt, lambda: self.running)
