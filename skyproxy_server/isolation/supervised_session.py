"""One session's process, seen from the supervisor: its orders, its reports, its end."""

from __future__ import annotations

import hmac
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

from skyproxy.protocol.messages import BULK, OPERATIONS, Hello, Welcome
from skyproxy.transport.stream import remaining
from skyproxy_server.auth import Identity
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.endings import ProcessEnding
from skyproxy_server.isolation.session_log import SessionLog
from skyproxy_server.isolation.session_words import Allowance, ProcessReport, count, seconds
from skyproxy_server.isolation.slots import ConnectionSlots
from skyproxy_server.isolation.uploads import UploadDesk
from skyproxy_server.status import checked_row

logger = logging.getLogger("skyproxy.server")

FORK_SECONDS = 30.0
REAP_SECONDS = 5.0
_HANG_SECONDS = 10.0
_SPARE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Resume:
    """The way in which a client comes back to a session whose connection broke.

    Attributes:
        grace_seconds: how long the session is kept for it; 0: not at all.
        secret: what it shows.
    """

    grace_seconds: float = 0.0
    secret: bytes = field(default=b"", repr=False)

    def is_known(self, secret: bytes) -> bool:
        """Return whether this is the secret, in a time that tells nothing of it."""
        return hmac.compare_digest(self.secret, secret) and bool(self.secret)


class SupervisedSession:
    """A session's process, seen from the supervisor.

    Attributes:
        identity: the session's name.
        client: whose it is.
        pid: its process.
        pidfd: readable once the process has ended.
        ended: set when it has ended; then `ending` says how.
        commands: how many commands it has executed, as far as is known.
        slots: the memory that it shares with us.
        resume: how its client comes back after its connection broke.
        detached_at: since when it has no operations connection, and is kept; None while it has one, or is over.
    """

    def __init__(
        self,
        identity: str,
        client: Identity,
        pid: int,
        control: ControlChannel,
        slots: ConnectionSlots,
        uploads: tuple[ControlChannel, UploadDesk] | None,
        on_end: Callable[[SupervisedSession], None],
        on_message: Callable[[SupervisedSession, dict[str, object]], bool],
        resume: Resume = Resume(),
        log: SessionLog | None = None,
    ) -> None:
        self.identity = identity
        self.client = client
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.ended = threading.Event()
        self.ending = ProcessEnding()
        self.commands = 0
        self.idle_seconds = 0.0
        self.is_open = True
        self.slots = slots
        self._control = control
        self._uploads = uploads
        self._log = log
        self._on_end = on_end
        self._on_other = on_message
        self._why = ""
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._asked = 0
        self._report: ProcessReport | None = None
        self._unanswered: set[tuple[str, int]] = set()
        """Questions that its process was asked, and has not answered: a word of the order, and a number."""
        self._saved: dict[int, tuple[int, int]] = {}
        self._roles: set[str] = set()
        self._begun = threading.Event()
        self.resume = resume
        self.detached_at: float | None = None
        self._operations = 0
        self._preparing = 0
        self._prepared: dict[int, dict[str, Any] | None] = {}
        self._grace: threading.Timer | None = None
        self._users = 1
        self._is_over_told = False
        self._is_reaped = False
        self._watchdog: threading.Timer | None = None
        threading.Thread(target=self._watch, name=f"skyproxy-watch-{identity[:8]}", daemon=True).start()

    # --- connections ---------------------------------------------------------------------------------------------

    def claim(self, role: str, secret: bytes = b"") -> bool:
        """Reserve a connection of this role; False if the session is over, or has had one and this is not its secret.

        Whoever has claimed one calls `release` when the connection is over.
        """
        with self._lock:
            if not self.is_open or (role in self._roles and not self.resume.is_known(secret)):
                return False
            if role in (OPERATIONS, BULK):
                self._roles.add(role)
            if role == OPERATIONS:
                self._operations += 1
                self.detached_at = None
                if self._grace is not None:
                    self._grace.cancel()
            self._users += 1
            return True

    def prepare(self, timeout_seconds: float) -> tuple[int, int] | None:
        """Have the process let go of its operations connection, for its client has come on another one.

        Returns:
            The number of this attempt and the newest batch that came; None where the process refuses.

        Raises:
            TimeoutError: it does not answer now.
        """
        if not self._begun.wait(timeout_seconds):
            raise TimeoutError("the session has not begun")
        with self._lock:
            self._preparing += 1
            number = self._preparing
            self._prepared[number] = None
        try:
            self._question("prepare", number, {"secret": self.resume.secret})
            with self._answered:
                self._answered.wait_for(lambda: self.ended.is_set() or self._prepared[number], timeout_seconds)
                answer = self._prepared[number]
        except ChannelClosedError:
            return None
        finally:
            with self._lock:
                del self._prepared[number]
        if answer is None:
            if self.ended.is_set():
                return None
            raise TimeoutError("the session's process does not answer now")
        return (answer["attempt"], answer["received"]) if "attempt" in answer else None

    def hand_over(
        self, descriptor: int, slot: int, hello: Hello, welcome: Welcome, received: bytes, attempt: int = 0
    ) -> None:
        """Give the process a copy of a connection: that of the operations first, whatever comes first.

        Raises:
            ChannelClosedError: it takes none any more.
        """
        if hello.role != OPERATIONS and not self._begun.wait(FORK_SECONDS):
            raise ChannelClosedError("the session has no operations connection")
        order = {
            "order": "connection",
            "role": hello.role,
            "slot": slot,
            "hello": list(astuple(hello)),
            "welcome": list(astuple(welcome)),
            "received": received,
            "attempt": attempt,
        }
        try:
            self._control.send(order, [descriptor], wait=False)
        finally:
            if hello.role == OPERATIONS:
                self._begun.set()

    def order(self, message: dict[str, object], descriptors: Iterable[int] = ()) -> None:
        """Send an order without waiting for room.

        Raises:
            ChannelClosedError: the process takes none any more.
        """
        self._control.send(message, list(descriptors), wait=False)

    def close_connections(self, code_name: str, reason: str) -> None:
        """Have the process say goodbye to its client."""
        with suppress(ChannelClosedError):
            self._control.send({"order": "close", "code": code_name, "reason": reason}, wait=False)

    def announce_leaving(self, seconds: float) -> None:
        """Have the process tell its client that the worker ends."""
        with suppress(ChannelClosedError):
            self._control.send({"order": "leave", "milliseconds": int(seconds * 1000)}, wait=False)

    # --- names ---------------------------------------------------------------------------------------------------

    def save_names(self, *, lets_go: bool = False) -> int:
        """Have the process save what is under names and used by no client, or let go of it; returns the question's
        number.
        """
        with self._lock:
            self._asked += 1
            number = self._asked
        with suppress(ChannelClosedError):
            self._question("let-go" if lets_go else "save", number, {})
        return number

    def saved_names(self, number: int, deadline: float) -> tuple[int, int] | None:
        """Return how many were saved, and how many could not be; None where no answer comes before `deadline`."""
        with self._answered:
            self._answered.wait_for(lambda: self.ended.is_set() or number in self._saved, remaining(deadline))
            return self._saved.pop(number, None)

    # --- reports -------------------------------------------------------------------------------------------------

    @property
    def row(self) -> dict[str, Any]:
        """Its row in the web view, as its process said it the last time."""
        with self._lock:
            said = None if self._report is None else self._report.row
        row = checked_row(said, self.identity, self.client)
        return row if self.is_open else {**row, "state": "over"}

    def ask(self, *, rows: bool = False) -> int:
        """Ask for a report; returns the number that it will have.

        Args:
            rows: whether reports tell of the session, too, from now on.
        """
        with self._lock:
            self._asked += 1
            number = self._asked
        with suppress(ChannelClosedError):
            self._question("report", number, {"rows": rows})
        return number

    def _question(self, word: str, number: int, fields: dict[str, object]) -> None:
        """Send an order that is answered once.

        Raises:
            ChannelClosedError: the process takes none any more.
        """
        with self._lock:
            self._unanswered.add((word, number))
        try:
            self._control.send({"order": word, "number": number, **fields}, wait=False)
        except ChannelClosedError:
            with self._lock:
                self._unanswered.discard((word, number))
            raise

    def answer(self, number: int, deadline: float) -> ProcessReport | None:
        """The report of this number or a later one; None where it does not come before `deadline`."""
        with self._answered:
            self._answered.wait_for(
                lambda: self.ended.is_set() or (self._report is not None and self._report.number >= number),
                remaining(deadline),
            )
            report = self._report
        return report if report is not None and report.number >= number else None

    def operations_left(self, call_grace_seconds: float, on_detach: Callable[[], object]) -> None:
        """One of its operations connections is over; with the last the session is, or it is kept for a while."""
        with self._lock:
            self._operations -= 1
            if self._operations:
                return
            is_kept = self.resume.grace_seconds > 0 and self.is_open
            if is_kept:
                self.detached_at = time.monotonic()
                # The process watches the time itself; this is for one that does not.
                patience = self.resume.grace_seconds + _SPARE_SECONDS
                self._grace = threading.Timer(patience, self._end_detached, (call_grace_seconds,))
                self._grace.daemon = True
                self._grace.start()
        if is_kept:
            on_detach()
        else:
            self.operations_ended(call_grace_seconds)

    def _end_detached(self, call_grace_seconds: float) -> None:
        if self.detached_at is not None:
            self.expire(call_grace_seconds)

    def expire(self, call_grace_seconds: float) -> None:
        """End a session that has no operations connection."""
        with suppress(ChannelClosedError):
            self._control.send({"order": "expire"}, wait=False)
        self.operations_ended(call_grace_seconds)

    def operations_ended(self, grace_seconds: float) -> None:
        """The session is over, whatever its process does; it may go on for so long, and then as long as it answers."""
        with self._lock:
            self.is_open, self.detached_at = False, None
            if self.ended.is_set() or self._watchdog is not None:
                return
            self._watchdog = threading.Timer(grace_seconds, self._end_if_hung)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _end_if_hung(self) -> None:
        if self.answer(self.ask(), time.monotonic() + _HANG_SECONDS) is None:
            self.kill("its client is gone, and it hangs")

    # --- the end -------------------------------------------------------------------------------------------------

    def kill(self, reason: str) -> None:
        """End the process now, whatever it does; its client is told why."""
        with self._lock:
            if self.ended.is_set():
                return
            self._why = self._why or reason
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def while_unreaped(self, act: Callable[[int], None]) -> None:
        """Call with the process id, unless it may belong to another process already."""
        with self._lock:
            if not self._is_reaped:
                act(self.pid)

    def _watch(self) -> None:
        answers: dict[int, Callable[[], object]] = {self._control.fileno(): self._on_message}
        if self._uploads is not None:
            channel, desk = self._uploads
            answers[channel.fileno()] = partial(desk.answer, channel)
        poll = select.poll()
        if self._log is not None:
            answers[self._log.fileno()] = partial(self._take_output, self._log, poll)
        for descriptor in (self.pidfd, *answers):
            poll.register(descriptor, select.POLLIN)
        allowance = Allowance()
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self.pidfd in ready or self._ends_within(allowance.pause_seconds()):
                break
            for descriptor in ready:
                try:
                    answers[descriptor]()
                except TimeoutError:
                    continue
                except Exception as error:  # whatever was said: who waits for the process's end must not end
                    poll.unregister(descriptor)
                    logger.debug("session %s: a channel of it ended: %r", self.identity[:8], error)
                    # Without its channels nobody could tell it anything; it may be ending by itself.
                    if not self._ends_within(REAP_SECONDS):
                        self.kill("it broke its control channel")
        self._reap()

    def _take_output(self, log: SessionLog, poll: select.poll) -> None:
        if not log.take():  # all that could write have closed it, and may live
            poll.unregister(log.fileno())

    def _ends_within(self, limit_seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return limit_seconds > 0 and bool(poll.poll(limit_seconds * 1e3))

    def _on_message(self) -> None:
        message, descriptors = self._control.receive(0)
        for descriptor in descriptors:
            os.close(descriptor)
        if message.get("over") and not self._is_over_told:
            commands, idle_seconds = count(message.get("commands")), seconds(message.get("idle_seconds"))
            with self._lock:
                self._is_over_told = True
                self.is_open, self.detached_at = False, None
                self.commands, self.idle_seconds = commands, idle_seconds
            self._control.send({"order": "wake"}, wait=False)
            self._on_other(self, message)
        elif "report" in message:
            report = ProcessReport.parse(message)
            with self._answered:
                self._take_question("report", report.number)
                self._report = report
                self.commands = report.commands
                self._answered.notify_all()
        elif "prepared" in message:
            self._note_prepared(message)
        elif "saved" in message:
            self._note_saved(message)
        elif not self._on_other(self, message):
            raise ValueError("a message that nobody asked for")

    def _note_prepared(self, message: dict[str, Any]) -> None:
        number = count(message["prepared"])
        answer: dict[str, object] = {"prepared": number}
        if "attempt" in message:
            answer.update(attempt=count(message["attempt"]), received=count(message.get("received")))
        with self._answered:
            self._take_question("prepare", number)
            if number in self._prepared:
                self._prepared[number] = answer
                self._answered.notify_all()

    def _note_saved(self, message: dict[str, Any]) -> None:
        number, said = count(message["saved"]), (count(message.get("count")), count(message.get("failed")))
        with self._answered:
            word = "save" if ("save", number) in self._unanswered else "let-go"
            self._take_question(word, number)
            self._saved[number] = said
            self._answered.notify_all()

    def _take_question(self, word: str, number: int) -> None:
        """Take note that a question is answered.

        Raises:
            ValueError: nobody asked it, or the answer has come already.
        """
        if (word, number) not in self._unanswered:
            raise ValueError(f"an answer to {word} {number}, which nobody waits for")
        self._unanswered.discard((word, number))

    def _reap(self) -> None:
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        # Before the process is waited for: until then its number, which is its group's too, belongs to nobody else.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with self._lock:
            os.waitpid(self.pid, 0)  # at once, for it has ended
            self._is_reaped = True
        with self._answered:
            self.ending = ProcessEnding.of(result, self._why)
            self.is_open, self.detached_at = False, None
            self.ended.set()
            for timer in (self._watchdog, self._grace):
                if timer is not None:
                    timer.cancel()
            self._answered.notify_all()
        self._control.close()
        if self._uploads is not None:
            channel, desk = self._uploads
            channel.close()
            desk.close()
        if self._log is not None:
            self._log.close()
        self._on_end(self)
        self.release()

    def release(self) -> None:
        """Let go of it; with the last user go the descriptors."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self.pidfd)
            self.slots.close()
