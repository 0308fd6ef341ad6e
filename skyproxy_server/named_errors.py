"""Reasons why a client does not get a named session."""

from __future__ import annotations


class NamedSessionChangedError(Exception):
    """Another client has used the session since."""


class NamedSessionMovedError(Exception):
    """The session goes on at another worker.

    Attributes:
        where: the address of that one, as its client gave it.
    """

    def __init__(self, where: str) -> None:
        super().__init__("the session has moved to another worker")
        self.where = where


class NamedSessionElsewhereError(Exception):
    """Another worker of the same volume has the session, and lives.

    Attributes:
        where: the machine and the process, for people.
        seconds: for how long a client has used it there; 0 where that is not known.
        is_here: whether it is this worker, of which each session has a process.
    """

    def __init__(self, where: str, seconds: float = 0.0, *, is_here: bool = False) -> None:
        super().__init__(f"another worker of this volume has the session: {where}")
        self.where = where
        self.seconds = seconds
        self.is_here = is_here


class NamedSessionInUseError(Exception):
    """Another client holds the session, for so many seconds now."""

    def __init__(self, seconds: float) -> None:
        super().__init__("another client holds this session")
        self.seconds = seconds
