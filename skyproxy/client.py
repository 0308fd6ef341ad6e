"""The public names of skyproxy under a second name: `from skyproxy.client import Compute, Cluster, compute`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import skyproxy

if TYPE_CHECKING:
    from skyproxy import *  # noqa: F403


def __getattr__(name: str) -> object:
    if name in skyproxy.__all__:
        return getattr(skyproxy, name)
    raise AttributeError(f"module 'skyproxy.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *skyproxy.__all__})
