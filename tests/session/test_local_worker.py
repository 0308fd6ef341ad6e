"""How the end of a worker's process is told."""

from __future__ import annotations

import signal

import pytest
import torch  # noqa: F401

from skyproxy.session.local_worker import _how_it_ended


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL (the system does that when memory runs out"),
        (-signal.SIGABRT, "was killed by SIGABRT (C code"),
        (-signal.SIGBUS, "/dev/shm"),
        (137, "exited with code 137, that is SIGKILL (the system"),  # from a container's engine
        (255, "exited with code 255"),
    ],
)
def test_an_exit_status_is_told_in_words(status: int, said: str) -> None:
    assert said in _how_it_ended(status)
