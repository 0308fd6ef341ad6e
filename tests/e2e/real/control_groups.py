"""The part of the machine's control groups that a node has: one group in each hierarchy, and what is below."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_END_SECONDS = 30.0


def hierarchies() -> list[Path]:
    """Where the hierarchies of control groups (version 1) are mounted."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup":
            found.append(Path(place))
    return found


def make(name: str) -> list[Path]:
    """Make a group of a name in each hierarchy.

    Returns:
        The groups.
    """
    groups = []
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # empty at first, and nothing can join then
            if (hierarchy / file).exists():
                (group / file).write_text((hierarchy / file).read_text())
        groups.append(group)
    return groups


def remove(name: str) -> None:
    """Kill what is left in the groups of a name, and remove them.

    Raises:
        RuntimeError: something in them does not end.
    """
    deadline = time.monotonic() + _END_SECONDS
    for hierarchy in hierarchies():
        while (hierarchy / name).exists() and not _removed(hierarchy / name):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{hierarchy / name} cannot be removed: {list(_processes(hierarchy / name))}")
            time.sleep(0.05)


def left(prefix: str) -> set[str]:
    """The names of groups that begin with a prefix."""
    return {group.name for hierarchy in hierarchies() for group in hierarchy.glob(f"{prefix}*") if group.is_dir()}


def _processes(group: Path) -> Iterator[int]:
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            yield from map(int, (Path(folder) / "cgroup.procs").read_text().split())


def _removed(group: Path) -> bool:
    for process_id in _processes(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
    return not group.exists()
