"""Which way leads to a worker, and what comes with it."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from skyproxy.errors import ClusterError, ConnectError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.reach import Way, reach, reach_in_thread

pytestmark = pytest.mark.timeout(60)


class Secrets:
    """The worker's Secrets, its Compute, and a gateway that answers as it is told."""

    def __init__(self, server: Any) -> None:
        self.rows = {"w-token": {"token": "t0ken\n"}, "w-tls": {"ca.crt": "PEM"}}
        self.gateway_status = 200
        self.url = server.url
        server.handler = self

    async def __call__(self, request: Any) -> Any:
        if request.path == "/gate/readyz":
            return web.Response(status=self.gateway_status)
        name = request.path.rpartition("/")[2]
        if "/secrets/" in request.path and name in self.rows:
            data = {key: base64.b64encode(value.encode()).decode() for key, value in self.rows[name].items()}
            return web.json_response({"data": data})
        if name == "w":
            return web.json_response(self.compute("Pending", message="no node has room"))
        if name == "pods":
            return web.json_response({"items": []})
        return web.json_response({"reason": "NotFound", "details": {"name": name}}, status=404)

    def compute(self, phase: str = "Running", message: str = "", **status: Any) -> dict[str, Any]:
        conditions = [{"type": "Ready", "status": str(phase == "Running"), "reason": "r", "message": message}]
        return {
            "metadata": {"name": "w", "namespace": "team"},
            "spec": {"port": 9000},
            "status": {"phase": phase, "conditions": conditions, **status},
        }

    def gateway(self) -> str:
        return self.url.replace("http://", "ws://") + "/gate"


@pytest.fixture
def cluster(server: Any) -> Secrets:
    return Secrets(server)


def way(kubeconfig: Path, compute: Any, **more: Any) -> Way:
    async def run() -> Way:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            return await reach(client, compute, **more)

    found = asyncio.run(run())
    found.close()
    return found


def test_from_outside_it_is_a_port_forward_with_the_services_certificate(cluster: Secrets, kubeconfig: Path) -> None:
    found = way(kubeconfig, cluster.compute())
    assert found.url.startswith("wss://127.0.0.1:")
    assert (found.via, found.token, found.certificate) == ("port-forward", "t0ken", "PEM")
    assert found.server_name == "w.team.svc"


def test_from_inside_it_is_the_service_of_the_node(cluster: Secrets, kubeconfig: Path) -> None:
    assert way(kubeconfig, cluster.compute(), via="service").url == "wss://w.team.svc:9000"
    second = way(kubeconfig, cluster.compute(), via="service", node=1, local_rank=2)
    assert second.url == "wss://w-1.w-nodes.team.svc:9002"
    assert second.server_name == "w.team.svc"


def test_a_worker_without_a_certificate_is_reached_in_clear(cluster: Secrets, kubeconfig: Path) -> None:
    del cluster.rows["w-tls"]
    found = way(kubeconfig, cluster.compute(), via="service")
    assert (found.url, found.certificate, found.server_name) == ("ws://w.team.svc:9000", None, None)


def test_a_gateway_that_answers_goes_first(cluster: Secrets, kubeconfig: Path) -> None:
    found = way(kubeconfig, cluster.compute(externalUrl=cluster.gateway()))
    assert (found.url, found.via, found.certificate) == (cluster.gateway(), "gateway", None)


def test_a_gateway_that_does_not_answer_is_passed_by(cluster: Secrets, kubeconfig: Path) -> None:
    cluster.gateway_status = 503
    assert way(kubeconfig, cluster.compute(externalUrl=cluster.gateway())).via == "port-forward"


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "wss:", "http://127.0.0.1:1", 7, ["x"]])
def test_what_is_no_workers_address_is_no_gateway(url: object, cluster: Secrets, kubeconfig: Path) -> None:
    assert way(kubeconfig, cluster.compute(externalUrl=url)).via == "port-forward"


def test_a_gateway_leads_to_the_first_process_only(cluster: Secrets, kubeconfig: Path) -> None:
    assert way(kubeconfig, cluster.compute(externalUrl=cluster.gateway()), node=1).via == "port-forward"


def test_a_gateway_that_was_asked_for_must_exist(cluster: Secrets, kubeconfig: Path) -> None:
    with pytest.raises(ConnectError, match="no gateway url"):
        way(kubeconfig, cluster.compute(), via="gateway")


@pytest.mark.parametrize("rows", [{}, {"w-token": {"token": ""}}])
def test_without_a_token_there_is_no_way(cluster: Secrets, kubeconfig: Path, rows: Any) -> None:
    cluster.rows = rows
    with pytest.raises(ClusterError):
        way(kubeconfig, cluster.compute())


def test_a_worker_that_is_not_ready_is_refused_with_its_cause(cluster: Secrets, kubeconfig: Path) -> None:
    with pytest.raises(ConnectError, match="not ready: no node has room"):
        reach_in_thread(ClusterAddress(kubeconfig=str(kubeconfig)), "w")


def test_a_name_that_is_not_there_is_refused_also_on_a_running_loop(cluster: Secrets, kubeconfig: Path) -> None:
    async def on_a_loop() -> None:
        reach_in_thread(ClusterAddress(kubeconfig=str(kubeconfig)), "absent")

    with pytest.raises(ConnectError, match="no worker 'absent'"):
        asyncio.run(on_a_loop())


def test_no_text_of_a_way_has_its_token(cluster: Secrets, kubeconfig: Path) -> None:
    assert "t0ken" not in repr(way(kubeconfig, cluster.compute(), via="service"))
