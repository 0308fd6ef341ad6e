"""`skyproxy sessions`: what programs have left on a worker under names."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from skyproxy.cli.arguments import (
    Json,
    Kubeconfig,
    KubeContext,
    Namespace,
    Provider,
    ProviderName,
    address_of,
    complete_worker,
)
from skyproxy.cli.examples import examples_text
from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.cli.fleet import WorkerAccess
from skyproxy.cli.fleets import access_of_environment, locate
from skyproxy.cli.output import age_text, bytes_text, note, show_json, show_table
from skyproxy.errors import ProtocolError
from skyproxy.kubernetes.address import ClusterAddress

app = typer.Typer(help="List the named sessions on a worker, and end them.", invoke_without_command=True)
_On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Name of the worker; default: the one of SKYPROXY_URL, else the current context's.",
        autocompletion=complete_worker,
    ),
]
_FIELDS = {"name", "names", "bytes", "age_seconds", "held", "expires_in_seconds"}
_COLUMNS = ("name", "names", "size", "age", "used", "expires")


@app.callback()
def sessions(ctx: typer.Context) -> None:
    """List the named sessions on a worker, and end them."""
    if ctx.invoked_subcommand is None:
        list_sessions()


@app.command("list", epilog=examples_text("skyproxy sessions list"))
def list_sessions(
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """List the named sessions of your token, with what they hold, their age, and when they expire."""
    rows = _rows_of(_ask(on, provider, address_of(namespace, context, kubeconfig), "named_sessions"))
    if as_json:
        show_json(rows)
        return
    shown = [
        {
            "name": row["name"],
            "names": row["names"],
            "size": bytes_text(row["bytes"]),
            "age": age_text(row["age_seconds"]),
            "used": _use_of(row),
            "expires": "" if row["expires_in_seconds"] is None else f"in {age_text(row['expires_in_seconds'])}",
        }
        for row in rows
    ]
    show_table(_COLUMNS, shown, 'There are no named sessions. Make one: skyproxy.connect(url, session="exp1")')


@app.command("end", epilog=examples_text("skyproxy sessions end"))
def end(
    session: Annotated[str, typer.Argument(help="Name of the session.")],
    on: _On = None,
    provider: Provider = None,
    namespace: Namespace = None,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """End a named session: forget what it holds; a program that uses it is told."""
    if not _ask(on, provider, address_of(namespace, context, kubeconfig), "end_named", session):
        raise NotFoundError(f"there is no session {session!r} of your token. See: skyproxy sessions list")
    note(f"The session {session} has ended; its memory is free.")


def _rows_of(said: object) -> list[dict[str, Any]]:
    """Return what a worker says of its sessions.

    Raises:
        ProtocolError: that is no such list.
    """
    rows: list[Any] = said if isinstance(said, list) else [said]
    if not all(isinstance(row, dict) and row.keys() >= _FIELDS for row in rows):
        raise ProtocolError(f"the worker sent no list of sessions: {said!r:.200}")
    return rows


def _use_of(row: dict[str, Any]) -> str:
    if row.get("saved"):
        return "perhaps (saved)" if row["held"] else "no (saved)"
    return "yes" if row["held"] else "no"


def _ask(on: str | None, provider: ProviderName | None, address: ClusterAddress, control: str, *arguments: str) -> Any:
    async def find() -> WorkerAccess:
        chosen = access_of_environment() if on is None and provider is None and not address.options else None
        if chosen is not None:
            return chosen
        worker, fleet = await locate(on, provider, address)
        return await fleet.access(worker)

    access = asyncio.run(find())
    from skyproxy.transport.worker_questions import ask_control  # the transport, which other commands do without

    try:
        return ask_control(
            access.url,
            access.token,
            control,
            *arguments,
            certificate=access.certificate,
            server_name=access.server_name,
        )
    finally:
        access.close()
