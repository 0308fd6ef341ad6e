"""Cells of a notebook under the names that IPython shows, "Cell In[6]": the files that Python knows are temporary."""

from __future__ import annotations

import re
import sys

_PLACE = re.compile(r'(?<=^  )File "([^"\n]+)"(?=, line \d)', re.MULTILINE)


def cell_name(file: str) -> str | None:
    """Return what IPython calls the cell that it keeps under a file's name; None where there is no such cell."""
    find_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    name_of = getattr(getattr(find_shell(), "compile", None), "format_code_name", lambda name: None)
    named = name_of(file)
    return " ".join(named) if named is not None else None


def with_cell_names(traceback: str) -> str:
    """Return a traceback that names this notebook's cells, as IPython does, in place of their files."""
    return _PLACE.sub(lambda found: cell_name(found[1]) or found[0], traceback)


__all__ = ["cell_name", "with_cell_names"]
