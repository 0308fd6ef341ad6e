"""Ways back to workers that were suspended: the provider starts them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skyproxy.contexts import Context
from skyproxy.providers.detached import find, resume_detached
from skyproxy.session.successor import WayBack

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
