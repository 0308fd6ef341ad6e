"""Fixtures for all tests: remote devices without a second process.

Most tests run against workers on threads of this process, joined by the in-memory transport: the real session, the
real frames and the real executor, and a debugger that sees both ends. `tests/integration` uses real processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


def add_memory_worker() -> list[int]:
    """Starts a worker on threads of this process; the numbers of its `sky` devices."""
    from skyproxy.protocol.messages import Welcome
    from skyproxy.session.session import Session
    from skyproxy.settings import SETTINGS
    from skyproxy.tensor.devices import DEVICES
    from skyproxy.transport.memory import memory_transport_pair
    from skyproxy_server.worker_session import WorkerSession

    client_end, worker_end = memory_transport_pair()
    client_bulk, worker_bulk = memory_transport_pair(kind="bulk")
    rows = [{"type": "cpu", "index": 0, "name": "CPU"}]
    worker = WorkerSession(worker_end, rows, SETTINGS)
    threading.Thread(target=worker.run, name="worker", daemon=True).start()
    threading.Thread(target=worker.run_bulk, args=(worker_bulk,), name="worker-bulk", daemon=True).start()
    welcome = Welcome(1, worker.identity, {"torch": "in-process"}, rows, {})
    session = Session(client_end, client_bulk, welcome, SETTINGS)
    return [device.index for device in DEVICES.add(session)]


@pytest.fixture(scope="session")
def sky_devices() -> Iterator[tuple[str, str]]:
    """Two devices on two workers: "sky:0" and "sky:1"."""
    from skyproxy.tensor.activation import activate
    from skyproxy.tensor.devices import DEVICES

    activate()
    while len(DEVICES.existing()) < 2:
        add_memory_worker()
    yield "sky:0", "sky:1"


@pytest.fixture
def sky(sky_devices: tuple[str, str]) -> str:
    """The first device."""
    return sky_devices[0]


@pytest.fixture
def sky1(sky_devices: tuple[str, str]) -> str:
    """A device with an index that is not zero: several of PyTorch's paths work for index 0 only."""
    return sky_devices[1]
