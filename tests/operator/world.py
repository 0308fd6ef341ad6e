"""A cluster with one Compute, and an operator that can be replaced at any time."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from typing import Any

from skyproxy_operator.controller import Controller
from skyproxy_operator.options import Options
from tests.operator.fake_cluster import FakeCluster, FakeProber
from tests.operator.makers import NOW, OPTIONS, make_compute

KEY = ("lab", "dev")
EVERYTHING = {
    "nodes": 2,
    "idleTimeout": "10m",
    "volumes": [
        {"name": "cache", "storage": "1Gi", "path": "/cache"},
        {"name": "data", "storage": "1Gi", "path": "/data", "reclaimPolicy": "Retain"},
    ],
    "gateway": {"enabled": True, "hostname": "dev.example", "parentRef": {"name": "g", "namespace": "infra"}},
}


class World:
    """A cluster with one Compute, and an operator that can be replaced at any time."""

    def __init__(self, options: Options = OPTIONS, **spec: Any) -> None:
        self.options = options
        self.cluster = FakeCluster()
        self.cluster.kinds = {"HTTPRoute": "v1", "BackendTLSPolicy": "v1"}
        self.prober = FakeProber()
        self.now = NOW
        self.compute = self.cluster.put(make_compute(uid="compute-1", **spec))
        self.start_operator()

    def start_operator(self) -> None:
        """A new process: nothing is remembered."""
        self.controller = Controller(self.cluster, self.cluster, self.prober, self.options, lambda: self.now)  # type: ignore[arg-type]

    async def look(self) -> float | None:
        return await self.controller.reconcile(KEY)

    async def settle(self, looks: int = 12) -> None:
        """The world goes on until nothing changes any more."""
        for _ in range(looks):
            await self.look()
            self.cluster.finish_deletions()
            self.cluster.collect_garbage()
            self.cluster.make_ready()
            self.now += datetime.timedelta(seconds=1)
        if self.cluster.stop_after is None:
            count = len(self.cluster.requests)
            await self.look()
            changes = [request for request in self.cluster.requests[count:] if request[0] not in ("get", "list")]
            assert changes == [], "it does not come to rest"

    def edit(self, **spec: Any) -> None:
        compute = self.cluster.objects["Compute", *KEY]
        compute["spec"].update(spec)
        compute["metadata"]["generation"] += 1

    @property
    def status(self) -> dict[str, Any]:
        return self.cluster.objects["Compute", *KEY].get("status", {})

    def names(self, kind: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.cluster.all(kind)]


def run(scenario: Callable[[World], Any], world: World) -> None:
    asyncio.run(scenario(world))
