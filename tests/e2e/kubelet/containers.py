"""Containers without an engine: namespaces for network, processes and mounts, an overlay over this machine's root."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.control_plane.processes import bound
from tests.e2e.kubelet.memory_limits import MemoryGroup
from tests.e2e.kubelet.network import Network

_SETUP = Path(__file__).with_name("container.sh")
_CLONE_NEWNET = 0x40000000
# The first child is process 1 of the new process namespace; its end is told as an exit code, 128 + n for a signal.
# Not `unshare --fork`, which fails on a child that was killed. The shell's own remarks go nowhere.
_FIRST = 'setpriv --pdeathsig KILL -- "$0" "$@" 2>&1; exit $?'
_REPOSITORY = Path(__file__).resolve().parents[3]

# What images hold: the interpreter of this environment, and the tree under test.
IMAGE_ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'operator'}",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "HOME": "/tmp",
}


@dataclass(frozen=True)
class Mount:
    """One mount of a container.

    Attributes:
        mode: "rw", "ro", or "mask" for a path that the container may not see.
        source: on this machine.
        target: in the container.
    """

    mode: str
    source: Path
    target: str


def image_mounts(masked: Sequence[Path]) -> list[Mount]:
    """What every container needs, wherever it is on this machine, and what it may not see."""
    parts = {_REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
    return [
        *(Mount("mask", path, str(path)) for path in masked),
        *(Mount("ro", path, str(path)) for path in sorted(parts)),
    ]


@dataclass(frozen=True)
class User:
    """Who a container's processes are.

    They may read everything all the same: the interpreter may be where only root looks. Writing is as in a cluster.

    Attributes:
        uid: the user.
        gid: the group.
        groups: more groups.
    """

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()

    def command(self) -> list[str]:
        """What goes before the container's command."""
        if self == User():
            return []
        groups = ",".join(map(str, self.groups)) or str(self.gid)
        return [
            *("setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", f"--groups={groups}"),
            *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search", "--no-new-privs", "--"),
        ]


class Sandbox:
    """The network namespace that the containers of a Pod share, held by a process that only sleeps.

    Attributes:
        address: the Pod's.
    """

    def __init__(self, network: Network, process: asyncio.subprocess.Process, address: str) -> None:
        self._network = network
        self._process = process
        self.address = address

    @classmethod
    async def create(cls, network: Network) -> Sandbox:
        """Makes one, joined to the network."""
        process = await asyncio.create_subprocess_exec(
            *bound(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        try:
            return cls(network, process, await network.attach(process.pid))
        except BaseException:
            process.kill()
            raise

    @property
    def namespace(self) -> str:
        """The file that names the network namespace."""
        return f"/proc/{self._process.pid}/ns/net"

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to a port on the Pod's own loopback, as a kubelet does for port-forward."""
        made = await asyncio.to_thread(self._connected, port)
        made.setblocking(False)
        return await asyncio.open_connection(sock=made)

    def _connected(self, port: int) -> socket.socket:
        result: list[socket.socket | OSError] = []

        def inside() -> None:
            # A thread of its own, for it stays in the other namespace.
            descriptor = os.open(self.namespace, os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                result.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            except OSError as error:
                result.append(error)
            finally:
                os.close(descriptor)

        thread = threading.Thread(target=inside, daemon=True)
        thread.start()
        thread.join()
        if isinstance(result[0], OSError):
            raise result[0]
        return result[0]

    async def close(self) -> None:
        """Ends the namespace."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._network.release(self.address)


async def copy_lines(source: asyncio.StreamReader, log: Path) -> None:
    """Writes what a container says to its log, each line with its time in front, until the container has ended."""
    with log.open("ab", buffering=0) as file:
        rest = b""
        while chunk := await source.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            now = time.time_ns()
            day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000))
            stamp = f"{day}.{now % 1_000_000_000:09}Z ".encode()
            file.write(b"".join(stamp + line + b"\n" for line in lines))
        if rest:
            file.write(stamp + rest + b"\n")


@dataclass
class Container:
    """One run of a container.

    Attributes:
        process: the one that made the namespaces; the container's first process is its child.
        exit_code: as Kubernetes counts it: 128 + signal for a killed one. None while it runs.
    """

    process: asyncio.subprocess.Process
    log: Path
    message: Path
    copying: asyncio.Task[None]
    memory: MemoryGroup | None = None
    exit_code: int | None = field(default=None)

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        sandbox: Sandbox,
        hostname: str,
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        directory: str,
        user: User,
        read_only: bool,
        scratch: Path,
        log: Path,
        memory: MemoryGroup | None = None,
    ) -> Container:
        """Starts one; returns when its own command is about to begin, or when that has failed.

        Args:
            scratch: an empty directory for the container's file system.
            log: where its output goes.
            memory: the control group with its limit.
        """
        overlay, message, table = scratch / "overlay", scratch / "message", scratch / "mounts"
        overlay.mkdir(parents=True)
        message.touch()
        message.chmod(0o666)
        # A mount hides what is below it, so what is below comes later.
        everything = sorted([*mounts, Mount("rw", message, "/dev/termination-log")], key=lambda m: m.target)
        table.write_text("".join(f"{m.mode}\t{m.source}\t{m.target}\n" for m in everything), encoding="utf-8")
        log.parent.mkdir(parents=True, exist_ok=True)
        receiver, sender = os.pipe()
        with open(sender, "wb", buffering=0) as begun:
            process = await asyncio.create_subprocess_exec(
                *bound(memory.command() if memory is not None else []),
                *("nsenter", f"--net={sandbox.namespace}"),
                *("unshare", "--mount", "--uts", "--ipc", "--pid", "/bin/sh", "-c", _FIRST),
                *(str(_SETUP), str(overlay), hostname, "yes" if read_only else "no", directory, str(table)),
                *user.command(),
                *argv,
                stdin=begun,  # container.sh writes to it, then takes /dev/null instead
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**IMAGE_ENVIRONMENT, **environment},
                start_new_session=True,
            )
        assert process.stdout is not None
        copying = asyncio.create_task(copy_lines(process.stdout, log))
        with open(receiver, "rb", buffering=0) as pipe:
            await asyncio.to_thread(pipe.read, 1)
        return cls(process, log, message, copying, memory)

    @property
    def first_process(self) -> int | None:
        """The id, on this machine, of the container's process 1; None when it is not there."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to process 1. Without a handler it ignores all but SIGKILL, as in every container."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first_process or self.process.pid, number)

    async def wait(self) -> int:
        """Waits for its end; gives the exit code."""
        code = await self.process.wait()
        await self.copying
        self.exit_code = code if code >= 0 else 128 - code
        return self.exit_code

    async def execute(self, argv: Sequence[str], timeout_seconds: float) -> bool:
        """Runs a command inside, for a probe; whether it succeeded."""
        pid = self.first_process
        if pid is None:
            return False
        process = await asyncio.create_subprocess_exec(
            *bound(["nsenter", f"--target={pid}", "--all", "--root", "--wd", *argv]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await asyncio.wait_for(process.wait(), timeout_seconds) == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            return False

    def termination_message(self, from_log: bool) -> str:
        """What it left in its message file, else the end of its log if that was asked for."""
        text = self.message.read_text(errors="replace")[-4096:]
        if not text and from_log and self.exit_code:
            lines = self.log.read_text(errors="replace").splitlines()[-80:]
            # With the end of the last line: a reader that wants none takes it away.
            text = "".join(line.partition(" ")[2] + "\n" for line in lines)[-2048:]
        return text
