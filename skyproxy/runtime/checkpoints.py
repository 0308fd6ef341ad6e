"""The folder for checkpoints of what runs here: of a job, or of a call that is started again when a rank dies."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.calls import current_call
from skyproxy.runtime.scratch import hold, remove_if_unheld

CHECKPOINT_VARIABLE = "SKYPROXY_CHECKPOINT_DIR"
RESTARTS_VARIABLE = "SKYPROXY_RESTART_COUNT"
FOLDER_PREFIX = "skyproxy-checkpoints-"
"""The beginning of the names of folders of calls that are started again."""
LEFT_SECONDS = 14 * 86_400.0
"""The time without a change after which such a folder that no process uses was left by a program that died."""


def checkpoint_dir() -> Path:
    """Return the folder in which a job, or a call with restarts, finds what it has saved before it was started again.

    Raises:
        ConfigurationError: this is neither.

    Example:
        ```python
        def train() -> int:
            place = skyproxy.checkpoint_dir() / "state.pt"
            step = torch.load(place)["step"] if place.exists() else 0
            torch.save({"step": step + 1}, place)
            return step


        print(node.submit_job(train, max_restarts=3).result())
        ```
    """
    call = current_call()
    place = call.values.get("checkpoint_dir") if call is not None else None
    if place:
        folder = checkpoint_folder(str(place))
    elif place := os.environ.get(CHECKPOINT_VARIABLE):
        folder = Path(place)
    else:
        raise ConfigurationError(
            "this is no job, and no call that is started again: there is no folder for checkpoints. Use "
            "node.submit_job(...), skyproxy run --detach, or call.with_restarts(...) @ pool"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.name.startswith(FOLDER_PREFIX):
        hold(folder)  # of a file system without locks: two weeks without a change count alone
    return folder


def checkpoint_folder(name: str) -> Path:
    """Return the folder for the checkpoints of a call, which all processes of this machine share.

    It lies where the worker keeps its jobs, if that was said: on a volume, it outlives the machine.
    """
    return Path(os.environ.get("SKYPROXY_JOBS") or tempfile.gettempdir()) / name


def remove_left_folders() -> None:
    """Remove the folders of calls whose programs died: no process has used them for two weeks. A worker does so at its
    start.
    """
    for folder in _left_folders():
        remove_if_unheld(folder)


def _left_folders() -> Iterator[Path]:
    """Yield the folders of this user in which nothing has changed for two weeks."""
    if not hasattr(os, "getuid"):  # Windows: nothing tells there whose a folder is, nor whether it is in use
        return
    newest_of_old = time.time() - LEFT_SECONDS
    with contextlib.suppress(OSError):
        for folder in checkpoint_folder("").glob(FOLDER_PREFIX + "*"):
            with contextlib.suppress(OSError):
                found = [folder.lstat(), *(inner.lstat() for inner in folder.rglob("*"))]
                if found[0].st_uid == os.getuid() and max(one.st_mtime for one in found) < newest_of_old:
                    yield folder


def restart_count() -> int:
    """Return how often this job, or this call, was started again.

    Example:
        ```python
        if skyproxy.restart_count():
            print("going on from the last checkpoint")
        ```
    """
    call = current_call()
    count = call.values.get("restart_count") if call is not None else None
    if isinstance(count, int):
        return count
    text = os.environ.get(RESTARTS_VARIABLE, "0")
    return int(text) if text.isdecimal() else 0
