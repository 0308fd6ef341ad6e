"""Parsing of what an API server says. What one user has stored must not keep anybody from reading what others have."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64
"""Of objects and lists within each other; nothing that Kubernetes or skyproxy knows has half of it."""
TOO_DEEP = "nested too deeply"
"""Stands where something deeper was."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)


def parse(text: bytes) -> Any:
    """Parse JSON of any depth. The API server stores objects that are nested 10,000 deep where a schema lets it, and
    answers with them in the same list as with all others; Python's parser takes some hundreds.

    Args:
        text: JSON in UTF-8.

    Returns:
        The value. Where it is too deep for the parser, `TOO_DEEP` stands in the place of each part below `MAX_DEPTH`.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_cut(text))


def _cut(text: bytes) -> bytes:
    """Return JSON without what is deeper than `MAX_DEPTH`.

    Raises:
        ValueError: something is not closed.
    """
    kept: list[bytes] = []
    depth = begun = place = 0
    for token in _TOKEN.finditer(text):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == MAX_DEPTH + 1:
                begun = token.start()
        elif token[0] in (b"]", b"}"):
            if depth == MAX_DEPTH + 1:
                kept += [text[place:begun], json.dumps(TOO_DEEP).encode()]
                place = token.end()
            depth -= 1
    if depth:
        raise ValueError("it ends within an object or a list")
    return b"".join([*kept, text[place:]])
