"""The public names of skyproxy under a second name: `from skyproxy.client import Compute, Cluster, compute`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import skyproxy

if TYPE_CHECKING:
    from skyproxy import *  # noqa: F403


def _load(name: str) -> object:
    if name in skyproxy._NAMES:
        return getattr(skyproxy, name)
    raise AttributeError(f"module 'skyproxy.client' has no attribute {name!r}")


if not TYPE_CHECKING:  # for a checker, there would be an attribute of any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *skyproxy._NAMES})
