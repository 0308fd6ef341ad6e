"""`skyproxy up` and `skyproxy down`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
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
    variables_of,
    volume_of,
)
from skyproxy.cli.fleet import EndingOptions, Fleet, WorkerRow, not_found
from skyproxy.cli.fleets import asks_for_cluster, fleet_of, has_cluster, locate
from skyproxy.cli.jobs import tell_of_jobs
from skyproxy.cli.output import note, progress, show_json, show_line
from skyproxy.contexts import CONTEXT_VARIABLE, Context, ContextStore, checked_name, connection_files
from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.kubernetes.accelerators import WHOLE_GPU
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.resources import claim_rows
from skyproxy.providers.ssh import name_of
from skyproxy.providers.ssh_connection import SshTarget, is_host
from skyproxy.units import duration_seconds, limit_seconds

PROVIDER_VARIABLE = "SKYPROXY_PROVIDER"
_SNAPSHOTS = "20Gi"
_POSSIBLE = {
    ProviderName.LOCAL: ("suspend_after",),
    ProviderName.SSH: ("suspend_after",),
    ProviderName.CONTAINER: ("memory", "image", "volume", "suspend_after"),
}
"""The options for clusters that a worker on this machine can have, too."""


def up(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|ssh://HOST",
            help="Name of the worker (small letters, digits and hyphens), or a host to run one on: ssh://[USER@]HOST[:PORT].",
        ),
    ],
    provider: Annotated[
        ProviderName | None,
        typer.Option(help="Where it runs; default: SKYPROXY_PROVIDER, else the kubeconfig's cluster, else local."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs per node; 0 for none.")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="GPU model, such as A100; skyproxy gpus lists them.")] = None,
    cpu: Annotated[str | None, typer.Option(help="CPUs per node, such as 4 or 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory per node, such as 16Gi.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image; default: the operator's.")] = None,
    runtime: Annotated[
        str | None, typer.Option(help="In Kubernetes: a runtime of the installation, which fills in the rest.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes, each in its own Pod.")] = 1,
    queue: Annotated[
        str | None, typer.Option(help="In Kubernetes: Kueue's LocalQueue, in which it waits for its turn.")
    ] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(help="In Kubernetes: devices by a claim: CLASS[:COUNT], template/NAME or claim/NAME; repeatable."),
    ] = None,
    volume: Annotated[list[str] | None, typer.Option(help="Persistent storage, NAME:SIZE:PATH; repeatable.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the worker, or NAME to pass on your own value; repeatable.")
    ] = None,
    env_from_secret: Annotated[
        list[str] | None, typer.Option(help="A Secret whose keys all become variables; repeatable.")
    ] = None,
    idle_timeout: Annotated[str | None, typer.Option(help="Shut down after being idle this long, such as 30m.")] = None,
    max_lifetime: Annotated[str | None, typer.Option(help="Shut down after this long in any case, such as 8h.")] = None,
    suspend_after: Annotated[
        str | None,
        typer.Option(help="Save its sessions and end it after being idle this long, such as 15m; see skyproxy resume."),
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(help="In Kubernetes: size of the volume for suspended sessions; with --suspend-after, 20Gi."),
    ] = None,
    named: Annotated[
        str | None,
        typer.Option("--name", help="With ssh://: the worker's name; default: derived from the host's."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="With ssh://: the host's Python, 3.11 or newer; if it has torch, torch is not downloaded."),
    ] = None,
    ssh_config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="With ssh://: a file to use instead of ~/.ssh/config."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it accepts clients.")] = True,
    timeout: Annotated[str, typer.Option(help="How long to wait for it.")] = "15m",
    use: Annotated[bool, typer.Option("--use/--no-use", help="Use it as sky:0.")] = True,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Start a worker and use it as sky:0; if one of that name exists, change it.

    With the provider local, the worker is a process on this machine that outlives this command; with kubernetes, a Pod
    that skyproxy's operator creates; with ssh://HOST, a process under your account on that host, which needs Python and
    no open port.
    """
    target = SshTarget.parse(name, str(ssh_config.absolute()) if ssh_config else None) if is_host(name) else None
    _check_ssh_options(target is not None, provider, {"--name": named, "--python": python, "--ssh-config": ssh_config})
    if target is not None:
        name, provider = named or name_of(target), ProviderName.SSH
    checked_name(name)
    address = address_of(namespace, context, kubeconfig)
    given = {
        "gpu_type": gpu_type,
        "memory": memory,
        "image": image,
        "queue": queue,
        "runtime": runtime,
        "claim": claim,
        "volume": volume,
        "idle_timeout": idle_timeout,
        "max_lifetime": max_lifetime,
        "env_from_secret": env_from_secret,
        "suspend_after": suspend_after,
        "snapshots": snapshots,
    }
    suspend_seconds = limit_seconds(suspend_after, "--suspend-after")
    chosen, why = asyncio.run(_choose(provider, address))
    if chosen is ProviderName.SSH:
        _check_ssh_options(target is not None, chosen, {})
    if why:
        note(f"Provider: {chosen.value}, {why}.")
    variables = variables_of(env or ())
    volumes = [volume_of(text) for text in volume or ()]
    if chosen is not ProviderName.KUBERNETES:
        impossible = {key: value for key, value in given.items() if value and key not in _POSSIBLE[chosen]}
        _refuse(chosen, impossible | ({"nodes": nodes} if nodes > 1 else {}))
    # What a worker of this machine got when it was started: one that runs keeps what it has.
    asked = {"gpus": gpus, "cpu": cpu, "memory": memory, "image": image, "volume": volume, "env": env}
    asked |= {"suspend-after": suspend_after}
    if chosen is ProviderName.LOCAL:
        fleet = _bring_up_locally(name, gpus, cpu, variables, wait, suspend_seconds or 0.0, asked)
    elif target is not None:
        fleet = _bring_up_over_ssh(name, target, python, gpus, cpu, variables, suspend_seconds or 0.0, asked)
    elif chosen is ProviderName.CONTAINER:
        limits: dict[str, Any] = {
            "gpus": gpus,
            "cpu": cpu,
            "memory": memory,
            "image": image,
            "volumes": volumes,
            "env": variables,
        }
        limits |= {"wait": wait, "suspend_after_seconds": suspend_seconds or 0.0}
        fleet = asyncio.run(_bring_up_container(name, limits, asked))
    else:
        manifest_options: dict[str, object] = {
            "image": image,
            "nodes": nodes,
            "queue": queue,
            "runtime": runtime,
            "resourceClaims": claim_rows(claim or ()) or None,
            "volumes": volumes,
            "env": variables,
            "envFrom": [{"secretRef": {"name": item}} for item in env_from_secret or ()] or None,
            "idle_timeout_seconds": limit_seconds(idle_timeout, "--idle-timeout"),
            "max_lifetime_seconds": limit_seconds(max_lifetime, "--max-lifetime"),
            "suspend_after_seconds": suspend_seconds,
            "snapshots": {"storage": snapshots or _SNAPSHOTS} if snapshots or suspend_seconds else None,
        }
        seconds = duration_seconds(timeout, "--timeout") if wait else None
        wanted = _resources(gpus, gpu_type, cpu, memory)
        try:
            fleet = asyncio.run(_bring_up_in_cluster(name, address, gpu_type, wanted, manifest_options, seconds))
        except (KeyboardInterrupt, WorkerStartError):
            note(f"{name} is still being started, and may become ready later. To give up: skyproxy down {name}")
            raise
    found = asyncio.run(_finish(fleet, name, use))
    if as_json:
        show_json(found.row)
        return
    state = "is ready" if found.ready else f"is being created: {found.message}" if found.message else "is being created"
    show_line(f"{name} {state}" + (f" ({found.devices})" if found.devices else ""))
    if use:
        note("sky:0 is now this worker. End it: skyproxy down " + name)
        for variable in ("SKYPROXY_URL", CONTEXT_VARIABLE):
            if os.environ.get(variable) not in (None, name):
                note(f"{variable} is set in this shell and takes precedence; unset it to use {name}.")


def down(
    name: WorkerName = None,
    provider: Provider = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is gone.")] = True,
    timeout: Annotated[str, typer.Option(help="How long to wait for that.")] = "5m",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Remove Pods on unresponsive machines at once, others after --timeout; forget hosts ssh cannot reach.",
        ),
    ] = False,
    keep_environment: Annotated[
        bool, typer.Option("--keep-environment", help="With ssh://: keep what was installed on the host.")
    ] = False,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Shut down a worker. Its tensors are lost; volumes are kept or deleted as their reclaimPolicy says.

    A Pod removed by force may keep running on its machine until that machine responds again.
    """
    if force and not wait:
        raise ConfigurationError("--force matters only while the command waits. Leave out --no-wait.")
    address = address_of(namespace, context, kubeconfig)
    seconds = duration_seconds(timeout, "--timeout")

    async def work() -> str:
        worker, fleet = await locate(name, provider, address)
        if keep_environment and fleet.provider != ProviderName.SSH:
            raise ConfigurationError(
                f"--keep-environment is for workers over ssh; {worker} is one of {fleet.provider}."
            )
        await tell_of_jobs(worker, fleet)
        with progress(f"Ending {worker}") as say:
            there = await fleet.down(worker, EndingOptions(wait, seconds, force, keep_environment, say))
        forgotten = _forget(worker, await fleet.context(worker))
        if not there and not forgotten:
            raise not_found(worker, fleet.provider)
        return worker

    show_line(f"{asyncio.run(work())} is gone" if wait else "it is being deleted")


def _forget(name: str, context: Context) -> bool:
    """Removes the worker's own context, but not one of the same name that means another; whether there was one."""
    store = ContextStore()
    forgotten = store.get(name) == context and store.remove(name)
    if forgotten:
        for path in connection_files(name):
            path.unlink(missing_ok=True)
    return forgotten


async def _choose(provider: ProviderName | None, address: ClusterAddress) -> tuple[ProviderName, str]:
    """The provider, and why, where the user did not say."""
    if provider is not None:
        return provider, ""
    if asks_for_cluster(address):
        return ProviderName.KUBERNETES, ""
    if named := os.environ.get(PROVIDER_VARIABLE):
        try:
            return ProviderName(named), f"as {PROVIDER_VARIABLE} says"
        except ValueError:
            known = ", ".join(ProviderName)
            raise ConfigurationError(f"{PROVIDER_VARIABLE}={named!r} is not one of: {known}.") from None
    if await has_cluster(address):
        return ProviderName.KUBERNETES, f"in {await address.resolved()}"
    return ProviderName.LOCAL, "on this machine, because no cluster is configured"


def _check_ssh_options(is_ssh: bool, provider: ProviderName | None, given: dict[str, Any]) -> None:
    if is_ssh and provider not in (None, ProviderName.SSH):
        raise ConfigurationError(f"--provider {provider} takes no host (ssh://...). Leave --provider out.")
    if not is_ssh and (provider is ProviderName.SSH or any(given.values())):
        flags = [flag for flag, value in given.items() if value] or ["--provider ssh"]
        raise ConfigurationError(
            f"{', '.join(flags)} needs a host in place of a name. Example: skyproxy up ssh://gpu-box"
        )


def _refuse(provider: ProviderName, given: dict[str, Any]) -> None:
    if given:
        flags = ", ".join("--" + key.replace("_", "-") for key in given)
        what = {
            ProviderName.LOCAL: "a process on this machine",
            ProviderName.SSH: "a process on that host",
        }.get(provider, "a container on this machine")
        raise ConfigurationError(
            f"this worker is {what} and cannot have {flags}. Leave it out, or use another --provider."
        )


def _note_what_stays(name: str, provider: ProviderName, asked: dict[str, Any]) -> None:
    """Tell of a worker that is already running which of the options given now it does not get."""
    given = [
        f"--{key} {part.partition('=')[0] if key == 'env' else part}"
        for key, value in asked.items()
        if value is not None
        for part in (value if isinstance(value, list) else [value])
    ]
    if not given:
        note(f"{name} is already running; nothing was changed.")
        return
    again = (
        "skyproxy up ssh://..."
        if provider is ProviderName.SSH
        else f"skyproxy up {name} --provider {provider.value} ..."
    )
    note(
        f"{name} is already running, and its options cannot be changed while it runs: {', '.join(given)} "
        f"had no effect. To restart it, losing its tensors: skyproxy down {name}; {again}"
    )


def _worker_variables(gpus: int | None, cpu: str | None, env: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the device that a worker's process is to offer, and its variables."""
    variables = dict(env)
    if gpus:
        variables.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    if cpu:
        if not cpu.isdigit():
            raise ConfigurationError(f"--cpu {cpu!r}: a worker that is a process takes a whole number of threads.")
        variables.setdefault("OMP_NUM_THREADS", cpu)
    return "auto" if gpus is None else "cuda" if gpus else "cpu", variables


def _bring_up_over_ssh(
    name: str,
    target: SshTarget,
    python: str | None,
    gpus: int | None,
    cpu: str | None,
    env: dict[str, str],
    suspend_after_seconds: float,
    asked: dict[str, Any],
) -> Fleet:
    from skyproxy.providers.ssh import DEFAULT_PYTHON, find, start

    fleet = fleet_of(ProviderName.SSH, ClusterAddress())
    asked = asked | {"python": python}
    existing = find(name)
    if existing is not None and existing.target != target:
        existing = None
    there = existing.ask("status") if existing is not None else {"alive": False}
    if there["alive"]:
        _note_what_stays(name, ProviderName.SSH, asked)
        return fleet
    device, variables = _worker_variables(gpus, cpu, env)
    known = existing.python if existing is not None else DEFAULT_PYTHON
    arguments = ["--device", device]
    arguments += ["--suspend-after", f"{suspend_after_seconds:g}"] if suspend_after_seconds else []
    with progress(f"Starting {name} on {target.shown}") as say:
        is_suspended = there.get("suspended") is not None and all(value is None for value in asked.values())
        if existing is not None and is_suspended:
            existing.resume()
        else:
            start(name, target, python=python or known, arguments=arguments, env=variables, say=say)
    return fleet


def _bring_up_locally(
    name: str,
    gpus: int | None,
    cpu: str | None,
    env: dict[str, str],
    wait: bool,
    suspend_after_seconds: float,
    asked: dict[str, Any],
) -> Fleet:
    from skyproxy.providers.detached import find, resume_detached, start_detached

    fleet = fleet_of(ProviderName.LOCAL, ClusterAddress())
    existing = find(name)
    if existing is not None and existing.alive and existing.url:
        _note_what_stays(name, ProviderName.LOCAL, asked)
        return fleet
    device, variables = _worker_variables(gpus, cpu, env)
    with progress(f"Starting {name} on this machine"):
        if existing is not None and existing.is_suspended and all(value is None for value in asked.values()):
            resume_detached(name)
        else:
            start_detached(name, device=device, env=variables, wait=wait, suspend_after_seconds=suspend_after_seconds)
    return fleet


async def _bring_up_container(name: str, options: dict[str, Any], asked: dict[str, Any]) -> Fleet:
    from skyproxy.providers.detached_container import resume_container, start_container

    fleet = fleet_of(ProviderName.CONTAINER, ClusterAddress())
    existing = await fleet.row(name)
    if existing is not None and existing.ready:
        _note_what_stays(name, ProviderName.CONTAINER, asked)
        return fleet
    with progress(f"Starting {name} in a container"):
        if existing is not None and existing.phase == "Suspended" and all(value is None for value in asked.values()):
            await resume_container(name)
        else:
            await start_container(name, **options)
    return fleet


async def _bring_up_in_cluster(
    name: str,
    address: ClusterAddress,
    gpu_type: str | None,
    resources: dict[str, str],
    options: dict[str, Any],
    timeout_seconds: float | None,
) -> Fleet:
    from skyproxy.kubernetes.client import ClusterClient
    from skyproxy.kubernetes.gpus import placement
    from skyproxy.kubernetes.resources import compute_manifest
    from skyproxy.kubernetes.waiting import apply_and_wake, wait_until_ready

    async with ClusterClient(address) as client:
        with progress(f"Asking for {name} in {client.address}") as say:
            if gpu_type:
                found = await placement(client, gpu_type)
                options["affinity"] = found.affinity
                resources[found.resource] = resources.pop(WHOLE_GPU)
            # An `up` wakes what was suspended, has expired or failed.
            manifest = compute_manifest(name, namespace=client.namespace, resources=resources, suspend=False, **options)
            woken_from = await apply_and_wake(client, manifest)
            if timeout_seconds is not None:
                await wait_until_ready(
                    client,
                    name,
                    timeout_seconds,
                    lambda found: say(f"{name}: {found.text}"),
                    woken_from=woken_from,
                )
        return fleet_of(ProviderName.KUBERNETES, client.address)


async def _finish(fleet: Fleet, name: str, use: bool) -> WorkerRow:
    ContextStore().save(await fleet.context(name), make_current=use)
    found = await fleet.row(name)
    if found is None:
        raise not_found(name, fleet.provider)
    return found


def _resources(gpus: int | None, gpu_type: str | None, cpu: str | None, memory: str | None) -> dict[str, str]:
    count = gpus if gpus is not None else 1 if gpu_type else 0
    if gpu_type and not count:
        raise ConfigurationError("--gpu-type was given with --gpus 0. Leave one of them out.")
    wanted = {"cpu": cpu, "memory": memory, WHOLE_GPU: str(count) if count else None}
    return {key: value for key, value in wanted.items() if value}
