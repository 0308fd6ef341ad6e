"""The cluster and the namespace that are meant, and the credentials for them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command

_LIBRARY = "kubernetes_asyncio"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoClusterError(ConfigurationError):
    """Nobody has configured a cluster here: no kubeconfig, no Pod around us, no context that is the current one."""


class LibraryMissingError(ConfigurationError):
    """The package that talks to clusters is not installed."""


_HOW_TO_NAME_ONE = (
    "Set KUBECONFIG or pass --kubeconfig; for a worker on this machine: skyproxy up NAME --provider local"
)


@dataclass(frozen=True)
class ClusterAddress:
    """A cluster as this machine knows it; whatever is None is decided as kubectl does.

    Attributes:
        namespace: where our objects are.
        context: of the kubeconfig.
        kubeconfig: the file; KUBECONFIG, ~/.kube/config, or the Pod's own account by default.
    """

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> ClusterAddress:
        """The address that a saved context holds."""
        return cls(options.get("namespace"), options.get("context"), options.get("kubeconfig"))

    @property
    def options(self) -> dict[str, str]:
        """For a saved context."""
        given = {"namespace": self.namespace, "context": self.context, "kubeconfig": self.kubeconfig}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def in_cluster(self) -> bool:
        """True if we run in a Pod and mean its cluster."""
        return self._kubeconfig_file() is None and "KUBERNETES_SERVICE_HOST" in os.environ

    async def resolved(self) -> ClusterAddress:
        """The same with every choice made, so that it means the same tomorrow and in another folder.

        Raises:
            NoClusterError: none is configured.
            ConfigurationError: the kubeconfig that somebody named is not there, cannot be read, or does not have that
                context.
        """
        # The library is imported where there is a cluster: that takes longer than all else that `skyproxy list` does.
        if importlib.util.find_spec(_LIBRARY) is None:
            raise _make_library_error()
        file = self._kubeconfig_file()
        if file is None:
            if not self.in_cluster:
                raise NoClusterError(f"no Kubernetes cluster is configured: there is no kubeconfig. {_HOW_TO_NAME_ONE}")
            own = _SERVICE_ACCOUNT / "namespace"
            namespace = self.namespace or (own.read_text(encoding="ascii").strip() if own.exists() else "default")
            return ClusterAddress(namespace)
        self._check_files(file)
        kubernetes = load_library()
        try:
            contexts, current = kubernetes.config.list_kube_config_contexts(config_file=file)
            rows = {row["name"]: row for row in contexts}
            name = self.context or (current["name"] if current else None)
        except Exception as error:
            raise ConfigurationError(
                f"the kubeconfig {file} cannot be used: {error}. See: kubectl config view --kubeconfig {file}"
            ) from error
        if name is None or name not in rows:
            known = ", ".join(sorted(rows)) or "none"
            lacking = f"context {name!r}" if name else "current context"
            raise ConfigurationError(f"the kubeconfig {file} has no {lacking}. It has: {known}. Name one: --context")
        namespace = self.namespace or rows[name]["context"].get("namespace") or "default"
        path = os.pathsep.join(str(Path(item).expanduser().absolute()) for item in file.split(os.pathsep) if item)
        return ClusterAddress(namespace, name, path)

    async def configuration(self) -> Any:
        """The library's configuration for a resolved address.

        Raises:
            ConfigurationError: the credentials cannot be loaded.
        """
        kubernetes = load_library()
        configuration = kubernetes.client.Configuration()
        try:
            if self.kubeconfig is None:
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            else:
                await kubernetes.config.load_kube_config(
                    config_file=self.kubeconfig,
                    context=self.context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except Exception as error:
            where = f"context {self.context!r} of {self.kubeconfig}" if self.kubeconfig else "the Pod's service account"
            raise ConfigurationError(f"the credentials of {where} cannot be used: {error}") from error
        return configuration

    def _check_files(self, named: str) -> None:
        """Say of a kubeconfig what the library does not: that it is not there, or names no context to use.

        Of several files, as KUBECONFIG may have them, kubectl leaves out those that are not there.
        """
        said = "--kubeconfig" if self.kubeconfig else "KUBECONFIG" if os.environ.get("KUBECONFIG") else ""
        files = [Path(item).expanduser() for item in named.split(os.pathsep) if item]
        found = [file for file in files if file.exists()]
        if not found:
            raise ConfigurationError(
                f"the kubeconfig {named}, which {said or 'HOME'} names, cannot be used: there is no such file. Correct "
                "the path, or leave it out; for a worker on this machine: skyproxy up NAME --provider local"
            )
        if said or self.context:
            return
        # Tools that made a cluster and took it away again leave a file behind in which nothing is current.
        import yaml

        try:
            content = yaml.safe_load(found[0].read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigurationError(f"the kubeconfig {found[0]} cannot be read: {error}") from error
        if content is None or (isinstance(content, Mapping) and not content.get("current-context")):
            raise NoClusterError(
                f"no Kubernetes cluster is configured: {found[0]} has no current context. {_HOW_TO_NAME_ONE}"
            )

    def _kubeconfig_file(self) -> str | None:
        if self.kubeconfig:
            return self.kubeconfig
        if named := os.environ.get("KUBECONFIG"):
            return named
        usual = Path.home() / ".kube" / "config"
        return str(usual) if usual.exists() else None

    def __str__(self) -> str:
        where = f"namespace {self.namespace}" if self.namespace else "the default namespace"
        return f"{where} of {self.context}" if self.context else where


def load_library() -> Any:
    """The package kubernetes_asyncio.

    Raises:
        LibraryMissingError: it is not installed.
    """
    try:
        import kubernetes_asyncio
    except ImportError as error:
        raise _make_library_error() from error
    return kubernetes_asyncio


def _make_library_error() -> LibraryMissingError:
    return LibraryMissingError(
        f"talking to a Kubernetes cluster needs {_LIBRARY}, which is not installed here. "
        f"Install it: {install_command('kubernetes')}"
    )
