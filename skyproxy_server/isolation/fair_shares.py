"""The decision how nice each session is to the others, from the processor time that it used lately. No system calls.

Whoever used much gives way to whoever used little: tokens to tokens, the addresses of one token to each other, and the
sessions of one address to each other. So eight sessions of one token together give way to the single one of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NICEST = 19
NICEST_FOR_EVER = 10
"""The niceness that is given where it cannot be taken back: still a tenth of the processor beside one that has 0."""
_STEP_FOR_EVER = 5
_HALF_LIFE_SECONDS = 3.0
_ACTIVE_SECONDS = 60.0
"""A session that has used nothing for so long is compared with nobody: alone, the others are as nice as ever."""
_LEAST_SECONDS = 0.1
"""Uses below this are the same: about a fortieth of a processor."""
_NO_DIFFERENCE = 0.5
_ALL_DIFFERENCE = 2.0
"""Doublings of the least use from which on, and with which, a use makes nicer, and makes `NICEST`."""
_STEADY = 2
"""Smaller changes are left out: they change nothing that could be noticed."""

Place = tuple[str, ...]
"""A place in the tree of users of the processors: (token, address, session), or the beginning of that."""


@dataclass(slots=True)
class _Account:
    """The processor time that a place has used: `recent`, which halves with each half-life, until `at`."""

    recent: float = 0.0
    at: float = 0.0
    used_at: float = -math.inf

    def add(self, seconds: float, now: float) -> None:
        self.recent = self.use_at(now) + seconds
        self.at = now
        if seconds > 0:
            self.used_at = now

    def use_at(self, now: float) -> float:
        return self.recent * math.exp2(-max(now - self.at, 0.0) / _HALF_LIFE_SECONDS)


class FairShares:
    """A table of what every session used lately, and how nice it is.

    Args:
        lowers: whether a niceness can be taken back. Where it cannot, it is given in a few steps, up to
            `NICEST_FOR_EVER`, and whoever uses as much as somebody who has it gets it, too: equals stay equal.
    """

    def __init__(self, *, lowers: bool) -> None:
        self.lowers = lowers
        self._accounts: dict[Place, _Account] = {}
        self._niceness: dict[Place, int] = {}

    def begin(self, place: Place, now: float) -> None:
        """Begin to consider a session; what its token has used before counts."""
        self._niceness[place] = 0
        for above in _path(place):
            self._accounts.setdefault(above, _Account(at=now))

    def end(self, place: Place) -> None:
        """Forget a session, but not what it used: a client that begins another one has used that as well."""
        self._niceness.pop(place, None)

    def note(self, place: Place, seconds: float, now: float) -> None:
        """Take note of processor time that a session used since it was noted the last time."""
        for above in _path(place):
            self._accounts.setdefault(above, _Account(at=now)).add(seconds, now)

    @property
    def are_even(self) -> bool:
        """True if no session is nicer than it began."""
        return not any(self._niceness.values())

    def has_set(self, place: Place, niceness: int) -> None:
        """Take note that a session has this niceness now."""
        if place in self._niceness:
            self._niceness[place] = niceness

    def changes(self, now: float) -> dict[Place, int]:
        """Return the niceness of the sessions that should have another one than they have."""
        self._drop_what_is_over(now)
        wanted = self._choose_niceness(now)
        if not self.lowers:
            wanted = self._for_ever(wanted, now)
        return {
            place: niceness
            for place, niceness in wanted.items()
            if abs(niceness - self._niceness[place]) >= (_STEADY if niceness else 1)
        }

    def _choose_niceness(self, now: float) -> dict[Place, int]:
        siblings: dict[Place, set[Place]] = {}
        for place in self._niceness:
            for above in _path(place):
                siblings.setdefault(above[:-1], set()).add(above)
        levels: dict[Place, float] = {}
        for group in siblings.values():
            levels.update(self._levels(group, now))
        return {place: min(round(sum(levels[above] for above in _path(place))), NICEST) for place in self._niceness}

    def _levels(self, group: Iterable[Place], now: float) -> Mapping[Place, float]:
        """Return how nice some are to each other: 0 for who used the least, more for each doubling of that."""
        accounts = {place: self._accounts[place] for place in group}
        uses = {place: max(account.use_at(now), _LEAST_SECONDS) for place, account in accounts.items()}
        active = [uses[place] for place, account in accounts.items() if now - account.used_at <= _ACTIVE_SECONDS]
        if len(active) < 2:
            return dict.fromkeys(accounts, 0.0)
        least = min(active)
        difference = math.log2(max(active) / least)
        if difference <= _NO_DIFFERENCE:
            return dict.fromkeys(accounts, 0.0)
        # The heaviest gets so much; the others between, so that the middle one of three is preferred to the heaviest.
        most = NICEST * min((difference - _NO_DIFFERENCE) / (_ALL_DIFFERENCE - _NO_DIFFERENCE), 1.0)
        return {place: max(most * math.log2(use / least) / difference, 0.0) for place, use in uses.items()}

    def _for_ever(self, wanted: Mapping[Place, int], now: float) -> dict[Place, int]:
        own = {place: self._accounts[place].use_at(now) for place in wanted}
        found: dict[Place, int] = {}
        for place, niceness in wanted.items():
            step = min(niceness, NICEST_FOR_EVER) // _STEP_FOR_EVER * _STEP_FOR_EVER
            if step:
                # Whoever came after somebody as heavy was made nicer is not preferred to it.
                step = max([step, *(self._niceness[other] for other in own if own[other] <= own[place])])
            found[place] = max(step, self._niceness[place])
        return found

    def _drop_what_is_over(self, now: float) -> None:
        kept = {above for place in self._niceness for above in _path(place)}
        for place in [place for place in self._accounts if place not in kept]:
            if self._accounts[place].use_at(now) < _LEAST_SECONDS / 10:
                del self._accounts[place]


def _path(place: Place) -> list[Place]:
    return [place[: depth + 1] for depth in range(len(place))]
