"""Output of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyproxy.cli.exit_codes import ExitCode
from skyproxy.errors import visible, visible_output
from skyproxy.units import size_text

Row = dict[str, Any]

_GAP = 2
_SHORTEST = 5
_UNBROKEN = 1 << 16


def console() -> Console:
    """Return the console for results; made anew each time, because tests and notebooks replace the streams.

    Lines are broken where a terminal ends, or where `COLUMNS` says so, and nowhere in a file or a pipe.
    """
    ends = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(file=sys.stdout, highlight=False, width=None if ends else _UNBROKEN)


def show_line(text: str) -> None:
    """A line of the result for people, whoever said it: it does not command the terminal."""
    typer.echo(visible(text))


def show_output(text: str) -> None:
    """A line that a program printed: it may draw and colour, and nothing else."""
    typer.echo(visible_output(text))


def show_json_line(value: object) -> None:
    """A result for programs that have each on a line of its own."""
    typer.echo(json.dumps(value))


def show_for_shell(line: str) -> None:
    """A line that a shell reads; what stands in it is quoted by whoever makes it."""
    typer.echo(line)


def note(message: str) -> None:
    """Something a person should know, beside the result."""
    typer.echo(visible(message), err=True)


def warn(message: str) -> None:
    """Something a person should look into, beside the result."""
    typer.secho(f"Warning: {visible(message)}", fg=_color(typer.colors.YELLOW), err=True)


def fail(message: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    """Ends the command with a message."""
    typer.secho(f"Error: {visible(message)}", fg=_color(typer.colors.RED), err=True)
    raise typer.Exit(int(code))


def _color(name: str) -> str | None:
    """Return a colour, unless the user wants none: https://no-color.org, which rich follows and `secho` does not."""
    return None if os.environ.get("NO_COLOR") else name


def show_json(value: object) -> None:
    """The result for programs."""
    typer.echo(json.dumps(value, indent=2, default=str))


def show_table(
    columns: Sequence[str],
    rows: Sequence[Row],
    empty: str,
    *,
    shorten: Sequence[str] = (),
    unnamed: Sequence[str] = (),
) -> None:
    """The result for people: a line for each row where the terminal is wide enough for that.

    Args:
        columns: keys of the rows, which are the headings too.
        rows: what to show, whoever said it: it does not command the terminal. A key that is missing shows as nothing.
        empty: what to say in place of an empty table.
        shorten: columns whose texts are cut where the terminal is narrow, the widest first. What they cannot give up
            makes the other columns take several lines.
        unnamed: columns without a heading.
    """
    if not rows:
        note(empty)
        return
    headings = {column: "" if column in unnamed else column.replace("_", " ").upper() for column in columns}
    texts = [{column: "" if row.get(column) is None else visible(row[column]) for column in columns} for row in rows]
    target = console()
    widths = _fit_columns(
        {
            column: max(cell_len(text) for text in [headings[column], *(row[column] for row in texts)])
            for column in columns
        },
        {column: max(cell_len(headings[column]), _SHORTEST) for column in shorten},
        target.width - _GAP * (len(columns) - 1),
    )
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, _GAP, 0, 0))
    for column in columns:
        if column in shorten:
            table.add_column(headings[column], width=widths[column], no_wrap=True, overflow="ellipsis")
        else:
            table.add_column(headings[column], overflow="fold")
    for row in texts:
        table.add_row(*(Text(text) for text in row.values()))
    target.print(table)


def _fit_columns(widths: dict[str, int], shortest: dict[str, int], room: int) -> dict[str, int]:
    """Return `widths` with the widest of the columns in `shortest` made narrower until all fit in `room`."""
    result = dict(widths)
    while sum(result.values()) > room:
        candidates = [column for column, least in shortest.items() if result[column] > least]
        if not candidates:
            break
        result[max(candidates, key=lambda column: result[column])] -= 1
    return result


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being waited for; silent where standard error is not a terminal.

    Args:
        first: what it says at the beginning.

    Yields:
        A function that changes the line.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(file=sys.stderr).status(Text(visible(first))) as status:
        yield lambda message: status.update(Text(visible(message)))


def age_text(seconds: float | None) -> str:
    """A length of time in its largest unit: "3h"; a question mark for what is no length of time."""
    if seconds is None:
        return ""
    if not _is_number(seconds):
        return "?"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(max(seconds, 0))}s"


def bytes_text(count: int | None) -> str:
    """A size in binary units, "79.2 GiB"; empty where it is not known, a question mark for what is no size."""
    if count is None:
        return ""
    return size_text(count) if _is_number(count) else "?"


def _is_number(said: object) -> bool:
    """Return whether it is one that can be shown, for workers may say anything."""
    return isinstance(said, int | float) and abs(said) < 1e30 and math.isfinite(said)
