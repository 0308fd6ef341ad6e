"""The workers in a Kubernetes cluster: its Computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.cli.fleet import EndingOptions, WorkerAccess, WorkerRow
from skyproxy.contexts import Context
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.ending import end
from skyproxy.kubernetes.explain import explain
from skyproxy.kubernetes.objects import EventObject, PodObject
from skyproxy.kubernetes.reach import reach_by_name
from skyproxy.kubernetes.rotation import rotate_token
from skyproxy.kubernetes.suspending import resume, suspend


class ClusterFleet:
    """Workers as Computes.

    Attributes:
        provider: "kubernetes".
    """

    provider = "kubernetes"

    def __init__(self, address: ClusterAddress, *, via: str = "auto", all_namespaces: bool = False) -> None:
        self._address = address
        self._via = via
        self._all = all_namespaces

    async def rows(self) -> list[WorkerRow]:
        """All of them, by name."""
        async with ClusterClient(self._address) as client:
            found = await client.list_computes(all_namespaces=self._all)
            return [_row(item, client.address) for item in found]

    async def row(self, name: str) -> WorkerRow | None:
        """One of them, with its Pods' and events' causes; None where there is none."""
        async with ClusterClient(self._address) as client:
            compute = await client.get(name)
            if compute is None:
                return None
            return _row(compute, client.address, await client.pods(name), await client.events(name))

    async def down(self, name: str, ending: EndingOptions) -> bool:
        """Deletes one; whether there was one."""
        async with ClusterClient(self._address) as client:
            if not ending.wait:
                return await client.delete(name, wait=False)
            return await end(client, name, ending.timeout_seconds, force=ending.force, say=ending.say)

    async def suspend(self, name: str, ending: EndingOptions) -> str:
        """Has the operator end one when its sessions are saved."""
        async with ClusterClient(self._address) as client:
            await suspend(client, name, ending.timeout_seconds, force=ending.force, say=ending.say)
        return "its Pods are gone, and its volumes stay"

    async def resume(self, name: str, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Has the operator start one again, and waits for it."""
        await resume(self._address, name, timeout_seconds, say)

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Gives one another token, beside which the former one is accepted for a while."""
        async with ClusterClient(self._address) as client:
            await rotate_token(client, name, timeout_seconds=timeout_seconds, say=say)

    async def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """The lines that its Pods wrote; those of several are marked with the node's number."""
        async with ClusterClient(self._address) as client:
            pods = sorted(item["metadata"]["name"] for item in await client.pods(name))
            if node is not None:
                pods = [pod for pod in pods if pod == f"{name}-{node}"]
            if not pods:
                raise NotFoundError(f"the worker {name!r} has no Pod to show a log of. See: skyproxy status {name}")
            lines: asyncio.Queue[str | None] = asyncio.Queue(1000)

            async def read(pod: str) -> None:
                mark = f"[{pod.rpartition('-')[2]}] " if len(pods) > 1 else ""
                try:
                    async for line in client.logs(pod, follow=follow, tail=tail):
                        await lines.put(mark + line)
                finally:
                    await lines.put(None)

            readers = [asyncio.create_task(read(pod)) for pod in pods]
            try:
                ended = 0
                while ended < len(readers):
                    line = await lines.get()
                    if line is None:
                        ended += 1
                    else:
                        yield line
                await asyncio.gather(*readers)
            finally:
                for reader in readers:
                    reader.cancel()

    async def context(self, name: str) -> Context:
        """Return the way to find it again, from any folder."""
        return Context(name, self.provider, (await self._address.resolved()).options)

    async def access(self, name: str) -> WorkerAccess:
        """A way to its first process."""
        way = await reach_by_name(self._address, name, via=self._via)
        return WorkerAccess(way.url, way.token, way.certificate, way.server_name, way.via, way.close)


def _row(
    compute: Mapping[str, Any],
    address: ClusterAddress,
    pods: list[PodObject] | None = None,
    events: list[EventObject] | None = None,
) -> WorkerRow:
    found = explain(compute, pods or [], events or [])
    status, metadata = compute.get("status") or {}, compute["metadata"]
    worker = status.get("worker") or {}
    namespace = metadata.get("namespace", address.namespace)
    return WorkerRow(
        name=metadata["name"],
        provider="kubernetes",
        where=f"{namespace} ({address.context})" if address.context else str(namespace),
        phase=found.phase,
        ready=found.ready,
        nodes=int(compute.get("spec", {}).get("nodes", 1)),
        devices=str(worker.get("summary", "")),
        age_seconds=_seconds_since(metadata.get("creationTimestamp")),
        idle_seconds=_seconds_since(status.get("lastActivityTime")),
        url=status.get("externalUrl") or status.get("url"),
        reason="" if found.ready else found.reason,
        message="" if found.ready else found.text,
        hint=found.hint,
        queue=str(compute.get("spec", {}).get("queue") or ""),
        events=found.events,
        software={key: worker[key] for key in ("skyproxy", "torch", "python") if key in worker},
    )


def _seconds_since(stamp: str | None) -> float | None:
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds() if stamp else None
    except (ValueError, TypeError):  # a leap second, say: one worker's is no reason to show none
        return None
