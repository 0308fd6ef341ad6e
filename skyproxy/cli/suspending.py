"""`skyproxy suspend`, `skyproxy resume` and `skyproxy move`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from skyproxy.cli.arguments import (
    Kubeconfig,
    KubeContext,
    Namespace,
    Provider,
    WorkerName,
    address_of,
    complete_worker,
)
from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.cli.fleet import EndingOptions
from skyproxy.cli.fleets import locate
from skyproxy.cli.output import note, progress, show_line
from skyproxy.contexts import ContextStore, checked_name
from skyproxy.errors import ConfigurationError, SkyproxyError, visible
from skyproxy.providers.program_control import ask_programs
from skyproxy.units import duration_seconds


def suspend(
    name: WorkerName = None,
    provider: Provider = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for its end.")] = "5m",
    force: Annotated[
        bool, typer.Option("--force", help="Also where sessions would be lost: without a volume.")
    ] = False,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Save a worker's sessions to its volume and end it: memory and GPU are free.

    Programs keep their tensors. The next operation of one of them brings the worker back, or skyproxy resume.
    """
    address = address_of(namespace, context, kubeconfig)
    seconds = duration_seconds(timeout, "--timeout")

    async def work() -> tuple[str, str]:
        worker, fleet = await locate(name, provider, address)
        with progress(f"Suspending {worker}") as say:
            return worker, await fleet.suspend(worker, EndingOptions(True, seconds, force, say=say))

    worker, text = asyncio.run(work())
    show_line(f"{worker} is suspended" + (f": {text}" if text else ""))
    note(f"The next operation of a program brings it back; or: skyproxy resume {worker}")


def resume(
    name: WorkerName = None,
    provider: Provider = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for it.")] = "15m",
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Bring a suspended worker back; its sessions go on with their programs' next operations."""
    address = address_of(namespace, context, kubeconfig)
    seconds = duration_seconds(timeout, "--timeout")

    async def work() -> str:
        worker, fleet = await locate(name, provider, address)
        with progress(f"Bringing {worker} back") as say:
            await fleet.resume(worker, seconds, say)
        return worker

    show_line(f"{asyncio.run(work())} is ready")


def move(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="Worker that programs use now.", autocompletion=complete_worker)
    ],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="Saved context to go on at.", autocompletion=complete_worker)
    ],
) -> None:
    """Move the sessions of your running programs on this machine to another worker; their tensors stay valid.

    Both workers must keep snapshots; where they see no common folder, the programs carry the sessions' bytes.
    """
    store = ContextStore()
    for name in (source, target):
        if store.get(checked_name(name)) is None:
            raise NotFoundError(f"there is no context {name!r} on this machine. See: skyproxy context list")
    if source == target:
        raise ConfigurationError(f"{source} is where the sessions are already.")
    answers = ask_programs(source, target)
    problems = [f"process {row['process_id']}: {visible(row['problem'])}" for row in answers if row.get("problem")]
    moved = sum(count for row in answers if type(count := row.get("moved")) is int)
    if problems:
        raise SkyproxyError(f"{moved} sessions were moved, and not all: " + "; ".join(problems))
    if not moved:
        raise NotFoundError(
            f"no program on this machine uses {source} by its saved context. One that connects by address moves with "
            "node.move_to(url)."
        )
    show_line(f"{moved} session{'s' * (moved != 1)} moved from {source} to {target}")
    note(f"{source} still runs. End it: skyproxy down {source}")
