"""The template that sessions' processes are forked from is started again when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import ConnectError
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import wait_for
from tests.server.isolation.workers import Worker

pytestmark = [
    pytest.mark.timeout(400),  # it loads torch twice
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]


def test_a_template_that_was_killed_is_started_again(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        (template,) = worker.children()
        with worker.connect() as node:
            tensor = torch.ones(3, device=str(node.devices[0]))
            os.kill(template, signal.SIGKILL)
            assert tensor.sum().item() == 3
            # It loads torch anew, which on a busy machine takes longer than a client waits for its greeting.
            with wait_for(lambda: _connected(worker), "sessions can be started again", 200) as other:
                assert torch.ones(2, device=str(other.devices[0])).sum().item() == 2
                running = worker.children()
            wait_for(lambda: len(worker.children()) == 2, "the other session's process ends")
            # The one that was started for the other client stays without it.
            with worker.connect() as third:
                assert len(worker.children() & running) == 2
                assert torch.ones(2, device=str(third.devices[0])).sum().item() == 2
            assert tensor.sum().item() == 3
    finally:
        worker.end()


def _connected(worker: Worker) -> skyproxy.Node | None:
    with contextlib.suppress(ConnectError):
        return worker.connect()
    return None
