"""Suspending a Compute and bringing it back, against an API server whose answers a test decides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes import suspending
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.waiting import WAKE

pytestmark = pytest.mark.timeout(60)


class Cluster:
    """One Compute, or none, whose status each change may move on."""

    def __init__(self, server: Any, spec: dict[str, Any] | None, phase: str = "Running", **status: Any) -> None:
        self.spec, self.status = spec, {"phase": phase, "observedGeneration": 1, **status}
        self.after_patch = ""
        self.patches: list[Any] = []
        server.handler = self

    async def __call__(self, request: Any) -> Any:
        if request.path.endswith("/pods"):
            return web.json_response({"items": []})
        if self.spec is None:
            return web.json_response({"reason": "NotFound", "details": {"name": "w"}}, status=404)
        if request.method == "PATCH":
            self.patches.append(json.loads(await request.text()))
            self.status["phase"] = self.after_patch or self.status["phase"]
        return web.json_response({"metadata": {"name": "w", "generation": 1}, "spec": self.spec, "status": self.status})


def suspend(kubeconfig: Path, timeout_seconds: float = 10.0, *, force: bool = False) -> None:
    async def work() -> None:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            await suspending.suspend(client, "w", timeout_seconds, force=force)

    asyncio.run(work())


def test_it_is_suspended_when_its_pods_are_gone(server: Any, kubeconfig: Path) -> None:
    cluster = Cluster(server, {"snapshots": {"storage": "1Gi"}})
    cluster.after_patch = "Suspended"
    suspend(kubeconfig)
    assert cluster.patches == [{"spec": {"suspend": True}}]


def test_without_a_volume_it_is_left_alone_unless_that_is_wanted(server: Any, kubeconfig: Path) -> None:
    cluster = Cluster(server, {})
    cluster.after_patch = "Suspended"
    with pytest.raises(ConfigurationError, match="no volume for snapshots"):
        suspend(kubeconfig)
    assert cluster.patches == []
    suspend(kubeconfig, force=True)
    assert cluster.patches == [{"spec": {"suspend": True}}]


def test_what_does_not_end_and_what_is_not_there_are_named(server: Any, kubeconfig: Path) -> None:
    Cluster(server, {"snapshots": {"storage": "1Gi"}})
    with pytest.raises(ClusterError, match="w has not ended within 0 s"):
        suspend(kubeconfig, 0.01)
    Cluster(server, None)
    with pytest.raises(ConfigurationError, match="there is no worker 'w'"):
        suspend(kubeconfig)


@pytest.mark.parametrize(
    ("spec", "phase", "status", "wakes"),
    [
        ({"suspend": True}, "Suspended", {}, False),
        ({}, "Suspended", {"endedFor": "1/"}, True),
        ({}, "Running", {}, None),
    ],
)
def test_only_what_is_suspended_is_changed(
    server: Any, kubeconfig: Path, spec: dict[str, Any], phase: str, status: dict[str, Any], wakes: bool | None
) -> None:
    cluster = Cluster(server, spec, phase, **status)
    asyncio.run(suspending.resume(ClusterAddress(kubeconfig=str(kubeconfig)), "w", None))
    if wakes is None:
        assert cluster.patches == []
    else:
        (patch,) = cluster.patches
        assert patch["spec"] == {"suspend": False}
        assert (WAKE in patch["metadata"].get("annotations", {})) == wakes
