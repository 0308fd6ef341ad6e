"""`skyproxy list`, `status`, `logs`, `top` and `gpus`: what there is and what it does."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer

from skyproxy.cli.arguments import (
    Json,
    Kubeconfig,
    KubeContext,
    Namespace,
    Provider,
    ProviderName,
    WorkerName,
    address_of,
)
from skyproxy.cli.exit_codes import ExitCode
from skyproxy.cli.fleet import Fleet, WorkerRow, not_found
from skyproxy.cli.fleets import asks_for_cluster, fleet_of, has_cluster, locate
from skyproxy.cli.jobs import RankOfJob, jobs_on, show_logs
from skyproxy.cli.output import (
    age_text,
    bytes_text,
    console,
    note,
    show_json,
    show_json_line,
    show_line,
    show_output,
    show_table,
    warn,
)
from skyproxy.contexts import ContextStore
from skyproxy.errors import ClusterError, ConfigurationError, visible
from skyproxy.kubernetes.address import ClusterAddress

_COLUMNS = ("current", "name", "provider", "where", "phase", "nodes", "devices", "idle", "age")


def list_command(
    provider: Annotated[ProviderName | None, typer.Option(help="Only workers of this provider; default: all.")] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="In all namespaces.")] = False,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """List the workers on this machine, on hosts reached over ssh, and in the kubeconfig's cluster."""
    address = address_of(namespace, context, kubeconfig)
    rows = asyncio.run(_all_rows(provider, address, all_namespaces))
    if as_json:
        show_json([row.row for row in rows])
        return
    current = ContextStore().current_name()
    shown = [
        {
            "current": "*" if row.name == current else "",
            "name": row.name,
            "provider": row.provider,
            "where": row.where,
            "phase": row.phase,
            "nodes": row.nodes,
            "devices": row.devices,
            "idle": age_text(row.idle_seconds),
            "age": age_text(row.age_seconds),
        }
        for row in rows
    ]
    show_table(
        _COLUMNS,
        shown,
        "There are no workers. Start one: skyproxy up NAME",
        shorten=("where", "devices", "provider"),
        unnamed=("current",),
    )


async def _all_rows(provider: ProviderName | None, address: ClusterAddress, all_namespaces: bool) -> list[WorkerRow]:
    rows: list[WorkerRow] = []
    wants_cluster = provider is ProviderName.KUBERNETES or asks_for_cluster(address) or all_namespaces
    if provider in (None, ProviderName.LOCAL):
        rows += await fleet_of(ProviderName.LOCAL, address).rows()
    if provider is None:
        rows += await fleet_of("remote", address).rows()
    if provider in (None, ProviderName.SSH):
        rows += await fleet_of(ProviderName.SSH, address).rows()
    if provider is ProviderName.CONTAINER or (provider is None and _knows_containers()):
        rows += await fleet_of(ProviderName.CONTAINER, address).rows()
    if wants_cluster or provider is None:
        try:
            if wants_cluster or await has_cluster(address):
                from skyproxy.cli.cluster_fleet import ClusterFleet

                rows += await ClusterFleet(address, all_namespaces=all_namespaces).rows()
        except (ClusterError, ConfigurationError) as error:
            # Nobody asked for the cluster by name, so the others are worth showing.
            if wants_cluster:
                raise
            warn(str(error))
    return rows


def _knows_containers() -> bool:
    """Return whether a saved context is a container: without one, no engine is asked."""
    store = ContextStore()
    contexts = (store.get(name) for name in store.names())
    return any(context is not None and context.provider == ProviderName.CONTAINER for context in contexts)


def status(
    name: WorkerName = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Show a worker's status; exit 1 if it is not ready."""
    address = address_of(namespace, context, kubeconfig)

    async def work() -> WorkerRow:
        worker, fleet = await locate(name, provider, address)
        found = await fleet.row(worker)
        if found is None:
            raise not_found(worker, fleet.provider)
        return found

    found = asyncio.run(work())
    if as_json:
        show_json(found.row)
    else:
        _show_status(found)
    if not found.ready:
        raise typer.Exit(int(ExitCode.FAILED))


def _show_status(found: WorkerRow) -> None:
    software = ", ".join(f"{name} {text}" for name, text in found.software.items())
    lines = {
        "worker": f"{found.name} ({found.provider}, {found.where})",
        "phase": found.phase + (f" ({found.reason})" if found.reason and found.reason != found.phase else ""),
        "why": found.message,
        "hint": found.hint,
        "queue": found.queue,
        "nodes": str(found.nodes),
        "devices": found.devices,
        "software": software,
        "url": found.url or "",
        "idle": age_text(found.idle_seconds),
        "age": age_text(found.age_seconds),
    }
    for key, text in lines.items():
        if text:
            show_line(f"{key:<9} {text}")
    for event in found.events:
        show_line(f"{'event':<9} {event}")


def logs(
    name: WorkerName = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the worker ends.")
    ] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last N lines.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Only this node's log.")] = None,
    job: Annotated[str | None, typer.Option("--job", help="The output of this job instead.")] = None,
    rank: RankOfJob = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Show a worker's log, or the output of a job on it; with --json, one object per line."""
    address = address_of(namespace, context, kubeconfig)
    if job is not None:
        with jobs_on(name, provider, address, job) as found:
            show_logs(found, follow=follow, tail=tail, node=node, rank=rank, as_json=as_json)
        return
    if rank is not None:
        raise ConfigurationError("--rank is for the output of a job. Name one: --job JOB")

    async def work() -> None:
        worker, fleet = await locate(name, provider, address)
        if await fleet.row(worker) is None:
            raise not_found(worker, fleet.provider)
        async for line in fleet.logs(worker, follow=follow, tail=tail, node=node):
            show_json_line({"name": worker, "line": line}) if as_json else show_output(line)

    asyncio.run(work())


def top(
    name: WorkerName = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one update and exit.")] = False,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Show a worker's activity: sessions, operations per second, device memory. Press Ctrl-C to stop."""
    address = address_of(namespace, context, kubeconfig)

    async def find() -> tuple[str, Fleet]:
        return await locate(name, provider, address)

    worker, fleet = asyncio.run(find())
    access = asyncio.run(fleet.access(worker))
    try:
        before, then = access.report(), time.monotonic()
        if once or as_json:
            time.sleep(min(interval, 1.0))
            now = _rates(before, access.report(), time.monotonic() - then)
            show_json({"name": worker, **now}) if as_json else console().print(_top_table(worker, now))
            return
        from rich.live import Live

        shown, page = _top_table(worker, before), console()
        if not page.is_terminal:  # a pipe or a file, into which `Live` writes at its end only
            page.print(shown)
        with Live(shown, console=page, auto_refresh=False) if page.is_terminal else nullcontext() as live:
            while True:
                time.sleep(interval)
                report, at = access.report(), time.monotonic()
                shown = _top_table(worker, _rates(before, report, at - then))
                live.update(shown, refresh=True) if live is not None else page.print(shown)
                before, then = report, at
    finally:
        access.close()


def _rates(before: dict[str, Any], report: dict[str, Any], seconds: float) -> dict[str, Any]:
    if "commands" not in report or "commands" not in before:
        return report
    done = report["commands"] - before["commands"]
    return {**report, "commands_per_second": round(max(done, 0) / max(seconds, 1e-3), 1)}


def _top_table(worker: str, report: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rate = report.get("commands_per_second")
    caption = [
        f"sessions {report.get('sessions', 0)}",
        f"calls running {report.get('calls_running', 0)}",
        f"operations a second {rate:,.0f}" if rate is not None else "",
        f"idle {age_text(report.get('idle_seconds'))}",
    ]
    title = Text(visible(f"{worker}: " + ", ".join(text for text in caption if text)), style="bold")
    table = Table(box=None, pad_edge=False)
    for column in ("DEVICE", "NAME", "USED", "TOTAL", "BUSY"):
        table.add_column(column)
    for row in report.get("devices", ()):
        busy = row.get("utilization_percent")
        cells = (
            f"{row['type']}:{row['index']}",
            row.get("name", ""),
            bytes_text(row.get("used_memory_bytes")),
            bytes_text(row.get("total_memory_bytes")),
            "" if busy is None else f"{busy}%",
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return Group(title, table)  # a table's own title is broken at the table's width


def gpus(
    namespace: Namespace = None, context: KubeContext = None, kubeconfig: Kubeconfig = None, as_json: Json = False
) -> None:
    """Show the cluster's GPUs, and which of them are free."""
    from skyproxy.kubernetes.client import ClusterClient
    from skyproxy.kubernetes.gpus import cluster_gpus

    async def work() -> list[dict[str, Any]]:
        async with ClusterClient(address_of(namespace, context, kubeconfig)) as client:
            return [{**asdict(row), "free": row.free} for row in await cluster_gpus(client)]

    try:
        rows = asyncio.run(work())
    except ClusterError as error:
        if error.status != 403:
            raise
        raise ClusterError(
            f"{error} Listing nodes needs a permission of its own: kubectl auth can-i list nodes. Without it, ask for "
            "a GPU and see: skyproxy status NAME"
        ) from error
    if as_json:
        show_json(rows)
        return
    shown = [
        {**row, "memory": bytes_text(row["memory_mib"] << 20) if row["memory_mib"] else "", "used": row["used"]}
        for row in rows
    ]
    columns = ("node", "product", "memory", "resource", "total", "used", "free")
    show_table(columns, shown, "No node has GPUs.", shorten=("product", "resource"))
    if any(not row["schedulable"] for row in rows):
        note("Nodes that accept no new Pods have nothing free.")
