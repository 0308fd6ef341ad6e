"""The text that Prometheus reads."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from skyproxy_operator.http_server import HttpServer, listen
from skyproxy_operator.metrics import Metrics


def test_what_is_counted_can_be_read_by_prometheus() -> None:
    metrics = Metrics()
    metrics.requests.labels(method="GET", status="200").inc()
    metrics.duration.observe(0.02)
    metrics.computes.read = lambda: {"Running": 2, "Failed": 1}
    metrics.queued.set_function(lambda: 7)
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    samples = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert samples["skyproxy_operator_api_requests_total", "GET", "200"] == 1
    assert samples["skyproxy_operator_computes", "Running"] == 2
    assert samples["skyproxy_operator_queued",] == 7
    assert samples["skyproxy_operator_reconcile_seconds_bucket", "0.03"] == 1
    assert samples["skyproxy_operator_reconcile_seconds_bucket", "0.01"] == 0
    assert all(family.documentation for family in families)


def test_every_metric_is_in_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/operator-metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(skyproxy_operator_\w+)` \|", page, re.MULTILINE))
    own = {family.name for family in Metrics().registry.collect() if family.name.startswith("skyproxy_operator_")}
    counters = {family.name for family in Metrics().registry.collect() if family.type == "counter"}
    assert listed == {f"{name}_total" if name in counters else name for name in own}


@pytest.mark.parametrize("lacking", [None, socket.AF_INET, socket.AF_INET6])
def test_health_is_served_to_whichever_family_of_addresses_there_is(
    lacking: socket.AddressFamily | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = socket.create_server

    def create_server(address: Any, *, family: Any, **more: Any) -> socket.socket:
        if family == lacking:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(address, family=family, **more)

    monkeypatch.setattr(socket, "create_server", create_server)

    async def main() -> None:
        server = HttpServer("*", 0, lambda: True, lambda: True)
        await server.start()
        reached = set()
        async with aiohttp.ClientSession() as session:
            for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "[::1]")):
                try:
                    async with session.get(f"http://{host}:{server.port}/healthz") as response:
                        assert response.status == 200
                        reached.add(family)
                except aiohttp.ClientConnectorError:
                    continue
        await server.close()
        assert reached == {socket.AF_INET, socket.AF_INET6} - {lacking}

    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    asyncio.run(main())


def test_a_port_that_is_taken_is_an_error() -> None:
    (taken,) = listen("127.0.0.1", 0)
    with taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_health_and_metrics_are_served() -> None:
    alive, ready = True, False

    async def main() -> None:
        nonlocal alive
        server = HttpServer("127.0.0.1", 0, lambda: alive, lambda: ready)
        await server.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
                answers = {}
                for path in ("/healthz", "/readyz", "/metrics", "/other"):
                    async with session.get(path) as response:
                        answers[path] = (response.status, await response.text())
                assert (answers["/healthz"][0], answers["/readyz"][0], answers["/other"][0]) == (200, 503, 404)
                assert "skyproxy_operator_reconciles_total" in answers["/metrics"][1]
                alive = False
                async with session.get("/healthz") as response:
                    assert response.status == 503
        finally:
            await server.close()
            await server.close()

    asyncio.run(main())
