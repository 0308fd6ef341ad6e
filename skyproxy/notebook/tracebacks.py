"""Tracebacks in a notebook: cells and files of the user, without what PyTorch and skyproxy did below them."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from skyproxy.errors import SkyproxyError

_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def show_shortened(
    shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None, tb_offset: int | None = None
) -> None:
    """Show an error as IPython does, with shortened tracebacks.

    Args:
        shell: the `InteractiveShell`.
        kind: of the error.
        error: what a cell raised.
        tb: its traceback.
        tb_offset: how many frames are IPython's own.
    """
    shorten(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)


def shorten(error: BaseException) -> None:
    """Cut the tracebacks of an error, and of those that it came from, below the user's innermost frame.

    One that skyproxy has nothing to do with stays as it is, and so does one without a frame of the user.
    """
    lines = sys.modules.get("skyproxy.tensor.core.user_lines")
    if lines is None:
        return  # nothing was on a worker yet
    for each in chain(error):
        each.__traceback__ = _cut(each.__traceback__, lines.FOREIGN, ours=isinstance(each, SkyproxyError))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_users(file: str, foreign: Mapping[str, bool]) -> bool:
    """Return whether code is the user's: not PyTorch's, ours, or of Python's own library, in which our waits end."""
    return not foreign[file] and (not file.startswith(_LIBRARY) or file.startswith(_PACKAGES))


def _cut(tb: TracebackType | None, foreign: Mapping[str, bool], *, ours: bool) -> TracebackType | None:
    rows = []
    while tb is not None:
        rows.append(tb)
        tb = tb.tb_next
    files = [row.tb_frame.f_code.co_filename for row in rows]
    kept = max((number for number, file in enumerate(files) if _is_users(file, foreign)), default=-1) + 1
    if not kept or not (ours or any(file.startswith(_OWN) for file in files[kept:])):
        return rows[0] if rows else None
    made: TracebackType | None = None
    for row in reversed(rows[:kept]):
        made = TracebackType(made, row.tb_frame, row.tb_lasti, row.tb_lineno)
    return made
