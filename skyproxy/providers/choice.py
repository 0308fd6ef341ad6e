"""The choice of a provider where none is named."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import cast

from skyproxy.contexts import ContextStore
from skyproxy.errors import ConfigurationError
from skyproxy.providers.base import Provider

logger = logging.getLogger("skyproxy")

PROVIDER_VARIABLE = "SKYPROXY_PROVIDER"
_CLASSES = {"local": "Local", "container": "Container", "kubernetes": "Kubernetes", "aws": "AWS"}


def default_provider(environ: Mapping[str, str] = os.environ, contexts: ContextStore | None = None) -> Provider:
    """The provider for those who named none: that of SKYPROXY_PROVIDER, that of the saved context if it is a cluster,
    else this machine. Says which it took.

    Raises:
        ConfigurationError: the variable names no provider.
    """
    named = environ.get(PROVIDER_VARIABLE, "").strip().lower()
    if named:
        if named not in _CLASSES:
            raise ConfigurationError(f"{PROVIDER_VARIABLE}={named!r} is not one of: {', '.join(_CLASSES)}.")
        provider = _make_provider(named)
        reason = PROVIDER_VARIABLE
    else:
        context = (contexts or ContextStore()).chosen()
        if context is not None and context.provider == "kubernetes":
            from skyproxy.kubernetes.address import ClusterAddress
            from skyproxy.providers.kubernetes_provider import Kubernetes

            address = ClusterAddress.of_options(context.options)
            provider = cast(Provider, Kubernetes(address.namespace, address.context, address.kubeconfig))
            reason = f"the saved context {context.name!r}"
        else:
            provider = _make_provider("local")
            reason = "no other was named"
    logger.info("skyproxy: workers come from %s (%s)", provider.name, reason)
    return provider


def _make_provider(name: str) -> Provider:
    found = getattr(importlib.import_module("skyproxy.providers"), _CLASSES[name])
    return cast(Provider, found())
