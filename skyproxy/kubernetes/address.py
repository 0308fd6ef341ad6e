"""Which cluster and namespace is meant, and with which credentials."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


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
        """Whether we run in a Pod and mean its cluster."""
        return self._kubeconfig_file() is None and "KUBERNETES_SERVICE_HOST" in os.environ

    async def resolved(self) -> ClusterAddress:
        """The same with every choice made, so that it means the same tomorrow and in another folder.

        Raises:
            ConfigurationError: there is no kubeconfig, or it does not have that context.
        """
        kubernetes = load_library()
        file = self._kubeconfig_file()
        if file is None:
            if not self.in_cluster:
                raise ConfigurationError(
                    "no Kubernetes cluster is configured: there is no kubeconfig. Set KUBECONFIG or pass --kubeconfig; "
                    "for a worker on this machine: skyproxy up NAME --provider local"
                )
            own = _SERVICE_ACCOUNT / "namespace"
            namespace = self.namespace or (own.read_text(encoding="ascii").strip() if own.exists() else "default")
            return ClusterAddress(namespace)
        try:
            contexts, current = kubernetes.config.list_kube_config_contexts(config_file=file)
        except Exception as error:
            raise ConfigurationError(
                f"the kubeconfig {file} cannot be used: {error}. See: kubectl config view"
            ) from error
        rows = {row["name"]: row for row in contexts}
        name = self.context or (current["name"] if current else None)
        if name is None or name not in rows:
            known = ", ".join(sorted(rows)) or "none"
            raise ConfigurationError(f"the kubeconfig {file} has no context {name!r}. It has: {known}.")
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
        ConfigurationError: it is not installed.
    """
    try:
        import kubernetes_asyncio
    except ImportError as error:
        raise ConfigurationError(
            "talking to a Kubernetes cluster needs kubernetes_asyncio, which is not installed here. "
            f"Install it: {install_command('kubernetes')}"
        ) from error
    return kubernetes_asyncio
