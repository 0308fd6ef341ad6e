"""The log of who did what, a line each: by the name of a token, never by its value."""

from __future__ import annotations

import functools
import json
import logging

from skyproxy_server.auth import Identity

NAME = "skyproxy.server.audit"
_LONGEST_VALUE = 200
logger = logging.getLogger(NAME)
_left_out: set[str] = set()


def leave_out(event: str) -> None:
    """Write no lines of an event in this process."""
    _left_out.add(event)


def note(identity: Identity, event: str, **details: object) -> None:
    """Write a line: `session-begin token="ci" address="10.0.0.7" session="1f3a0c22"`.

    Args:
        identity: who did it.
        event: what; a word of ours.
        details: about it, perhaps in a client's own words: they are quoted as JSON in ASCII, so that none of them can
            end its quotes or its line.
    """
    if event in _left_out:
        return
    fields = {"token": identity.name, "address": identity.address, **details}
    text = " ".join(f"{key}={_quote(str(value)[:_LONGEST_VALUE])}" for key, value in fields.items())
    logger.info("%s %s", event, text)


@functools.lru_cache(1024)
def _quote(value: str) -> str:
    return json.dumps(value)
