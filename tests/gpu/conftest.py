"""Tests on a real CUDA device, and where there is none their rehearsal on the CPU.

`make gpu` runs them. With SKYPROXY_TEST_GPU_REHEARSAL=1 those that compare a worker with the local device do so with
the CPU in CUDA's place, so that a mistake in a test does not wait for a machine with a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import skyproxy
from skyproxy.node import Node

_REHEARSAL = os.environ.get("SKYPROXY_TEST_GPU_REHEARSAL") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        item.add_marker(pytest.mark.gpu)
        can_rehearse = _REHEARSAL and "kind" in getattr(item, "fixturenames", ())
        if not torch.cuda.is_available() and not can_rehearse:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


@pytest.fixture(scope="session")
def kind() -> str:
    """The type of the devices that are compared: "cuda"; in a rehearsal "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def gpu_node(kind: str) -> Iterator[Node]:
    """A worker of the module's own on that device."""
    with skyproxy.launch_local(kind) as node:
        yield node
