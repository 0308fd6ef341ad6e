"""Ending a Compute: waits until its Pods are gone, says what for, and uses force where Kubernetes never ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from skyproxy.errors import ClusterError
from skyproxy.kubernetes.api_server import Manifest
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.objects import Metadata, PodObject

_LOOK_SECONDS = 0.5
_OVERDUE_SECONDS = 10.0
_OWN_FINALIZERS = {"foregroundDeletion", "orphan"}


async def end(
    client: ClusterClient,
    name: str,
    timeout_seconds: float,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Delete a Compute and wait until it and its Pods are gone.

    Args:
        client: for the cluster.
        name: of the Compute.
        timeout_seconds: how long to wait.
        force: removes Pods whose machine does not answer at once, and what is left after the time: their processes may
            go on there until the machine is back.
        say: told what is being waited for, whenever that changes.

    Returns:
        Whether there was one, or Pods of one that is gone.

    Raises:
        ClusterError: it is not gone in time; says what it waits for and what to do.
    """
    before = await client.get(name)
    if before is not None and await client.delete(name, wait=False):
        uid: str | None = str(before["metadata"]["uid"])
    else:
        # Deleted before, and its Pods may still be there: those of a lost machine do not go by themselves.
        uid = _owner(await _pods(client, name))
    if uid is None:
        return False
    reasons: list[str] = []
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                compute, pods = await _list_remaining(client, name, uid)
                if compute is None and not pods:
                    return True
                if force:
                    await _force(client, [pod for pod in pods if _silent_machine(pod)])
                now = list(reasons_to_wait(compute, pods))
                if now != reasons:
                    reasons = now
                    say(f"{name} is ending. {' '.join(reasons)}")
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        pass
    if force:
        compute, pods = await _list_remaining(client, name, uid)
        await _force(client, pods)
        await asyncio.sleep(_LOOK_SECONDS)
        compute, pods = await _list_remaining(client, name, uid)
        if compute is None and not pods:
            return True
        reasons = list(reasons_to_wait(compute, pods))
    more = "" if force else f" To remove it anyway: skyproxy down {name} --force"
    raise ClusterError(
        f"{name} is not gone after {timeout_seconds:g} s; it is still being deleted. {' '.join(reasons)}{more}"
    )


async def _list_remaining(client: ClusterClient, name: str, uid: str) -> tuple[Manifest | None, list[PodObject]]:
    """Return what is left of a Compute, and of its Pods as far as we may look at them."""
    compute = await client.get(name)
    if compute is not None and compute["metadata"].get("uid") != uid:
        compute = None
    return compute, [
        pod
        for pod in await _pods(client, name)
        if any(row.get("uid") == uid for row in pod["metadata"].get("ownerReferences") or ())
    ]


async def _pods(client: ClusterClient, name: str) -> list[PodObject]:
    """Return the Pods of a Compute's name; none where we may not look at them."""
    try:
        return await client.pods(name)
    except ClusterError as error:
        if error.status != 403:
            raise
        return []


def _owner(pods: Sequence[PodObject]) -> str | None:
    """Return the uid of the object that Pods belong to, of the first one that belongs to any."""
    rows = (row for pod in pods for row in pod["metadata"].get("ownerReferences") or ())
    return next((str(row["uid"]) for row in rows if row.get("uid")), None)


async def _force(client: ClusterClient, pods: Sequence[PodObject]) -> None:
    for pod in pods:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        path = f"/api/v1/namespaces/{client.namespace}/pods/{pod['metadata']['name']}"
        try:
            await client.request("DELETE", path, body=body)
        except ClusterError as error:
            # It is gone, or another one has its name.
            if error.status not in (404, 409):
                raise


def reasons_to_wait(
    compute: Mapping[str, Any] | None, pods: Sequence[PodObject], now: datetime | None = None
) -> Iterator[str]:
    """Yield what keeps a Compute that was deleted, a sentence each; pure.

    Args:
        compute: what the server has of it; None where it is gone.
        pods: those of it that are left.
        now: for tests.
    """
    now = now or datetime.now(UTC)
    for pod in pods:
        yield _pod_text(pod, now)
    if compute is not None and (foreign := _finalizers(compute["metadata"])):
        yield f"The Compute has the finalizer {foreign}, which must be removed by whoever set it."
    elif compute is not None and not pods:
        yield "Kubernetes has not removed the Compute yet: its controller manager does that."


def _pod_text(pod: PodObject, now: datetime) -> str:
    metadata = pod["metadata"]
    name, due = metadata["name"], metadata.get("deletionTimestamp")
    machine = (pod.get("spec") or {}).get("nodeName", "")
    if not due:
        return f"Pod {name} has not been told to end yet: Kubernetes' controller manager does that."
    if foreign := _finalizers(metadata):
        return f"Pod {name} has the finalizer {foreign}, which must be removed by whoever set it."
    if _silent_machine(pod):
        return (
            f"The machine {machine} of Pod {name} does not answer, and Kubernetes waits for it indefinitely; see: "
            f"kubectl describe node {machine}."
        )
    overdue = (now - datetime.fromisoformat(str(due))).total_seconds()
    if overdue > _OVERDUE_SECONDS:
        where = f" on {machine}" if machine else ""
        return f"Pod {name}{where} should have ended {overdue:.0f} s ago; see: kubectl describe pod {name}."
    return f"Pod {name} is ending."


def _finalizers(metadata: Metadata) -> str:
    return ", ".join(set(metadata.get("finalizers") or ()) - _OWN_FINALIZERS)


def _silent_machine(pod: PodObject) -> bool:
    """Return whether the node controller has said of a Pod that is being deleted that its machine does not answer.

    It writes Ready=False over what the kubelet said last, and leaves ContainersReady as it was; older ones wrote
    Unknown.
    """
    conditions = {row["type"]: row.get("status") for row in (pod.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready")
    gated = bool((pod.get("spec") or {}).get("readinessGates"))
    silent = ready == "Unknown" or (ready == "False" and conditions.get("ContainersReady") == "True" and not gated)
    return silent and bool((pod.get("spec") or {}).get("nodeName")) and bool(pod["metadata"].get("deletionTimestamp"))
