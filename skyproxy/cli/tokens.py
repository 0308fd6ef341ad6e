"""`skyproxy token`: what clients show to a worker."""

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
)
from skyproxy.cli.examples import examples_text
from skyproxy.cli.fleet import not_found
from skyproxy.cli.fleets import locate
from skyproxy.cli.output import progress, show_line
from skyproxy.units import duration_seconds

app = typer.Typer(help="Manage workers' tokens.", no_args_is_help=True)


@app.callback()
def token() -> None:
    """Manage workers' tokens."""


@app.command("rotate", epilog=examples_text("skyproxy token rotate"))
def rotate(
    name: WorkerName = None,
    provider: Provider = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the worker accepts the new token.")] = True,
    timeout: Annotated[str, typer.Option(help="How long to wait for that.")] = "5m",
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Replace a running worker's token. Sessions continue, and clients find the new token by themselves.

    The worker accepts the old token for a while (its SKYPROXY_TOKEN_OVERLAP_SECONDS, ten minutes by default).
    """
    address = address_of(namespace, context, kubeconfig)
    seconds = duration_seconds(timeout, "--timeout")

    async def work() -> str:
        worker, fleet = await locate(name, provider, address)
        if await fleet.row(worker) is None:
            raise not_found(worker, fleet.provider)
        with progress(f"Replacing the token of {worker}") as say:
            await fleet.rotate_token(worker, timeout_seconds=seconds if wait else None, say=say)
        return worker

    show_line(f"{asyncio.run(work())} has a new token")
