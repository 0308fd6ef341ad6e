"""`skyproxy debug`: what waits at a breakpoint, and pdb for it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from skyproxy.cli.arguments import Json
from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.cli.output import note, show_json, show_table
from skyproxy.errors import ConfigurationError, visible
from skyproxy.runtime import debug_rooms
from skyproxy.runtime.debug_rooms import Line

_COLUMNS = ("id", "pool", "rank", "function", "where", "what", "process")


def debug(
    identity: Annotated[str | None, typer.Argument(metavar="ID", help="Default: the only one that waits.")] = None,
    just_list: Annotated[bool, typer.Option("--list", "-l", help="Only tell what waits.")] = False,
    post_mortem: Annotated[bool, typer.Option(help="Only what waits with an exception.")] = False,
    as_json: Json = False,
) -> None:
    """Attach pdb to what waits at a breakpoint, or with an exception, on a worker of a program of yours.

    Functions wait where they were called with debug=True, or with SKYPROXY_DEBUG=1, and so do the processes of scripts
    under torchrun with SKYPROXY_DEBUG=1. Ctrl-D leaves them waiting.
    """
    found = _waiting_breakpoints(post_mortem)
    try:
        if just_list or as_json:
            _show([row for row, _ in found], as_json)
            return
        row, line = _choose(found, identity)
        _talk(line, row)
    finally:
        for _, line in found:
            line.close()


def _waiting_breakpoints(post_mortem: bool) -> list[tuple[dict[str, Any], Line]]:
    found: list[tuple[dict[str, Any], Line]] = []
    for line in debug_rooms.programs():
        rows = debug_rooms.waiting(line)
        wanted = [row for row in rows if not post_mortem or row.get("kind") == "exception"]
        found += [(row, line) for row in wanted]
        if not wanted:
            line.close()
    return found


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        show_json(rows)
        return
    shown = [
        {
            "id": row["id"],
            "pool": visible(row["pool"] or "-"),
            "rank": row["rank"],
            "function": visible(row["function"]),
            "where": f"{visible(row['file'])}:{row['line']}",
            "what": row["kind"],
            "process": row["process"],
        }
        for row in rows
    ]
    show_table(_COLUMNS, shown, "nothing waits")


def _choose(found: list[tuple[dict[str, Any], Line]], identity: str | None) -> tuple[dict[str, Any], Line]:
    chosen = [(row, line) for row, line in found if identity in (None, row["id"])]
    if not chosen:
        which = f"with the id {identity}" if identity else "at a breakpoint"
        raise NotFoundError(
            f"nothing waits {which} in a program of this user on this machine. Functions wait where they are called "
            "with debug=True, or with SKYPROXY_DEBUG=1; scripts under torchrun with the latter."
        )
    if len(chosen) > 1:
        _show([row for row, _ in chosen], as_json=False)
        raise ConfigurationError("several wait: name one, as in skyproxy debug " + str(chosen[0][0]["id"]))
    return chosen[0]


def _talk(line: Line, row: dict[str, Any]) -> None:
    line.wait_for_ever()
    line.send({"attach": row["id"]})
    while True:
        try:
            message = line.receive()
        except OSError:
            note("the program has ended")
            return
        if message["kind"] == "text":
            sys.stdout.write(visible(message["text"]))
            sys.stdout.flush()
        elif message["kind"] == "prompt":
            typed = sys.stdin.readline()
            if not typed:
                return  # Ctrl-D
            line.send({"line": typed})
        elif message["kind"] == "end":
            note(visible(message["text"]) or "the function has ended")
            return
