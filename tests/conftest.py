"""Fixtures for all tests: two workers, each in a process of its own, as users have them.

Not threads of this process: a worker draws from its process's default generator, and would draw from ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def sky_devices() -> Iterator[tuple[str, str]]:
    """Two devices on two workers: "sky:0" and "sky:1"."""
    import skyproxy
    from skyproxy.tensor.devices import DEVICES

    while len(DEVICES.existing()) < 2:
        skyproxy.launch_local("cpu")
    yield "sky:0", "sky:1"
    skyproxy.reset()


@pytest.fixture
def sky(sky_devices: tuple[str, str]) -> str:
    """The first device."""
    return sky_devices[0]


@pytest.fixture
def sky1(sky_devices: tuple[str, str]) -> str:
    """A device with an index that is not zero: several of PyTorch's paths work for index 0 only."""
    return sky_devices[1]
