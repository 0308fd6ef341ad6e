"""Requests of the layers above to a session: commands to record, questions to answer, tensors to move."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from skyproxy import telemetry, torch_codec
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked, checked_rows
from skyproxy.session import backlog
from skyproxy.session.backlog import Backlog, Backlogs, BacklogWatch
from skyproxy.session.cancelling import Cancelling
from skyproxy.session.downloads import Downloads
from skyproxy.session.failures import FailureReports
from skyproxy.session.progress import in_notebook
from skyproxy.session.recorder import Recorder
from skyproxy.session.signatures import Signatures
from skyproxy.session.trace import SessionTrace
from skyproxy.session.transfer_groups import wait_for_download
from skyproxy.session.transfers import UploadQueue
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.settings import Settings
from skyproxy.torch_codec import Description

AFTER_END = (
    "skyproxy.connect(...) puts another session in its place, with the same sky:N; after skyproxy.reset() the next use "
    "of sky:0 starts afresh."
)
WAIT_OBSERVERS: list[Callable[[str], None]] = []
"""Called before every wait for an answer, with a word for what is waited for."""


class _OutcomeWaits(threading.local):
    """A flag for each thread that tells if it waits for the outcome of an op that it has just recorded."""

    waiting = False


class Requests:
    """The asking side of a session; `Session` has the connections.

    Attributes:
        recorder: where commands are recorded; the dispatcher writes to it directly.
        settings: limits and timeouts.
        round_trips: waits for an answer so far.
        known_signature, signature, structures: see `Signatures`.
        failure: see `FailureReports.error`.
        recordings: captured graphs, by number: commands, and the lines that recorded them.
        cancelling: cancels what the worker has not begun.
        cancels_on_interrupt: whether an interrupt that ends a wait does so.
        backlogs: what the worker has still to do.
    """

    _ended: SessionLostError | None = None
    """The error that ended the session; None while it lives."""

    def __init__(self, settings: Settings, recorder: Recorder, uploads: UploadQueue) -> None:
        self.settings = settings
        self.recorder = self._own_recorder = recorder
        self.round_trips = 0
        self._waiters = Waiters()
        self._outcomes = _OutcomeWaits()
        self._signatures = Signatures(self.recorder, settings.max_signatures)
        self._failures = FailureReports(self.recorder, self._signatures.structures)
        self._downloads = Downloads(self._waiters)
        self._uploads = uploads
        self.cancelling = Cancelling(self.recorder, self._waiters, self._failures)
        self.cancels_on_interrupt = settings.cancel_on_stop if in_notebook() else settings.cancel_on_interrupt
        self.backlogs = Backlogs(self.recorder, self._signatures.structures, self._ask_load)
        self.recorder.wait_for_news = self._wait_for_room
        self._trace: SessionTrace | None = None
        self.known_signature = self._signatures.known
        self.signature = self._signatures.number
        self.structures = self._signatures.structures
        self.failure = self._failures.answer
        self.recordings = self._failures.recordings

    def divert(self, stand_in: Recorder) -> None:
        """Have a stand-in take what is recorded from now on, until `end_diversion`.

        Batches, their acks and failures stay with the session's own recorder.
        """
        self.recorder = stand_in

    def end_diversion(self) -> None:
        """Record with the session's own recorder again; nothing where it does so already."""
        self.recorder = self._own_recorder

    @property
    def recent_errors(self) -> list[dict[str, object]]:
        """The latest errors of the worker, with the lines that caused them; see `FailureReports.recent`."""
        return list(self._failures.recent)

    def line_of(self, place: dict[str, object]) -> str:
        """Return the line that recorded the command at a "sequence" and "position"; empty where that is not known."""
        return self._failures.line_at(place)

    @property
    def bytes_saved(self) -> int:
        """Bytes of uploads that the worker had already."""
        return self._uploads.offers.saved_bytes

    def check(self) -> None:
        """Check that the session goes on.

        Raises:
            SessionLostError: the session is over.
        """
        if self._ended is not None:
            raise self._ended.again()

    # --- commands and questions --------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: object) -> Any:
        """Asks the worker's control `name`, after everything recorded so far; waits for its answer.

        Raises:
            RemoteError: the control failed, or an earlier command did and was not reported yet.
            SessionLostError: the worker is gone.
            ProtocolError: it answered what such a control does not.
        """
        return checked(name, self.request(name, lambda number: (commands.CALL, number, name, list(arguments))))

    def describe(self, purpose: str, slots: list[int], inputs: list[int]) -> list[Any]:
        """Asks what slots hold, and which of the inputs they are views of; waits for the answer.

        Raises:
            RemoteError: what should have made them failed.
            SessionLostError: the worker is gone.
            ProtocolError: what it tells cannot be.
        """
        rows = self.request(purpose, lambda number: (commands.DESCRIBE, number, slots, inputs))
        return checked_rows(purpose, rows, len(slots))

    def do(self, name: str, *arguments: object) -> None:
        """Records the worker's control `name`; does not wait."""
        self.recorder.append(commands.DO, name, list(arguments))

    def request(self, purpose: str, command: Callable[[int], tuple[object, ...]]) -> Any:
        """Records the command that `command` makes of a request number, and waits for its reply."""
        waiter = self.ask(command)
        return self.wait(waiter, purpose)

    def ask(self, command: Callable[[int], tuple[object, ...]], *, send: bool = True) -> Waiter:
        """Records a request; the answer can be waited for once it was sent, here or by who calls."""
        self.check()
        number, waiter = self._waiters.open()
        try:
            self.recorder.append(*command(number))
            if send:
                self.recorder.flush()
        except BaseException:
            self._waiters.abandon(number)
            raise
        return waiter

    def wait(self, waiter: Waiter, purpose: str, *, counted: bool = True) -> Any:
        """The answer of a request, counted as a round trip unless it comes with that of another one."""
        started_ns = time.time_ns() if self._trace is not None else 0
        span = telemetry.begin("skyproxy.wait", purpose=purpose) if counted else None
        outer = sys.exception() if span is not None else None  # raised by a handler that waits
        try:
            if counted:
                self.count_wait(purpose)
            target = waiter.keep_alive
            if isinstance(target, torch.Tensor) and not waiter.done:
                missing = partial(self._downloads.missing_bytes, target)
                return wait_for_download(waiter, target.nbytes, missing, self.settings.show_progress)
            return self._wait_long(waiter)
        except SessionLostError as lost:
            raise lost.again() from None
        except KeyboardInterrupt as interrupt:
            self.on_interrupt(interrupt)
            raise
        finally:
            if span is not None:
                telemetry.end(span, "" if (error := sys.exception()) is outer else type(error).__name__)
            if counted:
                self.recorder.reset_batch_limit()
            if self._trace is not None and started_ns:
                self._trace.add("wait", purpose, started_ns)
            if self._failures.warnings.pending:
                self._failures.warnings.show()

    def _wait_long(self, waiter: Waiter) -> object:
        """Wait for what comes behind all that the worker has to do; show what that is, if it takes long."""
        if not self.settings.show_progress or waiter.done_within(backlog.PATIENCE_SECONDS):
            return waiter.wait()
        with BacklogWatch(self.backlogs) as watch:
            return watch.wait(waiter)

    def _wait_for_room(self, waiter: Waiter) -> None:
        try:
            self._wait_long(waiter)
        except KeyboardInterrupt as interrupt:
            self.on_interrupt(interrupt)
            raise

    @shielded
    def on_interrupt(self, interrupt: BaseException) -> None:
        """Cancel what the worker has not begun, because the program was interrupted; say so in a note."""
        if not self.cancels_on_interrupt:
            return
        before = self.backlogs.read()
        if self.cancelling.cancel():
            interrupt.add_note(
                f"skyproxy: cancelled what {before.device} had not begun, of {before.operations:,} operations. "
                "Values that depend on it raise CancelledOperationError; everything else is unchanged."
            )

    def backlog(self, timeout_seconds: float = 2.0) -> Backlog:
        """Return what the worker has to do; asks it past its operations, and waits for no longer than that."""
        return self.backlogs.read(backlog.load_now(self.backlogs, timeout_seconds))

    def _ask_load(self) -> Waiter:
        """Ask what the worker does; a session without a bulk connection never learns."""
        return Waiter()

    def count_wait(self, purpose: str) -> None:
        """Somebody is about to wait for the worker."""
        self.round_trips += 1
        for observer in WAIT_OBSERVERS:
            observer(purpose)

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

    # --- tensors -----------------------------------------------------------------------------------------------------

    def fetch(self, slot: int, description: Description) -> torch.Tensor:
        """The values of a slot as a new CPU tensor, in the strides of `torch_codec.packed_stride`.

        Raises:
            RemoteError: the value is poisoned; the error of the op that failed.
            SessionLostError: the worker is gone.
        """
        return self.fetched(self.start_fetch(slot, description), description)

    def start_fetch(self, slot: int, description: Description, *, send: bool = True) -> Waiter:
        """Asks for the values of a slot without waiting; `fetched` gives them, once the question was sent.

        Args:
            slot: whose values.
            description: what the slot holds.
            send: whether to send what was recorded; who asks for many at once sends when all are recorded.
        """
        count = torch_codec.byte_count(description)
        if count <= self.settings.max_inline_bytes:
            return self.ask(lambda number: (commands.FETCH, number, slot, 0), send=send)
        target = torch_codec.empty_packed(description)
        self.check()
        number, waiter = self._waiters.open(keep_alive=target)
        self._downloads.open(number, target)
        try:
            self.recorder.append(commands.FETCH, number, slot, number)
            if send:
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
            if [len(buffer) for buffer in waiter.buffers] != [len(view)]:
                raise ProtocolError(f"the worker answered with other bytes than the {len(view)} that were asked for")
            view[:] = waiter.buffers[0]
        return target

    def upload(self, slot: int, tensor: torch.Tensor, device: list[object]) -> None:
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

    # --- profiling ---------------------------------------------------------------------------------------------------

    def start_trace(self) -> SessionTrace:
        """From now on, what leaves and comes is noted; see `skyproxy.profiling`."""
        self._trace = self._uploads.trace = self._downloads.trace = SessionTrace()
        return self._trace

    def stop_trace(self) -> None:
        """Nothing is noted any more."""
        self._trace = self._uploads.trace = self._downloads.trace = None
