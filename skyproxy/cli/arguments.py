"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress


class ProviderName(StrEnum):
    """The one who runs workers for `skyproxy up`."""

    LOCAL = "local"
    CONTAINER = "container"
    KUBERNETES = "kubernetes"
    SSH = "ssh"


def complete_worker(incomplete: str) -> list[str]:
    """The names of saved contexts, for the shell's completion."""
    from skyproxy.contexts import ContextStore

    return [name for name in ContextStore().names() if name.startswith(incomplete)]


WorkerName = Annotated[
    str | None,
    typer.Argument(help="Name of the worker; default: the current context's.", autocompletion=complete_worker),
]
Provider = Annotated[ProviderName | None, typer.Option(help="Where it runs; default: found by its name.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; default: the kubeconfig's.")]
KubeContext = Annotated[str | None, typer.Option("--context", help="Context in the kubeconfig.")]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", help="The kubeconfig file; default: as kubectl finds it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def address_of(namespace: str | None, context: str | None, kubeconfig: str | None) -> ClusterAddress:
    """The cluster that the options mean."""
    return ClusterAddress(namespace, context, kubeconfig)


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
