"""A worker that runs functions, in a process of its own."""

from __future__ import annotations

import pytest

import skyproxy


@pytest.fixture
def node(sky: str) -> skyproxy.Node:
    """The worker behind "sky:0"."""
    return skyproxy.list_nodes()[0]


@pytest.fixture
def other_node(sky_devices: tuple[str, str]) -> skyproxy.Node:
    """The worker behind "sky:1"."""
    return skyproxy.list_nodes()[1]
