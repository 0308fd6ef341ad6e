"""The worker that `skyproxy up` saved, as what `sky:0` means."""

from __future__ import annotations

from skyproxy.contexts import Context, ContextStore, remote_address
from skyproxy.errors import ConnectError
from skyproxy.nodes import Node, connect
from skyproxy.providers.detached import local_address


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
    """Connects to the worker of a context.

    Raises:
        ConnectError: it is gone or cannot be reached.
    """
    source = f"saved context {context.name!r} ({context.provider})"
    if context.provider == "kubernetes":
        from skyproxy.kubernetes.reach import ClusterAddress, reach_in_thread

        address = ClusterAddress.of_options(context.options)

        def renew_in_cluster() -> tuple[str, str | None]:
            again = reach_in_thread(address, context.name)
            again.close()
            return again.token, again.certificate

        way = reach_in_thread(address, context.name)
        try:
            return connect(
                way.url,
                token=way.token,
                certificate=way.certificate,
                server_name=way.server_name,
                source=source,
                on_close=way.close,
                renew=renew_in_cluster,
                trust_worker=True,
            )
        except BaseException:
            way.close()
            raise
    if context.provider == "remote":
        return _open_remote(context, source)
    if context.provider == "ssh":
        return _open_ssh(context, source)
    if context.provider == "container":
        from skyproxy.kubernetes.reach import run_apart
        from skyproxy.providers.detached_container import container_address

        def address_now() -> tuple[str, str]:
            return run_apart(container_address(context.name))
    else:

        def address_now() -> tuple[str, str]:
            return local_address(context.name)

    url, token = address_now()
    # `skyproxy up` started it, as this user.
    return connect(url, token=token, source=source, renew=lambda: (address_now()[1], None), trust_worker=True)


def _open_ssh(context: Context, source: str) -> Node:
    from skyproxy.providers.ssh import find

    worker = find(context.name)
    if worker is None:
        raise ConnectError(
            f"there is no record of the worker {context.name!r} any more. Start it again: skyproxy up ssh://HOST; or "
            f"forget it: skyproxy context remove {context.name}"
        )
    url, token, close = worker.open()
    try:
        # `skyproxy up` started it, as this user.
        return connect(
            url,
            token=token,
            source=source,
            on_close=close,
            renew=lambda: (worker.token(), None),
            trust_worker=True,
        )
    except BaseException:
        close()
        raise


def _open_remote(context: Context, source: str) -> Node:
    there = remote_address(context)
    return connect(
        there.url, token=there.token, certificate=there.certificate, server_name=there.server_name, source=source
    )
