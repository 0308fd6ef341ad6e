"""What the checks of `skyproxy doctor` find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at.
        state: "ok", "warning", "broken" or "skipped".
        message: what was found.
        hint: how to mend it; empty where nothing is to be done.
    """

    check: str
    state: str
    message: str
    hint: str = ""
