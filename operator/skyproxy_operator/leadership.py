"""Leader election among several operators: the one that holds a Lease works."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from skyproxy_operator.cluster import ApiError, ClusterConnection, path_of
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.options import Options

logger = logging.getLogger("skyproxy.operator")

Object = dict[str, Any]

_API = "coordination.k8s.io/v1"


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class LeaseLostError(Exception):
    """The Lease could not be renewed in time: another operator may be at work, so this one must end."""


class Leadership:
    """Takes part in the election; at most one of those who do works at any time.

    Whether a Lease has run out is judged by how long it has not changed before our eyes, never by comparing clocks.
    """

    def __init__(self, cluster: ClusterConnection, options: Options, identity: str) -> None:
        self._cluster = cluster
        self._namespace = options.lease_namespace
        self._name = options.lease_name
        self._seconds = options.lease_seconds
        self._identity = identity
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        self._held: Object | None = None
        self.leading = False
        METRICS.leading.set_function(lambda: float(self.leading))

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Waits until it is our turn, and works as long as it is.

        Raises:
            LeaseLostError: it is not our turn any more.
        """
        if not self._namespace:
            self.leading = True
            await work()
            return
        while not await self._try():
            await asyncio.sleep(self._seconds / 4)
        logger.info("this operator leads now")
        self.leading = True
        working, renewing = asyncio.ensure_future(work()), asyncio.ensure_future(self._renew())
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            else:
                raise LeaseLostError(f"the Lease {self._namespace}/{self._name} could not be renewed in time")
        finally:
            self.leading = False
            working.cancel()
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)
            await self._give_up()

    async def _renew(self) -> None:
        """Returns when the Lease could not be renewed for two thirds of its time: before it runs out for others."""
        renewed = _loop_time()
        try:
            while True:
                async with asyncio.timeout_at(renewed + self._seconds * 2 / 3):
                    await asyncio.sleep(self._seconds / 4)
                    asked = _loop_time()
                    if await self._try():
                        renewed = asked
        except TimeoutError:
            pass

    async def _try(self) -> bool:
        """Takes or renews the Lease; whether it is ours now."""
        try:
            async with asyncio.timeout(self._seconds / 3):
                return await self._take()
        except TimeoutError:
            logger.warning("the Lease cannot be taken: the API server does not answer")
        except ApiError as exc:
            if exc.status != 409:  # another one was faster
                logger.warning("the Lease cannot be taken: %s", exc)
        except Exception:
            # A Lease that is none, for which the next try may find a better answer.
            logger.exception("the Lease cannot be taken")
        return False

    async def _take(self) -> bool:
        held, self._held = self._held, None
        if held is not None:
            # Nobody else has written it since, or this is refused: there is no need to read it first.
            try:
                await self._replace(self._lease(held["metadata"], held["spec"]))
                return True
            except ApiError as exc:
                if exc.status != 409:
                    raise
        lease = await self._cluster.read(_API, "Lease", self._namespace, self._name)
        if lease is None:
            return await self._cluster.create(self._lease({"name": self._name, "namespace": self._namespace}, {}))
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity):
            seen = (holder, spec.get("renewTime"))
            if seen != self._seen:
                self._seen, self._seen_at = seen, _loop_time()
            if _loop_time() - self._seen_at < float(spec.get("leaseDurationSeconds") or self._seconds):
                return False
        await self._replace(self._lease(lease["metadata"], spec))
        return True

    def _lease(self, metadata: Object, spec: Object) -> Object:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        mine = spec.get("holderIdentity") == self._identity
        return {
            "apiVersion": _API,
            "kind": "Lease",
            # With the resourceVersion that we saw, so that of two who replace it only one succeeds.
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(round(self._seconds), 1),
                "acquireTime": spec.get("acquireTime") if mine else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if mine or not spec else 1),
            },
        }

    async def _replace(self, lease: Object) -> None:
        path = path_of(_API, "Lease", self._namespace, self._name)
        self._held = await self._cluster.request("PUT", path, what=f"Lease {self._name}", body=lease)

    async def _give_up(self) -> None:
        """Lets the next one begin at once."""
        try:
            async with asyncio.timeout(2.0):
                lease = await self._cluster.read(_API, "Lease", self._namespace, self._name)
                if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._replace(lease)
        except Exception as exc:
            logger.debug("the Lease was not given up: %s", exc)
