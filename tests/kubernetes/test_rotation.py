"""A token is replaced while a worker runs, and nobody is shut out on the way."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from skyproxy.errors import AuthenticationError, ClusterError, ConfigurationError, ConnectError
from skyproxy.kubernetes import reach as reaching
from skyproxy.kubernetes import rotation
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.reach import Way, reach
from skyproxy.kubernetes.rotation import rotate_token
from skyproxy.providers.kubernetes_provider import _renew

pytestmark = pytest.mark.timeout(60)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Running:
    """A Compute with two nodes, its Secrets, and workers that take what they are told to take."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = {"token": encoded("first-token")}
        self.version = 7
        self.taken = {"first-token"}
        self.phase = "Running"
        self.arrives = True
        self.asked: list[tuple[str, str]] = []
        self.touched: list[str] = []
        server.handler = self.answer
        monkeypatch.setattr(rotation, "_LOOK_SECONDS", 0.01)
        monkeypatch.setattr(reaching, "ask_worker", self.ask)
        monkeypatch.setattr(rotation, "ask_worker", self.ask)

    def ask(self, url: str, token: str, **_: Any) -> dict[str, Any]:
        self.asked.append((url, token))
        if self.taken == set():
            raise ConnectError("nobody answers")
        if token not in self.taken:
            raise AuthenticationError("refused")
        return {}

    @property
    def compute(self) -> dict[str, Any]:
        ready = {"type": "Ready", "status": str(self.phase == "Running"), "message": "x"}
        metadata = {"name": "w", "namespace": "team", "uid": "u"}
        status = {"phase": self.phase, "conditions": [ready]}
        return {"metadata": metadata, "spec": {"nodes": 2, "port": 9000}, "status": status}

    async def answer(self, request: Any) -> Any:
        name = request.path.rpartition("/")[2]
        if request.method == "PATCH" and "/secrets/" in request.path:
            body = json.loads(await request.text())
            if body["metadata"]["resourceVersion"] != str(self.version):
                return web.json_response({"reason": "Conflict", "message": "changed"}, status=409)
            self.version += 1
            self.data |= body["data"]
            if self.arrives:
                self.taken.add(base64.b64decode(self.data["token"]).decode())
            return web.json_response({})
        if request.method == "PATCH":
            self.touched.append(name)
            return web.json_response({})
        if name == "w-token":
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "data": self.data})
        if name == "w-tls":
            return web.json_response({"data": {"ca.crt": encoded("PEM")}})
        if name == "pods":
            return web.json_response({"items": [{"metadata": {"name": "w-0"}}, {"metadata": {"name": "w-1"}}]})
        return web.json_response(self.compute)


@pytest.fixture
def running(server: Any, monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running(server, monkeypatch)


def rotated(kubeconfig: Path, timeout_seconds: float | None = 20) -> None:
    async def run() -> None:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            await rotate_token(client, "w", timeout_seconds=timeout_seconds)

    asyncio.run(run())


def way(kubeconfig: Path, running: Running) -> Way:
    async def run() -> Way:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            return await reach(client, running.compute, via="service")

    return asyncio.run(run())


def test_every_worker_takes_the_new_token_before_it_is_said_to_be_done(running: Running, kubeconfig: Path) -> None:
    rotated(kubeconfig)
    new = base64.b64decode(running.data["token"]).decode()
    assert new != "first-token"
    assert base64.b64decode(running.data["former"]).decode() == "first-token"
    assert [token for _, token in running.asked] == [new, new]
    assert running.touched == ["w-0", "w-1"]
    assert way(kubeconfig, running).token == new


def test_until_it_has_arrived_clients_use_the_former_token(running: Running, kubeconfig: Path) -> None:
    running.arrives = False
    with pytest.raises(ClusterError, match=r"have not read it after 0.3 s"):
        rotated(kubeconfig, 0.3)
    assert way(kubeconfig, running).token == "first-token"
    new = base64.b64decode(running.data["token"]).decode()
    running.taken.add(new)
    assert way(kubeconfig, running).token == new
    # Whether it takes the new one is not known of a worker that does not answer: the Secret is right.
    running.taken.clear()
    assert way(kubeconfig, running).token == new


def test_a_rotation_that_is_on_its_way_is_not_overtaken(running: Running, kubeconfig: Path) -> None:
    running.arrives = False
    rotated(kubeconfig, None)
    before = dict(running.data)
    with pytest.raises(ConfigurationError, match="has not accepted its last new token yet"):
        rotated(kubeconfig)
    assert running.data == before
    running.taken.add(base64.b64decode(before["token"]).decode())
    running.arrives = True
    rotated(kubeconfig)
    assert running.data["former"] == before["token"]


def test_of_two_who_rotate_at_once_one_is_refused(
    running: Running, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            monkeypatch.setattr(client, "request", _raced(client, running))
            await rotate_token(client, "w", timeout_seconds=1)

    with pytest.raises(ClusterError, match="changed"):
        asyncio.run(run())
    assert "former" not in running.data


def _raced(client: ClusterClient, running: Running) -> Any:
    request = client.request

    async def raced(method: str, path: str, **more: Any) -> Any:
        if method == "PATCH":
            running.version += 1  # somebody else was faster
        return await request(method, path, **more)

    return raced


def test_a_worker_that_sleeps_gets_its_token_when_it_wakes(running: Running, kubeconfig: Path) -> None:
    running.phase = "Expired"
    rotated(kubeconfig)
    assert running.asked == []
    assert "former" in running.data


def test_a_pools_workers_are_asked_for_with_the_token_of_their_secret(running: Running, kubeconfig: Path) -> None:
    rotated(kubeconfig)
    new = base64.b64decode(running.data["token"]).decode()
    address = ClusterAddress(kubeconfig=str(kubeconfig))
    assert _renew(address, "w", pinned=True) == (new, "PEM")
    # At a gateway, its own certificate is trusted as the system says.
    assert _renew(address, "w", pinned=False) == (new, None)
