"""`torchrun` that writes down which processes failed, and that ends with who started it.

python -m skyproxy.functions.script_agent REPORT PARENT OPTIONS... SCRIPT ARGS...
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException, tail_log
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from skyproxy.functions.script_output import pass_on_file
from skyproxy.transport.addresses import listen_on_loopback

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class MachineStore(torch.distributed.TCPStore):  # type: ignore[name-defined, misc]
    """PyTorch's store that only this machine can connect to, where its clients are told so."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **more: Any
    ) -> None:
        if is_master:
            more["master_listen_fd"] = listen_on_loopback(host_name, port)
        super().__init__(host_name, port, world_size, is_master, *rest, **more)


class RoundHandler(dynamic_rendezvous.DynamicRendezvousHandler):
    """PyTorch's meeting of agents, where the processes of each round get a store of their own.

    PyTorch's own agents publish the place of the processes' store in their first round only: one that joins later waits
    for it until both give up. And whoever starts again would find what the processes before have left in it.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        return super().next_rendezvous()


def main(report: Path, parent: int, arguments: list[str]) -> int:
    """Run the launcher of PyTorch; return the exit code.

    Args:
        report: where the failed processes are written to, the first failure first.
        parent: the process that started this one.
        arguments: of torchrun.
    """
    _end_with(parent)
    torch.distributed.TCPStore = MachineStore  # type: ignore[attr-defined]
    c10d_rendezvous_backend.TCPStore = MachineStore  # type: ignore[attr-defined]
    static_tcp_rendezvous.TCPStore = MachineStore  # type: ignore[attr-defined]
    dynamic_rendezvous.DynamicRendezvousHandler = RoundHandler  # type: ignore[misc]
    tail_log.tail_logfile = pass_on_file
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        rows = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "exit_code": failure.exitcode,
                # Without a file of the script's own, PyTorch gives a hint on how to have one.
                "message": _words(failure.message) if os.path.isfile(failure.error_file) else "",
            }
            for rank, failure in failures
        ]
        report.write_text(json.dumps(rows), encoding="utf-8")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _words(message: object) -> str:
    """Return what a process said of its failure: PyTorch's `@record` has its traceback beside it."""
    return str(message.get("message", message) if isinstance(message, dict) else message)


def _end_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, so that the script's processes are ended as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
