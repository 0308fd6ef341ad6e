"""The cluster and the namespace that are meant, and the credentials for them."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command
from skyproxy.kubernetes.credential_plugin import make_credentials
from skyproxy.kubernetes.kubeconfig import Kubeconfig, is_there, read, split

_LIBRARY = "kubernetes_asyncio"
_NAMESPACE = re.compile(r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
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
                context; or the namespace cannot be one.
        """
        # The library is imported where a cluster is asked: that takes longer than all else that `skyproxy list` does.
        if importlib.util.find_spec(_LIBRARY) is None:
            raise _make_library_error()
        file = self._kubeconfig_file()
        if file is None:
            if not self.in_cluster:
                raise NoClusterError(f"no Kubernetes cluster is configured: there is no kubeconfig. {_HOW_TO_NAME_ONE}")
            own = _SERVICE_ACCOUNT / "namespace"
            namespace = self.namespace or (own.read_text(encoding="ascii").strip() if own.exists() else "default")
            return ClusterAddress(_check_namespace(namespace))
        config = self._read(file)
        name = self.context or config.current
        if name not in config.contexts:
            known = ", ".join(sorted(config.contexts)) or "none"
            lacking = f"context {name!r}" if name else "current context"
            raise ConfigurationError(f"the kubeconfig {file} has no {lacking}. It has: {known}. Name one: --context")
        namespace = self.namespace or str(config.contexts[name].get("namespace") or "default")
        return ClusterAddress(_check_namespace(namespace), name, os.pathsep.join(map(str, config.files)))

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
                await self._load_user(kubernetes.config.kube_config, configuration)
        except Exception as error:
            where = f"context {self.context!r} of {self.kubeconfig}" if self.kubeconfig else "the Pod's service account"
            raise ConfigurationError(f"the credentials of {where} cannot be used: {error}") from error
        return configuration

    async def _load_user(self, library: Any, configuration: Any) -> None:
        """Fill in the context's cluster and user; a credential plugin is run by us, who end it when it hangs."""
        merged = library.KubeConfigMerger(self.kubeconfig).config
        name = merged["contexts"].get_with_name(self.context)["context"].safe_get("user")
        user = merged["users"].get_with_name(name, safe=True) if name else None
        row = user.value.get("user") if user is not None else None
        if isinstance(row, dict) and isinstance(row.get("exec"), Mapping):
            row |= await make_credentials(row.pop("exec"))
        loader = library.KubeConfigLoader(config_dict=merged, active_context=self.context)
        await loader.load_and_set(configuration)

    def _read(self, named: str) -> Kubeconfig:
        """Read the kubeconfig, and say so where it is not there or names no context to use.

        Of several files, as KUBECONFIG may have them, kubectl leaves out those that are not there.
        """
        said = "--kubeconfig" if self.kubeconfig else "KUBECONFIG" if os.environ.get("KUBECONFIG") else ""
        if not any(map(is_there, split(named))):
            raise ConfigurationError(
                f"the kubeconfig {named}, which {said or 'HOME'} names, cannot be used: there is no such file. Correct "
                "the path, or leave it out; for a worker on this machine: skyproxy up NAME --provider local"
            )
        config = read(named)
        # Tools that made a cluster and took it away again leave a file behind in which nothing is current.
        if not (said or self.context or config.current):
            raise NoClusterError(
                f"no Kubernetes cluster is configured: {named} has no current context. {_HOW_TO_NAME_ONE}"
            )
        return config

    def _kubeconfig_file(self) -> str | None:
        if self.kubeconfig:
            return self.kubeconfig
        if named := os.environ.get("KUBECONFIG"):
            return named
        usual = Path.home() / ".kube" / "config"
        return str(usual) if is_there(usual) else None

    def __str__(self) -> str:
        where = f"namespace {self.namespace}" if self.namespace else "the default namespace"
        return f"{where} of {self.context}" if self.context else where


def _check_namespace(namespace: str) -> str:
    """Return a namespace that can be one: it becomes part of the paths that are asked for."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigurationError(
            f"{namespace!r} cannot name a namespace: those have up to 63 small letters, digits and hyphens. "
            "See: kubectl get namespaces"
        )
    return namespace


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


def load_yaml() -> Any:
    """The package yaml.

    Raises:
        LibraryMissingError: it is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise _make_library_error("yaml") from error
    return yaml


def _make_library_error(library: str = _LIBRARY) -> LibraryMissingError:
    return LibraryMissingError(
        f"talking to a Kubernetes cluster needs {library}, which is not installed here. "
        f"Install it: {install_command('kubernetes')}"
    )
