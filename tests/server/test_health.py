"""The health answers, as bytes."""

from __future__ import annotations

import pytest

from skyproxy_server.health import answer


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
