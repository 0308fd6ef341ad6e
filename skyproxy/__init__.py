"""Run PyTorch locally with GPUs somewhere else: `import skyproxy; tensor.to("sky:0")`.

Importing this package loads neither torch nor a network library. The `sky` device is registered as soon as torch is
imported too, in either order; the other public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skyproxy.torch_watcher import watch_torch

if TYPE_CHECKING:
    from skyproxy.debugging import SyncWarning as SyncWarning
    from skyproxy.debugging import debug_syncs as debug_syncs
    from skyproxy.nodes import DeviceInfo as DeviceInfo
    from skyproxy.nodes import Node as Node
    from skyproxy.nodes import connect as connect
    from skyproxy.nodes import connect_async as connect_async
    from skyproxy.nodes import devices as devices
    from skyproxy.nodes import fetch_async as fetch_async
    from skyproxy.nodes import launch_local as launch_local
    from skyproxy.nodes import list_nodes as list_nodes
    from skyproxy.nodes import reset as reset
    from skyproxy.tensor.pending import prefetch as prefetch
    from skyproxy.tensor.remote_tensor import RemoteTensor as RemoteTensor

_PUBLIC = {
    "DeviceInfo": "skyproxy.nodes",
    "Node": "skyproxy.nodes",
    "RemoteTensor": "skyproxy.tensor.remote_tensor",
    "SyncWarning": "skyproxy.debugging",
    "connect": "skyproxy.nodes",
    "connect_async": "skyproxy.nodes",
    "debug_syncs": "skyproxy.debugging",
    "devices": "skyproxy.nodes",
    "fetch_async": "skyproxy.nodes",
    "launch_local": "skyproxy.nodes",
    "list_nodes": "skyproxy.nodes",
    "prefetch": "skyproxy.tensor.pending",
    "reset": "skyproxy.nodes",
}
__all__ = sorted([*_PUBLIC, "__version__", "errors"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("skyproxy")
    if name in _PUBLIC:
        if name != "errors":
            _load_device()
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name == "errors":
        return importlib.import_module("skyproxy.errors")
    raise AttributeError(f"module 'skyproxy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load_device() -> None:
    """Registers the `sky` device; needs torch.

    Raises:
        ImportError: torch is not installed.
    """
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ImportError(
            "skyproxy needs PyTorch 2.11 to 2.13, and it is not installed here. Try: pip install torch==2.13.0"
        ) from error
    importlib.import_module("skyproxy.nodes")
    importlib.import_module("skyproxy.tensor.activation").activate()


watch_torch(_load_device)
