"""The text that Prometheus reads."""

from __future__ import annotations

import asyncio
import re

import aiohttp

from skyproxy_operator.http_server import HttpServer
from skyproxy_operator.metrics import METRICS, Counter, Gauge, Histogram

SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(\\.|[^"\\])*"(,[a-z_]+="(\\.|[^"\\])*")*\})? [0-9.e+-]+')


def test_counters() -> None:
    counter = Counter("x_total", "Things.")
    counter.add(1, method="GET", status="200")
    counter.add(2, method="GET", status="200")
    counter.add(1, method='a"b\\c\nd', status="")
    assert counter.value(method="GET", status="200") == 3
    assert list(counter.lines()) == [
        "# HELP x_total Things.",
        "# TYPE x_total counter",
        'x_total{method="GET",status="200"} 3',
        'x_total{method="a\\"b\\\\c\\nd",status=""} 1',
    ]


def test_histograms_add_up() -> None:
    histogram = Histogram("t_seconds", "Times.")
    for seconds in (0.01, 0.02, 100.0):
        histogram.observe(seconds)
    lines = list(histogram.lines())
    assert lines[2:4] == ['t_seconds_bucket{le="0.01"} 1', 't_seconds_bucket{le="0.03"} 2']
    assert lines[-4:] == [
        't_seconds_bucket{le="30.0"} 2',
        't_seconds_bucket{le="+Inf"} 3',
        "t_seconds_sum 100.03",
        "t_seconds_count 3",
    ]


def test_gauges_are_read_when_somebody_asks() -> None:
    gauge = Gauge("g", "Now.", "phase")
    gauge.read = lambda: {"Running": 2, "": 1}
    assert list(gauge.lines())[2:] == ["g 1", 'g{phase="Running"} 2']


def test_all_of_it_has_the_form_that_prometheus_reads() -> None:
    METRICS.requests.add(1, method="GET", status="200")
    for line in METRICS.text().splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or SAMPLE.fullmatch(line), line


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
