"""A session: its two connections, the threads that read them, and the requests of the layers above."""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any, Protocol

import torch

from skyproxy import torch_codec
from skyproxy.errors import (
    ConfigurationError,
    InferenceMismatchError,
    LimitExceededError,
    ProtocolError,
    RemoteError,
    SessionLostError,
    UnsupportedOpError,
    remote_error_class,
    visible,
)
from skyproxy.protocol import commands
from skyproxy.protocol.messages import (
    Ack,
    Batch,
    CancelTransfer,
    Challenge,
    Chunk,
    Failure,
    Goodbye,
    Known,
    Message,
    NamedBatch,
    PackedChunk,
    Ping,
    Pong,
    Repeat,
    Reply,
    Warned,
    Welcome,
)
from skyproxy.session.lines import describe_line, find_line
from skyproxy.session.liveness import Liveness
from skyproxy.session.offers import Offers
from skyproxy.session.recorder import Recorder, SentBatch
from skyproxy.session.trace import SessionTrace
from skyproxy.session.transfers import Downloads, Uploads, wait_for_download
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.session.worker_warnings import WorkerWarnings
from skyproxy.settings import Settings
from skyproxy.torch_codec import Description
from skyproxy.transport.base import Transport

logger = logging.getLogger("skyproxy.session")

_ERRORS: dict[str, type[BaseException]] = {
    "UnsupportedOpError": UnsupportedOpError,
    "InferenceMismatchError": InferenceMismatchError,
    "LimitExceededError": LimitExceededError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "_LinAlgError": torch.linalg.LinAlgError,  # type: ignore[attr-defined]
}

_NEVER_REBUILT = (BaseExceptionGroup, StopIteration, StopAsyncIteration)
"""Exceptions that end a loop in silence, or are made of others; a worker's is a `RemoteError` with its text."""
_REMEMBERED_FAILURES = 1024
"""The worker tells of a failed op at once, while its batch is still known here; the error may be raised much later."""

WAIT_OBSERVERS: list[Callable[[str], None]] = []
"""Called before every wait for an answer, with a word for what is waited for."""
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Further(Protocol):
    """What a session needs to know of a connection that others opened for it."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def keep_alive(self) -> None: ...

    def abandon(self) -> None: ...


class _OutcomeWaits(threading.local):
    """Whether a thread waits for the outcome of an op that it has just recorded."""

    waiting = False


class Session:
    """One client's conversation with one worker.

    Attributes:
        recorder: where commands are recorded; the dispatcher writes to it directly.
        welcome: what the worker said of itself.
        round_trips: waits for an answer so far.
        round_trip_seconds: how long a message to the worker and back took, the quicker of the last two; 0 at first.
        recordings: captured graphs, by number: commands, and the lines that recorded them.
        further: connections that others opened for this session; counted here, and kept alive.
        at_end: called with the reason when the session is over.
        explain_end: how the worker's process ended, and the end of its log; None while it lives, or where nobody knows.
    """

    def __init__(
        self,
        operations: Transport,
        bulk: Transport,
        welcome: Welcome,
        settings: Settings,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.welcome = welcome
        self.settings = settings
        self.round_trips = 0
        self.round_trip_seconds = 0.0
        self._asked_at = (0, 0.0)
        self._round_trips_seconds: deque[float] = deque(maxlen=2)
        self._operations = operations
        self._bulk = bulk
        self._on_end = on_end
        self.further: list[Further] = []
        self.at_end: list[Callable[[SessionLostError], object]] = []
        self.explain_end: Callable[[], tuple[str, str] | None] = lambda: None
        self._waiters = Waiters()
        self._outcomes = _OutcomeWaits()
        self.recorder = Recorder(self._send_batch, self._unacked, settings, self._wait_for_outcome)
        self._downloads = Downloads(self._waiters)
        offers = Offers(
            settings.min_blob_bytes,
            keeps=settings.remember_uploads and welcome.limits.get("blob_bytes", 0) > 0,
            had_blobs=welcome.limits.get("blobs", 0) > 0,
        )
        self._uploads = Uploads(bulk, settings.chunk_bytes, settings.show_progress, offers)
        self._trace: SessionTrace | None = None
        self._signatures: dict[Any, int] = {}
        self._signature_lock = threading.RLock()
        self._warnings = WorkerWarnings()
        self._failed_lines: dict[tuple[int, int], str] = {}
        self.recordings: dict[int, SentBatch] = {}
        self._ended: SessionLostError | None = None
        self._closing = False
        self._end_lock = threading.Lock()
        self._last_heard = time.monotonic()
        self._bulk.set_sink(self._downloads.sink)
        self._threads = [
            threading.Thread(target=body, name=f"skyproxy-{name}", daemon=True)
            for name, body in (
                ("replies", self._read_operations),
                ("bulk", self._read_bulk),
                ("uploads", self._uploads.run),
                ("housekeeping", self._keep_house),
            )
        ]
        self._stop = threading.Event()
        self._process = os.getpid()
        _sessions.add(self)
        for thread in self._threads:
            thread.start()

    # --- what the layers above ask for -------------------------------------------------------------------------------

    @property
    def lost(self) -> SessionLostError | None:
        """Why the session is over; None while it lives."""
        return self._ended

    @property
    def is_foreign(self) -> bool:
        """Whether the session belongs to the process that this one was forked from."""
        return self._process != os.getpid()

    def abandon_in_child(self) -> None:
        """Makes every use fail clearly after a fork. The connections belong to the parent; nothing is said on them."""
        self._ended = SessionLostError(
            "this process was forked from one with a sky session, which belongs to the parent. Move tensors to the CPU "
            "before forking, or start processes with the 'spawn' method."
        )
        self.recorder.abandon(self._ended)
        self._waiters = Waiters()
        self._waiters.end(self._ended)
        for transport in (self._operations, self._bulk, *self.further):
            transport.abandon()

    @property
    def bytes_sent(self) -> int:
        return sum(item.bytes_sent for item in (self._operations, self._bulk, *self.further))

    @property
    def bytes_received(self) -> int:
        return sum(item.bytes_received for item in (self._operations, self._bulk, *self.further))

    @property
    def bytes_saved(self) -> int:
        """Bytes of uploads that the worker had already."""
        return self._uploads.offers.saved_bytes

    def check(self) -> None:
        """Raises:
        SessionLostError: the session is over.
        """
        if self._ended is not None:
            raise SessionLostError(str(self._ended)) from self._ended

    def call(self, name: str, *arguments: Any) -> Any:
        """Asks the worker's control `name`, after everything recorded so far; waits for its answer.

        Raises:
            RemoteError: the control failed, or an earlier command did and was not reported yet.
            SessionLostError: the worker is gone.
        """
        return self.request(name, lambda number: (commands.CALL, number, name, list(arguments)))

    def do(self, name: str, *arguments: Any) -> None:
        """Records the worker's control `name`; does not wait."""
        self.recorder.append(commands.DO, name, list(arguments))

    def request(self, purpose: str, command: Callable[[int], tuple[Any, ...]]) -> Any:
        """Records the command that `command` makes of a request number, and waits for its reply."""
        waiter = self.ask(command)
        return self.wait(waiter, purpose)

    def ask(self, command: Callable[[int], tuple[Any, ...]]) -> Waiter:
        """Records a request and sends it; the answer can be waited for later."""
        self.check()
        number, waiter = self._waiters.open()
        try:
            self.recorder.append(*command(number))
            self.recorder.flush()
        except BaseException:
            self._waiters.abandon(number)
            raise
        return waiter

    def wait(self, waiter: Waiter, purpose: str, *, counted: bool = True) -> Any:
        """The answer of a request, counted as a round trip unless it comes with that of another one."""
        if counted:
            self.count_wait(purpose)
        started_ns = time.time_ns() if self._trace is not None else 0
        try:
            target = waiter.keep_alive
            if isinstance(target, torch.Tensor) and not waiter.done:
                missing = partial(self._downloads.missing_bytes, target)
                return wait_for_download(waiter, target.nbytes, missing, self.settings.show_progress)
            return waiter.wait()
        except SessionLostError as lost:
            raise SessionLostError(str(lost)) from lost
        finally:
            if counted:
                self.recorder.begin_small()
            if self._trace is not None and started_ns:
                self._trace.add("wait", purpose, started_ns)
            if self._warnings.pending:
                self._warnings.show()

    def count_wait(self, purpose: str) -> None:
        """Somebody is about to wait for the worker."""
        self.round_trips += 1
        for observer in WAIT_OBSERVERS:
            observer(purpose)

    def fetch(self, slot: int, description: Description) -> torch.Tensor:
        """The values of a slot as a new CPU tensor, in the strides of `torch_codec.packed_stride`.

        Raises:
            RemoteError: the value is poisoned; the error of the op that failed.
            SessionLostError: the worker is gone.
        """
        return self.fetched(self.start_fetch(slot, description), description)

    def start_fetch(self, slot: int, description: Description) -> Waiter:
        """Asks for the values of a slot without waiting; `fetched` gives them."""
        count = torch_codec.byte_count(description)
        if count <= self.settings.max_inline_bytes:
            return self.ask(lambda number: (commands.FETCH, number, slot, 0))
        target = torch_codec.empty_packed(description)
        self.check()
        number, waiter = self._waiters.open(keep_alive=target)
        self._downloads.open(number, target)
        try:
            self.recorder.append(commands.FETCH, number, slot, number)
            self.recorder.flush()
        except BaseException:
            self._waiters.abandon(number)
            raise
        return waiter

    def fetched(self, waiter: Waiter, description: Description, *, counted: bool = True) -> torch.Tensor:
        """Waits for what `start_fetch` asked for; `counted` as `wait` says."""
        self.wait(waiter, "fetch", counted=counted)
        if waiter.keep_alive is not None:
            target = waiter.keep_alive
            assert isinstance(target, torch.Tensor)
            return target
        target = torch_codec.empty_packed(description)
        view = torch_codec.byte_view(target)
        if len(view):
            view[:] = waiter.buffers[0]
        return target

    def known_signature(self, structure: Any) -> int | None:
        """The number of a signature that was defined before; None for others."""
        return self._signatures.get(structure)

    def signature(self, structure: Any, define: Callable[[], list[Any]], width: int) -> int:
        """The number of an op's signature; it is defined for the worker the first time.

        Args:
            structure: what makes two signatures the same.
            define: makes the definition, see `protocol.commands`.
            width: how many operands it takes.

        Raises:
            LimitExceededError: the session has as many signatures as it may.
        """
        number = self._signatures.get(structure)
        if number is None:
            with self._signature_lock:
                number = self._signatures.get(structure)
                if number is None:
                    number = commands.FIRST_SIGNATURE + len(self._signatures)
                    if len(self._signatures) >= self.settings.max_signatures:
                        raise LimitExceededError(
                            f"this session uses {len(self._signatures)} different operation signatures, its limit. "
                            "Set SKYPROXY_MAX_SIGNATURES on both sides."
                        )
                    self.recorder.widths[number] = width
                    record = partial(self.recorder.stream.extend, (commands.DEFINE, number, define()))
                    remember = partial(self._signatures.__setitem__, structure, number)
                    # Both or neither: `deque` makes these calls without returning to the interpreter, where Ctrl-C
                    # strikes, and a number that was given twice would end the session.
                    deque(map(call, (record, remember)), 0)
        return number

    def structures(self) -> dict[int, Any]:
        """For the number of each signature that was defined so far, what `signature` was given as its structure."""
        return {number: structure for structure, number in self._signatures.copy().items()}

    def upload(self, slot: int, tensor: torch.Tensor, device: list[Any]) -> None:
        """Records that `slot` gets the values of a dense CPU tensor; they are read before this returns.

        Args:
            tensor: strided, dense, on the CPU, without conjugate or negative bit.
            device: the worker's device, `[type, index]`.
        """
        description = torch_codec.describe(tensor)._replace(offset=0)
        fields = torch_codec.encode_description(description)
        view = torch_codec.byte_view(tensor)
        if len(view) <= self.settings.max_inline_bytes:
            self.recorder.append_with_buffer(bytes(view), commands.UPLOAD, slot, fields, device)
            return
        self.check()
        transfer = self._waiters.next_number()

        def announce() -> None:
            self.recorder.append(commands.RECEIVE, slot, fields, device, transfer)
            self.recorder.flush()

        self._uploads.send(transfer, view, tensor.element_size(), tensor, announce)

    def upload_bytes(self, slot: int, description: Description, values: bytes, device: list[Any]) -> None:
        """Record that `slot` gets values that travel with the commands.

        Args:
            description: what the tensor looks like, with offset 0.
            values: its bytes, in the order of memory.
            device: the worker's device, `[type, index]`.
        """
        fields = torch_codec.encode_description(description)
        self.recorder.append_with_buffer(values, commands.UPLOAD, slot, fields, device)

    def synchronize(self) -> None:
        """Waits until the worker has executed everything, its device included.

        Raises:
            RemoteError: a command failed and nobody has seen the error yet.
        """
        self.call("synchronize")

    def _wait_for_outcome(self) -> None:
        if self._outcomes.waiting:  # this very question was recorded
            return
        self._outcomes.waiting = True
        try:
            self.synchronize()
        finally:
            self._outcomes.waiting = False

    def start_trace(self) -> SessionTrace:
        """From now on, what leaves and comes is noted; see `skyproxy.profiling`."""
        self._trace = self._uploads.trace = self._downloads.trace = SessionTrace()
        return self._trace

    def stop_trace(self) -> None:
        """Nothing is noted any more."""
        self._trace = self._uploads.trace = self._downloads.trace = None

    # --- the connections ---------------------------------------------------------------------------------------------

    def _send_batch(self, batch: Batch | NamedBatch | Repeat) -> None:
        started_ns = time.time_ns() if self._trace is not None else 0
        try:
            self._operations.send(batch)
            if self._trace is not None and started_ns:
                self._trace.add("send", batch.sequence, started_ns)
        except (ConfigurationError, LimitExceededError) as error:
            # What was recorded can never leave, and everything after it depends on it.
            self._end(f"a batch of operations cannot be sent: {error}")
            raise
        except SessionLostError as error:
            self._end(str(error).rstrip("."))
            raise SessionLostError(str(self._ended)) from error

    def _unacked(self) -> tuple[int, int]:
        connection = self._operations.connection
        return connection.last_sequence - connection.acked_sequence, connection.unacked_bytes

    def _read_operations(self) -> None:
        handlers: dict[type[Message], Callable[[Any], None]] = {
            Ack: lambda message: self.recorder.ack(message.sequence),
            Reply: self._on_reply,
            Failure: self._on_failure,
            Warned: self._on_warned,
            Goodbye: self._on_goodbye,
        }
        self._read(self._operations, handlers)

    def _read_bulk(self) -> None:
        handlers: dict[type[Message], Callable[[Any], None]] = {
            Chunk: self._downloads.on_chunk,
            PackedChunk: self._downloads.on_packed_chunk,
            CancelTransfer: self._downloads.on_cancel,
            Known: self._uploads.on_known,
            Challenge: self._uploads.on_known,
            Ping: lambda message: self._bulk.send(Pong(message.number)),
            Pong: self._on_pong,
            Goodbye: self._on_goodbye,
        }
        self._read(self._bulk, handlers)

    def _on_pong(self, pong: Pong) -> None:
        number, asked_at = self._asked_at
        if pong.number == number:
            self._round_trips_seconds.append(time.monotonic() - asked_at)
            self.round_trip_seconds = min(self._round_trips_seconds)

    def _read(self, transport: Transport, handlers: dict[type[Message], Callable[[Any], None]]) -> None:
        try:
            while True:
                message = transport.recv()
                self._last_heard = time.monotonic()
                handlers[type(message)](message)
        except (SessionLostError, ProtocolError) as error:
            self._end(str(error))
        except Exception as error:  # the thread's last line of defence: whoever waits must learn of it
            logger.exception("skyproxy: a reading thread failed")
            self._end(f"an internal error on the client: {error!r}")

    def _on_reply(self, reply: Reply) -> None:
        if self._trace is not None:
            self._trace.replied(reply.request)
        waiter = self._waiters.take(reply.request)
        if waiter is not None:
            waiter.set(reply.value, tuple(bytes(buffer) for buffer in reply.buffers))

    def failure(self, record: dict[str, Any]) -> RemoteError:
        """The error that a command's failure on the worker is here; names the line that recorded the command."""
        return self._remote_error(record, self._line_of(record))

    def _line_of(self, record: dict[str, Any]) -> str:
        graph = record.get("graph")  # then the position is in that graph's stream
        place = (record["sequence"] if graph is None else -graph, record["position"])
        if place not in self._failed_lines:
            if len(self._failed_lines) >= _REMEMBERED_FAILURES:
                self._failed_lines.pop(next(iter(self._failed_lines)))
            sent = self.recorder.sent(record["sequence"]) if graph is None else self.recordings.get(graph)
            line = describe_line(sent, record["position"], self.recorder.widths) if sent is not None else ""
            self._failed_lines[place] = line
        return self._failed_lines[place]

    def _on_failure(self, failure: Failure) -> None:
        self._downloads.forget(failure.request)
        try:
            line = self._line_of(failure.error)
        except (KeyError, TypeError):  # it does not say where the command stood
            line = ""
        error = self._remote_error(failure.error, line)
        waiter = self._waiters.take(failure.request)
        if waiter is not None:
            waiter.fail(error)

    def _on_warned(self, warned: Warned) -> None:
        place, found = warned.place, None
        with contextlib.suppress(KeyError, TypeError):  # it does not say where the command stood
            graph = place.get("graph")
            sent = self.recorder.sent(place["sequence"]) if graph is None else self.recordings.get(graph)
            found = find_line(sent, place["position"], self.recorder.widths) if sent is not None else None
        self._warnings.add(warned.category, visible(warned.message), found)

    def _on_goodbye(self, goodbye: Goodbye) -> None:
        self._end(f"the worker ended the session: {visible(goodbye.reason or goodbye.code_name)}")

    def _remote_error(self, record: dict[str, Any], user_line: str) -> RemoteError:
        """The error that a worker describes; whatever it says, there is one, for somebody waits for it."""
        name = str(record.get("type", ""))
        foreign = _ERRORS.get(name) or getattr(builtins, name, RuntimeError)
        if not (isinstance(foreign, type) and issubclass(foreign, Exception)) or issubclass(foreign, _NEVER_REBUILT):
            foreign = RuntimeError
        text, op, traceback = (visible(record.get(key) or "") for key in ("message", "op", "traceback"))
        if op:
            text += f"\n  in {op} on the worker"
        if user_line:
            text += f"\n  recorded at {user_line}"
        try:
            error = remote_error_class(foreign)(text)  # type: ignore[arg-type]  # classes are hashable
        except Exception:  # a class that wants more than a text
            error = RemoteError(text)
        error.op, error.user_line, error.remote_traceback = op, user_line, traceback
        if traceback:
            error.add_note("Traceback of the worker:\n" + traceback.rstrip())
        return error

    # --- its end -----------------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Sends what lies around unsent, asks a silent worker whether it lives, gives up on a dead one.

        Never waits for the worker itself, nor for a thread that does.
        """
        interval, patience = self.settings.ping_interval_seconds, self.settings.liveness_timeout_seconds
        seen, unchanged, idle, number = -1, 0, 0.001, 0
        moved, silent_since = -1, time.monotonic()
        liveness = Liveness(patience + interval, max(interval, 1.0), silent_since)
        last_ping = silent_since - interval  # the first at once: it tells how far the worker is
        while not self._stop.wait(idle):
            recorder = self.recorder
            pending = len(recorder.stream)
            # A program that merely pauses between two operations is not cut off there: where it is cut, a loop does not
            # repeat itself. While the worker has enough to do, nothing is lost by waiting longer.
            unchanged = unchanged + 1 if pending == seen else 0
            stale = (pending or recorder.dirty) and unchanged >= (3 if recorder.is_all_executed else 20)
            seen = pending
            idle = 0.001 if pending else min(idle * 2, 0.05)
            try:
                if stale and not recorder.flush_unless_busy():
                    unchanged = 0  # whoever was waiting goes on recording as soon as it can
                now = time.monotonic()
                # Behind a large upload a question would wait; its progress tells as much.
                if now - last_ping >= interval and not self._uploads.busy:
                    number, last_ping = number + 1, now
                    self._asked_at = (number, now)
                    self._bulk.send(Ping(number))
                moved_now = self._operations.bytes_sent + self._operations.bytes_received
                if moved_now != moved:
                    moved, silent_since = moved_now, now
                elif now - silent_since >= interval:
                    silent_since = now
                    for transport in (self._operations, *self.further):
                        transport.keep_alive()  # gateways cut connections that are silent for long
                if liveness.is_gone(now, max(self._last_heard, self._uploads.last_progress)):
                    self._end(f"the worker answered nothing for {patience:g} s")
            except SessionLostError as error:
                self._end(str(error))
            except Exception:  # a failed flush is the recorder's to report, at the next wait
                logger.debug("skyproxy: housekeeping could not flush", exc_info=True)

    def _end(self, reason: str, before_closing: Callable[[], object] = lambda: None) -> None:
        with self._end_lock:
            if self._ended is not None:
                return
            how, log = (None if self._closing else self.explain_end()) or ("", "")
            ended = SessionLostError(
                f"{f'The worker is gone: {how}' if how else reason}. The tensors that lived there are gone; tensors on "
                "the CPU are unharmed. skyproxy.connect(...) puts another session in its place, with the same sky:N; "
                f"after skyproxy.reset() the next use of sky:0 starts anew.{log}"
            )
            ended.process_ended = bool(how)
            self._ended = ended
        self._stop.set()
        self.recorder.end(self._ended)
        self._waiters.end(self._ended)
        self._uploads.end(self._ended)
        before_closing()
        for transport in (self._operations, self._bulk):
            with contextlib.suppress(Exception):
                transport.close()
        for observer in self.at_end:
            observer(self._ended)
        if not self._closing:
            logger.debug("skyproxy: session ended: %s", reason)
        self._on_end()

    def close(
        self, reason: str = "the session was closed", before_closing: Callable[[], object] = lambda: None
    ) -> None:
        """Ends the session; idempotent. Its tensors are gone.

        Args:
            reason: for the errors of those who wait.
            before_closing: called when nobody waits any more, and before the connections are closed in good order,
                which takes a busy worker a moment.
        """
        if self.is_foreign:
            return
        self._closing = True
        with contextlib.suppress(Warning):  # a filter may make an error of one; it comes too late to be raised
            self._warnings.show()
        self._end(reason, before_closing)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.settings.close_timeout_seconds)


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
