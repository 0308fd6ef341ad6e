"""Docker or podman, as their command line."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers.bounded_output import MOST_BYTES, communicate_bounded, run_bounded
from skyproxy.providers.commands import run_command

ENGINE_VARIABLE = "SKYPROXY_CONTAINER_ENGINE"
LABEL = "skyproxy.dev/worker"
_KNOWN = ("docker", "podman")
_SECONDS = 600.0
"""For one command: the first start of an image pulls it."""
_LOOKS = ("container", "inspect", "logs", "port", "ps")
_LOOK_SECONDS = 60.0
_QUESTION_SECONDS = 5.0
_MOST_READ_BYTES = 1 << 20
_MOST_TAR_HEADER_BYTES = 1 << 16

HOME_FOLDER = "/home/worker"
CONFINEMENT = (
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--read-only",
    # Volumes without a name, which go with the container: on disk, and files in them can be executed, as compiled
    # graphs need. A tmpfs would take memory, and engines forbid to execute what is in it.
    "--volume=/tmp",
    f"--volume={HOME_FOLDER}",
    f"--env=HOME={HOME_FOLDER}",
)
"""Options of every container, so that a function in it can do no more than one in a Pod of the operator: no
capabilities, nothing that gives more of them, and nothing to write but a home, temporary files and volumes."""


async def gpu_options(executable: str, count: int | None, devices: Sequence[str] = ()) -> list[str]:
    """Return the options that give a container GPUs, in the words of this engine.

    Args:
        executable: docker or podman. One that is called docker can be podman.
        count: how many GPUs; None for all of the machine.
        devices: certain ones, by number or name, in place of a count.

    Raises:
        WorkerStartError: the engine does not say what it is.
    """
    if "podman" in (await run_command([executable, "--version"], "ask the container engine who it is")).lower():
        named = devices or (["all"] if count is None else [str(number) for number in range(count)])
        return [part for device in named for part in ("--device", f"nvidia.com/gpu={device}")]  # names of CDI
    if devices:
        return ["--gpus", f'"device={",".join(devices)}"']
    return ["--gpus", "all" if count is None else str(count)]


def is_running(executable: str, name: str) -> bool:
    """Tell whether a container runs; one that the engine says nothing of within some seconds does not."""
    command = [executable, "inspect", "--format", "{{.State.Running}}", name]
    try:
        asked = run_bounded(command, b"", _QUESTION_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == b"true"


@dataclass(frozen=True)
class ContainerEngine:
    """An engine on this machine.

    Attributes:
        executable: its command.
    """

    executable: str

    @classmethod
    def find(cls) -> ContainerEngine:
        """The engine of SKYPROXY_CONTAINER_ENGINE, or docker, or podman.

        Raises:
            ConfigurationError: there is none.
        """
        asked = os.environ.get(ENGINE_VARIABLE)
        for name in (asked,) if asked else _KNOWN:
            if found := shutil.which(name):
                return cls(found)
        missing = f"{ENGINE_VARIABLE}={asked!r} is no command" if asked else "neither docker nor podman is installed"
        raise ConfigurationError(f"{missing}. Install one, or use another --provider.")

    async def call(self, *arguments: str, data: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run a command, and return what it prints.

        Args:
            arguments: of the command.
            data: for its standard input.
            env: variables for it, beside ours.

        Raises:
            WorkerStartError: it failed; with what it said.
        """
        return (await self._run(*arguments, data=data, env=env)).decode(errors="replace")

    async def _run(
        self, *arguments: str, data: bytes | None = None, env: Mapping[str, str] | None = None, beginning: int = 0
    ) -> bytes:
        """Run a command, and return the end of what it prints, or so many bytes of its beginning."""
        try:
            process = await asyncio.create_subprocess_exec(
                self.executable,
                *arguments,
                stdin=asyncio.subprocess.PIPE if data is not None else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **(env or {})},
            )
        except OSError as error:
            raise ConfigurationError(f"{self.executable} cannot be run: {error}") from error
        # Images are fetched, and containers have time to end; to look at something takes no time.
        seconds = _LOOK_SECONDS if arguments[0] in _LOOKS else _SECONDS
        output, problem = await self._communicate(process, arguments[0], seconds, data, beginning)
        if process.returncode:
            said = problem.decode(errors="replace").strip()
            hint = " Is its daemon running, and may you use it?" if "daemon" in said.lower() else ""
            raise WorkerStartError(f"{os.path.basename(self.executable)} {arguments[0]} failed: {said}{hint}")
        return output

    async def _communicate(
        self,
        process: asyncio.subprocess.Process,
        verb: str,
        seconds: float,
        data: bytes | None = None,
        beginning: int = 0,
    ) -> tuple[bytes, bytes]:
        """Return what a command prints; it is killed when it takes too long, or nobody waits for it any more.

        Raises:
            WorkerStartError: it took too long.
        """
        try:
            async with asyncio.timeout(seconds):
                most = beginning or MOST_BYTES
                output, problem = await communicate_bounded(process, data, most, beginning=bool(beginning))
        except BaseException as error:
            if process.returncode is None:
                process.kill()
            # What it has started may hold its pipes, and `wait` waits for their end, too. No public way leads to them.
            process._transport.close()  # type: ignore[attr-defined]
            await process.wait()
            if not isinstance(error, TimeoutError):
                raise
            engine = os.path.basename(self.executable)
            raise WorkerStartError(
                f"{engine} {verb} has not answered for {seconds:g} s. Is the engine in order? See: {engine} info"
            ) from error
        return output, problem

    async def start(
        self,
        name: str,
        image: str,
        command: Sequence[str],
        *,
        files: Mapping[str, str],
        env: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        """Makes a container and starts it; takes it back where that fails.

        Args:
            name: of the container.
            image: of it.
            command: what runs in it.
            files: texts by absolute path, put in before it starts: what they say is in no command line and in no
                description of the container.
            env: variables. Their values are in no command line either.
            options: more for the engine.
        """
        names = [part for key in env for part in ("--env", key)]
        await self.call("create", "--name", name, *options, *names, image, *command, env=env)
        try:
            for path, text in files.items():
                await self.write(name, path, text)
            await self.call("start", name)
        except BaseException:
            await asyncio.shield(self.remove(name))
            raise

    async def write(self, name: str, path: str, text: str) -> None:
        """Put a file into a container, in place of one that may be there; its content is in no command line."""
        folder, _, file = path.rpartition("/")
        await self.call("cp", "-", f"{name}:{folder}", data=_archive(file, text))

    async def read(self, name: str, path: str) -> str | None:
        """Return what a file in a container says, whether that runs or not; None where there is none."""
        try:
            # Of a file of any size, which what runs there may have made.
            content = await self._run("cp", f"{name}:{path}", "-", beginning=_MOST_READ_BYTES + _MOST_TAR_HEADER_BYTES)
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                file = archive.extractfile(archive.next() or tarfile.TarInfo())
                return file.read(_MOST_READ_BYTES).decode(errors="replace") if file is not None else None
        except (WorkerStartError, tarfile.TarError, KeyError):
            return None

    async def stop(self, name: str, seconds: float) -> None:
        """Ask what runs in a container to end, and wait; after so many seconds it is killed. The container stays."""
        await self.call("stop", "-t", str(math.ceil(seconds)), name)

    async def restart(self, name: str) -> None:
        """Start a container that has ended, with all that was written in it."""
        await self.call("start", name)

    async def inspect(self, name: str) -> dict[str, Any] | None:
        """Return what the engine knows of a container; None where there is none."""
        try:
            rows = json.loads(await self.call("container", "inspect", name))
        except WorkerStartError as error:
            if "no such container" in str(error).lower():
                return None
            raise
        return dict(rows[0]) if rows else None

    async def names(self) -> list[str]:
        """Return the names of all containers that hold workers which outlive their starter, running or not."""
        # Podman of before 4.4 cannot print a label.
        listed = await self.call("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
        return sorted(line.strip() for line in listed.splitlines() if line.strip())

    async def logs(self, name: str, tail: int = 40) -> str:
        """The end of what a container wrote."""
        process = await asyncio.create_subprocess_exec(
            self.executable,
            *("logs", "--tail", str(tail), name),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await self._communicate(process, "logs", _LOOK_SECONDS)
        return output.decode(errors="replace").strip()

    async def remove(self, name: str) -> bool:
        """Ends a container and removes it; whether there was one."""
        if await self.inspect(name) is None:
            return False
        # With its volumes that have no name; others stay.
        await self.call("rm", "-fv", name)
        return True


def published_port(description: Mapping[str, Any], port: int) -> int | None:
    """Return the port of this machine that stands for a container's; None while there is none."""
    rows = (description.get("NetworkSettings", {}).get("Ports") or {}).get(f"{port}/tcp") or []
    return int(rows[0]["HostPort"]) if rows and rows[0].get("HostPort") else None


def _archive(file: str, text: str) -> bytes:
    """A tar archive of one file that every user in the container can read."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo(file)
        # With a time, because whoever rereads the file when it changes looks at that.
        entry.size, entry.mode, entry.mtime = len(text.encode()), 0o444, time.time()
        archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()
