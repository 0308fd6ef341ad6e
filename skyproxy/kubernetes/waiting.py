"""Waiting until a Compute takes clients, and saying meanwhile what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime

from skyproxy.errors import ClusterError, WorkerStartError
from skyproxy.kubernetes.api_server import GROUP, Manifest
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.explain import Explanation, explain

WAKE = f"{GROUP}/wake"
"""On a Compute: any new value starts one that has expired or failed."""
_LOOK_SECONDS = 2.0
_SHOWN_LOG_LINES = 20


async def apply_and_wake(client: ClusterClient, manifest: Manifest) -> str | None:
    """Applies a Compute, and starts it again where it had expired or failed.

    Returns:
        What its status says about the end that it is woken from, for `wait_until_ready`; None where it had not ended.
    """
    name = manifest["metadata"]["name"]
    status = ((before := await client.get(name)) or {}).get("status", {})
    ended = status.get("phase") in ("Expired", "Failed") or "endedFor" in status
    # What we set and then leave out would be taken away, and that would be one more change.
    wake = ((before or {}).get("metadata", {}).get("annotations") or {}).get(WAKE)
    if ended:
        wake = datetime.now(UTC).isoformat(timespec="microseconds")
    if wake:
        metadata = {**manifest["metadata"], "annotations": {**manifest["metadata"].get("annotations", {}), WAKE: wake}}
        manifest = {**manifest, "metadata": metadata}
    await client.apply(manifest)
    return str(status.get("endedFor", "")) if ended else None


async def wait_until_ready(
    client: ClusterClient,
    name: str,
    timeout_seconds: float,
    report: Callable[[Explanation], None],
    *,
    woken_from: str | None = None,
) -> Manifest:
    """Waits until a Compute takes clients.

    Args:
        client: for the cluster.
        name: of the Compute.
        timeout_seconds: after which it counts as failed.
        report: told whenever it is somewhere else, or for another reason.
        woken_from: what `apply_and_wake` returned: that end is not news.

    Returns:
        The object as the server has it then.

    Raises:
        WorkerStartError: it failed, was deleted, or was not ready in time; with the true cause.
    """
    looker = _Looker(client, name, report, woken_from)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await looker.run()
    except TimeoutError:
        last = looker.last
        cause = f"{last.text}. {last.hint}".strip() if last is not None else "nothing is known about it."
        events = "".join(f"\n  {text}" for text in last.events) if last is not None else ""
        raise WorkerStartError(
            f"the worker {name!r} was not ready within {timeout_seconds:.0f} s: {cause}{events}"
        ) from None


class _Looker:
    def __init__(
        self, client: ClusterClient, name: str, report: Callable[[Explanation], None], woken_from: str | None
    ) -> None:
        self.last: Explanation | None = None
        self._client = client
        self._name = name
        self._report = report
        self._woken_from = woken_from

    async def run(self) -> Manifest:
        changes = self._client.watch(self._client.computes_path(), field_selector=f"metadata.name={self._name}")
        upcoming: asyncio.Task[tuple[str, Manifest]] | None = None
        compute: Manifest | None = None
        try:
            while True:
                if upcoming is None:
                    upcoming = asyncio.ensure_future(anext(changes))
                # Events and Pods change without the object, so we look at them from time to time.
                await asyncio.wait({upcoming}, timeout=_LOOK_SECONDS)
                if upcoming.done():
                    kind, item = upcoming.result()
                    upcoming = None
                    if kind in ("DELETED", "ABSENT"):
                        raise WorkerStartError(f"the worker {self._name!r} was deleted during the wait.")
                    compute = item
                if compute is not None and (found := await self._look(compute)).ready:
                    return compute
                if compute is not None and found.failed and not self._is_old(compute):
                    raise WorkerStartError(
                        f"the worker {self._name!r} did not start: {found.text}. {found.hint}".strip()
                        + await last_words(self._client, self._name)
                    )
        finally:
            if upcoming is not None:
                upcoming.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClusterError, StopAsyncIteration):
                    await upcoming
            await changes.aclose()

    def _is_old(self, compute: Manifest) -> bool:
        status = compute.get("status", {})
        return self._woken_from is not None and str(status.get("endedFor", "")) == self._woken_from

    async def _look(self, compute: Manifest) -> Explanation:
        found = explain(compute, [], [])
        if not found.ready:
            try:
                pods, events = await self._client.pods(self._name), await self._client.events(self._name)
                found = explain(compute, pods, events)
            except ClusterError:
                pass  # we may see Computes and no Pods: the conditions have to do
        if self.last is None or (found.phase, found.text) != (self.last.phase, self.last.text):
            self._report(found)
        self.last = found
        return found


async def last_words(client: ClusterClient, name: str) -> str:
    """The end of the log of a worker that failed; an empty string where there is none."""
    for pod in [item["metadata"]["name"] for item in await client.pods(name)] if name else []:
        with contextlib.suppress(ClusterError):
            lines = [line async for line in client.logs(pod, tail=_SHOWN_LOG_LINES)]
            if lines:
                return f"\nThe end of the log of {pod}:\n" + "\n".join(lines)
    return ""
