"""Meeting points of other libraries and ours: a decorator for functions on pools, and what some want before they know
our device.

`@sky.integrations.torch` sets up PyTorch for one function, where a pool has no plugin for it; it shares what it does
with `sky.plugins.torch()`: with both, the process group is joined once. `sky.integrations.lightning` and
`sky.integrations.huggingface` are for training loops that run here, on remote tensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyproxy.integrations import huggingface as huggingface
    from skyproxy.integrations import lightning as lightning
    from skyproxy.integrations.torch_integration import torch as torch

_PUBLIC = {"torch": "torch_integration"}
_MODULES = {"huggingface", "lightning"}
__all__ = sorted([*_PUBLIC, *_MODULES])


def _load(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"skyproxy.integrations.{name}")
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'skyproxy.integrations' has no attribute {name!r}. There are: {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"skyproxy.integrations.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # for a checker, there would be an attribute of any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
