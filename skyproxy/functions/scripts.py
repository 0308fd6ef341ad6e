"""Unchanged scripts for torchrun: packed here, started on every node by an agent of PyTorch's own launcher."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import difflib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from skyproxy.errors import ConfigurationError, ScriptError
from skyproxy.functions.rank_listener import listening
from skyproxy.payloads.project_files import ProjectFiles, read_file
from skyproxy.runtime.calls import current_call
from skyproxy.runtime.descendants import end_marked
from skyproxy.runtime.instance import POOL_VARIABLE, InstanceInfo, instance_info
from skyproxy.runtime.lifecycle import port_for
from skyproxy.runtime.project_code import PROJECT_CODE, pack_files, unpack_files
from skyproxy.runtime.scratch import scratch
from skyproxy.settings import SETTINGS

PROCESS_COUNTS = ("gpu", "cpu", "auto")
"""Words that torchrun takes for --nproc-per-node in place of a number."""
PURPOSE = "torchrun"
"""Of the port where the agents meet; see `port_for`."""
STOP_SECONDS = 10.0
"""The time that a script has to end, for example to save its state, after it was sent SIGTERM."""
REPORT = "failures.json"
"""The file in which the agent says which processes failed, the first failure first."""
_MARK_VARIABLE = "SKYPROXY_SCRIPT_MARK"
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 5.0
_SHOWN_FAILURES = 8
_MEETING = {"last_call_timeout": 10, "keep_alive_interval": 3, "keep_alive_max_attempt": 3}
"""Seconds for which agents wait for more of them once they are enough, and between two signs of life of each; and how
many of these may be missing."""


@dataclass(frozen=True)
class Meeting:
    """The place where the agents of a changing number of nodes meet.

    Attributes:
        endpoint: "host:port" of the store.
        is_host: whether the store is on the node that is told so.
        restarts: how often all agents were started anew before.
    """

    endpoint: str
    is_host: bool
    restarts: int = 0


@dataclass(frozen=True)
class Script:
    """A script as it travels to the nodes that start it.

    Attributes:
        target: the file, or the name of the module.
        args: what follows it on the command line.
        is_module: whether to start it as `python -m` does.
        procs_per_node: processes on each node, or one of `PROCESS_COUNTS`.
        max_restarts: how often all processes are started again when one fails.
        env: further environment variables.
        folder: what its imports begin with, as the program that sends it sees it.
        files: the content of that folder, packed; None where the node sees the folder itself.
        directory: the working directory; None keeps the worker's.
        run: names this run.
        nodes: at least and at most so many; None: as many as the pool has.
        meeting: where their agents meet, if their number may change.
        debug_seconds: how long breakpoints and exceptions of its processes wait for somebody; None: they do not wait.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    procs_per_node: int | str = 1
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    files: bytes | None = None
    directory: str | None = None
    run: str = ""
    nodes: tuple[int, int] | None = None
    meeting: Meeting | None = None
    debug_seconds: float | None = None

    @property
    def name(self) -> str:
        """The script's name, for people."""
        return self.target if self.is_module else Path(self.target).name


def script_missing(script: str, as_module: str) -> str:
    """Return the message for a script that is not there: the nearest of its folder, or how a module is run."""
    path = Path(script)
    where = f"there is no script {script!r} in {os.getcwd()}."
    if path.is_dir():
        return f"{where} That is a folder."
    if not path.suffix:
        return f"{where} For a module: {as_module}."
    if not path.parent.is_dir():
        return f"{where} There is no folder {str(path.parent)!r}."
    near = difflib.get_close_matches(path.name, (each.name for each in path.parent.glob("*" + path.suffix)), n=1)
    return f"{where} Did you mean {str(path.with_name(near[0]))!r}?" if near else where


def describe_script(
    target: str | os.PathLike[str],
    args: Sequence[object] = (),
    *,
    is_module: bool = False,
    procs_per_node: int | str = 1,
    max_restarts: int = 0,
    env: Mapping[str, object] | None = None,
    nodes: int | str | None = None,
) -> Script:
    """Check what a user asks for, and look at nothing but the script's file.

    Raises:
        ConfigurationError: there is no such script, or a number cannot be meant.
    """
    text = os.fspath(target)
    if is_module:
        folder = os.getcwd()
    else:
        path = Path(text).absolute()
        if not path.is_file():
            raise ConfigurationError(script_missing(text, "module=True"))
        text, folder = str(path), str(path.parent)
    is_count = type(procs_per_node) is int and procs_per_node >= 1
    if not is_count and procs_per_node not in PROCESS_COUNTS:
        raise ConfigurationError(
            f"nproc_per_node={procs_per_node!r}: use a number from 1, or one of: {', '.join(PROCESS_COUNTS)}."
        )
    if type(max_restarts) is not int or max_restarts < 0:
        raise ConfigurationError(f"max_restarts={max_restarts!r}: use 0 or more.")
    return Script(
        target=text,
        args=tuple(str(arg) for arg in args),
        is_module=is_module,
        procs_per_node=procs_per_node,
        max_restarts=max_restarts,
        env={str(name): str(value) for name, value in (env or {}).items()},
        folder=folder,
        run=secrets.token_hex(8),
        nodes=None if nodes is None else node_range(nodes),
        debug_seconds=float(SETTINGS.breakpoint_seconds) if SETTINGS.debug else None,
    )


def node_range(given: int | str) -> tuple[int, int]:
    """Return how many nodes a script runs on, at least and at most, as torchrun reads `--nnodes`: 2, "2" or "1:4".

    Raises:
        ConfigurationError: it is neither.
    """
    parts = str(given).split(":")
    if type(given) in (int, str) and len(parts) <= 2 and all(part.isdecimal() for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 1 <= least <= most:
            return least, most
    raise ConfigurationError(f"nnodes={given!r}: use a number from 1, or two of them: '1:4'.")


def pack_for(script: Script, *, shares_files: bool) -> Script:
    """The script with what its nodes need of this machine: the working directory, or copies of the files.

    Args:
        script: of `describe_script`.
        shares_files: whether the nodes see this machine's folders under the same paths.

    Raises:
        ConfigurationError: the files are too many.
    """
    if shares_files:
        return replace(script, directory=os.getcwd())
    found = ProjectFiles(SETTINGS).current(((script.folder, True),))
    names = {name for _, name in found}
    if not script.is_module:
        names.add(Path(script.target).name)
    contents = {(0, name): read_file(script.folder, name) for name in sorted(names)}
    return replace(script, files=pack_files({key: content for key, content in contents.items() if content is not None}))


# --- on the worker ----------------------------------------------------------------------------------------------------


def run_script(script: Script) -> None:
    """Start the script's processes of this node and wait for their end; the first process of each node does it.

    What they print is what the call prints. They end with the call: they are sent SIGTERM, and have `STOP_SECONDS`.

    Raises:
        ScriptError: a process failed; names it.
    """
    info = instance_info()
    if info.local_rank:
        return
    with contextlib.ExitStack() as stack:
        folder = script.folder
        if script.files is not None:
            copies = stack.enter_context(scratch("script"))
            unpack_files(copies, script.files)
            folder = str(copies / "0")
        own = stack.enter_context(scratch("torchrun"))
        report = own / REPORT
        command = agent_command(script, info, folder, own, os.getpid())
        environment = agent_environment(script, folder, info)
        call = current_call()
        announce = call.tell_wait if call is not None else None
        listener = stack.enter_context(listening(own, script.debug_seconds, announce, info.job))
        if listener is not None:
            environment |= listener.variables(environment["PYTHONPATH"])
        exit_code = _run(command, environment, script.directory)
        if exit_code:
            raise ScriptError(_failure(script, exit_code, report))


def agent_command(script: Script, info: InstanceInfo, folder: str, own: Path, parent: int) -> list[str]:
    """Return the command that starts the script's processes of this node.

    Args:
        script: the script.
        info: who the nodes are.
        folder: where the script lies on this one.
        own: a folder for the agent: what the processes print, and `REPORT`.
        parent: the process that it ends with.
    """
    agent = [sys.executable, "-m", "skyproxy.functions.script_agent", str(own / REPORT), str(parent)]
    # Through files, so that the lines of two processes never mix.
    options = [*_options(script, info), "--tee=3", f"--log-dir={own}"]
    kind = ["--module"] if script.is_module else []
    target = script.target if script.is_module else str(Path(folder, Path(script.target).name))
    return [*agent, *options, *kind, target, *script.args]


def _options(script: Script, info: InstanceInfo) -> list[str]:
    """Return what torchrun is told: who the nodes are, and where they meet."""
    options = [f"--nproc-per-node={script.procs_per_node}"]
    if script.meeting is not None and script.nodes is not None:
        return [*options, *_elastic_options(script, script.meeting, script.nodes, info)]
    options += [f"--max-restarts={script.max_restarts}"]
    if info.total_nodes == 1:
        # Torchrun's own --standalone would name the machine as the place to meet, which others can reach.
        options += ["--local-addr=127.0.0.1", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=is_host=1"]
        return [*options, "--rdzv-backend=c10d", f"--rdzv-id={script.run}"]
    port = port_for(PURPOSE, info)
    address = next((peer.address for peer in info.peers if peer.rank == info.rank), info.head_addr)
    options += [f"--nnodes={info.total_nodes}", f"--local-addr={address}"]
    if not script.max_restarts:
        # Ranks in the order of nodes. This way of meeting knows no second time.
        return [*options, f"--node-rank={info.node}", f"--master-addr={info.head_addr}", f"--master-port={port}"]
    return [
        *options,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={info.head_addr}:{port}",
        f"--rdzv-id={script.run}",
        f"--rdzv-conf=is_host={int(info.node == 0)}",
    ]


def _elastic_options(script: Script, meeting: Meeting, nodes: tuple[int, int], info: InstanceInfo) -> list[str]:
    address = next((peer.address for peer in info.peers if peer.rank == info.rank), info.head_addr)
    timing = ",".join(f"{name}={value}" for name, value in _MEETING.items())
    return [
        f"--max-restarts={script.max_restarts - meeting.restarts}",
        f"--nnodes={nodes[0]}:{nodes[1]}",
        f"--local-addr={address}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting.endpoint}",
        f"--rdzv-id={script.run}",
        f"--rdzv-conf=is_host={int(meeting.is_host)},{timing}",
    ]


def agent_environment(script: Script, folder: str, info: InstanceInfo) -> dict[str, str]:
    """Return the variables of the agent and its processes; see `agent_command`."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    env.pop(POOL_VARIABLE, None)  # of the agents; torchrun tells the processes their own place
    call = current_call()
    folders = PROJECT_CODE.folders(call.session) if call is not None else []
    known = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in (folder, *folders, *known) if part))
    if info.head_addr.startswith("127."):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return env | dict(script.env)


def _run(command: list[str], env: dict[str, str], directory: str | None) -> int:
    """Run a command whose processes all end with it, and print what it prints; return its exit code."""
    mark = secrets.token_hex(16)
    process = subprocess.Popen(
        command,
        env=env | {_MARK_VARIABLE: mark},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        readers = [_pass_on(process.stdout, sys.stdout), _pass_on(process.stderr, sys.stderr)]
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(_POLL_SECONDS)
                break
    except BaseException:
        _stop(process)
        raise
    finally:
        end_marked(mark, _MARK_VARIABLE)
    for reader in readers:
        reader.join(_DRAIN_SECONDS)
    return exit_code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the agent to end its processes, and itself; one that does not is ended."""
    process.send_signal(signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        process.kill()
        process.wait()


def _pass_on(source: IO[bytes], target: IO[str]) -> threading.Thread:
    """Print what comes, as the call that runs now."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_on() -> None:
        with source:
            while piece := os.read(source.fileno(), 1 << 16):
                target.write(decoder.decode(piece))
                target.flush()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(pass_on,), name="skyproxy-script", daemon=True)
    thread.start()
    return thread


def _failure(script: Script, exit_code: int, report: Path) -> str:
    rows = list(_failed_processes(report))
    if not rows:
        return f"{script.name} was not run to its end: torchrun's agent {_ending(exit_code)}. What it printed says why"
    further = f"; and {len(rows) - _SHOWN_FAILURES} more" if len(rows) > _SHOWN_FAILURES else ""
    return f"{script.name} failed: {'; '.join(rows[:_SHOWN_FAILURES])}{further}"


def _failed_processes(report: Path) -> Iterator[str]:
    """The failed processes, the first failure first, as the agent wrote them down."""
    try:
        rows = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for row in rows:
        text = f"rank {row['rank']} (process {row['local_rank']} of this node) {_ending(row['exit_code'])}"
        yield f"{text}: {row['message']}" if row["message"] else text


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"
