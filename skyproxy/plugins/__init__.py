"""Plugins: what a pool does for a framework, on its image, in its rank processes and on the client.

`sky.plugins.torch()` and its fellows stand in a pool's `plugins=[...]`. A framework is imported only in the hooks that
run on workers; the client need not have it. `Plugin` is the base for plugins of your own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.plugins.accelerate_plugin import AcceleratePlugin as accelerate
    from skyproxy.plugins.coordination_plugin import CoordinationPlugin as coordination
    from skyproxy.plugins.coordination_plugin import barrier as barrier
    from skyproxy.plugins.coordination_plugin import counter as counter
    from skyproxy.plugins.coordination_plugin import lock as lock
    from skyproxy.plugins.huggingface_plugin import HuggingFacePlugin as huggingface
    from skyproxy.plugins.jax_plugin import JaxPlugin as jax
    from skyproxy.plugins.joblib_plugin import JoblibPlugin as joblib
    from skyproxy.plugins.keras_plugin import KerasPlugin as keras
    from skyproxy.plugins.sklearn_plugin import SklearnPlugin as sklearn
    from skyproxy.plugins.torch_plugin import TorchPlugin as torch

_PUBLIC = {
    "accelerate": ("accelerate_plugin", "AcceleratePlugin"),
    "barrier": ("coordination_plugin", "barrier"),
    "coordination": ("coordination_plugin", "CoordinationPlugin"),
    "counter": ("coordination_plugin", "counter"),
    "huggingface": ("huggingface_plugin", "HuggingFacePlugin"),
    "jax": ("jax_plugin", "JaxPlugin"),
    "joblib": ("joblib_plugin", "JoblibPlugin"),
    "keras": ("keras_plugin", "KerasPlugin"),
    "lock": ("coordination_plugin", "lock"),
    "sklearn": ("sklearn_plugin", "SklearnPlugin"),
    "torch": ("torch_plugin", "TorchPlugin"),
}
__all__ = [
    "Plugin",
    "accelerate",
    "barrier",
    "coordination",
    "counter",
    "huggingface",
    "jax",
    "joblib",
    "keras",
    "lock",
    "sklearn",
    "torch",
]


def _load(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'skyproxy.plugins' has no attribute {name!r}. There are: {', '.join(sorted(_PUBLIC))}"
        )
    module, attribute = _PUBLIC[name]
    value = getattr(importlib.import_module(f"skyproxy.plugins.{module}"), attribute)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # for a checker, there would be an attribute of any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
