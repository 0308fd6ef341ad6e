"""How a worker on this machine is started, and how the end of its process is told."""

from __future__ import annotations

import signal

import pytest
import torch  # noqa: F401

from skyproxy.session.local_worker import _explain_exit, worker_environment


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
    assert said in _explain_exit(status)


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_threads_of_kernels_sleep_soon_unless_the_user_says_how_they_wait(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert 0 < int(worker_environment()["GOMP_SPINCOUNT"]) < 300_000
    monkeypatch.setenv(variable, "7")
    waiting = {name: value for name, value in worker_environment().items() if name in names}
    assert waiting == {variable: "7"}
