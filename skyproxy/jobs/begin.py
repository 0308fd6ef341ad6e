"""The beginning of a job's own process: it reads what to do, and becomes that. The worker starts nothing else.

python -m skyproxy.jobs.begin FOLDER WORKER
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

from skyproxy.jobs.documents import Document, read_document
from skyproxy.runtime.descendants import JOB_MARK_VARIABLE, leave_watcher
from skyproxy.runtime.instance import POOL_VARIABLE, InstanceInfo
from skyproxy.runtime.project_code import unpack_files

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_AGENT_SECONDS = 10.0
"""The time that the agent of torchrun has to end its processes once its worker is gone; others the kernel has ended."""


def main(folder: Path, worker: int) -> int:
    """Do what the document in the folder says.

    Args:
        folder: of the job.
        worker: the process that started this one, and that it ends with.
    """
    _end_with(worker)
    leave_watcher(worker, JOB_MARK_VARIABLE, _AGENT_SECONDS)
    # The place of the worker is not that of the job.
    os.environ.pop(POOL_VARIABLE, None)
    document = read_document(folder / "payload")
    code = folder / "code"
    if document.get("files") is not None:
        _unpack(code, document["files"])
    if document["kind"] == "function":
        from skyproxy.jobs.function_process import run_function

        return run_function(folder, code, document)
    _become_script(folder, code, document, worker)
    return 127


def _end_with(worker: int) -> None:
    """Have the kernel kill this process, whatever it has become by then, when the worker is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != worker:
        sys.exit(1)


def _unpack(code: Path, files: bytes) -> None:
    shutil.rmtree(code, ignore_errors=True)
    code.mkdir(mode=0o700)
    unpack_files(code, files)


def _become_script(folder: Path, code: Path, document: Document, worker: int) -> None:
    fields = document["script"]
    place = fields["folder"]
    if fields["files"] is not None:
        _unpack(code, fields["files"])
        place = str(code / "0")
        os.makedirs(place, exist_ok=True)
    os.chdir(fields["directory"] or place)
    if document["info"] is None:
        command, environment = _plain_command(fields, place)
    else:
        command, environment = _torchrun_command(folder, document, place, worker)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def _plain_command(fields: Document, place: str) -> tuple[list[str], dict[str, str]]:
    environment = dict(os.environ)
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in (place, *known) if part))
    target = ["-m", fields["target"]] if fields["is_module"] else [str(Path(place, Path(fields["target"]).name))]
    return [sys.executable, *target, *fields["args"]], environment | fields["env"]


def _torchrun_command(folder: Path, document: Document, place: str, worker: int) -> tuple[list[str], dict[str, str]]:
    from skyproxy.functions.scripts import Script, agent_command, agent_environment  # late: it loads torch

    fields = document["script"]
    script = Script(**{**fields, "args": tuple(fields["args"])})
    own = folder / "torchrun"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(mode=0o700)
    info = InstanceInfo.from_mapping(document["info"])
    return agent_command(script, info, place, own, worker), agent_environment(script, place, info)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
