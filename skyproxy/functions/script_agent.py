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

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def main(report: Path, parent: int, arguments: list[str]) -> int:
    """Run the launcher of PyTorch; return the exit code.

    Args:
        report: where the failed processes are written to, the first failure first.
        parent: the process that started this one.
        arguments: of torchrun.
    """
    _end_with(parent)
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
