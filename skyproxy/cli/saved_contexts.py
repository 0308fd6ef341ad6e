"""`skyproxy context`: which worker `sky:0` is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from skyproxy.cli.arguments import Json, complete_worker
from skyproxy.cli.examples import examples_text
from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.cli.output import note, show_json, show_line, show_table
from skyproxy.contexts import CONTEXT_VARIABLE, ContextStore, connection_files

app = typer.Typer(help="List saved workers, and choose which one sky:0 is.", no_args_is_help=True)
_Name = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=complete_worker)]


@app.command("list", epilog=examples_text("skyproxy context list"))
def list_contexts(as_json: Json = False) -> None:
    """List the saved contexts; a star marks the current one."""
    store = ContextStore()
    chosen = store.chosen({}) if store.current_name() else None
    rows = []
    for name in store.names():
        context = store.get(name)
        if context is not None:
            rows.append({**asdict(context), "current": chosen is not None and chosen.name == name})
    if as_json:
        show_json(rows)
        return
    shown = [
        {
            "current": "*" if row["current"] else "",
            "name": row["name"],
            "provider": row["provider"],
            "details": ", ".join(f"{key}={value}" for key, value in row["options"].items()),
        }
        for row in rows
    ]
    columns = ("current", "name", "provider", "details")
    show_table(columns, shown, "No context is saved. Start a worker: skyproxy up NAME", unnamed=("current",))


@app.command("current", epilog=examples_text("skyproxy context current"))
def current(as_json: Json = False) -> None:
    """Print the context that sky:0 currently uses."""
    context = ContextStore().chosen()
    if as_json:
        show_json(asdict(context) if context is not None else None)
    elif context is None:
        note("No context is chosen: sky:0 is an embedded worker, unless SKYPROXY_URL is set.")
    else:
        show_line(context.name)


@app.command("use", epilog=examples_text("skyproxy context use"))
def use(name: _Name) -> None:
    """Make a context the current one."""
    store = ContextStore()
    if store.get(name) is None:
        raise NotFoundError(f"there is no context {name!r}. Saved are: {', '.join(store.names()) or 'none'}.")
    store.use(name)
    note(f"sky:0 is now the worker {name}, unless {CONTEXT_VARIABLE} or SKYPROXY_URL says otherwise.")


@app.command("clear", epilog=examples_text("skyproxy context clear"))
def clear() -> None:
    """Use no context: sky:0 is an embedded worker again. Saved contexts are kept."""
    ContextStore().use(None)


@app.command("remove", epilog=examples_text("skyproxy context remove"))
def remove(name: _Name) -> None:
    """Delete a context and the token saved with it. The worker keeps running."""
    if not ContextStore().remove(name):
        raise NotFoundError(f"there is no context {name!r}. See: skyproxy context list")
    for path in connection_files(name):
        path.unlink(missing_ok=True)
