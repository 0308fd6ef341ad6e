"""`skyproxy connect`, `run` and `port-forward`: using a worker as `sky:0`."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from skyproxy.cli.arguments import (
    Kubeconfig,
    KubeContext,
    Namespace,
    Provider,
    WorkerName,
    address_of,
    complete_worker,
)
from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.cli.fleet import WorkerAccess, not_found
from skyproxy.cli.fleets import locate
from skyproxy.cli.output import note, progress, show_for_shell
from skyproxy.contexts import Context, ContextStore, checked_name, connection_files, write_private
from skyproxy.errors import ConfigurationError
from skyproxy.settings import SETTINGS
from skyproxy.transport.addresses import check_confidential, parse_url
from skyproxy.transport.links import is_link, read_url
from skyproxy.transport.trust import client_context, is_fingerprint, normal_fingerprint, pem_text

URL_SCHEMES = ("ws://", "wss://", "sky://")
_MAX_TOKEN_CHARACTERS = 4096


def connect(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|URL]",
            help="A worker's name, its URL (wss://, ws://), or the link that skyproxy serve --tls prints (sky://); "
            "default: the current context's worker.",
            autocompletion=complete_worker,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="For a URL: the name to save it under.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="For a URL, or to change what is saved: the file with the worker's token; default: for a URL, read it "
            "from standard input.",
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            help="For a URL, or to change what is saved: the certificate to trust: a PEM file, PEM text, or a "
            "fingerprint (sha256:...)."
        ),
    ] = None,
    server_name: Annotated[
        str | None,
        typer.Option(help="For a URL, or to change what is saved: the name in the certificate, if not the host's."),
    ] = None,
    print_environment: Annotated[
        bool,
        typer.Option("--env", help='Change nothing; print variables to use as: eval "$(skyproxy connect NAME --env)"'),
    ] = False,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check that a worker can be reached, and use it as sky:0."""
    if target is not None and target.startswith(URL_SCHEMES):
        _connect_url(target, name, token_file, certificate, server_name, print_environment)
        return
    if name:
        raise ConfigurationError("--name belongs to a URL: ws://, wss:// or sky://")
    if token_file or certificate or server_name:
        _connect_anew(target, token_file, certificate, server_name, print_environment)
        return
    address = address_of(namespace, context, kubeconfig)

    async def work() -> tuple[str, Context, WorkerAccess]:
        worker, fleet = await locate(target, provider, address)
        return worker, await fleet.context(worker), await fleet.access(worker)

    with progress("Connecting"):
        worker, saved, access = asyncio.run(work())
        try:
            report = access.report()
        finally:
            access.close()
    if print_environment:
        if access.via == "port-forward":
            raise ConfigurationError(
                f"{worker} is reached through a port-forward, which must stay open while it is used. "
                f"Run: skyproxy port-forward {worker}"
            )
        _print_environment(access.url, _token_file(worker, access), access, worker)
        return
    ContextStore().save(saved)
    software = report.get("software", {})
    note(f"sky:0 is now {worker}, via {access.via} at {access.url} (torch {software.get('torch', 'unknown')}).")


def _connect_anew(
    target: str | None,
    token_file: Path | None,
    certificate: str | None,
    server_name: str | None,
    print_environment: bool,
) -> None:
    """Connect to a worker at a URL that is saved already, with what has changed: its certificate was renewed, say.

    Raises:
        ConfigurationError: the saved worker is not one at a URL.
        NotFoundError: nothing of that name is saved.
    """
    store = ContextStore()
    saved = store.chosen() if target is None else store.get(checked_name(target))
    if saved is None:
        known = ", ".join(store.names()) or "none"
        raise NotFoundError(f"there is no saved worker {target or ''!r} to change. Saved are: {known}.")
    if saved.provider != "remote":
        raise ConfigurationError(
            f"{saved.name} was started by skyproxy up, which keeps its token and certificate. --token-file, "
            "--certificate and --server-name belong to workers at a URL: ws://, wss:// or sky://"
        )
    options = saved.options
    _connect_url(
        options["url"],
        saved.name,
        token_file or Path(options["token_file"]),
        certificate or options.get("certificate") or options.get("certificate_file"),
        server_name or options.get("server_name"),
        print_environment,
    )


def _connect_url(
    url: str,
    name: str | None,
    token_file: Path | None,
    certificate: str | None,
    server_name: str | None,
    print_environment: bool,
) -> None:
    kept = checked_name(name) if name else "remote"
    if is_link(url):
        url, certificate = read_url(url, certificate)
    # Errors in a file or an argument are reported before the token, or the network, is asked for.
    address = parse_url(url, "")
    if not address.secure:
        check_confidential(address.host, address.shown, insecure=SETTINGS.insecure)
    client_context(certificate)
    token = ask_for_token(url) if token_file is None else _read_token(token_file)
    options = {"url": url} | ({"server_name": server_name} if server_name else {})
    if certificate is not None and is_fingerprint(certificate):
        options["certificate"] = certificate = normal_fingerprint(certificate)
    access = WorkerAccess(url, token, certificate, server_name)
    report = access.report()
    # Kept only now: whoever mistyped the token has lost nothing of an older context of that name.
    token_path, certificate_path = connection_files(kept)
    if token_file is None:
        write_private(token_path, token + "\n")
    options["token_file"] = str(token_path if token_file is None else token_file.absolute())
    if certificate is not None and "certificate" not in options:
        text = pem_text(certificate)
        if text == certificate:
            write_private(certificate_path, text)
        # A file stays where it is, because it may be renewed there.
        options["certificate_file"] = str(certificate_path if text == certificate else Path(certificate).absolute())
    if print_environment:
        _print_environment(url, Path(options["token_file"]), access, kept)
        return
    ContextStore().save(Context(kept, "remote", options))
    note(f"sky:0 is now {url}, kept as {kept} (torch {report.get('software', {}).get('torch', 'unknown')}).")


def _read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigurationError: it cannot be read, or holds none.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it is not plain text"
        raise ConfigurationError(f"the token file {path} cannot be read: {reason}.") from error
    if not token or len(token.split()) > 1:
        held = "is empty" if not token else "holds more than a token"
        raise ConfigurationError(f"the token file {path} {held}: it has to have one line, the token.")
    return token


def ask_for_token(url: str) -> str:
    """Return the token of a worker, from the terminal or from standard input: arguments can be read by everybody.

    Raises:
        ConfigurationError: nothing came.
    """
    if sys.stdin.isatty():
        token = str(typer.prompt(f"Token of the worker at {url}", hide_input=True, err=True))
    else:
        token = sys.stdin.readline(_MAX_TOKEN_CHARACTERS)
    if not token.strip():
        raise ConfigurationError(
            "a worker at a URL needs a token, and standard input had none. Pipe it in, or name its file: "
            "--token-file FILE"
        )
    return token.strip()


def _token_file(worker: str, access: WorkerAccess) -> Path:
    """A file with the token that only we can read: a token in a command line or a history is everybody's."""
    path, _ = connection_files(worker)
    write_private(path, access.token + "\n")
    return path


def _print_environment(url: str, token_file: Path, access: WorkerAccess, worker: str) -> None:
    show_for_shell(f"export SKYPROXY_URL={shlex.quote(url)}")
    show_for_shell(f'export SKYPROXY_TOKEN="$(cat {shlex.quote(str(token_file))})"')
    if access.certificate and is_fingerprint(access.certificate):
        show_for_shell(f"export SKYPROXY_CERTIFICATE={shlex.quote(access.certificate)}")
    elif access.certificate:
        _, path = connection_files(worker)
        write_private(path, pem_text(access.certificate))
        show_for_shell(f"export SKYPROXY_CERTIFICATE={shlex.quote(str(path))}")
    if access.server_name:
        show_for_shell(f"export SKYPROXY_SERVER_NAME={shlex.quote(access.server_name)}")


def port_forward(
    name: WorkerName = None,
    local_port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 picks a free one.")] = 0,
    node: Annotated[int, typer.Option(min=0, help="The worker's node.")] = 0,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Forward a local port to a worker in the cluster until Ctrl-C; print the variables that select it.

    Only programs that cannot connect by themselves need this: sky:0 opens its own port-forward.
    """
    from skyproxy.kubernetes.client import ClusterClient
    from skyproxy.kubernetes.reach import DEFAULT_PORT, Way, reach

    address = address_of(namespace, context, kubeconfig)

    async def work() -> tuple[str, Way]:
        worker, fleet = await locate(name, None, address)
        if fleet.provider != "kubernetes":
            raise ConfigurationError(f"{worker} runs with the provider {fleet.provider}; it needs no port-forward.")
        saved = ContextStore().get(worker)
        where = address
        if saved is not None and saved.provider == "kubernetes" and not address.options:
            where = type(address).of_options(saved.options)
        async with ClusterClient(where) as client:
            compute = await client.get(worker)
            if compute is None:
                raise not_found(worker, "kubernetes")
            return worker, await reach(client, compute, node=node, via="port-forward", local_port=local_port)

    worker, way = asyncio.run(work())
    access = WorkerAccess(way.url, way.token, way.certificate, way.server_name, way.via, way.close)
    try:
        _print_environment(way.url, _token_file(worker, access), access, worker)
        sys.stdout.flush()
        note(f"Port {way.url.rpartition(':')[2]} forwards to port {DEFAULT_PORT} of {worker}. Ctrl-C ends it.")
        _wait_for_a_signal()
    finally:
        way.close()


def _wait_for_a_signal() -> None:
    """Until SIGTERM or Ctrl-C, which both end the command in order."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        # In slices, because on Windows a signal does not end a wait.
        while not ended.wait(1.0):
            pass
    except KeyboardInterrupt:
        pass
