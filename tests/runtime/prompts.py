"""What a debugger says on a line, read until it waits for a command."""

from __future__ import annotations

from collections.abc import Iterator


def until_prompt(said: Iterator[tuple[str, str]]) -> str:
    """Return the text before the next prompt."""
    text = ""
    for kind, part in said:
        if kind == "prompt":
            return text
        assert kind in ("text", "alive")
        text += part
    raise AssertionError(f"it ended after {text!r}")
