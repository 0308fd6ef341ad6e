"""Workers in containers of this machine that outlive the command which started them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from skyproxy.contexts import checked_name, state_folder, write_private
from skyproxy.errors import ConfigurationError, ConnectError, WorkerStartError
from skyproxy.providers.container_engine import (
    CONFINEMENT,
    HOME_FOLDER,
    LABEL,
    ContainerEngine,
    gpu_options,
    published_port,
)
from skyproxy.settings import SETTINGS
from skyproxy.transport.worker_report import ask_worker
from skyproxy.units import plain_text, quantity, size_bytes

PORT = 8765
_TOKEN_PATH = "/tmp/skyproxy-token"
_SNAPSHOTS, _REPORT = f"{HOME_FOLDER}/snapshots", f"{HOME_FOLDER}/suspended.json"
"""They stay while the container does, whether it runs or not."""
_BEYOND_LEAVE_SECONDS = 30.0
"""The time that a worker may take to end when its sessions are suspended."""
_POLL_SECONDS = 0.2
_PREFIX = "skyproxy-"


def container_name(name: str) -> str:
    """The container of a worker."""
    return f"{_PREFIX}{checked_name(name)}"


async def container_workers() -> list[str]:
    """Return the names of the workers that have a container here.

    Raises:
        ConfigurationError: there is no engine.
        WorkerStartError: it does not answer.
    """
    return [name.removeprefix(_PREFIX) for name in await ContainerEngine.find().names()]


def default_image(gpus: int | None) -> str:
    """The image of this version's workers."""
    try:
        own = version("skyproxy")
    except PackageNotFoundError:
        own = "latest"
    return f"ghcr.io/skyproxy/worker:{own}" + ("-cuda" if gpus else "")


async def start_container(
    name: str,
    *,
    image: str | None = None,
    gpus: int | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    volumes: Sequence[Mapping[str, str]] = (),
    env: Mapping[str, str] | None = None,
    wait: bool = True,
    suspend_after_seconds: float = 0.0,
) -> None:
    """Starts a worker in a container that lives on when we end; listens on loopback only.

    Args:
        name: by which it is found again.
        image: of the container; this version's worker by default.
        gpus: how many it gets.
        cpu: how much, as a quantity of Kubernetes.
        memory: how much, as a quantity of Kubernetes.
        volumes: dicts with name and path; the engine keeps them, and limits no size.
        env: variables of the worker.
        wait: until it takes clients.
        suspend_after_seconds: the time without anything to do after which it is suspended; 0: never.

    Raises:
        ConfigurationError: there is no engine, or a container of that name exists.
        WorkerStartError: it did not come up; with the end of its log.
    """
    engine, container = ContainerEngine.find(), container_name(name)
    if await engine.inspect(container) is not None:
        raise ConfigurationError(f"a container {container!r} already exists. End it first: skyproxy down {name}")
    options = ["--label", f"{LABEL}={name}", "--publish", f"127.0.0.1::{PORT}", "--init", *CONFINEMENT]
    options += await gpu_options(engine.executable, gpus) if gpus else []
    options += ["--cpus", plain_text(quantity(cpu, "cpu"))] if cpu else []
    options += ["--memory", f"{size_bytes(memory, 'memory')}b"] if memory else []
    for row in volumes:
        options += ["--volume", f"{container}-{row['name']}:{row['path']}"]
    command = ["python", "-P", "-m", "skyproxy_server", "--host", "0.0.0.0", "--port", str(PORT)]
    # Encryption would protect nothing: the port is published on loopback, and nowhere else.
    command += ["--insecure", "--token-file", _TOKEN_PATH, "--snapshots", _SNAPSHOTS, "--suspend-report", _REPORT]
    command += ["--suspend-after", f"{suspend_after_seconds:g}"] if suspend_after_seconds else []
    token = secrets.token_urlsafe(32)
    write_private(_token_file(name), token + "\n")
    try:
        await engine.start(
            container,
            image or default_image(gpus),
            command,
            files={_TOKEN_PATH: token + "\n"},
            env=env or {},
            options=options,
        )
        if wait:
            await _wait_until_it_answers(engine, name)
    except BaseException:
        await asyncio.shield(stop_container(name))
        raise


async def stop_container(name: str) -> bool:
    """Ends a worker's container; whether there was one. Volumes stay, with the engine."""
    there = await ContainerEngine.find().remove(container_name(name))
    _token_file(name).unlink(missing_ok=True)
    return there


async def suspend_container(name: str) -> str:
    """Have a worker's sessions saved, and end it; return what became of them. Its container stays, and holds nothing.

    Raises:
        ConfigurationError: there is none that runs.
        WorkerStartError: it does not end.
    """
    engine, container = ContainerEngine.find(), container_name(name)
    found = await engine.inspect(container)
    if found is None or not _runs(found):
        what = "is suspended already" if found is not None and is_suspended(found) else "does not run"
        raise ConfigurationError(f"the worker {name!r} {what}. See: skyproxy list")
    await engine.stop(container, SETTINGS.leave_seconds + _BEYOND_LEAVE_SECONDS)
    return await suspension_text(name)


async def suspension_text(name: str) -> str:
    """Return what became of the sessions of a worker that was suspended, for people."""
    said = await ContainerEngine.find().read(container_name(name), _REPORT)
    try:
        return str(json.loads(said or "")["text"])
    except (ValueError, KeyError, TypeError):
        return ""


async def resume_container(name: str) -> None:
    """Start a worker's container again where it was suspended, or has ended otherwise; wait until it takes clients.

    Raises:
        ConfigurationError: there is no such container any more.
        WorkerStartError: it did not come up.
    """
    engine, container = ContainerEngine.find(), container_name(name)
    found = await engine.inspect(container)
    if found is None:
        raise ConfigurationError(f"there is no worker {name!r} any more, and what it held is gone with it.")
    if not _runs(found):
        await engine.restart(container)
    await _wait_until_it_answers(engine, name)


async def resume_if_suspended(name: str) -> None:
    """Start a worker's container again where it was suspended; any other is left alone.

    Raises:
        WorkerStartError: it did not come up.
    """
    found = await ContainerEngine.find().inspect(container_name(name))
    if found is not None and is_suspended(found):
        await resume_container(name)


def is_suspended(description: Mapping[str, Any]) -> bool:
    """Return whether a worker in a container has ended in order, and left its sessions there."""
    return not _runs(description) and description.get("State", {}).get("ExitCode") == 0


async def replace_token(name: str) -> None:
    """Give the worker of a container another token; it accepts the former one for a while.

    Raises:
        WorkerStartError: there is no such container.
    """
    token = secrets.token_urlsafe(32) + "\n"
    # The worker first: a client that is early with the new one makes it look.
    await ContainerEngine.find().write(container_name(name), _TOKEN_PATH, token)
    write_private(_token_file(name), token)


async def container_address(name: str) -> tuple[str, str]:
    """Url and token of a worker in a container.

    Raises:
        ConnectError: it does not run, or is not ours to use.
    """
    engine = ContainerEngine.find()
    found = await engine.inspect(container_name(name))
    port = published_port(found, PORT) if found is not None else None
    if found is not None and is_suspended(found):
        raise ConnectError(f"the worker {name!r} is suspended. Bring it back: skyproxy resume {name}")
    if found is None or port is None or not _runs(found):
        raise ConnectError(
            f"the worker {name!r} in a container is not running. Start it again: skyproxy down {name}; "
            f"skyproxy up {name} --provider container; or forget it: skyproxy context remove {name}"
        )
    try:
        token = _token_file(name).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConnectError(
            f"the token of the worker {name!r} is not here: {error}. Did another user start it?"
        ) from error
    return f"ws://127.0.0.1:{port}", token


async def _wait_until_it_answers(engine: ContainerEngine, name: str) -> None:
    deadline = time.monotonic() + SETTINGS.worker_start_timeout_seconds
    while True:
        found = await engine.inspect(container_name(name))
        ended = found is None or not _runs(found)
        if not ended:
            try:
                url, token = await container_address(name)
                await asyncio.to_thread(ask_worker, url, token)
                return
            except ConnectError:
                pass
        if ended or time.monotonic() > deadline:
            how = "ended" if ended else f"accepted no clients within {SETTINGS.worker_start_timeout_seconds:.0f} s"
            last = await engine.logs(container_name(name))
            raise WorkerStartError(f"the worker {name!r} in a container {how}. The end of its log:\n{last}")
        await asyncio.sleep(_POLL_SECONDS)


def _runs(description: Mapping[str, Any]) -> bool:
    return bool(description.get("State", {}).get("Running"))


def _token_file(name: str) -> Any:
    return state_folder() / "containers" / f"{checked_name(name)}.token"
