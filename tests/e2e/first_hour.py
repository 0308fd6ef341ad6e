"""The row of a cluster in the table of `docs/howto/first-hour.md`; see `tests/firstrun/first_hour.py`.

`pytest -s -m e2e tests/e2e/first_hour.py` prints it. The environment is this checkout's, and the stand-in for the
kubelet pulls no image: what is measured is the operator, the control plane, the worker and the tunnel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.computes import User
from tests.firstrun.pages import blocks


@pytest.fixture
def seconds(user: User) -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    begin = time.perf_counter()
    user.sky("up", "dev")
    found["skyproxy up dev"] = time.perf_counter() - begin
    yield found
    user.sky("down", "dev")


def test_cluster(user: User, seconds: dict[str, float]) -> None:
    begin = time.perf_counter()
    assert "tensor(" in user.python("\n".join(blocks("README.md", "python")))
    seconds["python first.py"] = time.perf_counter() - begin
    detail = ", ".join(f"`{shown}` {passed:.1f}" for shown, passed in seconds.items())
    print(f"\n| a cluster with the operator | 4 | not measured | {sum(seconds.values()):.1f} | {detail} |")
