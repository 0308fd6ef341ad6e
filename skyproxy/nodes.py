"""Nodes of a process: connecting to workers, starting one of its own, and closing all of them in the end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from skyproxy.daemon_threads import ThreadsInOperations
from skyproxy.errors import ConfigurationError, ConnectError, SessionLostError
from skyproxy.first_use import tell_misspelt_variables, tell_worker
from skyproxy.node import OPEN_NODES, DeviceInfo, Node
from skyproxy.protocol.messages import Welcome
from skyproxy.session.early_worker import EARLY_WORKER
from skyproxy.session.local_worker import LocalWorker
from skyproxy.session.opening import Opener
from skyproxy.session.reconnector import Reconnector
from skyproxy.session.session import Session
from skyproxy.settings import SETTINGS
from skyproxy.tensor.activation import activate
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.dispatch.fake_tensors import prepare
from skyproxy.transport.addresses import parse_url
from skyproxy.transport.links import is_link, read_url
from skyproxy.transport.shared_threads import SharedThreads, shared_threads
from skyproxy.transport.trust import client_context

logger = logging.getLogger("skyproxy")


_starting = threading.RLock()


def connect(
    url: str,
    *,
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    certificate: str | Path | None = None,
    server_name: str | None = None,
    insecure: bool = False,
    trust_worker: bool | None = None,
    source: str = "skyproxy.connect",
    on_close: Callable[[], None] | None = None,
    shares_files: bool = False,
    renew: Callable[[], tuple[str, str | None]] | None = None,
    check_way: Callable[[], object] | None = None,
    explain_end: Callable[[], tuple[str, str] | None] | None = None,
    session: str | None = None,
    take: bool = False,
    shares_threads: bool = False,
) -> Node:
    """Connects to a worker and numbers its devices.

    Args:
        url: "ws://host:port" or "wss://host:port", or the link that `skyproxy serve --tls` prints: "sky://...".
        token: what the worker was started with; the variable SKYPROXY_TOKEN by default.
        ssl_context: for "wss://"; the system's certificates by default.
        certificate: whom to trust and nobody else, in place of an ssl_context: a PEM file, PEM text, or the
            fingerprint ("sha256:...") of the worker's own certificate.
        server_name: the name that the worker's certificate has, where it is not the url's host.
        insecure: whether "ws://" may go to other machines, where everybody on the way can read the token.
        renew: gives the token and the certificate anew, for further connections of a session that has outlived them.
        trust_worker: whether functions may return any object from there: as a pickle, which may run any code here.
            By default they return plain data: tensors, numbers, text, arrays, containers and the like; but a worker
            that this process started is trusted.
        source: how to name the origin of this connection to people.
        on_close: called once, after the session has ended by `Node.close`: ends what the connection goes through.
        shares_files: whether the worker sees this program's folders under the same paths; otherwise functions find
            copies of its modules there.
        check_way: called before each connection; raises ConnectError while what it would go through, a tunnel, is away.
        explain_end: tells how the worker's process ended, and the end of its log; None while it lives.
        session: a name for the session. What is put under a name in it (`node.put`) outlives this program: who connects
            with the same token and the same name finds it.
        take: whether to take the named session over if another client uses it; that client loses its session.
        shares_threads: whether its connections share a few threads with all others that do, as those of a pool: for a
            program with very many workers. By default they have up to ten of their own, which answer sooner.

    Raises:
        ConfigurationError: no token, or a url that cannot work; or the worker keeps no named sessions.
        SessionHeldError: another client uses the named session.
        ConnectError: nobody answers there, or not a worker.
        AuthenticationError: the worker refused the token.
        VersionMismatchError: its protocol is not ours.

    Example:
        ```python
        node = skyproxy.connect("wss://worker.example:8765", token=os.environ["SKYPROXY_TOKEN"])
        x = torch.ones(3, device=node.device("cuda"))
        ```
    """
    if is_link(url):
        url, certificate = read_url(url, certificate)
    if certificate is not None:
        if ssl_context is not None:
            raise ConfigurationError(
                "both ssl_context= and certificate= were given; each says whom to trust. Give one."
            )
        ssl_context = client_context(certificate)
    if token is not None and not isinstance(token, str):
        raise ConfigurationError(f"the token is no text but {type(token).__name__}. Use path.read_text().strip()")
    node = _connect(
        url,
        token,
        ssl_context,
        source,
        server_name=server_name,
        insecure=insecure,
        on_close=on_close,
        shares_files=shares_files,
        renew=renew,
        check_way=check_way,
        trust_worker=_is_own(url) or SETTINGS.trust_worker if trust_worker is None else trust_worker,
        explain_end=explain_end,
        threads=shared_threads() if shares_threads else None,
    )
    if session is not None:
        try:
            node._hold(session, take=take)
        except BaseException:
            node.close()
            raise
    return node


def _is_own(url: str) -> bool:
    """Return whether an embedded worker of this process listens there."""
    return any(node._worker is not None and node.alive and node.url == url for node in OPEN_NODES)


async def connect_async(url: str, **options: Any) -> Node:
    """`connect` with its options, without blocking the event loop.

    Example:
        ```python
        async def main() -> None:
            async with await skyproxy.connect_async("wss://worker.example:8765", token="...") as node:
                print(torch.ones(3, device=node.device("cuda")).sum().item())
        ```
    """
    return await asyncio.to_thread(connect, url, **options)


def launch_local(device: str = "auto") -> Node:
    """Starts one more embedded worker on this machine.

    Args:
        device: "auto" (CUDA where there is any), "cpu" or "cuda".

    Raises:
        WorkerStartError: it did not come up.

    Example:
        ```python
        with skyproxy.launch_local("cpu") as node:
            print(torch.ones(3, device=node.device("cpu")).sum().item())
        ```
    """
    return _launch_local(device, "skyproxy.launch_local")


def _launch_local(device: str, source: str) -> Node:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"device={device!r} is not one of 'auto', 'cpu', 'cuda'.")
    worker = EARLY_WORKER.take(device) or LocalWorker(device, SETTINGS, wait=False)
    try:
        importlib.import_module("skyproxy.transport.websocket")  # while the worker starts, as all that follows
        prepare(until=lambda: worker.has_answered)
        worker.wait_until_it_listens(SETTINGS.worker_start_timeout_seconds)
        return _connect(
            worker.url,
            worker.token,
            None,
            source,
            worker=worker,
            shares_files=True,
            explain_end=worker.explain_end,
        )
    except BaseException:
        worker.stop()
        raise


def _connect(
    url: str,
    token: str | None,
    ssl_context: ssl.SSLContext | None,
    source: str,
    *,
    worker: LocalWorker | None = None,
    server_name: str | None = None,
    insecure: bool = False,
    on_close: Callable[[], None] | None = None,
    shares_files: bool = False,
    renew: Callable[[], tuple[str, str | None]] | None = None,
    check_way: Callable[[], object] | None = None,
    trust_worker: bool = False,
    explain_end: Callable[[], tuple[str, str] | None] | None = None,
    threads: SharedThreads | None = None,
) -> Node:
    activate()
    tell_misspelt_variables()  # first: the variable with the token may be one of them
    token = token or os.environ.get("SKYPROXY_TOKEN")
    parse_url(url, token or "")  # before it: a token does not help where the url is wrong
    if not token:
        raise ConfigurationError(
            f"no token for {url}. Pass token=..., or set SKYPROXY_TOKEN; the worker was started with --token-file."
        )

    # Of a worker that this process has started, a connection breaks only when one of the two ends.
    grace_seconds = int(SETTINGS.reconnect_seconds) if SETTINGS.reconnect and worker is None else 0
    opener = Opener(
        url,
        token,
        torch.__version__,
        SETTINGS,
        ssl_context=ssl_context,
        server_name=server_name,
        insecure=insecure,
        renew=renew,
        check_way=check_way,
        grace_seconds=grace_seconds,
        threads=threads,
    )
    try:
        operations, bulk, welcome, _ = opener.open_session()
    except ConnectError as error:  # it says what to do: what led there would only hide that
        error.__traceback__ = None
        if error.__cause__ is not None:
            error.__cause__.__traceback__ = None
        raise
    _check_torch(welcome)
    resumes = bool(grace_seconds and welcome.secret)
    patience_seconds = min(grace_seconds, welcome.limits.get("grace_seconds", 0)) if resumes else 0
    reconnector = Reconnector(opener.reopen, url, patience_seconds, resumes=resumes)
    session = Session(operations, bulk, welcome, SETTINGS, reconnector=reconnector, threads=threads)
    if explain_end is not None:
        session.explain_end = explain_end
        reconnector.explain_end = lambda: session.explain_end()

    if worker is None:
        EARLY_WORKER.drop()  # what `sky:0` means is chosen now
    node = Node(
        url,
        source,
        session,
        worker,
        on_close,
        opener,
        shares_files=shares_files,
        trust_worker=trust_worker,
    )
    logger.info("skyproxy: connected to %r", node)
    return node


def _check_torch(welcome: Welcome) -> None:
    """Another torch on the worker mostly works; where it does not, the reason should be known."""
    theirs = welcome.software.get("torch", "")
    if theirs.split("+")[0].split(".")[:2] != torch.__version__.split("+")[0].split(".")[:2]:
        logger.warning(
            "skyproxy: the worker runs torch %s, this process torch %s. Operations that differ between them fail with "
            "a clear error; the same version on both sides is better.",
            theirs or "of an unknown version",
            torch.__version__,
        )


open_saved: Callable[[], Node | None] = lambda: None  # noqa: E731
"""Connects to the worker that `skyproxy up` saved; None where there is none. A layer above provides it."""


def start_default() -> None:
    """Start what `sky:0` means if nobody connected: the environment's worker, the saved one, or an embedded one."""
    with _starting:
        if DEVICES.existing():
            return
        if url := os.environ.get("SKYPROXY_URL"):
            node = _connect_environment(url)
        else:
            node = open_saved() or _launch_local("auto", "embedded worker, nothing else is configured")
        _announce(node)


def _announce(node: Node) -> None:
    preferred = node._devices[0]
    name = str(preferred.row.get("name", ""))
    tell_worker(str(preferred.worker_device), name, node.url, node.source, embedded=node._worker is not None)


def _connect_environment(url: str) -> Node:
    certificate = os.environ.get("SKYPROXY_CERTIFICATE") or None
    server_name = os.environ.get("SKYPROXY_SERVER_NAME") or None
    return connect(url, certificate=certificate, server_name=server_name, source="SKYPROXY_URL")


def list_nodes() -> list[Node]:
    """The nodes of this process, in the order in which they were added.

    Example:
        ```python
        for node in skyproxy.list_nodes():
            print(node.url, node.devices)
        ```
    """
    return list(OPEN_NODES)


def devices() -> list[DeviceInfo]:
    """The `sky` devices of this process, in order; starts nothing.

    Example:
        ```python
        for info in skyproxy.devices():
            print(info.device, info.name, info.total_memory_bytes)
        ```
    """
    existing = DEVICES.existing()
    return [
        DeviceInfo(
            chosen.torch_device,
            str(chosen.row.get("name", chosen.row["type"])),
            chosen.row["type"],
            int(chosen.row.get("total_memory_bytes", 0)),
            node.source,
            node.alive,
        )
        for node in OPEN_NODES
        for chosen in node._devices
        if chosen in existing  # another session may have taken its number
    ]


def reset() -> None:
    """Closes every node and forgets every device: the next use of `sky:0` starts anew. Old tensors are gone.

    Example:
        ```python
        skyproxy.reset()
        x = torch.ones(3, device="sky:0")  # a new session, and a new embedded worker
        ```
    """
    _close_all()
    OPEN_NODES.clear()
    DEVICES.forget_all()


def _close_all() -> None:
    EARLY_WORKER.drop()
    for node in reversed(OPEN_NODES):
        with contextlib.suppress(SessionLostError):
            node.close()


def _close_at_exit() -> None:
    threads = ThreadsInOperations()
    _close_all()
    threads.wait()


def fetch_async(tensor: torch.Tensor) -> asyncio.Future[torch.Tensor]:
    """Asks for a remote tensor's values and gives an awaitable of the CPU tensor; neither blocks.

    Must be called on a running event loop.

    Example:
        ```python
        async def total() -> float:
            x = torch.ones(3, device="sky:0")
            return (await skyproxy.fetch_async(x)).sum().item()


        print(asyncio.run(total()))
        ```
    """
    from skyproxy.tensor.core.transfers import start_download

    finish, _ = start_download(tensor)
    return asyncio.get_running_loop().run_in_executor(None, finish)


@contextlib.contextmanager
def observing(observer: Callable[[str], None]) -> Iterator[None]:
    """Calls `observer` before every wait for a worker, inside a `with` block."""
    from skyproxy.session.requests import WAIT_OBSERVERS

    WAIT_OBSERVERS.append(observer)
    try:
        yield
    finally:
        WAIT_OBSERVERS.remove(observer)


DEVICES.start_default = start_default
atexit.register(_close_at_exit)
