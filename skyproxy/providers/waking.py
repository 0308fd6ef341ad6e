"""Ways back to workers that were suspended: the provider starts them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyproxy.contexts import Context
from skyproxy.errors import ConfigurationError
from skyproxy.providers.detached import find, resume_detached
from skyproxy.session.successor import WayBack

if TYPE_CHECKING:
    from skyproxy.providers.ssh import SshWorker

_READY_SECONDS = 900.0
"""The time that a cluster may take to bring a worker back: machines may have to be started for it."""


@dataclass(frozen=True)
class PlainWay:
    """A way to a worker, with nothing to close or something."""

    url: str
    token: str = field(repr=False)
    certificate: str | None = None
    server_name: str | None = None
    close: Callable[[], None] = field(default=lambda: None, repr=False)
    check: Callable[[], object] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class FoundWay:
    """The way to the worker of a context.

    Attributes:
        way: its address and token.
        renew: gives the token and the certificate anew; None where they stay.
        is_own: whether `skyproxy up` started it, as this user.
        check: raises ConnectError while the way is away, and will be back; None where there is nothing in between.
    """

    way: WayBack
    renew: Callable[[], tuple[str, str | None]] | None
    is_own: bool = True
    check: Callable[[], object] | None = None


def waker(context: Context) -> Callable[[], WayBack] | None:
    """Return a function that brings the worker of a context back, and gives the way to it; None where nobody can."""
    if context.provider == "local":
        return lambda: wake_local(context.name)
    if context.provider == "kubernetes":
        return lambda: wake_in_cluster(context)
    if context.provider == "ssh":
        return lambda: wake_over_ssh(context.name)
    if context.provider == "container":
        return lambda: wake_container(context.name)
    return None


def wake_if_suspended(context: Context) -> None:
    """Bring the worker of a context back, where it was suspended.

    Raises:
        ConnectError: it did not come up.
    """
    if context.provider == "local":
        worker = find(context.name)
        if worker is not None and worker.is_suspended:
            wake_local(context.name)
    elif context.provider == "container":
        from skyproxy.kubernetes.reach import run_apart
        from skyproxy.providers.detached_container import resume_if_suspended as resume_if_stopped

        run_apart(resume_if_stopped(context.name))
    elif context.provider == "kubernetes":
        from skyproxy.kubernetes.reach import ClusterAddress, run_apart
        from skyproxy.kubernetes.suspending import resume_if_suspended

        run_apart(resume_if_suspended(ClusterAddress.of_options(context.options), context.name, _READY_SECONDS))


def wake_local(name: str) -> PlainWay:
    """Start a worker of this machine again where it was suspended, or has ended.

    Raises:
        ConfigurationError: there is no trace of it.
        WorkerStartError: it did not come up.
    """
    worker = resume_detached(name)
    return PlainWay(worker.url or "", worker.token())


def wake_over_ssh(name: str) -> PlainWay:
    """Start a worker on a host again where it was suspended, or has ended.

    Raises:
        ConfigurationError: there is no record of it.
        ConnectError: the host cannot be reached.
        WorkerStartError: it did not come up, or there is nothing of it any more.
    """
    from skyproxy.providers.ssh import find as find_on_host

    worker = find_on_host(name)
    if worker is None:
        raise ConfigurationError(f"there is no worker {name!r} any more, and what it held is gone with it.")
    worker.resume()
    return way_over_ssh(worker)


def way_over_ssh(worker: SshWorker) -> PlainWay:
    """Return the way to a worker on a host, through a tunnel; one that is suspended is brought back.

    Raises:
        ConnectError: it does not run, or the host cannot be reached.
        WorkerStartError: it did not come up.
    """
    tunnel, token = worker.open(wakes=True)
    return PlainWay(tunnel.url, token, close=tunnel.close, check=tunnel.check)


def wake_container(name: str) -> PlainWay:
    """Start a worker's container again where it was suspended, or has ended.

    Raises:
        ConfigurationError: there is no such container any more.
        ConnectError: the worker cannot be reached.
        WorkerStartError: it did not come up.
    """
    from skyproxy.kubernetes.reach import run_apart
    from skyproxy.providers.detached_container import container_address, resume_container

    async def work() -> tuple[str, str]:
        await resume_container(name)
        return await container_address(name)

    return PlainWay(*run_apart(work()))


def wake_in_cluster(context: Context) -> WayBack:
    """Have the operator start a worker again that was suspended, and wait for it.

    Raises:
        ConfigurationError: there is no such worker any more.
        ConnectError: it did not come up.
    """
    from skyproxy.kubernetes.reach import ClusterAddress, reach_in_thread, run_apart
    from skyproxy.kubernetes.suspending import resume

    address = ClusterAddress.of_options(context.options)
    run_apart(resume(address, context.name, _READY_SECONDS))
    return reach_in_thread(address, context.name)
