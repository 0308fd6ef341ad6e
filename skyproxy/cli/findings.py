"""Findings of the checks of `skyproxy doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The finding of one check.

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
