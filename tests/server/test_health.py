"""The health answers, as bytes."""

from __future__ import annotations

import pytest

from skyproxy_server.health import activity_response, answer, is_activity


@pytest.mark.parametrize(
    ("path", "ready", "status"),
    [
        ("/healthz", True, b"200 OK"),
        ("/healthz", False, b"200 OK"),
        ("/healthz?x=1", False, b"200 OK"),
        ("/readyz", True, b"200 OK"),
        ("/readyz", False, b"503 Service Unavailable"),
    ],
)
def test_questions_are_answered(path: str, ready: bool, status: bytes) -> None:
    response = answer(path, ready=ready)
    assert response is not None
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"Connection: close" in head


@pytest.mark.parametrize("path", ["/", "/healthz/", "/healthzx", "/metrics", ""])
def test_other_paths_are_no_questions(path: str) -> None:
    assert answer(path, ready=True) is None


REPORT = {
    "sessions": 2,
    "processes": 3,
    "memory_bytes": 4096,
    "calls_running": 1,
    "idle_seconds": 0.5,
    "commands": 77,
    "devices": [{"type": "cpu", "index": 0, "name": "any", "used_memory_bytes": 10, "total_memory_bytes": 20}],
    "software": {"torch": "2"},
}


def test_metrics_are_the_activity_for_prometheus() -> None:
    assert is_activity("/metrics")
    assert is_activity("/metrics?x=1")
    head, _, body = activity_response(REPORT, "/metrics").decode().partition("\r\n\r\n")
    assert "Content-Type: text/plain; version=0.0.4" in head
    values = dict(line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
    assert values == {
        "skyproxy_worker_sessions": "2",
        "skyproxy_worker_processes": "3",
        "skyproxy_worker_memory_bytes": "4096",
        "skyproxy_worker_calls_running": "1",
        "skyproxy_worker_idle_seconds": "0.5",
        "skyproxy_worker_commands_total": "77",
        'skyproxy_worker_device_used_memory_bytes{device="cpu:0"}': "10",
        'skyproxy_worker_device_total_memory_bytes{device="cpu:0"}': "20",
    }
    typed = [line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")]
    assert {name.partition("{")[0] for name in values} == set(typed)


def test_metrics_leave_out_what_a_worker_does_not_report() -> None:
    body = activity_response({"sessions": 1, "devices": []}, "/metrics").decode().partition("\r\n\r\n")[2]
    assert "skyproxy_worker_sessions 1" in body
    assert "processes" not in body
