"""Numbers that come along with one that is waited for, because a loop asked for them together before.

A training step reads its loss, its accuracy and the norm of its gradients, each by `.item()`. All of them were computed
when the first is asked for, but who asks for that one does not say so. In a loop that has settled each of them lies in
the same slot every time (see `Recorder.free`). So where one number is waited for after another, and was there already
when that one was, it comes along the next time: one wait for all.

What came along is used once, and only where the stream of commands proves that it is right: it is still whole since the
question, holds nothing but ops that change nothing, and none of them made what is in the slot now. Whatever was sent in
between, or could not be read, is taken for a change.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked
from skyproxy.session.recorder import Recorder
from skyproxy.tensor.dispatch.op_info import info_named

if TYPE_CHECKING:
    from skyproxy.session.session import Session
    from skyproxy.tensor.core.devices import Handle

Number = bool | int | float
_MOST_LEADERS = 256
_MOST_COMPANIONS = 32
_MOST_LOOKED_THROUGH = 4096
"""Items of the stream that are looked through after a question; what lies behind more is waited for."""
_MOST_USELESS = 3
"""Times that a number comes along in vain before it comes no more."""
_FEW_ITEMS = 256
_SELDOM = 8
"""Waits behind which more than a few items are looked through to learn: that may take a tenth of a wait."""


class _Outputs:
    """The number of a command's last operands that are slots which it fills, by ops that change nothing."""

    def __init__(self) -> None:
        self._counts: dict[int, int | None] = {}

    def of(self, number: int, session: Session) -> int | None:
        """Return that number; None for a command that may change what others see."""
        if number not in self._counts:
            self._counts[number] = _count_outputs(session.structures.get(number))
        return self._counts.get(number)


def _count_outputs(structure: Any) -> int | None:
    if structure is None or len(structure) != 4 or type(structure[0]) is not str or structure[0] == commands.COMPILED:
        return None
    name, _, _, outputs = structure
    info = info_named(name)
    return None if info is None or info.changes else commands.operand_count(outputs)


class Companions:
    """The numbers of one session that a thread asks for together."""

    def __init__(self) -> None:  # keeps nothing of the session, which would never die
        self._outputs = _Outputs()
        self._followers: dict[int, dict[int, int]] = {}
        self._came: dict[int, Number] = {}
        self._waits = self._next_lesson = 0
        self._begin(0)

    def _begin(self, leader: int) -> None:
        """Nothing is known of what was recorded since the last question, which was for this slot."""
        self._leader = leader
        self._sequence = -1
        self._epoch = self._looked_through = 0
        self._filled: set[int] = set()

    def take(self, handle: Handle) -> Number | None:
        """Return a number that came along with an earlier one, if it is certainly still right."""
        slot = handle.slot
        if slot not in self._came or not self._is_untouched(slot, handle.device.session):
            return None
        number = self._came.pop(slot)
        followers = self._followers.get(self._leader)
        if followers is not None and slot in followers:
            followers[slot] = 0
        return number

    def ask(self, handle: Handle) -> Any:
        """Wait for the number of a tensor, and for those that came to be asked for after it."""
        session, slot = handle.device.session, handle.slot
        recorder = session.recorder
        if type(recorder) is not Recorder or not session.welcome.limits.get("companions"):
            return session.call("item", slot)
        self._learn(slot, session)
        followers = self._followers.get(slot, {})
        wanted = recorder.live_among(followers)
        arguments: list[object] = [slot, wanted] if wanted else [slot]
        name = "numbers" if wanted else "item"
        self._came.clear()
        self._begin(slot)
        epoch = recorder.hidden_writes
        reply = checked(name, session.request(name, lambda number: (commands.CALL, number, name, arguments)))
        if session.recorder is recorder and recorder.hidden_writes == epoch:
            self._look_from(recorder, arguments, epoch)
        if not wanted:
            return reply
        if len(reply) != len(wanted) + 1:
            raise ProtocolError(f"the worker sent {len(reply)} numbers for {len(wanted) + 1} values")
        first, *others = reply
        for other, number in zip(wanted, others, strict=False):
            followers[other] += 1  # until it is taken
            if followers[other] > _MOST_USELESS:
                del followers[other]
            elif number is not None:
                self._came[other] = number
        return first

    def _learn(self, slot: int, session: Session) -> None:
        """Have a number that is about to be waited for come along the next time, if it could have."""
        self._waits += 1
        if session.recorder.unsent - self._looked_through > _FEW_ITEMS:
            if self._waits < self._next_lesson:
                return
            self._next_lesson = self._waits + _SELDOM + self._waits % 4  # each of a loop's waits has its turn
        if slot == self._leader or not self._is_untouched(slot, session):
            return
        if self._leader not in self._followers and len(self._followers) >= _MOST_LEADERS:
            self._followers.pop(next(iter(self._followers)))
        followers = self._followers.setdefault(self._leader, {})
        if len(followers) < _MOST_COMPANIONS:
            followers.setdefault(slot, 0)

    def _look_from(self, recorder: Recorder, arguments: list[object], epoch: int) -> None:
        """Look through what was recorded from the question on, if that was the last command of the last batch."""
        last = recorder.last_batch
        if last is None:
            return
        stream = last.stream
        if stream[-2:-1] == [commands.RELEASE]:  # of what was dead before the question left
            stream = stream[-3:-2]
        if stream and stream[-1] is arguments:
            self._sequence, self._epoch = last.sequence, epoch

    def _is_untouched(self, slot: int, session: Session) -> bool:
        """Return whether a slot certainly holds what it held when the last question was answered."""
        recorder = session.recorder
        if type(recorder) is not Recorder or session.lost is not None:
            return False
        begin, end = self._looked_through, recorder.unsent
        if recorder.batches != self._sequence or recorder.hidden_writes != self._epoch or end > _MOST_LOOKED_THROUGH:
            return False
        if begin < end:
            part, _ = recorder.recorded(begin, end, recorder.unsent_lines)
            if recorder.batches != self._sequence or not self._look_through(part, session):
                self._sequence = -1
                return False
            self._looked_through = end
        # Another thread may have sent meanwhile what was not looked at.
        return slot not in self._filled and recorder.batches == self._sequence

    def _look_through(self, part: list[Any], session: Session) -> bool:
        """Note the slots that some commands fill; return False if one of them may change something."""
        widths = session.recorder.widths
        for position in commands.walk(part, widths):
            number = part[position]
            if number in (commands.EXPECT, commands.DEFINE, commands.RELEASE):
                continue
            if number == commands.UPLOAD:
                self._filled.add(part[position + 1])
                continue
            count = self._outputs.of(number, session)
            if count is None:
                return False
            end = position + 1 + widths[number]
            for operand in part[end - count : end]:
                if type(operand) is list:
                    self._filled.update(operand)
                else:
                    self._filled.add(operand)
        return True


class _Threads(threading.local):
    """The companions that this thread knows, by session."""

    def __init__(self) -> None:
        self.by_session: weakref.WeakKeyDictionary[Session, Companions] = weakref.WeakKeyDictionary()


_THREADS = _Threads()


def companions_of(session: Session) -> Companions:
    """Return what this thread knows of the numbers of a session."""
    found = _THREADS.by_session.get(session)
    if found is None:
        found = _THREADS.by_session[session] = Companions()
    return found


__all__ = ["companions_of"]
