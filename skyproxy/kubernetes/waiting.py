"""Waiting until a Compute takes clients, and saying meanwhile what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from skyproxy.errors import ClusterError, WorkerStartError
from skyproxy.kubernetes.client import ClusterClient, Manifest
from skyproxy.kubernetes.explain import Explanation, explain

_LOOK_SECONDS = 2.0
_SHOWN_LOG_LINES = 20


async def wait_until_ready(
    client: ClusterClient, name: str, timeout_seconds: float, report: Callable[[Explanation], None]
) -> Manifest:
    """Waits until a Compute takes clients.

    Args:
        client: for the cluster.
        name: of the Compute.
        timeout_seconds: after which it counts as failed.
        report: told whenever it is somewhere else, or for another reason.

    Returns:
        The object as the server has it then.

    Raises:
        WorkerStartError: it failed, was deleted, or was not ready in time; with the true cause.
    """
    looker = _Looker(client, name, report)
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
    def __init__(self, client: ClusterClient, name: str, report: Callable[[Explanation], None]) -> None:
        self.last: Explanation | None = None
        self._client = client
        self._name = name
        self._report = report

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
                        raise WorkerStartError(f"the worker {self._name!r} was deleted while it was waited for.")
                    compute = item
                if compute is not None and (found := await self._look(compute)).ready:
                    return compute
                if compute is not None and found.failed:
                    raise WorkerStartError(
                        f"the worker {self._name!r} did not come up: {found.text}. {found.hint}".strip()
                        + await last_words(self._client, self._name)
                    )
        finally:
            if upcoming is not None:
                upcoming.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClusterError, StopAsyncIteration):
                    await upcoming
            await changes.aclose()

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
