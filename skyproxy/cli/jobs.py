"""`skyproxy jobs`, `attach`, `cancel` and `run --detach`: what runs on a worker when its program has ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from skyproxy.cli.arguments import (
    Json,
    Kubeconfig,
    KubeContext,
    Namespace,
    Provider,
    ProviderName,
    address_of,
    complete_worker,
)
from skyproxy.cli.examples import examples_text
from skyproxy.cli.fleet import Fleet, WorkerAccess
from skyproxy.cli.fleets import access_of_environment, locate
from skyproxy.cli.output import age_text, note, show_json, show_json_line, show_line, show_output, show_table, warn
from skyproxy.contexts import Context
from skyproxy.errors import ConfigurationError, SkyproxyError
from skyproxy.jobs.job import Job, JobStatus, ending_of, status_of
from skyproxy.jobs.link import JobLink, OpenConnection, job_rows, jobs_hello, part_of
from skyproxy.jobs.output import JobLine
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.transport.base import Transport
from skyproxy.transport.links import is_link, read_url
from skyproxy.transport.trust import client_context

if TYPE_CHECKING:
    from skyproxy.functions.scripts import Script
    from skyproxy.jobs.options import JobOptions
    from skyproxy.pools import Compute

app = typer.Typer(help="List the jobs on a worker, show their output, remove them.", invoke_without_command=True)
_On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Name of the worker; default: the one of SKYPROXY_URL, else the current context's.",
        autocompletion=complete_worker,
    ),
]
_JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]
NodeOfJob = Annotated[int | None, typer.Option("--node", min=0, help="Only what this node has printed.")]
RankOfJob = Annotated[
    int | None, typer.Option("--rank", min=0, help="Only what this rank has printed, of a job under torchrun.")
]
_Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job ends.")]
_COLUMNS = ("name", "state", "exit", "restarts", "age", "kind", "title", "node")
_BYTES_A_LINE = 200
_SIGNAL_STATUS = 128
_ASK_SECONDS = 5.0


@app.callback()
def jobs(ctx: typer.Context) -> None:
    """List the jobs on a worker, show their output, remove them."""
    if ctx.invoked_subcommand is None:
        list_jobs()


@app.command("list", epilog=examples_text("skyproxy jobs list"))
def list_jobs(
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """List the jobs of your token, the newest first: state, age, exit status, node."""
    with connection(on, provider, address_of(namespace, context, kubeconfig)) as open_connection:
        with JobLink(open_connection) as link:
            rows = job_rows(link)
        statuses = [(status_of(row), part_of(row)) for row in rows]
    if as_json:
        show_json([{**status._asdict(), "part": list(part)} for status, part in statuses])
        return
    shown = [_row(status, part) for status, part in statuses]
    show_table(_COLUMNS, shown, "There are no jobs. Start one: skyproxy run --detach train.py", shorten=("title",))


def _row(status: JobStatus, part: tuple[int, int]) -> dict[str, object]:
    index, count = part
    return {
        "name": status.name,
        "state": status.state,
        "exit": _exit_text(status),
        "restarts": status.restarts + status.preemptions or "",
        "age": age_text(status.age_seconds),
        "kind": status.kind,
        "title": status.title,
        "node": f"{index} of {count}" if count != 1 else "",
    }


def _exit_text(status: JobStatus) -> str:
    if status.signal is not None:
        return ending_of(status._replace(state="failed")).removeprefix("was ended by ")
    return "" if status.exit_code is None else str(status.exit_code)


@app.command("logs", epilog=examples_text("skyproxy jobs logs"))
def logs(
    job: _JobName,
    follow: _Follow = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last N lines, of each node.")] = None,
    node: NodeOfJob = None,
    rank: RankOfJob = None,
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Show what a job has printed, on all of its nodes; with --json, one object per line."""
    with jobs_on(on, provider, address_of(namespace, context, kubeconfig), job) as found:
        show_logs(found, follow=follow, tail=tail, node=node, rank=rank, as_json=as_json)


def show_logs(
    job: Job,
    *,
    follow: bool,
    tail: int | None,
    node: int | None = None,
    rank: int | None = None,
    as_json: bool = False,
) -> None:
    """Print the lines of a job, those of several nodes with the node in front."""
    tail_bytes = tail * _BYTES_A_LINE if follow and tail is not None else None
    lines = job.log_lines(follow, tail_bytes, node=node, rank=rank)
    if tail is not None and not follow:
        lines = _tail(lines, tail)
    for line in lines:
        if as_json:
            number = {"node": line.node} if job.node_count > 1 else {}
            show_json_line({"name": job.name, **number, "line": line.text})
        else:
            number_text = f"[node {line.node}] " if job.node_count > 1 and node is None else ""
            show_output(number_text + line.text)


def _tail(lines: Iterator[JobLine], count: int) -> Iterator[JobLine]:
    last: dict[int, deque[JobLine]] = {}
    for line in lines:
        last.setdefault(line.node, deque(maxlen=count)).append(line)
    for kept in last.values():
        yield from kept


@app.command("remove", epilog=examples_text("skyproxy jobs remove"))
def remove(
    job: _JobName,
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Forget a job that has ended, with its output, its result and its checkpoints."""
    with jobs_on(on, provider, address_of(namespace, context, kubeconfig), job) as found:
        found.remove()
    note(f"The job {job} is removed.")


def attach(
    job: _JobName,
    node: NodeOfJob = None,
    rank: RankOfJob = None,
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Follow a job's output until it ends, and exit with its status. Ctrl-C detaches; the job runs on."""
    with jobs_on(on, provider, address_of(namespace, context, kubeconfig), job) as found:
        follow(found, node, rank)


def follow(job: Job, node: int | None = None, rank: int | None = None) -> NoReturn:
    """Print a job's output until it ends, and exit as it did."""
    try:
        show_logs(job, follow=True, tail=None, node=node, rank=rank)
        status = job.wait()
    except KeyboardInterrupt:
        note(f"Detached; the job {job.name} runs on. Follow it again: skyproxy attach {job.name}")
        raise typer.Exit(0) from None
    note(f"The job {job.name} {ending_of(status)}.")
    if status.signal is not None:
        raise typer.Exit(_SIGNAL_STATUS + status.signal)
    raise typer.Exit(status.exit_code or int(status.state != "succeeded"))


def cancel(
    job: _JobName,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has ended.")] = True,
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """End a job: its processes get SIGTERM, and SIGKILL when its grace is over."""
    with jobs_on(on, provider, address_of(namespace, context, kubeconfig), job) as found:
        before = found.status()
        if before.has_ended:
            note(f"The job {job} has ended already: it {ending_of(before)}.")
            return
        found.cancel(wait=wait)
    note(f"The job {job} {'was cancelled' if wait else 'is being cancelled'}.")


def run_detached(script: Script, saved: Context, nodes: int, options: JobOptions, *, torchrun: bool) -> None:
    """Start a script as a job on a saved worker, and say how to find it again.

    Raises:
        ConfigurationError: the worker has fewer nodes, or runs no jobs for us.
    """
    from skyproxy.jobs.submitting import JobWorker, submit_script  # late: they load torch

    if nodes > 1:
        from skyproxy.pools.pool_jobs import job_places

        if saved.provider != "kubernetes":
            raise ConfigurationError(f"--nnodes {nodes}: the worker {saved.name!r} is a single node. Leave it out.")
        with cluster_pool(saved, nodes) as pool:
            job = submit_script(script, job_places(pool), options, torchrun=True)
    else:
        with connection(saved.name, None, ClusterAddress()) as open_connection:
            job = submit_script(script, [JobWorker(open_connection)], options, torchrun=torchrun)
    show_line(job.name)
    note(f"The job {job.name} runs on {saved.name}. Its output: skyproxy attach {job.name} --on {saved.name}")


async def tell_of_jobs(worker: str, fleet: Fleet) -> None:
    """Say how many jobs end with a worker that is about to be ended; nothing where it cannot be asked."""
    with suppress(SkyproxyError, OSError):
        row = await fleet.row(worker)
        if row is None or not row.ready:
            return
        async with asyncio.timeout(_ASK_SECONDS):
            access = await fleet.access(worker)
        try:
            count = (await asyncio.to_thread(access.report)).get("jobs_running")
        finally:
            access.close()
        if isinstance(count, int) and count > 0:
            warn(f"{count} job{'s run' if count > 1 else ' runs'} on {worker}, and end{'s' * (count == 1)} with it.")


# --- the worker of a command -----------------------------------------------------------------------------------------


@contextmanager
def connection(on: str | None, provider: ProviderName | None, address: ClusterAddress) -> Iterator[OpenConnection]:
    """Give what opens connections for jobs to the worker that a command means."""

    async def find() -> WorkerAccess:
        chosen = _access_of_environment(on, provider, address)
        if chosen is not None:
            return chosen
        worker, fleet = await locate(on, provider, address)
        return await fleet.access(worker)

    access = asyncio.run(find())
    try:
        yield opener_of(access)
    finally:
        access.close()


def _access_of_environment(
    on: str | None, provider: ProviderName | None, address: ClusterAddress
) -> WorkerAccess | None:
    """Return the worker of SKYPROXY_URL, where a command names none."""
    return access_of_environment() if on is None and provider is None and not address.options else None


def opener_of(access: WorkerAccess) -> OpenConnection:
    """Return what opens connections for jobs to a worker."""
    url, certificate = access.url, access.certificate
    if is_link(url):
        url, certificate = read_url(url, certificate)
    trusted = client_context(certificate) if certificate is not None else None

    from skyproxy.transport.websocket import connect_websocket  # late: most commands open no connection

    def open_connection(timeout_seconds: float | None = None) -> Transport:
        return connect_websocket(
            url,
            access.token,
            jobs_hello(),
            ssl_context=trusted,
            server_name=access.server_name,
            timeout_seconds=timeout_seconds,
        )[0]

    return open_connection


@contextmanager
def jobs_on(on: str | None, provider: ProviderName | None, address: ClusterAddress, name: str) -> Iterator[Job]:
    """Give a job of the worker that a command means, with all its parts where the worker has several nodes itself."""
    with connection(on, provider, address) as open_connection:
        with JobLink(open_connection) as link:
            index, count = part_of(link.ask("status", name=name)[0])
        saved = _saved_cluster(on, provider, address) if count != 1 else None
        if saved is None:
            if count != 1:
                # A pool of workers that know nothing of each other: only the program that made it has them all.
                warn(f"This is node {index} of the {count} that the job {name} runs on: ask the other workers, too.")
            yield Job(name, [open_connection])
            return
    with cluster_pool(saved, count) as pool:
        yield pool.job(name)


def _saved_cluster(on: str | None, provider: ProviderName | None, address: ClusterAddress) -> Context | None:
    """Return the worker that a command means, if it is one in a cluster, which may have several nodes."""
    if _access_of_environment(on, provider, address) is not None:
        return None
    worker, fleet = asyncio.run(locate(on, provider, address))
    saved = asyncio.run(fleet.context(worker))
    return saved if saved.provider == "kubernetes" else None


def cluster_pool(saved: Context, nodes: int) -> Compute:
    """Return the pool that a saved worker of several nodes is."""
    # Late, because they load torch.
    from skyproxy.pools import Compute
    from skyproxy.providers.kubernetes_provider import Kubernetes

    found = ClusterAddress.of_options(saved.options)
    provider = Kubernetes(found.namespace, found.context, found.kubeconfig)
    return Compute(name=saved.name, provider=provider, nodes=nodes, keep=True)
