"""Protection of a session against the end of its worker: snapshots there, a log here, and recovery from the two."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from skyproxy.errors import ConfigurationError, SessionLostError, say, visible
from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.digests import BLAKE3, SHA256
from skyproxy.protocol.messages import Batch, Buffer, NamedBatch, Repeat, Sequence, Welcome
from skyproxy.session.batch_log import BatchLog, Hole, KeptUpload, unrepeatable
from skyproxy.session.handover import Bring, Fresh, Handover, OpenAnew, PreparedMove
from skyproxy.session.recorder import Recorder
from skyproxy.session.restoring import NewSession, ReplayProgress, WorkerEndedError, load_newest
from skyproxy.session.suspension import Suspension
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.session.worker_warnings import ToldWarnings

logger = logging.getLogger("skyproxy.session")

_RETRY_SECONDS = 1.0
"""The time after which a snapshot that was refused is asked for again."""
_LOG_SHARE = 0.75
"""The part of the log's bound from which a snapshot is due."""
_LOOK_SECONDS = 0.005


class _Snapshot(Waiter):
    """A snapshot that the worker was asked for; its answer is dealt with by the thread that reads it."""

    __slots__ = ("on_end", "request", "sequence", "unanswered")

    def __init__(self, on_end: Callable[[_Snapshot], object]) -> None:
        super().__init__()
        self.on_end = on_end
        self.request = 0
        self.sequence = 0
        self.unanswered: frozenset[int] = frozenset()

    def set(self, value: object, buffers: tuple[Buffer, ...] = ()) -> None:
        super().set(value, buffers)
        self.on_end(self)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.on_end(self)


class Protection:
    """Keeps a session's log, asks its worker for snapshots, and has another worker go on where that one ended.

    Attributes:
        every_seconds: the interval of snapshots; infinite where they are taken by steps only.
        every_steps: the optimizer steps between two; 0 where they are taken by time only.
        log: what was sent since the last of them.
        recoveries: how often another worker went on.
        snapshots: how many are durable so far.
        last_error: why the last snapshot was refused, if it was.
        on_recovered: called when another worker has taken over.
        name: the name of the snapshots on the worker.
        is_moving: whether another worker is being prepared to go on with the session.
        patience_seconds: how long to try to reach a worker that does not refuse before another one is asked for.
        stall_seconds: how long recording waits, at the bound of the log, for a worker that does not answer.
        is_passing: whether it ends when the session has a worker again, for only a suspension needs it.
        suspension: whether the session is without a worker now, and needs none.
        told: the warnings that the program has heard of.
        hash_wish: the hash by which snapshots name their pieces, where the worker has it.
    """

    def __init__(
        self,
        recorder: Recorder,
        waiters: Waiters,
        log: BatchLog,
        name: str,
        open_anew: OpenAnew,
        *,
        every_seconds: float,
        every_steps: int = 0,
    ) -> None:
        """Protect one session.

        Args:
            recorder: what is protected.
            waiters: the session's open questions.
            log: an empty one.
            name: the name of the snapshots on the worker.
            open_anew: finds a worker.
            every_seconds, every_steps: when snapshots are due.
        """
        self.every_seconds, self.every_steps = every_seconds, every_steps
        self.log = log
        self.recoveries = self.snapshots = 0
        self.last_error: BaseException | None = None
        self.on_recovered: Callable[[Welcome], object] = lambda welcome: None
        self.cut_bulk: Callable[[int], object] = lambda recoveries: None
        self.cut_operations: Callable[[int], object] = lambda recoveries: None
        self.cut_operations_if: Callable[[Callable[[], bool]], object] = lambda is_wanted: None
        self.name, self.hash_wish = name, BLAKE3
        self._recorder = recorder
        self._waiters = waiters
        waiters.may_repeat = True  # what came behind a snapshot, the next worker does and answers once more
        self._open_anew = open_anew
        self._pending: _Snapshot | None = None
        self._asked: _Snapshot | None = None
        self._complete: _Snapshot | None = None
        self._steps = 0
        self._last_begun = time.monotonic()
        self._retry_at = 0.0
        self._wanted = False
        self._unrepeatable_names: dict[int, str] = {}
        self._progress = ReplayProgress()
        self._is_off = False
        self.is_moving = self.is_passing = False
        self.suspension = Suspension(recorder, waiters)
        self._late_holes: list[Hole] = []
        self._prepared: PreparedMove | None = None
        self._preparing = threading.Lock()
        self._moved = Waiter()
        self._handover: Handover | None = None
        self.patience_seconds = self.stall_seconds = math.inf
        self._is_settled = threading.Event()  # no other worker is taking over now
        self._is_settled.set()
        self.told = ToldWarnings()

    # --- the log -----------------------------------------------------------------------------------------------------

    def note(self, batch: Batch | NamedBatch | Repeat) -> None:
        """Log a batch that is about to be sent, on the thread that records."""
        self.log.add(batch.sequence, batch)
        if isinstance(batch, Repeat):
            reason = self._unrepeatable_names.get(batch.name, "")
        else:
            reason = unrepeatable(batch.stream, self._recorder.widths)
            if isinstance(batch, NamedBatch):
                self._unrepeatable_names.pop(batch.name, None)
                if reason:
                    self._unrepeatable_names[batch.name] = reason
        if reason and self.suspension.is_on:
            self._late_holes.append(Hole(batch.sequence, reason))  # no worker has done it yet
        elif reason:
            self.log.puncture(batch.sequence, reason)
            self._wanted = True

    def keep_upload(self, transfer: int, view: memoryview) -> KeptUpload | None:
        """Copy an upload's bytes into the log; None where it is larger than what the log may hold."""
        if len(view) > self.log.max_bytes:
            return None
        self._make_room(len(view))
        return self.log.keep(transfer, view)

    def note_upload(self, transfer: int, kept: KeptUpload | None) -> None:
        """Take note that an upload was announced, by the newest batch at the latest."""
        if kept is not None:
            self.log.announced(transfer, self._recorder.batches)
        else:
            self.log.puncture(
                self._recorder.batches, "an upload was larger than SKYPROXY_MAX_LOG_BYTES, or began before"
            )
            self._wanted = True

    def _make_room(self, byte_count: int) -> None:
        """Wait until the log has room for so many bytes more; go on without a log where that cannot be."""
        begun, until = False, time.monotonic() + self.stall_seconds
        while not self._is_off and self.log.byte_count + byte_count > self.log.max_bytes:
            if self._pending is None and not self.is_moving:
                if begun and self.last_error is not None:
                    self._give_up_log()
                    return
                begun = self.try_snapshot() or begun
            elif time.monotonic() >= until:
                self._give_up_log()
                return
            # By looks: another thread may be recording, and an answer may be complete with a download only.
            waited_for = self._pending or Waiter()
            waited_for.done_within(_LOOK_SECONDS)
            self._settle()

    def _give_up_log(self) -> None:
        if self.log.last:
            why = f": {self.last_error}" if self.last_error is not None else ""
            say(
                f"no snapshot could be taken while {self.log.max_bytes:,} bytes were logged (SKYPROXY_MAX_LOG_BYTES)"
                f"{why}. The session goes on, and is not protected until the next snapshot."
            )
        self.log.forget()
        self._wanted = True

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def on_sent(self) -> None:
        """Begin a snapshot if one is due; called on the thread that records, between two batches."""
        if self._pending is None and self._is_due():
            self.try_snapshot()
        if self.log.byte_count > self.log.max_bytes:
            self._make_room(0)

    def on_step(self) -> None:
        """Count a step of an optimizer, and begin a snapshot if one is due."""
        self._steps += 1
        if self._pending is None and self._is_due():
            self.try_snapshot()

    def tick(self) -> None:
        """Begin a snapshot if one is due in a program that does nothing at the moment; look after the last one."""
        self._settle()
        self.suspension.look()
        if self._pending is None and self._is_due() and self._recorder.batches > max(self.log.starts(), default=0):
            self.try_snapshot()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self._is_off or self.is_moving or self.suspension.is_on or now < self._retry_at:
            return False
        if self._wanted or (self.every_steps and self._steps >= self.every_steps):
            return True
        return now - self._last_begun >= self.every_seconds or self.log.byte_count >= _LOG_SHARE * self.log.max_bytes

    def try_snapshot(self) -> bool:
        """Ask the worker for a snapshot; return False, with nothing done, where that would have to wait."""
        if self._pending is not None or self._is_off:
            return False
        return self._recorder.try_to_begin_anew(self._begin)

    @shielded
    def _begin(self, sequence: Sequence) -> Batch:
        snapshot = _Snapshot(self._on_answer)
        snapshot.unanswered = self._waiters.open_numbers()
        snapshot.sequence = sequence
        snapshot.request = self._waiters.open_for(snapshot)
        self._unrepeatable_names.clear()
        self.log.begin(sequence)
        self._steps, self._wanted, self._last_begun = 0, False, time.monotonic()
        self._pending = self._asked = snapshot
        return Batch(
            sequence, [commands.CALL, snapshot.request, "save_snapshot", [self.name, None, b"", self.hash_wish]]
        )

    def snapshot(self) -> dict[str, Any]:
        """Take a snapshot, and wait until it is durable.

        Returns:
            What the worker says of it: "snapshot", "sequence", "bytes", "written_bytes".

        Raises:
            RemoteError: the worker refused; the one before is as good as it was.
            SessionLostError: the session is over.
            ProtocolError: what the worker says is no snapshot.
        """
        begun = self._pending
        while begun is not None or not self.try_snapshot():
            (begun or Waiter()).done_within(_LOOK_SECONDS)  # another thread may be recording
            self._recorder.check()
            begun = self._pending
        asked = self._asked
        assert asked is not None
        return dict(checked("save_snapshot", asked.wait()))

    def _on_answer(self, snapshot: _Snapshot) -> None:
        if snapshot.error is not None:
            self.last_error = snapshot.error
            self.log.fail(snapshot.sequence)
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._wanted = True
            logger.debug("skyproxy: no snapshot: %s", snapshot.error)
            self._pending = None
            return
        self.last_error = None
        self.snapshots += 1
        self._complete = snapshot
        self._settle()
        self._pending = None

    def _settle(self) -> None:
        """Drop the log before the last snapshot, once every question before it is answered: it may have to be done
        again for a download that is under way.
        """
        complete = self._complete
        if complete is not None and not complete.unanswered & self._waiters.open_numbers():
            self._complete = None
            self.log.commit(complete.sequence)

    def stop(self) -> None:
        """Take no more snapshots, and keep no log."""
        self._is_off = True
        self.suspension.wake()
        self._moved.fail(SessionLostError("the session ended while it was moved"))
        self._is_settled.set()
        self.log.forget()

    def wait_until_settled(self) -> None:
        """Wait until a worker that is taking over has done so; nothing else would be left of the session."""
        self._is_settled.wait()

    # --- moving ------------------------------------------------------------------------------------------------------

    def move(self, opened: NewSession, on_moved: Callable[[], object], bring: Bring) -> None:
        """Have another worker go on; wait until it does.

        Args:
            opened: an empty session on that worker.
            on_moved: called before anything is sent to it.
            bring: sees to it that it finds the snapshot.

        Raises:
            RemoteError: this worker takes no snapshot now; nothing has changed.
            ConfigurationError: that worker cannot restore it; nothing has changed.
            SessionLostError: the session has ended.
        """
        self._moved = moved = Waiter()
        self.is_moving = True
        self.hash_wish = BLAKE3 if opened.welcome.limits.get("blake3") else SHA256  # what that worker can read
        try:
            taken = self.snapshot()
            bring(self.name, str(taken["snapshot"]), int(taken["sequence"]))
            try:
                start, _ = load_newest(opened, self.name, self.log, self._usable_starts(), "the session was not moved")
            except SessionLostError as problem:
                raise ConfigurationError(f"{problem}. It goes on where it was.") from problem
            self._prepared = PreparedMove(opened, start, on_moved, moved)
            self.cut_operations_if(lambda: self.is_leaving)
            moved.wait()
        finally:
            self._take_prepared()
            self.is_moving, self.hash_wish = False, BLAKE3

    @property
    def is_leaving(self) -> bool:
        """True if another worker is ready, and waits for the operations connection to this one to be replaced."""
        return self._prepared is not None

    def _take_prepared(self) -> PreparedMove | None:
        with self._preparing:  # who moves may be interrupted while the thread of the operations leaves
            prepared, self._prepared = self._prepared, None
        return prepared

    def leave(self, abandon: Callable[[], object]) -> tuple[Fresh, Fresh] | None:
        """Return the operations and the bulk connection to the worker that the session moves to.

        Args:
            abandon: called before that is where the session is.

        Returns:
            None where no worker is ready, or what came since its snapshot cannot be done there, which is told.
        """
        prepared = self._take_prepared()
        if prepared is None or not prepared.can_be_made(self.log):
            return None
        abandon()
        handover = self._begin_handover(prepared.moved)
        self.on_recovered(prepared.opened.welcome)
        prepared.on_moved()
        return Fresh.pair(prepared.opened, prepared.start, handover)

    def _begin_handover(self, moved: Waiter | None) -> Handover:
        before = self._handover
        if moved is None and before is not None and not before.is_complete:
            moved = before.moved  # the worker that the session had moved to did not live to have all of it
        self._is_settled.clear()
        self._handover = handover = Handover(self._on_complete, moved)
        return handover

    def _on_complete(self, handover: Handover) -> None:
        if handover is not self._handover:
            return  # that worker is gone by now
        if handover.moved is not None:
            handover.moved.set(None)
        self._is_settled.set()
        if self.suspension.is_on:
            self._end_suspension()

    # --- suspending --------------------------------------------------------------------------------------------------

    @property
    def is_suspended(self) -> bool:
        """True if the session is without a worker now, and needs none."""
        return self.suspension.is_on

    @property
    def has_gone_on(self) -> bool:
        """True if another worker has all that it needs of a session that was suspended."""
        return self.suspension.has_ended

    def can_be_suspended(self, sequence: int) -> bool:
        """Return whether the session can go on from this snapshot or a later one, whatever it was asked since."""
        durable = self.log.durable
        return durable is not None and durable >= sequence and self.log.hole_after(durable) is None

    def suspend(self) -> None:
        """Need no worker until something is wanted; call it between two batches, when that can be."""
        self.suspension.begin()

    def _end_suspension(self) -> None:
        holes, self._late_holes = self._late_holes, []
        self.suspension.end()
        for hole in holes:
            self.log.puncture(hole.sequence, hole.reason)
            self._wanted = True

    def _wait_until_wanted(self) -> None:
        """Wait until the program needs a worker again; raises SessionLostError if the session is over."""
        self.suspension.wait()
        if self._is_off:
            raise SessionLostError("the session was closed")
        self._progress.begin_anew()

    # --- recovery ----------------------------------------------------------------------------------------------------

    def recover(self, reason: str, stop: threading.Event) -> tuple[Fresh, Fresh]:
        """Have another worker restore the newest snapshot that it can, for the log behind it to be done again.

        Raises:
            SessionLostError: there is no such worker, or no such snapshot; or the session is over.
        """
        if self.suspension.is_on:
            self._wait_until_wanted()
        handover = self._begin_handover(None)
        try:
            return self._recover(reason, stop, handover)
        except BaseException as error:
            left = self.leave(lambda: None) if isinstance(error, SessionLostError) else None
            if left is None:
                self._is_settled.set()
                raise
            return left

    def _recover(self, reason: str, stop: threading.Event, handover: Handover) -> tuple[Fresh, Fresh]:
        if not self.suspension.is_on:
            recorder = self._recorder
            self._progress.note_end(recorder.batches - len(recorder.sent_batches()), reason)
        while not stop.is_set():
            self._check_log(reason)
            opened = self._open_anew(reason, stop)
            try:
                start, answer = load_newest(opened, self.name, self.log, self._usable_starts(), reason)
            except SessionLostError as lost:
                opened.close()
                if not isinstance(lost.__cause__, WorkerEndedError):
                    raise
                logger.debug("skyproxy: a worker ended while it loaded a snapshot: %s", lost)
                stop.wait(_RETRY_SECONDS)
                continue
            self._note_durable(start, answer)
            self.recoveries += 1
            self.on_recovered(opened.welcome)
            if self.suspension.is_on:
                say(f"the session goes on; it was suspended for {self.suspension.seconds:.0f} s.")
            else:
                why = visible(reason.removeprefix("The worker is gone: ").removeprefix("The session is lost: "))
                say(
                    f"the worker is gone ({why}). Another one goes on from the last snapshot; "
                    f"{max(self.log.last - start, 0):,} batches of operations since then are executed again."
                )
            return Fresh.pair(opened, start, handover)
        raise SessionLostError("the session was closed")

    def _note_durable(self, start: int, answer: dict[str, object]) -> None:
        """Answer whoever waits for the snapshot that was loaded, if the worker that took it did not come to that."""
        pending = self._pending
        if pending is not None and pending.sequence == start and self._waiters.take(pending.request) is pending:
            pending.set(answer)

    def _check_log(self, reason: str) -> None:
        starts = self._usable_starts()
        if not starts:
            raise SessionLostError(f"{reason}; and there was no snapshot yet to go on from")
        hole = self.log.hole_after(starts[0])
        if hole is not None and all(self.log.hole_after(start) for start in starts):
            raise SessionLostError(f"{reason}; and since the last snapshot {hole.reason}, which cannot be done again")

    def _usable_starts(self) -> list[int]:
        """Return the batches of snapshots that have all that was answered before them, the newest first."""
        pending, complete = self._pending, self._complete
        unanswered = self._waiters.open_numbers()
        missing = {item.sequence for item in (pending, complete) if item is not None and item.unanswered & unanswered}
        return [start for start in self.log.starts() if start not in missing]

    def replay(self, fresh: Fresh, before: Connection) -> None:
        """Send what is logged behind the snapshot, and take note of it on the new connection."""
        link, start, handover = fresh.link, fresh.start, fresh.handover
        assert start is not None
        assert handover is not None
        kept = before.kept_batches()
        for sequence, message, size in self.log.batches_after(start, before.last_sequence):
            # What may be sent again by a program that was interrupted is known by the very object.
            same = message if self.log.is_blank(sequence) else kept.get(sequence, message)
            link.connection.on_send(same, size)
            link.repeat(same)
        handover.note_part()
