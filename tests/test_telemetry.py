"""Spans of OpenTelemetry: where a provider is chosen, around calls and waits; nowhere else nothing."""

from __future__ import annotations

import json
import sys

import pytest

from skyproxy import telemetry
from tests.integration.programs import succeed

SETUP = """
import json
import time
import torch
import skyproxy
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
"""


def test_without_opentelemetry_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    span = telemetry.begin("skyproxy.wait", purpose="item")
    assert span is None
    with telemetry.as_parent(span):
        telemetry.end(span, "ValueError")
    assert "opentelemetry.trace" not in sys.modules


def test_without_a_provider_there_is_no_span() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    assert succeed(SETUP + "from skyproxy import telemetry; print(telemetry.begin('skyproxy.wait'))") == "None"


def test_functions_waits_and_pool_calls_are_spans_and_operations_are_none() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    program = """
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("test")


def fails():
    raise ValueError("a secret text")


@skyproxy.function
def double(x):
    return 2 * x


with skyproxy.launch_local("cpu") as node:
    x = torch.ones(8, device=node.device("cpu"))
    before = len(exporter.get_finished_spans())
    for _ in range(50):
        x = x + 1
    assert len(exporter.get_finished_spans()) == before
    with tracer.start_as_current_span("outer"):
        x.sum().item()
        try:
            node.run(fails)
        except ValueError:
            with tracer.start_as_current_span("handler"):
                x.sum().item()  # waits while an exception is being handled, and is none the worse for it
with skyproxy.Compute(provider=skyproxy.Local(), progress=False) as pool:
    with tracer.start_as_current_span("around"):
        assert (double(4) >> pool) == 8
wanted = {("skyproxy.pool_call", "double"), ("skyproxy.function", "double"), ("skyproxy.function", "fails")}
deadline = time.monotonic() + 60
while time.monotonic() < deadline:  # who waits for a result may have it before the callback that ends the span
    spans = exporter.get_finished_spans()
    if wanted <= {(span.name, span.attributes.get("skyproxy.function")) for span in spans}:
        break
    time.sleep(0.02)
names = {span.context.span_id: span.name for span in spans}
rows = [
    [span.name, names.get(span.parent.span_id) if span.parent else None, span.status.status_code.name,
     dict(span.attributes)]
    for span in spans
]
assert "secret" not in json.dumps(rows)
print(json.dumps(rows))
"""
    rows = json.loads(succeed(SETUP + program, timeout=110.0))
    waits = [row for row in rows if row[0] == "skyproxy.wait" and row[1] == "outer"]
    assert waits
    assert waits[0][2] == "UNSET"
    handled = [row for row in rows if row[0] == "skyproxy.wait" and row[1] == "handler"]
    assert [row[2] for row in handled] == ["UNSET"] * len(handled) != []
    (failed,) = [row for row in rows if row[0] == "skyproxy.function" and row[1] == "outer"]
    assert failed[2] == "ERROR"
    assert failed[3]["error.type"] == "RemoteFunctionError"
    assert failed[3]["skyproxy.function"] == "fails"
    (pool_call,) = [row for row in rows if row[0] == "skyproxy.pool_call"]
    assert pool_call[1:3] == ["around", "UNSET"]
    (inner,) = [row for row in rows if row[0] == "skyproxy.function" and row[1] == "skyproxy.pool_call"]
    assert inner[3]["skyproxy.function"] == "double"
