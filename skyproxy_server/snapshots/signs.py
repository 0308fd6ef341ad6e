"""Signs of life of the workers that have named sessions of one token: each writes its own again and again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from skyproxy.snapshots.sources import SMALL_BYTES
from skyproxy.snapshots.stores import FileStore

SIGNS = ".workers"
"""A folder of a token's place: no snapshot has a name with a point in front."""


class SignsOfLife:
    """The sign of one worker in one token's place, and those of the others there.

    In the token's place, and not in the worker's: a session that has a user of its own may write nowhere else.

    Args:
        place: of the token.
        worker: a name that it was given at random.
        machine: gives the name of this machine since it was started; empty where the system gives none.
    """

    def __init__(self, place: FileStore, worker: str, machine: Callable[[], str]) -> None:
        self._place = place.child(SIGNS)
        self._worker = worker
        self._machine = machine
        self._beats = 0
        self._alive = contextlib.ExitStack()
        self._seen: dict[str, str] = {}

    def beat(self) -> None:
        """Give a sign of life."""
        self._place.prepare()
        if not self._beats or self._place.is_held(_lock_file(self._worker)) is False:  # somebody has cleared away
            self._alive.close()
            self._alive.enter_context(self._place.held(_lock_file(self._worker)))
        self._beats += 1
        put(self._place, _file(self._worker), {"count": self._beats, "machine": self._machine()})

    def look_at(self, worker: str) -> tuple[str, bool | None]:
        """Return the sign of life of a worker, and whether it lives, where that can be known at once."""
        file = _file(worker)
        if file not in self._place.files():
            return "", False  # it has left in order
        said = get(self._place, file)
        sign = f"{worker}:{said.get('count')}"
        if self._machine() and said.get("machine") == self._machine():
            return sign, self._place.is_held(_lock_file(worker))
        return sign, None

    def clear_away(self) -> None:
        """Delete the signs of workers that have given none since the last time."""
        signs: dict[str, str] = {}
        for file in self._place.files():
            worker, _, kind = file.rpartition(".")
            if kind == "json" and worker != self._worker:
                sign, lives = self.look_at(worker)
                if not lives:
                    signs[worker] = sign
        for worker, sign in signs.items():
            if self._seen.get(worker) == sign:
                self._remove(worker)
        self._seen = signs

    def end(self) -> None:
        """Take it back: the worker ends."""
        if self._beats:
            self._place.remove(_file(self._worker))
            self._alive.close()
            self._place.remove(_lock_file(self._worker))
            self._place.remove_place()
            self._beats = 0

    def _remove(self, worker: str) -> None:
        self._place.remove(_file(worker))
        self._place.remove(_lock_file(worker))


def _file(worker: str) -> str:
    return f"{worker}.json"


def _lock_file(worker: str) -> str:
    return f"{worker}.lock"


def put(place: FileStore, name: str, said: dict[str, object]) -> None:
    """Write a small file."""
    place.write(name, json.dumps(said).encode("ascii"))


def get(place: FileStore, name: str) -> dict[str, Any]:
    """Return what a small file says; nothing where it is gone by now, or none of ours."""
    with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
        said = json.loads(place.read(name, SMALL_BYTES))
        if isinstance(said, dict):
            return said
    return {}
