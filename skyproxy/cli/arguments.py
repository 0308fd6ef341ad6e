"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", re.ASCII)
_SIZES = (86400, 3600, 60, 1)
MAX_SECONDS = 10 * 365 * 86400
"""No worker lives longer, and calendars end not much later."""


class ProviderName(StrEnum):
    """Who runs workers for `skyproxy up`."""

    LOCAL = "local"
    CONTAINER = "container"
    KUBERNETES = "kubernetes"


def complete_worker(incomplete: str) -> list[str]:
    """The names of saved contexts, for the shell's completion."""
    from skyproxy.contexts import ContextStore

    return [name for name in ContextStore().names() if name.startswith(incomplete)]


WorkerName = Annotated[
    str | None,
    typer.Argument(help="Name of the worker; the current context's by default.", autocompletion=complete_worker),
]
Provider = Annotated[ProviderName | None, typer.Option(help="Who runs it; found by its name by default.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; the kubeconfig's by default.")]
KubeContext = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Kubeconfig = Annotated[str | None, typer.Option("--kubeconfig", help="The kubeconfig file; as kubectl finds it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def address_of(namespace: str | None, context: str | None, kubeconfig: str | None) -> ClusterAddress:
    """The cluster that the options mean."""
    return ClusterAddress(namespace, context, kubeconfig)


def duration_seconds(text: str | None) -> float | None:
    """The seconds of "90", "30m" or "1h30m"; None for an empty text.

    Raises:
        ConfigurationError: it is no length of time, or none that anything can take.
    """
    if not text:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise ConfigurationError(f"{text!r} is no length of time. Examples: 90s, 30m, 1h30m, 2d")
    seconds = sum(int(number) * size for number, size in zip(found.groups(), _SIZES) if number)
    if not 0 < seconds <= MAX_SECONDS:
        fault = "longer than ten years" if seconds else "over before it begins"
        raise ConfigurationError(f"{text!r} is {fault}. Examples: 90s, 30m, 1h30m, 2d; leave it out for no limit")
    return float(seconds)


def volume_of(text: str) -> dict[str, str]:
    """The volume of "NAME:SIZE:PATH", with ":KEY=VALUE" for what its claim should know besides.

    Raises:
        ConfigurationError: it is none.
    """
    parts = text.split(":")
    if len(parts) < 3 or not all(parts[:3]) or not all("=" in part for part in parts[3:]):
        raise ConfigurationError(f"--volume {text!r} is not NAME:SIZE:PATH. Example: cache:10Gi:/cache")
    row = dict(zip(("name", "storage", "path"), parts))
    return row | dict(part.split("=", 1) for part in parts[3:])


def variables_of(texts: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of "NAME=VALUE", or of "NAME" for our own value.

    Raises:
        ConfigurationError: a NAME without a value is not set here either.
    """
    environ = os.environ if environ is None else environ
    result = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not name or (not given and name not in environ):
            raise ConfigurationError(f"--env {text!r}: {name or 'it'} is not set here. Give it as NAME=VALUE.")
        result[name] = value if given else environ[name]
    return result
