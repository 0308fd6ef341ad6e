"""Workers in containers of this machine that outlive the command which started them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from skyproxy.contexts import checked_name, state_folder, write_private
from skyproxy.errors import ConfigurationError, ConnectError, WorkerStartError
from skyproxy.providers.container_engine import CONFINEMENT, LABEL, ContainerEngine, published_port
from skyproxy.settings import SETTINGS
from skyproxy.transport.worker_report import ask_worker
from skyproxy.units import plain_text, quantity, size_bytes

PORT = 8765
_TOKEN_PATH = "/tmp/skyproxy-token"
_POLL_SECONDS = 0.2


def container_name(name: str) -> str:
    """The container of a worker."""
    return f"skyproxy-{checked_name(name)}"


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

    Raises:
        ConfigurationError: there is no engine, or a container of that name exists.
        WorkerStartError: it did not come up; with the end of its log.
    """
    engine, container = ContainerEngine.find(), container_name(name)
    if await engine.inspect(container) is not None:
        raise ConfigurationError(f"a container {container!r} already exists. End it first: skyproxy down {name}")
    options = ["--label", f"{LABEL}={name}", "--publish", f"127.0.0.1::{PORT}", "--init", *CONFINEMENT]
    options += ["--gpus", str(gpus)] if gpus else []
    options += ["--cpus", plain_text(quantity(cpu, "cpu"))] if cpu else []
    options += ["--memory", f"{size_bytes(memory, 'memory')}b"] if memory else []
    for row in volumes:
        options += ["--volume", f"{container}-{row['name']}:{row['path']}"]
    command = ["python", "-P", "-m", "skyproxy_server", "--host", "0.0.0.0", "--port", str(PORT)]
    # Encryption would protect nothing: the port is published on loopback, and nowhere else.
    command += ["--insecure", "--token-file", _TOKEN_PATH]
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
