"""`skyproxy run`: a script with sky:0 bound to a worker, or under torchrun on the worker's own nodes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyproxy.cli.arguments import Kubeconfig, KubeContext, Namespace, address_of, complete_worker
from skyproxy.cli.fleet import Fleet
from skyproxy.cli.fleets import locate
from skyproxy.cli.jobs import cluster_pool, run_detached
from skyproxy.contexts import CONTEXT_VARIABLE, Context, ContextStore, checked_name
from skyproxy.errors import ConfigurationError
from skyproxy.jobs.options import JobOptions
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.units import duration_seconds

if TYPE_CHECKING:
    from skyproxy.functions.scripts import Script

_ISOLATE_VARIABLE = "SKYPROXY_ISOLATE"


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="The script, or with --module the module's name.")],
    on: Annotated[
        str | None,
        typer.Option("--on", help="The worker; default: the current context's.", autocompletion=complete_worker),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run a module, as python -m does.")] = False,
    nnodes: Annotated[
        str | None,
        typer.Option(
            help="Run the script on the nodes themselves, under torchrun: on this many; 1:4 for a number that changes."
        ),
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(help="The same, with this many processes on each node: a number, gpu, cpu or auto. Default: 1"),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Under torchrun, or with --detach: how often to start all processes again when one fails."
        ),
    ] = 0,
    isolate: Annotated[
        bool,
        typer.Option(help="Give each function that the script runs on a node a process of its own, where it can."),
    ] = True,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run the script on the worker itself, as a job, and do not wait.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="With --detach: the name of the job.")] = None,
    grace: Annotated[
        str | None,
        typer.Option(help="With --detach: the time that the job has after SIGTERM, to save its state. Example: 30s"),
    ] = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Run a Python script with sky:0 bound to a worker. Arguments after the script's name go to the script.

    With --nnodes or --nproc-per-node, the script itself runs on the worker's nodes, as torchrun would run it there.
    Where no worker is named and no context is chosen, it gets a pool of its own, which ends with it.

    With --detach, the script runs on the worker as a job, which goes on when this command, the connection and this
    machine are gone: skyproxy jobs, attach, cancel.
    """
    address = address_of(namespace, context, kubeconfig)
    saved = _context(on, address)
    if detach:
        job = JobOptions(name, max_restarts, None if grace is None else duration_seconds(grace, "--grace"))
        _detach(script, ctx.args, saved, job, is_module=module, nodes=nnodes, processes=nproc_per_node)
        return
    if name is not None or grace is not None:
        raise ConfigurationError("--name and --grace are for jobs. Add --detach.")
    if nnodes is not None or nproc_per_node is not None:
        from skyproxy.functions.scripts import describe_script

        count = nproc_per_node or "1"
        described = describe_script(
            script,
            ctx.args,
            is_module=module,
            procs_per_node=int(count) if count.isdecimal() else count,
            max_restarts=max_restarts,
            nodes=nnodes,
        )
        _run_there(described, saved)
        return
    if max_restarts:
        raise ConfigurationError("--max-restarts is for scripts under torchrun. Add --nproc-per-node or --nnodes.")
    if not module and not Path(script).is_file():
        from skyproxy.functions.scripts import script_missing

        raise ConfigurationError(script_missing(script, f"skyproxy run -m {script}"))
    if saved is None:
        late = " Options of skyproxy run stand before the script." if "--on" in ctx.args else ""
        raise ConfigurationError(f"no context is chosen. Name a worker: skyproxy run --on NAME SCRIPT.{late}")
    environment = {key: value for key, value in os.environ.items() if key not in ("SKYPROXY_URL", "SKYPROXY_TOKEN")}
    environment[CONTEXT_VARIABLE] = saved.name
    if not isolate:
        environment[_ISOLATE_VARIABLE] = "0"
    environment.setdefault(_ISOLATE_VARIABLE, "1")
    command = [sys.executable, *(["-m"] if module else []), script, *ctx.args]
    if os.name == "posix":
        # In our place, so that signals and the exit status are the script's own.
        os.execve(sys.executable, command, environment)
    sys.exit(subprocess.call(command, env=environment))


def _context(on: str | None, address: ClusterAddress) -> Context | None:
    """The context of the worker that is meant; None where none is named and none is chosen."""
    store = ContextStore()
    saved = store.chosen() if on is None else store.get(checked_name(on))
    if saved is None and on is not None:

        async def find() -> tuple[str, Fleet]:
            return await locate(on, None, address)

        worker, fleet = asyncio.run(find())
        saved = asyncio.run(fleet.context(worker))
        store.save(saved, make_current=False)
    return saved


def _detach(
    script: str,
    args: list[str],
    saved: Context | None,
    options: JobOptions,
    *,
    is_module: bool,
    nodes: str | None,
    processes: str | None,
) -> None:
    if saved is None:
        raise ConfigurationError(
            "--detach needs a worker that outlives this command. Start one: skyproxy up dev; then: skyproxy run --on "
            "dev --detach SCRIPT"
        )
    from skyproxy.functions.scripts import describe_script

    count = processes or "1"
    described = describe_script(
        script, args, is_module=is_module, procs_per_node=int(count) if count.isdecimal() else count, nodes=nodes
    )
    least, most = described.nodes or (1, 1)
    if least != most:
        raise ConfigurationError(f"--nnodes {nodes}: a job has one number of nodes.")
    torchrun = processes is not None or nodes is not None
    run_detached(replace(described, nodes=None), saved, most, options, torchrun=torchrun)


def _run_there(script: Script, saved: Context | None) -> None:
    # Late, because they import torch.
    from skyproxy.functions.scripts import pack_for, run_script
    from skyproxy.pools import Compute, Nodes

    least, nodes = script.nodes or (1, 1)
    if saved is None:
        pool = Compute(nodes=nodes if least == nodes else Nodes(least, nodes))
    elif saved.provider == "kubernetes":
        pool = cluster_pool(saved, nodes)
    else:
        if nodes > 1:
            raise ConfigurationError(
                f"--nnodes {nodes}: the worker {saved.name!r} is a single node. Leave --nnodes out; or, for a pool of "
                "this machine, choose no worker: skyproxy context clear"
            )
        from skyproxy.providers.saved import open_context

        with open_context(saved) as node:
            node.run(run_script, pack_for(script, shares_files=False))
        return
    with pool:
        pool.run_torchrun(script)
