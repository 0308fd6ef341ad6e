"""`skyproxy ui`: the web view of a worker, served on this machine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from skyproxy.cli.arguments import (
    Kubeconfig,
    KubeContext,
    Namespace,
    Provider,
    address_of,
    complete_worker,
)
from skyproxy.cli.connecting import URL_SCHEMES, ask_for_token
from skyproxy.cli.fleet import Fleet, WorkerAccess
from skyproxy.cli.fleets import access_of_environment, locate
from skyproxy.cli.output import note, progress, show_line
from skyproxy.errors import AuthenticationError, ConfigurationError
from skyproxy.interrupts import SIGNAL_LOOK_SECONDS

_INTERVAL_SECONDS = 2.0


def ui(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|URL]",
            help="A worker's name, its URL or its link (wss://, ws://, sky://); default: the one of "
            "SKYPROXY_URL, else the current context's.",
            autocompletion=complete_worker,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 picks a free one.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="For a URL: the file with the worker's token; default: SKYPROXY_TOKEN, else it is read from standard "
            "input.",
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(help="For a URL: the certificate to trust: a PEM file, PEM text, or a fingerprint (sha256:...)."),
    ] = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show a worker in the browser: sessions, memory, operations, transfers, errors, log. Press Ctrl-C to stop.

    The page is read-only and is served on this machine only. A worker's operator sees all sessions, others their own.
    """
    if target is not None and target.startswith(URL_SCHEMES):
        token = token_file.read_text(encoding="ascii").strip() if token_file is not None else ""
        access = WorkerAccess(target, token or os.environ.get("SKYPROXY_TOKEN") or ask_for_token(target), certificate)
        _serve(target.partition("#")[0], lambda: access.report("/status"), port)
        return
    if token_file or certificate:
        raise ConfigurationError("--token-file and --certificate belong to a URL: ws://, wss:// or sky://")
    address = address_of(namespace, context, kubeconfig)
    chosen = access_of_environment() if target is None and provider is None and not address.options else None
    if chosen is not None:
        _serve(chosen.url.partition("#")[0], lambda: chosen.report("/status"), port)
        return

    async def find() -> tuple[str, Fleet]:
        return await locate(target, provider, address)

    with progress("Connecting"):
        worker, fleet = asyncio.run(find())
        asker = _Asker(worker, fleet)
    try:
        _serve(worker, asker, port)
    finally:
        asker.close()


class _Asker:
    """Asks a worker of a fleet; finds the way anew where its token was replaced."""

    def __init__(self, worker: str, fleet: Fleet) -> None:
        self._worker = worker
        self._fleet = fleet
        self._access = asyncio.run(fleet.access(worker))

    def __call__(self) -> dict[str, object]:
        try:
            return self._access.report("/status")
        except AuthenticationError:
            before, self._access = self._access, asyncio.run(self._fleet.access(self._worker))
            before.close()
            return self._access.report("/status")

    def close(self) -> None:
        self._access.close()


def _serve(name: str, ask: Callable[[], dict[str, object]], port: int) -> None:
    """Serve the view of one worker until an interrupt.

    Raises:
        ConnectError: the worker does not answer at all.
        ConfigurationError: the port is taken.
    """
    from skyproxy.webview.history import History
    from skyproxy.webview.server import PageServer
    from skyproxy.webview.workers import workers_status

    ask()  # whoever mistyped something learns it here, and not from an empty page
    history = History(lambda: workers_status(name, {name: ask}), _INTERVAL_SECONDS)

    def give_another() -> None:
        note(f"For another tab: {server.link()}")

    try:
        server = PageServer(history.status, port, give_another)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be used here: {error.strerror}. Choose another: --port") from None
    history.start()
    server.start()
    try:
        show_line(server.link())
        note("Open this link in a browser on this machine; it works once. Press Ctrl-C to stop.")
        interrupted = threading.Event()  # nobody sets it: Ctrl-C ends the wait
        while not interrupted.wait(SIGNAL_LOOK_SECONDS):
            pass
    except KeyboardInterrupt:
        note("")
    finally:
        history.stop()
        server.close()
