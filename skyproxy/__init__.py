"""Run PyTorch locally with GPUs somewhere else: `import skyproxy; tensor.to("sky:0")`.

Importing this package loads neither torch nor a network library. The `sky` device is registered as soon as torch is
imported too, in either order, but on a worker with the first node that a function opens. The other public names load on
first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from skyproxy import import_watcher
from skyproxy.collector import collector_paused
from skyproxy.import_watcher import forget_all, namesakes, when_imported, when_whole

if TYPE_CHECKING:
    from skyproxy import errors as errors
    from skyproxy import integrations as integrations
    from skyproxy import plugins as plugins
    from skyproxy import providers as providers
    from skyproxy import runtime as runtime
    from skyproxy.debugging import SyncWarning as SyncWarning
    from skyproxy.debugging import debug_syncs as debug_syncs
    from skyproxy.early_start import start_early as start_early
    from skyproxy.jobs.job import Job as Job
    from skyproxy.jobs.job import JobStatus as JobStatus
    from skyproxy.node import DeviceInfo as DeviceInfo
    from skyproxy.node import Node as Node
    from skyproxy.nodes import connect as connect
    from skyproxy.nodes import connect_async as connect_async
    from skyproxy.nodes import devices as devices
    from skyproxy.nodes import fetch_async as fetch_async
    from skyproxy.nodes import launch_local as launch_local
    from skyproxy.nodes import list_nodes as list_nodes
    from skyproxy.nodes import reset as reset
    from skyproxy.notebook.extension import load_ipython_extension as load_ipython_extension
    from skyproxy.notebook.extension import unload_ipython_extension as unload_ipython_extension
    from skyproxy.pools import Actor as Actor
    from skyproxy.pools import ActorGroup as ActorGroup
    from skyproxy.pools import Cluster as Cluster
    from skyproxy.pools import Compute as Compute
    from skyproxy.pools import ComputePool as ComputePool
    from skyproxy.pools import Nodes as Nodes
    from skyproxy.pools import PendingCompute as PendingCompute
    from skyproxy.pools import Retry as Retry
    from skyproxy.pools import actor as actor
    from skyproxy.pools import compute as compute
    from skyproxy.pools import function as function
    from skyproxy.pools import gather as gather
    from skyproxy.profiling.profiles import Profile as Profile
    from skyproxy.profiling.profiles import profile as profile
    from skyproxy.protecting import Protected as Protected
    from skyproxy.protecting import protect as protect
    from skyproxy.providers.accelerators import Accelerator as Accelerator
    from skyproxy.providers.aws import AWS as AWS
    from skyproxy.providers.base import Volume as Volume
    from skyproxy.providers.container import Container as Container
    from skyproxy.providers.image import Image as Image
    from skyproxy.providers.image import PipIndex as PipIndex
    from skyproxy.providers.kubernetes_provider import Kubernetes as Kubernetes
    from skyproxy.providers.local import Local as Local
    from skyproxy.providers.remote import Remote as Remote
    from skyproxy.restoring import restore as restore
    from skyproxy.runtime import InstanceInfo as InstanceInfo
    from skyproxy.runtime import checkpoint_dir as checkpoint_dir
    from skyproxy.runtime import instance_info as instance_info
    from skyproxy.runtime import restart_count as restart_count
    from skyproxy.runtime import shard as shard
    from skyproxy.runtime import silent as silent
    from skyproxy.runtime import stderr as stderr
    from skyproxy.runtime import stdout as stdout
    from skyproxy.tensor.core.remote_tensor import RemoteTensor as RemoteTensor
    from skyproxy.tensor.ops.async_values import prefetch as prefetch
    from skyproxy.tensor.torch_api import sky as sky
    from skyproxy.tensor.torch_api.state_dicts import RemoteStateDict as RemoteStateDict
    from skyproxy.tensor.torch_api.state_dicts import load_into as load_into
    from skyproxy.webview.program import ui as ui

    __version__: str

_PUBLIC = {
    "AWS": "skyproxy.providers.aws",
    "Accelerator": "skyproxy.providers.accelerators",
    "Actor": "skyproxy.pools",
    "ActorGroup": "skyproxy.pools",
    "Cluster": "skyproxy.pools",
    "Compute": "skyproxy.pools",
    "ComputePool": "skyproxy.pools",
    "Container": "skyproxy.providers.container",
    "DeviceInfo": "skyproxy.node",
    "Image": "skyproxy.providers.image",
    "InstanceInfo": "skyproxy.runtime",
    "Job": "skyproxy.jobs.job",
    "JobStatus": "skyproxy.jobs.job",
    "Kubernetes": "skyproxy.providers.kubernetes_provider",
    "Local": "skyproxy.providers.local",
    "Node": "skyproxy.node",
    "Nodes": "skyproxy.pools",
    "PendingCompute": "skyproxy.pools",
    "PipIndex": "skyproxy.providers.image",
    "Profile": "skyproxy.profiling.profiles",
    "Protected": "skyproxy.protecting",
    "Remote": "skyproxy.providers.remote",
    "RemoteStateDict": "skyproxy.tensor.torch_api.state_dicts",
    "RemoteTensor": "skyproxy.tensor.core.remote_tensor",
    "Retry": "skyproxy.pools",
    "SyncWarning": "skyproxy.debugging",
    "Volume": "skyproxy.providers.base",
    "actor": "skyproxy.pools",
    "checkpoint_dir": "skyproxy.runtime",
    "compute": "skyproxy.pools",
    "connect": "skyproxy.nodes",
    "connect_async": "skyproxy.nodes",
    "debug_syncs": "skyproxy.debugging",
    "devices": "skyproxy.nodes",
    "fetch_async": "skyproxy.nodes",
    "function": "skyproxy.pools",
    "gather": "skyproxy.pools",
    "instance_info": "skyproxy.runtime",
    "launch_local": "skyproxy.nodes",
    "list_nodes": "skyproxy.nodes",
    "load_into": "skyproxy.tensor.torch_api.state_dicts",
    "load_ipython_extension": "skyproxy.notebook.extension",
    "prefetch": "skyproxy.tensor.ops.async_values",
    "profile": "skyproxy.profiling.profiles",
    "protect": "skyproxy.protecting",
    "reset": "skyproxy.nodes",
    "restart_count": "skyproxy.runtime",
    "restore": "skyproxy.restoring",
    "shard": "skyproxy.runtime",
    "silent": "skyproxy.runtime",
    "start_early": "skyproxy.early_start",
    "stderr": "skyproxy.runtime",
    "stdout": "skyproxy.runtime",
    "ui": "skyproxy.webview.program",
    "unload_ipython_extension": "skyproxy.notebook.extension",
}
_SUBMODULES = {"errors", "integrations", "plugins", "providers", "runtime"}
"""Packages that are public as they are: `skyproxy.plugins.torch()` needs no import of its own."""
_WITHOUT_DEVICE = ("early_start", "integrations", "jobs", "notebook", "plugins", "pools", "providers", "runtime")
"""Parts whose names neither load torch nor register the device: workers, which have the real devices, use them too."""
_NAMES = sorted([*_PUBLIC, *_SUBMODULES, "__version__", "install", "sky", "uninstall"])
if not TYPE_CHECKING:  # checkers read lists of words only; they take the imports above
    __all__ = _NAMES


def _load(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("skyproxy")
    if name == "sky":  # as `torch.sky`, which type checkers do not know
        _load_device()
        return importlib.import_module("torch.sky")
    if name in _PUBLIC:
        if _PUBLIC[name].split(".")[1] not in _WITHOUT_DEVICE:
            _load_device(registers=not import_watcher.in_worker)
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"skyproxy.{name}")
    raise AttributeError(f"module 'skyproxy' has no attribute {name!r}")


if not TYPE_CHECKING:  # for a checker, there would be an attribute of any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})


def _load_device(*, registers: bool = True) -> None:
    """Load what the `sky` device needs, and register it unless that is left to the first node; needs torch.

    Raises:
        ImportError: torch is not installed, or a file of the program has the name of a package that is needed.
    """
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ImportError(
            "skyproxy needs PyTorch 2.11 or newer, and it is not installed here. Try: pip install torch"
        ) from error
    try:
        with collector_paused():
            nodes: Any = importlib.import_module("skyproxy.nodes")
            nodes.open_saved = _open_saved
            if registers:
                importlib.import_module("skyproxy.tensor.activation").activate()
    except (ImportError, AttributeError) as error:
        for name, file in namesakes(("torch", "msgpack", "packaging")):
            raise ImportError(f"{file} was imported in place of the package {name}. Rename that file.") from error
        raise


def _open_saved() -> Node | None:
    """Connects to the worker that `skyproxy up` saved."""
    node: Node | None = importlib.import_module("skyproxy.providers.saved").open_saved()
    return node


def _complete_with(name: str) -> Callable[[ModuleType], object]:
    """Return a function that calls our module of this name with one that was imported."""

    def complete(module: ModuleType) -> None:
        ours: Any = importlib.import_module(name)
        ours.install(module)

    return complete


def install() -> None:
    """Register the `sky` device again after `uninstall`. Importing this package does so; idempotent.

    Raises:
        ConfigurationError: if this torch is not supported, or another backend is registered already.

    Example:
        ```python
        skyproxy.uninstall()
        skyproxy.install()
        print(torch.ones(2, device="sky:0").sum().item())
        ```
    """
    global _installed
    if _installed:
        return
    _installed = True
    when_imported("torch", lambda torch: when_whole("skyproxy", _load_device))
    when_imported("transformers.generation.utils", _complete_with("skyproxy.integrations.generation"))
    for name in ("transformers.masking_utils", "transformers.generation.utils"):
        when_imported(name, _complete_with("skyproxy.integrations.attention_masks"))
    when_imported("transformers.integrations.hub_kernels", _complete_with("skyproxy.integrations.layers"))
    for name in ("attention", "padding"):
        when_imported("transformers.modeling_utils", _complete_with(f"skyproxy.integrations.{name}"))


def uninstall() -> list[str]:
    """End all sessions, and put back what skyproxy has replaced in PyTorch, in other libraries and in Python.

    Returns:
        What stays until the process ends, by dotted name: PyTorch cannot take back the name of a device, nor that it is
        an accelerator. docs/reference/patches.md tells of each.

    Example:
        ```python
        for place in skyproxy.uninstall():
            print(place, "stays until the process ends")
        ```
    """
    global _installed
    _installed = False
    forget_all()
    nodes: Any = sys.modules.get("skyproxy.nodes")
    if nodes is not None:
        nodes.reset()
    early: Any = sys.modules.get("skyproxy.session.early_worker")
    if early is not None:
        early.EARLY_WORKER.drop()
    activation: Any = sys.modules.get("skyproxy.tensor.activation")
    return [patch.place for patch in activation.deactivate()] if activation is not None else []


_installed = False
install()
