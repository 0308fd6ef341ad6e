"""A worker to load things on."""

from __future__ import annotations

import pytest

import skyproxy


@pytest.fixture
def node(sky: str) -> skyproxy.Node:
    """The worker behind "sky:0"."""
    return skyproxy.list_nodes()[0]
