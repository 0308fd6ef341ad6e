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
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

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
                "message": failure.message if os.path.isfile(failure.error_file) else "",
            }
            for rank, failure in failures
        ]
        report.write_text(json.dumps(rows), encoding="utf-8")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, so that the script's processes are ended as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
