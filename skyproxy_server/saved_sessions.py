"""Named sessions that lie on the volume: each is found by its name, and expires."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A named session that was saved.

    Attributes:
        name: its name.
        place: the name of its snapshots.
        names: how many values it has.
        byte_count: the size of its tensors.
        age_seconds: the time since it was saved.
        is_held: whether a program may go on from there at any moment: its worker did not end as it should.
        expires_in_seconds: the time for which it is still kept; None where somebody may hold it.
    """

    name: str
    place: str
    names: int
    byte_count: int
    age_seconds: float
    is_held: bool
    expires_in_seconds: float | None

    @property
    def is_expired(self) -> bool:
        """True if nothing keeps it any more."""
        return self.expires_in_seconds is not None and self.expires_in_seconds <= 0


def saved_sessions(rows: Iterable[dict[str, object]], kept_days: float) -> list[SavedSession]:
    """Return what there is of named sessions, the newest of each place; of one name there may be several.

    Args:
        rows: those of all snapshots; what has trouble, or no named session, is left out.
        kept_days: how long one is kept that nobody holds.
    """
    newest: dict[str, tuple[int, SavedSession]] = {}
    for row in rows:
        name, place, names, size, age = (row.get(key) for key in ("session", "name", "names", "bytes", "seconds"))
        if not (isinstance(name, str) and isinstance(place, str) and isinstance(names, int)):
            continue
        number = row.get("snapshot")
        if not (isinstance(size, int) and isinstance(age, float) and isinstance(number, str)):
            continue
        is_held = bool(row.get("held"))
        left = None if is_held else kept_days * DAY_SECONDS - age
        one = SavedSession(name, place, names, size, age, is_held, left)
        # By their numbers: a clock may have been set back between two of one place.
        if place not in newest or newest[place][0] < int(number):
            newest[place] = int(number), one
    return sorted((one for _, one in newest.values()), key=lambda one: one.age_seconds)
