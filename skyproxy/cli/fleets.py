"""The workers of one provider, in the same shape for every command; and which provider has the worker of a name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from skyproxy.cli.arguments import ProviderName
from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.contexts import Context, ContextStore, checked_name
from skyproxy.errors import ConfigurationError, SkyproxyError
from skyproxy.kubernetes.address import ClusterAddress, LibraryMissingError, NoClusterError
from skyproxy.transport.worker_report import ask_worker


@dataclass(frozen=True)
class WorkerRow:
    """A worker as `list` and `status` show it; the fields are the keys of `--json`.

    Attributes:
        name: of the worker.
        provider: who runs it.
        where: a namespace and a kubeconfig's context, or "this machine".
        phase: Pending, Provisioning, Running, Suspended, Failed, Expired, Terminating; Lost for a process that is gone.
        ready: whether it takes clients.
        nodes: how many.
        devices: what it offers, in words; empty where it does not say.
        age_seconds: since it was made.
        idle_seconds: for how long nothing was done on it; None where it does not say.
        url: where it listens, as its surroundings see it.
        reason: one word for why it is not ready.
        message: the cause, for people.
        hint: what to do about it.
        events: the latest warnings.
        software: versions on the worker.
    """

    name: str
    provider: str
    where: str
    phase: str
    ready: bool
    nodes: int = 1
    devices: str = ""
    age_seconds: float | None = None
    idle_seconds: float | None = None
    url: str | None = None
    reason: str = ""
    message: str = ""
    hint: str = ""
    events: tuple[str, ...] = ()
    software: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Access:
    """How to speak to a worker from here; `close` when done."""

    url: str
    token: str = field(repr=False)
    certificate: str | None = None
    server_name: str | None = None
    via: str = "direct"
    release: Any = None

    def close(self) -> None:
        """Ends what it goes through; idempotent."""
        if self.release is not None:
            self.release()

    def report(self, path: str = "/activity") -> dict[str, Any]:
        """What the worker says of itself.

        Args:
            path: "/status" for what the web view shows.

        Raises:
            ConnectError: it does not answer.
        """
        return ask_worker(self.url, self.token, path, certificate=self.certificate, server_name=self.server_name)


@dataclass(frozen=True)
class Ending:
    """How a worker is to be ended; what is on this machine ends at once in any case.

    Attributes:
        wait: until it is gone.
        timeout_seconds: for how long.
        force: takes away what does not end by itself.
        keep_environment: leaves what was installed on a host.
        say: told what is being waited for.
    """

    wait: bool = True
    timeout_seconds: float = 300.0
    force: bool = False
    keep_environment: bool = False
    say: Callable[[str], None] = lambda _: None


class Fleet(Protocol):
    """The workers of one provider."""

    @property
    def provider(self) -> str:
        """Its name."""

    async def rows(self) -> list[WorkerRow]:
        """All of them, by name."""

    async def row(self, name: str) -> WorkerRow | None:
        """One of them, in all detail; None where there is none."""

    async def down(self, name: str, ending: Ending) -> bool:
        """Ends one; whether there was one."""

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Gives one another token; waits until it takes it, unless there is no time for that.

        Raises:
            ConfigurationError: its token is not ours to change.
        """

    def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """The lines it wrote."""

    async def context(self, name: str) -> Context:
        """How to find it again."""

    async def access(self, name: str) -> Access:
        """A way to it; blocks no loop.

        Raises:
            ConnectError: it cannot be reached.
        """


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
    """Whether the options name a cluster."""
    return bool(address.options)


async def has_cluster(address: ClusterAddress) -> bool:
    """Whether there is a cluster to ask: it is configured, and the library for it is installed.

    Raises:
        ConfigurationError: one is configured, and cannot work. Who named a cluster must not get another worker instead.
    """
    try:
        await address.resolved()
    except (NoClusterError, LibraryMissingError):
        return False
    return True


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
        raise ConfigurationError("no worker is named and no context is chosen. Name one: see skyproxy list")
    name = context.name if context is not None else checked_name(str(name))
    if provider is not None:
        return name, fleet_of(provider, address)
    if asks_for_cluster(address):
        return name, fleet_of(ProviderName.KUBERNETES, address)
    if context is not None:
        return name, fleet_of(context.provider, ClusterAddress.of_options(context.options))
    asked = []
    for kind in (ProviderName.LOCAL, ProviderName.SSH, ProviderName.KUBERNETES):
        try:
            if kind is ProviderName.KUBERNETES and not await has_cluster(address):
                continue
            fleet = fleet_of(kind, address)
            if await fleet.row(name) is not None:
                return name, fleet
            asked.append(kind.value)
        except SkyproxyError as error:
            asked.append(f"{kind.value} (which could not be asked: {error})")
    raise not_found(name, " nor ".join(asked))


def not_found(name: str, where: str) -> NotFoundError:
    """What to say of a worker that is not there."""
    return NotFoundError(
        f"there is no worker {name!r}, neither with {where}. See: skyproxy list"
        if " nor " in where
        else f"there is no worker {name!r} with the provider {where}. See: skyproxy list"
    )
