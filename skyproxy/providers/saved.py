"""The worker that `skyproxy up` saved, as what `sky:0` means."""

from __future__ import annotations

from skyproxy.contexts import Context, ContextStore, remote_address
from skyproxy.errors import ConfigurationError, ConnectError
from skyproxy.node import Node
from skyproxy.nodes import connect, list_nodes
from skyproxy.providers.detached import local_address
from skyproxy.providers.program_control import PROGRAM_CONTROL
from skyproxy.providers.waking import FoundWay, PlainWay, wake_if_suspended, waker, way_over_ssh
from skyproxy.transport.trust import client_context


def open_saved() -> Node | None:
    """Connects to the worker of the chosen context.

    Returns:
        The node; None where no context is chosen.

    Raises:
        ConnectError: the worker is gone or cannot be reached. Nothing else takes its place: it was chosen.
    """
    context = ContextStore().chosen()
    return open_context(context) if context is not None else None


def open_context(context: Context) -> Node:
    """Connects to the worker of a context; one that is suspended is brought back.

    Raises:
        ConnectError: it is gone or cannot be reached.
    """
    source = f"saved context {context.name!r} ({context.provider})"
    found = find_way(context)
    way = found.way
    try:
        node = connect(
            way.url,
            token=way.token,
            certificate=way.certificate,
            server_name=way.server_name,
            source=source,
            on_close=way.close,
            renew=found.renew,
            check_way=found.check,
            trust_worker=True if found.is_own else None,
        )
    except BaseException:
        way.close()
        raise
    node.wake, node.context_name = waker(context), context.name
    accept_moves()
    return node


def find_way(context: Context) -> FoundWay:
    """Return the way to the worker of a context; one that is suspended is brought back.

    Raises:
        ConnectError: it is gone or cannot be reached.
    """
    wake_if_suspended(context)
    if context.provider == "kubernetes":
        from skyproxy.kubernetes.reach import ClusterAddress, reach_in_thread

        address = ClusterAddress.of_options(context.options)

        def renew_in_cluster() -> tuple[str, str | None]:
            again = reach_in_thread(address, context.name)
            again.close()
            return again.token, again.certificate

        return FoundWay(reach_in_thread(address, context.name), renew_in_cluster)
    if context.provider == "remote":
        there = remote_address(context)
        return FoundWay(PlainWay(there.url, there.token, there.certificate, there.server_name), None, is_own=False)
    if context.provider == "ssh":
        return _find_ssh(context)
    if context.provider == "container":
        from skyproxy.kubernetes.reach import run_apart
        from skyproxy.providers.detached_container import container_address

        def address_now() -> tuple[str, str]:
            return run_apart(container_address(context.name))
    else:

        def address_now() -> tuple[str, str]:
            return local_address(context.name)

    return FoundWay(PlainWay(*address_now()), lambda: (address_now()[1], None))


def _find_ssh(context: Context) -> FoundWay:
    from skyproxy.providers.ssh import find

    worker = find(context.name)
    if worker is None:
        raise ConnectError(
            f"there is no record of the worker {context.name!r} any more. Start it again: skyproxy up ssh://HOST; or "
            f"forget it: skyproxy context remove {context.name}"
        )
    way = way_over_ssh(worker)
    return FoundWay(way, lambda: (worker.token(), None), check=way.check)


def move_node(node: Node, name: str) -> None:
    """Have a node's session go on on the worker of another saved context.

    Raises:
        ConfigurationError: there is no such context, or that worker cannot go on; nothing has changed.
        ConnectError: it cannot be reached; nothing has changed.
        RemoteError: no snapshot can be taken now; nothing has changed.
        SessionLostError: the session is over.
    """
    context = ContextStore().get(name)
    if context is None:
        raise ConfigurationError(f"there is no context {name!r} on this machine. See: skyproxy context list")
    found = find_way(context)
    way = found.way
    try:
        trusted = client_context(way.certificate) if way.certificate is not None else None
        node._go_to(way.url, way.token, trusted, way.server_name, renew=found.renew, check_way=found.check)
    except BaseException:
        way.close()
        raise
    node._use_way(way.close)
    node.wake, node.context_name = waker(context), name
    node.source = f"saved context {name!r} ({context.provider})"


def _move_all(before: str, name: str) -> int:
    """Move the sessions of this program from the worker of one context to that of another; return how many."""
    chosen = [node for node in list_nodes() if node.context_name == before and node.alive]
    for node in chosen:
        move_node(node, name)
    return len(chosen)


def accept_moves() -> None:
    """Have `skyproxy move` find this program."""
    PROGRAM_CONTROL.start(_move_all)
