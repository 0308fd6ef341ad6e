"""The lines that a program is told once, when it first uses a worker. No torch."""

from __future__ import annotations

from itertools import islice

from skyproxy.errors import say
from skyproxy.settings import SETTINGS
from skyproxy.variables import misspelt_variables, remedy

_MOST_LINES = 5
_told: set[str] = set()


def tell_worker(device: str, name: str, url: str, source: str, *, embedded: bool) -> None:
    """Say which worker `sky:0` is, where the program did not choose it itself.

    Args:
        device: as the worker calls it: "cuda:0".
        name: what its driver calls it.
        url: of the worker.
        source: what has chosen it: "SKYPROXY_URL", or a saved context.
        embedded: whether this process has started it.
    """
    if not SETTINGS.announce_worker:
        return
    what = device if name in ("", device) else f"{device} ({name})"
    if embedded:
        say(f"sky:0 is {what}, in a worker that this program started on this machine; nothing else is configured")
    elif source.startswith("saved context"):
        say(f"sky:0 is {what}, in the worker of the {source}")  # whose URL may be that of a tunnel
    else:
        say(f"sky:0 is {what}, in the worker at {url}, from {source}")


def tell_misspelt_variables() -> None:
    """Name the variables that are meant for us and that nothing reads, each once in a process."""
    found = {name: near for name, near in misspelt_variables().items() if name not in _told}
    _told.update(found)
    for name, near in islice(found.items(), _MOST_LINES):
        say(f"the environment variable {name} is not one of skyproxy's and has no effect. {remedy(near)}")
    if len(found) > _MOST_LINES:
        say(f"{len(found) - _MOST_LINES} more are not skyproxy's either. See all: skyproxy doctor")
