"""How much memory processes take at most while something happens, watched from a process of its own.

A thread of ours could not look while our interpreter is busy with the very thing that is watched.
"""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from _helper_process import HelperProcess, announce

_INTERVAL_SECONDS = 0.001


class Peak(NamedTuple):
    """Resident bytes of one process: when the watch began, and at most."""

    before: int
    most: int


class MemoryWatch:
    """Watches processes between `start` and `stop`."""

    def __init__(self, process_ids: list[int]) -> None:
        self._ids = process_ids
        self._helper = HelperProcess("_memory_watch.py", *map(str, process_ids))

    def start(self) -> None:
        """Begins anew, from what the processes take now."""
        self._helper.ask("start")

    def stop(self) -> list[Peak]:
        """The peaks since `start`, in the order of the processes."""
        rows = self._helper.ask("stop")
        return [Peak(*rows[str(process_id)]) for process_id in self._ids]

    def close(self) -> None:
        """Ends the helper process."""
        self._helper.close()


def main() -> None:
    import psutil

    processes = {process_id: psutil.Process(int(process_id)) for process_id in sys.argv[1:]}

    def resident() -> dict[str, int]:
        return {process_id: process.memory_info().rss for process_id, process in processes.items()}

    announce(**resident())
    while sys.stdin.readline().strip() == "start":
        before = resident()
        most = dict(before)
        asked = threading.Event()

        def wait_for_stop(asked: threading.Event = asked) -> None:
            sys.stdin.readline()
            asked.set()

        threading.Thread(target=wait_for_stop, daemon=True).start()
        announce(**before)
        while not asked.wait(_INTERVAL_SECONDS):
            for process_id, count in resident().items():
                most[process_id] = max(most[process_id], count)
        for process_id, count in resident().items():
            most[process_id] = max(most[process_id], count)
        announce(**{process_id: (before[process_id], most[process_id]) for process_id in processes})


if __name__ == "__main__":
    main()

__all__ = ["MemoryWatch", "Peak"]
