"""The addresses of one run: a free slot of the machine, so that several runs do not meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_SLOTS = 16
_LOCKS = Path("/run/lock/skyproxy-e2e")


@dataclass(frozen=True)
class Slot:
    """Addresses that belong to one run while it holds the slot's lock.

    Pods and Services get addresses of the range for benchmarks (RFC 2544), which no real network uses.

    Attributes:
        index: 0 to 15.
        lock: the open lock file; whoever inherits it holds the slot too.
    """

    index: int
    lock: int

    @property
    def loopback(self) -> str:
        """Where etcd, the API server and the kubelets listen."""
        return f"127.77.{self.index}.1"

    @property
    def bridge(self) -> str:
        """The network device that joins the Pods."""
        return f"skye2e{self.index}"

    @property
    def pods(self) -> str:
        """The first two and a half octets of Pod addresses: a /20."""
        return f"198.18.{16 * self.index}.0/20"

    def node_address(self, index: int) -> str:
        """The address of a real node on the bridge, which is like Pods of the stand-in there; -1 is this machine's."""
        return f"198.18.{16 * self.index}.{index + 2}"

    @property
    def services(self) -> str:
        """The range of Service addresses: a /20."""
        return f"198.19.{16 * self.index}.0/20"

    @property
    def api_service(self) -> str:
        """What Pods know the API server by."""
        return f"198.19.{16 * self.index}.1"


def take_slot() -> Slot:
    """Takes the first free slot; it is free again when every process that inherited the lock has ended.

    Raises:
        RuntimeError: all are taken.
    """
    import fcntl  # not everywhere, and whoever only collects the tests need not have it

    _LOCKS.mkdir(parents=True, exist_ok=True)
    for index in range(_SLOTS):
        lock = os.open(_LOCKS / str(index), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return Slot(index, lock)
    raise RuntimeError(f"all {_SLOTS} slots for end-to-end runs on this machine are taken; see {_LOCKS}")
