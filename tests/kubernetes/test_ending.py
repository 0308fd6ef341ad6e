"""What a worker that was deleted waits for, and who ends it where Kubernetes does not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from skyproxy.errors import ClusterError
from skyproxy.kubernetes import ending
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.ending import end, reasons_to_wait

pytestmark = pytest.mark.timeout(60)
DUE = "2026-05-01T12:00:00Z"
SILENT = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]


def pod(name: str = "dev-0", **metadata: Any) -> dict[str, Any]:
    conditions = metadata.pop("conditions", [{"type": "Ready", "status": "False"}])
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "ownerReferences": [{"uid": "uid-dev"}],
            "deletionTimestamp": DUE,
            **metadata,
        },
        "spec": {"nodeName": "node-7"},
        "status": {"conditions": conditions},
    }


COMPUTE = {"metadata": {"name": "dev", "uid": "uid-dev", "finalizers": ["foregroundDeletion"]}}


@pytest.mark.parametrize(
    ("compute", "pods", "told"),
    [
        (COMPUTE, [pod()], "Pod dev-0 is ending."),
        (COMPUTE, [pod(conditions=SILENT)], "The machine node-7 of Pod dev-0 does not answer"),
        (None, [pod(conditions=[{"type": "Ready", "status": "Unknown"}])], "describe node node-7"),
        (None, [pod(deletionTimestamp="2026-05-01T11:59:00Z")], "on node-7 should have ended 65 s ago"),
        (None, [pod(finalizers=["example.com/backup"])], "Pod dev-0 has the finalizer example.com/backup"),
        (COMPUTE, [pod(deletionTimestamp=None)], "has not been told to end yet"),
        ({"metadata": {"finalizers": ["example.com/x", "foregroundDeletion"]}}, [], "has the finalizer example.com/x,"),
        (COMPUTE, [], "Kubernetes has not removed the Compute yet"),
    ],
)
def test_what_is_waited_for_is_told(compute: Any, pods: list[Any], told: str) -> None:
    (line,) = reasons_to_wait(compute, pods, datetime(2026, 5, 1, 12, 0, 5, tzinfo=UTC))
    assert told in line


class Deleting:
    """A cluster from which a Compute is deleted, and whose Pods go only by force."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.compute: dict[str, Any] | None = {"metadata": {"name": "dev", "uid": "uid-dev"}}
        self.pods = {item["metadata"]["name"]: item for item in pods}
        self.forced: list[str] = []

    async def answer(self, request: Any) -> Any:
        name = request.path.rpartition("/")[2]
        if request.method == "DELETE" and "/pods/" in request.path:
            body = await request.json()
            assert body == {"gracePeriodSeconds": 0, "preconditions": {"uid": f"uid-{name}"}}
            self.forced.append(name)
            del self.pods[name]
            return web.json_response({})
        if request.method == "DELETE":
            deleted, self.compute = self.compute, None
            return web.json_response(deleted)
        if request.path.endswith("/pods"):
            return web.json_response({"items": list(self.pods.values())})
        if self.compute is None:
            status = {"kind": "Status", "reason": "NotFound", "details": {"name": "dev"}}
            return web.json_response(status, status=404)
        return web.json_response(self.compute)


def ended(server: Any, kubeconfig: Path, cluster: Deleting, said: list[str], **options: Any) -> bool:
    server.handler = cluster.answer

    async def run() -> bool:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            return await end(client, "dev", say=said.append, **options)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_LOOK_SECONDS", 0.01)


def test_a_pod_that_does_not_end_is_named_when_the_time_is_over(server: Any, kubeconfig: Path) -> None:
    cluster, said = Deleting(pod(conditions=SILENT)), list[str]()
    with pytest.raises(
        ClusterError, match=r"not gone after 0.3 s.*node-7 of Pod dev-0 does not answer.*down dev --force"
    ):
        ended(server, kubeconfig, cluster, said, timeout_seconds=0.3)
    assert len(said) == 1
    assert "node-7" in said[0]
    assert cluster.forced == []


def test_force_takes_away_at_once_what_is_on_a_machine_that_does_not_answer(server: Any, kubeconfig: Path) -> None:
    cluster = Deleting(pod("dev-0", conditions=SILENT), pod("dev-1", conditions=SILENT))
    # A time that would be too long for the test: nothing is waited for.
    assert ended(server, kubeconfig, cluster, [], timeout_seconds=600, force=True) is True
    assert cluster.forced == ["dev-0", "dev-1"]


def test_force_takes_away_the_rest_when_the_time_is_over(server: Any, kubeconfig: Path) -> None:
    cluster = Deleting(pod())
    assert ended(server, kubeconfig, cluster, [], timeout_seconds=0.3, force=True) is True
    assert cluster.forced == ["dev-0"]


def test_pods_of_another_compute_of_that_name_are_left_alone(server: Any, kubeconfig: Path) -> None:
    cluster = Deleting(pod(ownerReferences=[{"uid": "another"}], conditions=SILENT))
    assert ended(server, kubeconfig, cluster, [], timeout_seconds=600, force=True) is True
    assert cluster.forced == []


def test_what_is_not_there_is_not_ended(server: Any, kubeconfig: Path) -> None:
    cluster = Deleting()
    cluster.compute = None
    assert ended(server, kubeconfig, cluster, [], timeout_seconds=1) is False


def test_pods_of_a_compute_that_is_gone_are_waited_for_and_forced(server: Any, kubeconfig: Path) -> None:
    # What `down` leaves when it gives up: a lost machine never confirms the end of its Pods.
    cluster = Deleting(pod(conditions=SILENT))
    said: list[str] = []
    with pytest.raises(ClusterError, match="skyproxy down dev --force"):
        ended(server, kubeconfig, cluster, said, timeout_seconds=0.2)
    assert cluster.compute is None
    with pytest.raises(ClusterError, match="node-7 of Pod dev-0 does not answer"):
        ended(server, kubeconfig, cluster, said, timeout_seconds=0.2)
    assert ended(server, kubeconfig, cluster, said, timeout_seconds=30.0, force=True)
    assert cluster.forced == ["dev-0"]
    assert not ended(server, kubeconfig, cluster, said, timeout_seconds=30.0, force=True)


def test_pods_that_belong_to_nobody_are_nobodys_to_end(server: Any, kubeconfig: Path) -> None:
    cluster = Deleting(pod(ownerReferences=[]))
    cluster.compute = None
    assert not ended(server, kubeconfig, cluster, [], timeout_seconds=30.0, force=True)
    assert cluster.forced == []
