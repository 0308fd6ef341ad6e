"""The providers of this machine's user, their workers, and the one that has the worker of a name."""

from __future__ import annotations

import os

from skyproxy.cli.arguments import ProviderName
from skyproxy.cli.fleet import Fleet, WorkerAccess, not_found
from skyproxy.contexts import ContextStore, checked_name
from skyproxy.errors import ConfigurationError, SkyproxyError
from skyproxy.kubernetes.address import ClusterAddress, LibraryMissingError, NoClusterError


def fleet_of(provider: str, address: ClusterAddress) -> Fleet:
    """The workers of a provider, one of `contexts.PROVIDERS`."""
    if provider == ProviderName.KUBERNETES:
        from skyproxy.cli.cluster_fleet import ClusterFleet

        return ClusterFleet(address)
    if provider == ProviderName.LOCAL:
        from skyproxy.cli.local_fleet import LocalFleet

        return LocalFleet()
    if provider == ProviderName.CONTAINER:
        from skyproxy.cli.container_fleet import ContainerFleet

        return ContainerFleet()
    if provider == ProviderName.SSH:
        from skyproxy.cli.ssh_fleet import SshFleet

        return SshFleet()
    from skyproxy.cli.remote_fleet import RemoteFleet

    return RemoteFleet()


def asks_for_cluster(address: ClusterAddress) -> bool:
    """Return whether the options name a cluster."""
    return bool(address.options)


async def has_cluster(address: ClusterAddress) -> bool:
    """Return whether there is a cluster to ask: it is configured, and the library for it is installed.

    Raises:
        ConfigurationError: one is configured, and cannot work. Who named a cluster must not get another worker instead.
    """
    try:
        await address.resolved()
    except (NoClusterError, LibraryMissingError):
        return False
    return True


def access_of_environment() -> WorkerAccess | None:
    """Return the way to the worker of SKYPROXY_URL, which `sky:0` is before any saved context; None if it is not set.

    Raises:
        ConfigurationError: there is no token for it.
    """
    url = os.environ.get("SKYPROXY_URL")
    if not url:
        return None
    token = os.environ.get("SKYPROXY_TOKEN")
    if not token:
        raise ConfigurationError("SKYPROXY_URL is set, and SKYPROXY_TOKEN is not. Set both, or unset both.")
    trusted, name = (os.environ.get(f"SKYPROXY_{key}") or None for key in ("CERTIFICATE", "SERVER_NAME"))
    return WorkerAccess(url, token, trusted, name)


async def locate(name: str | None, provider: ProviderName | None, address: ClusterAddress) -> tuple[str, Fleet]:
    """The worker that a command means.

    Args:
        name: as it was given; the current context's where it was not.
        provider: as it was given.
        address: the cluster that the options mean.

    Returns:
        Its name and the fleet that it is, or should be, in.

    Raises:
        ConfigurationError: no name was given, and no context is chosen.
        NotFoundError: nobody knows it.
    """
    store = ContextStore()
    context = store.chosen() if name is None else store.get(checked_name(name))
    if context is None and name is None:
        if os.environ.get("SKYPROXY_URL"):
            raise ConfigurationError(
                "no worker is named. SKYPROXY_URL has the address of one; to save it under a name: "
                'skyproxy connect "$SKYPROXY_URL"'
            )
        raise ConfigurationError("no worker is named and no context is chosen. Name one: see skyproxy list")
    name = context.name if context is not None else checked_name(str(name))
    if provider is not None:
        return name, fleet_of(provider, address)
    if asks_for_cluster(address):
        return name, fleet_of(ProviderName.KUBERNETES, address)
    if context is not None:
        return name, fleet_of(context.provider, ClusterAddress.of_options(context.options))
    asked, unasked = [], {}
    for kind in (ProviderName.LOCAL, ProviderName.SSH, ProviderName.KUBERNETES):
        try:
            if kind is ProviderName.KUBERNETES and not await has_cluster(address):
                continue
            fleet = fleet_of(kind, address)
            if await fleet.row(name) is not None:
                return name, fleet
            asked.append(kind.value)
        except SkyproxyError as error:
            unasked[kind.value] = str(error).rstrip(".")
    raise not_found(name, *asked, unasked=unasked)
