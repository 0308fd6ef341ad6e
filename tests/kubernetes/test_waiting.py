"""Waiting for a worker: what is reported, when it is given up, and what is woken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from skyproxy.errors import WorkerStartError
from skyproxy.kubernetes import waiting
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.resources import compute_manifest
from skyproxy.kubernetes.waiting import WAKE, apply_and_wake, wait_until_ready

pytestmark = pytest.mark.timeout(60)


class Cluster:
    """One Compute that goes through stages: each look at it, or wait for its change, shows the next."""

    def __init__(self, server: Any, *stages: dict[str, Any] | None) -> None:
        self.stages = list(stages)
        self.applied: list[Any] = []
        self.pods: list[Any] = []
        self.events: list[Any] = []
        self.log = ""
        server.handler = self

    def compute(self, status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
        return {
            "metadata": {"name": "w", "uid": "u", "generation": 1, "resourceVersion": "1", **metadata},
            "spec": {},
            "status": {"observedGeneration": 1, **status} if status else {},
        }

    async def __call__(self, request: Any) -> Any:
        if request.method == "PATCH":
            self.applied.append(json.loads(await request.text()))
            return web.json_response({})
        if request.path.endswith("/log"):
            return web.Response(text=self.log)
        if request.path.endswith("/pods"):
            return web.json_response({"items": self.pods})
        if request.path.endswith("/events"):
            return web.json_response({"items": self.events})
        if request.path.endswith("/computes/w"):
            stage = self.stages[0]
            missing = {"reason": "NotFound", "details": {"name": "w"}}
            return web.json_response(self.compute(**stage) if stage else missing, status=200 if stage else 404)
        if "watch" not in request.query:
            stage = self.stages.pop(0)
            items = [] if stage is None else [self.compute(**stage)]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        while self.stages:
            stage = self.stages.pop(0)
            event = {"type": "MODIFIED" if stage else "DELETED", "object": self.compute(**(stage or {"status": {}}))}
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.Event().wait()


def stage(phase: str, ready: str = "False", reason: str = "", message: str = "", **more: Any) -> dict[str, Any]:
    row = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    return {"status": {"phase": phase, "conditions": [row], **more}}


def wait(kubeconfig: Path, seconds: float = 30, **more: Any) -> tuple[Any, list[str]]:
    reported: list[str] = []

    async def run() -> Any:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            return await wait_until_ready(client, "w", seconds, lambda found: reported.append(found.text), **more)

    return asyncio.run(run()), reported


def test_each_step_is_reported_once_until_it_is_ready(server: Any, kubeconfig: Path) -> None:
    Cluster(
        server,
        stage("Pending", message="no node has room"),
        stage("Pending", message="no node has room"),
        stage("Provisioning", message="the image is on its way"),
        stage("Running", ready="True"),
    )
    compute, reported = wait(kubeconfig)
    assert compute["status"]["phase"] == "Running"
    assert reported == ["no node has room", "the image is on its way", "it accepts clients"]


def test_a_failure_ends_the_wait_with_its_cause_and_the_last_words(server: Any, kubeconfig: Path) -> None:
    cluster = Cluster(server, stage("Failed", reason="CrashLoopBackOff", message="it ended with status 1"))
    cluster.pods = [{"metadata": {"name": "w-0"}, "status": {}}]
    cluster.log = "2026-01-01T00:00:00Z Traceback\n2026-01-01T00:00:00Z MemoryError\n"
    with pytest.raises(WorkerStartError, match="it ended with status 1") as caught:
        wait(kubeconfig)
    assert "The end of the log of w-0:\nTraceback\nMemoryError" in str(caught.value)
    assert "skyproxy logs w" in str(caught.value)


@pytest.mark.parametrize("stages", [[None], [stage("Pending", message="m"), None]])
def test_a_deletion_ends_the_wait(server: Any, kubeconfig: Path, stages: list[Any]) -> None:
    Cluster(server, *stages)
    with pytest.raises(WorkerStartError, match="was deleted during the wait"):
        wait(kubeconfig)


def test_when_time_is_up_the_cause_is_told_with_the_events(server: Any, kubeconfig: Path) -> None:
    cluster = Cluster(server, stage("Pending", reason="Unschedulable", message="2 Insufficient nvidia.com/gpu"))
    target = {"kind": "Pod", "name": "w-0"}
    cluster.events = [{"type": "Warning", "message": "0/2 nodes are available", "involvedObject": target}]
    with pytest.raises(WorkerStartError, match=r"not ready within 1 s: 2 Insufficient nvidia.com/gpu") as caught:
        wait(kubeconfig, 1)
    assert "Pod w-0: 0/2 nodes are available" in str(caught.value)


def test_pods_and_events_tell_what_changes_without_the_object(
    server: Any, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.05)
    cluster = Cluster(server, stage("Pending"))
    told: list[str] = []

    def tell(found: Any) -> None:
        told.append(found.text)
        state = {"waiting": {"reason": "ErrImagePull", "message": "denied"}}
        cluster.pods = [{"metadata": {"name": "w-0"}, "status": {"containerStatuses": [{"state": state}]}}]
        if len(told) == 2:
            raise InterruptedError

    async def run() -> None:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            await wait_until_ready(client, "w", 30, tell)

    with pytest.raises(InterruptedError):
        asyncio.run(run())
    assert told == ["it is pending", "w-0: denied"]


def apply(kubeconfig: Path) -> str | None:
    async def run() -> str | None:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            return await apply_and_wake(client, compute_manifest("w"))

    return asyncio.run(run())


def wakes(cluster: Cluster) -> list[Any]:
    return [item["metadata"].get("annotations", {}).get(WAKE) for item in cluster.applied]


@pytest.mark.parametrize("first", [None, stage("Running", ready="True")])
def test_what_has_not_ended_is_not_woken(server: Any, kubeconfig: Path, first: Any) -> None:
    cluster = Cluster(server, first)
    assert apply(kubeconfig) is None
    assert wakes(cluster) == [None]


def test_what_has_ended_is_woken_and_its_old_end_is_no_news(server: Any, kubeconfig: Path) -> None:
    ended = stage("Expired", message="idle for 30m", endedFor="1/a")
    cluster = Cluster(server, ended, stage("Provisioning", message="m"), stage("Running", ready="True"))
    woken_from = apply(kubeconfig)
    assert woken_from == "1/a"
    assert wakes(cluster)[0]
    assert wait(kubeconfig, woken_from=woken_from)[0]["status"]["phase"] == "Running"


def test_a_new_end_after_the_wake_is_an_end(server: Any, kubeconfig: Path) -> None:
    Cluster(server, stage("Expired", endedFor="1/a"), stage("Failed", message="again", endedFor="1/b"))
    with pytest.raises(WorkerStartError, match="again"):
        wait(kubeconfig, woken_from="1/a")


def test_a_wake_of_the_past_stays_as_it_is(server: Any, kubeconfig: Path) -> None:
    running = {**stage("Running", ready="True"), "annotations": {WAKE: "then"}}
    cluster = Cluster(server, running)
    assert apply(kubeconfig) is None
    assert wakes(cluster) == ["then"]
