"""Suspending a Compute, and bringing it back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.api_server import Manifest
from skyproxy.kubernetes.client import FIELD_MANAGER, ClusterClient
from skyproxy.kubernetes.waiting import WAKE, wait_until_ready

_MERGE = "application/merge-patch+json"
_LOOK_SECONDS = 1.0


def keeps_sessions(compute: Manifest) -> bool:
    """Return whether a Compute has a volume for snapshots of its sessions."""
    return bool(compute.get("spec", {}).get("snapshots"))


def is_suspended(compute: Manifest) -> bool:
    """Return whether a Compute is suspended, or somebody wants it to be."""
    return bool(compute.get("spec", {}).get("suspend")) or compute.get("status", {}).get("phase") == "Suspended"


async def suspend(
    client: ClusterClient,
    name: str,
    timeout_seconds: float,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Have the operator end a Compute's Pods, whose sessions are saved before; wait until they are gone.

    Args:
        client: for the cluster.
        name: of the Compute.
        timeout_seconds: how long to wait.
        force: whether to do it where the sessions would be lost.
        say: told what is being waited for.

    Raises:
        ConfigurationError: there is no such Compute, or it has no place for what its sessions hold.
        ClusterError: the Pods did not end in time.
    """
    compute = await _require_compute(client, name)
    if not keeps_sessions(compute) and not force:
        raise ConfigurationError(
            f"{name} has no volume for snapshots, so its sessions would be lost. Give it one: skyproxy up {name} "
            "--snapshots 20Gi; that starts it anew. To suspend it all the same: --force"
        )
    await _patch(client, name, {"spec": {"suspend": True}})
    say(f"{name}: its Pods end when their sessions are saved")
    try:
        async with asyncio.timeout(timeout_seconds):
            while (await _require_compute(client, name)).get("status", {}).get("phase") != "Suspended" or (
                await client.pods(name)
            ):
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise ClusterError(
            f"{name} has not ended within {timeout_seconds:.0f} s. See: skyproxy status {name}"
        ) from None


async def resume(
    address: ClusterAddress, name: str, timeout_seconds: float | None, say: Callable[[str], None] = lambda _: None
) -> None:
    """Have the operator make a Compute's Pods again, and wait until they take clients.

    Args:
        address: of the cluster.
        name: of the Compute.
        timeout_seconds: how long to wait; None does not.
        say: told what is being waited for.

    Raises:
        ConfigurationError: there is no such Compute.
        WorkerStartError: it did not come up.
    """
    async with ClusterClient(address) as client:
        compute = await _require_compute(client, name)
        ended_for = compute.get("status", {}).get("endedFor")
        if is_suspended(compute):
            now = datetime.now(UTC).isoformat(timespec="microseconds")
            metadata = {"annotations": {WAKE: now}} if ended_for else {}
            await _patch(client, name, {"metadata": metadata, "spec": {"suspend": False}})
        if timeout_seconds is not None:
            woken_from = str(ended_for) if ended_for else None
            await wait_until_ready(
                client, name, timeout_seconds, lambda found: say(f"{name}: {found.text}"), woken_from=woken_from
            )


async def resume_if_suspended(address: ClusterAddress, name: str, timeout_seconds: float) -> None:
    """Bring a Compute back where it is suspended; any other is left alone.

    Raises:
        WorkerStartError: it did not come up.
    """
    async with ClusterClient(address) as client:
        compute = await client.get(name)
    if compute is not None and is_suspended(compute):
        await resume(address, name, timeout_seconds)


async def _require_compute(client: ClusterClient, name: str) -> Manifest:
    compute = await client.get(name)
    if compute is None:
        raise ConfigurationError(f"there is no worker {name!r} in {client.address}. See: skyproxy list")
    return compute


async def _patch(client: ClusterClient, name: str, body: Manifest) -> None:
    # The field manager of `skyproxy up`, whose next value of the field counts.
    query = [("fieldManager", FIELD_MANAGER)]
    await client.request("PATCH", client.computes_path(name), body=body, query=query, content_type=_MERGE)
