"""How an installation differs from another: what the operator's Deployment sets in its environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyproxy.errors import ConfigurationError


@dataclass(frozen=True)
class Options:
    """The values in force; each can be set by `SKYPROXY_OPERATOR_` and its name in capitals."""

    worker_image: str = "ghcr.io/skyproxy/worker:0.1.0"
    """For Computes that name no image and ask for no GPU."""
    gpu_worker_image: str = "ghcr.io/skyproxy/worker:0.1.0-cuda"
    """The same for those that ask for GPUs."""
    worker_uid: int | None = 10001
    """The user, group and file-system group of workers; empty where the platform chooses them, as OpenShift does."""
    gateway: str = ""
    """NAMESPACE/NAME of the Gateway for Computes that name none."""
    gateway_domain: str = ""
    """The domain under which Computes that name no host are reached."""
    concurrency: int = 8
    """Computes that are looked after at the same time."""
    resync_seconds: float = 300.0
    """How often every Compute is looked at though nothing happened; then children are applied again, too."""
    probe_seconds: float = 30.0
    """How often a running worker is asked for its activity; more often when an idle timeout comes near."""
    probe_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 30.0
    """A request to the API server that takes longer has failed."""
    lease_namespace: str = ""
    """Where the Lease is by which one of several operators leads; without one, every operator works."""
    lease_name: str = "skyproxy-operator"
    lease_identity: str = ""
    """What names this operator in the Lease: with the uid of its pod, a container that starts again goes on at once,
    for the one before it has ended. Without it, every process is another operator."""
    lease_seconds: float = 15.0
    """A leader that has not renewed its Lease for this long is none any more."""
    http_host: str = "0.0.0.0"
    http_port: int = 8080
    """Serves /healthz, /readyz and /metrics; 0 takes a free port, and an empty host serves nothing."""


def load(environ: Mapping[str, str] | None = None) -> Options:
    """The options that the environment asks for.

    Raises:
        ConfigurationError: a value is not of its option's kind.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Options):
        variable = "SKYPROXY_OPERATOR_" + item.name.upper()
        text = environ.get(variable)
        if text is not None:
            values[item.name] = _parse(variable, text.strip(), str(item.type))
    return Options(**values)


def _parse(variable: str, text: str, kind: str) -> object:
    if kind == "str":
        return text
    if kind == "int | None" and not text:
        return None
    convert: Callable[[str], float] = float if kind == "float" else int
    try:
        value = convert(text)
    except ValueError:
        raise ConfigurationError(f"{variable}={text!r} is not a number. Example: {variable}=10") from None
    if value < 0:
        raise ConfigurationError(f"{variable}={text!r} is negative. Use 0 or more.")
    return value
