"""Memory limits of containers, kept by the kernel where this machine lets us make control groups."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"(\d+)([kMGT]i?|Ki|)")
_ROOT = Path("/sys/fs/cgroup")
_JOIN = 'echo $$ > "$0" && exec "$@"'


def quantity_bytes(text: str) -> int:
    """The bytes of a quantity in whole units, such as 64Mi.

    Raises:
        ValueError: it is of another form.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity of memory in whole units")
    return int(match[1]) * _UNITS[match[2]]


def _parent() -> tuple[Path, str] | None:
    """Where our groups may be, and the name of the file with a group's limit; None where they may not."""
    first = _ROOT / "memory"
    if os.access(first / "cgroup.procs", os.W_OK):
        return first, "memory.limit_in_bytes"
    with contextlib.suppress(OSError):
        if "memory" in (_ROOT / "cgroup.subtree_control").read_text().split() and os.access(_ROOT, os.W_OK):
            return _ROOT, "memory.max"
    return None


def enforced() -> bool:
    """Whether limits are kept on this machine."""
    return _parent() is not None


class MemoryGroup:
    """The control group of one run of a container."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def create(cls, run: str, name: str, limit: str) -> MemoryGroup | None:
        """Makes one; None where this machine does not let us, and the limit is not kept.

        Args:
            run: names the run of the tests.
            name: of the group.
            limit: a quantity.
        """
        place = _parent()
        if place is None:
            return None
        parent, file = place
        path = parent / f"{run}-{name}"
        try:
            path.mkdir()
            (path / file).write_text(str(quantity_bytes(limit)))
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                path.rmdir()
            return None
        return cls(path)

    def command(self) -> list[str]:
        """What goes before a command that is to be in the group, with all that it starts."""
        return ["/bin/sh", "-c", _JOIN, str(self._path / "cgroup.procs")]

    def ran_out(self) -> bool:
        """Whether the kernel has killed something in it."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                for line in (self._path / name).read_text().splitlines():
                    if line.startswith("oom_kill ") and int(line.split()[1]):
                        return True
        return False

    def remove(self) -> None:
        """Removes it; everything in it has ended."""
        with contextlib.suppress(OSError):
            self._path.rmdir()


def remove_leftovers(run: str) -> None:
    """Removes the groups of a run that was killed."""
    place = _parent()
    if place is not None:
        for path in place[0].glob(f"{run}-*"):
            MemoryGroup(path).remove()
