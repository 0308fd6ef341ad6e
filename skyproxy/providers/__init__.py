"""Providers, which make workers: what is asked for, and one module for each place that can give it.

Nothing here speaks to a worker; a provider hands out endpoints, and pools connect to them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyproxy.providers.accelerators import Accelerator as Accelerator
    from skyproxy.providers.aws import AWS as AWS
    from skyproxy.providers.base import Endpoint as Endpoint
    from skyproxy.providers.base import Launched as Launched
    from skyproxy.providers.base import Progress as Progress
    from skyproxy.providers.base import Provider as Provider
    from skyproxy.providers.base import Volume as Volume
    from skyproxy.providers.base import WorkerSpec as WorkerSpec
    from skyproxy.providers.container import Container as Container
    from skyproxy.providers.image import Image as Image
    from skyproxy.providers.image import PipIndex as PipIndex
    from skyproxy.providers.kubernetes_provider import Kubernetes as Kubernetes
    from skyproxy.providers.local import Local as Local
    from skyproxy.providers.remote import Remote as Remote

_HOMES = {
    "AWS": "aws",
    "Accelerator": "accelerators",
    "Container": "container",
    "Endpoint": "base",
    "Image": "image",
    "Kubernetes": "kubernetes_provider",
    "Launched": "base",
    "Local": "local",
    "PipIndex": "image",
    "Progress": "base",
    "Provider": "base",
    "Remote": "remote",
    "Volume": "base",
    "WorkerSpec": "base",
}
__all__ = sorted(_HOMES)


def _load(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'skyproxy.providers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"skyproxy.providers.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # for a checker, there would be an attribute of any name
    __getattr__ = _load
