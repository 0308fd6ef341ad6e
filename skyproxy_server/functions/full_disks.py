"""A search for the full disks of a worker: some libraries say no more than that writing failed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile

from skyproxy.errors import text_of

_FULL_BYTES = 1 << 20
_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_FAILED_WRITES = (
    "failed writing",
    "write failed",
    "unexpected pos",  # of torch.save, which goes on after a write that failed
    "no space left",
    "disk quota",
    "i/o error",
)


def explain_full_disk(error: BaseException) -> str:
    """Return what to say about a write that failed because a disk is full; an empty text for other errors."""
    is_full = isinstance(error, OSError) and error.errno in _ERRNOS
    if not is_full and not any(text in text_of(error).lower() for text in _FAILED_WRITES):
        return ""
    named = getattr(error, "filename", None)
    full = _full_places([os.path.dirname(os.path.abspath(named))] if isinstance(named, str) else [])
    if not is_full and not full:
        return ""
    where = f": {', '.join(full)}" if full else f", at {named}" if named else ""
    return (
        f"A disk of the worker is full{where}. Remove what is not needed there, write to another folder or a volume, "
        "or ask for a larger disk."
    )


def _full_places(places: list[str]) -> list[str]:
    found = []
    for place in dict.fromkeys([*places, os.getcwd(), tempfile.gettempdir(), os.path.expanduser("~"), "/dev/shm"]):
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        if usage.free < _FULL_BYTES:
            found.append(f"{place} ({usage.free >> 10:,} KiB of {usage.total / (1 << 30):.1f} GiB are free)")
    return found
