"""Decorators that set up a framework for one function, where a pool has no plugin for it.

`@sky.integrations.torch` shares what it does with `sky.plugins.torch()`: with both, the process group is joined once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyproxy.integrations.torch_integration import torch as torch

_PUBLIC = {"torch": "torch_integration"}
__all__ = ["torch"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'skyproxy.integrations' has no attribute {name!r}. There are: {', '.join(sorted(_PUBLIC))}"
        )
    value = getattr(importlib.import_module(f"skyproxy.integrations.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
