"""Starts the embedded worker before PyTorch is loaded here, so that the two load it side by side."""

from __future__ import annotations

import os
import sys

from skyproxy.contexts import ContextStore
from skyproxy.errors import SkyproxyError
from skyproxy.session.early_worker import EARLY_WORKER


def start_early() -> bool:
    """Start the worker that `sky:0` will mean, without waiting for it; loads no PyTorch.

    A worker loads PyTorch for as long as a program does. Called before `import torch`, this lets both do it at once, so
    that the first value comes up to a second sooner. Call it in programs that are sure to use `sky:0`.

    Returns:
        Whether a worker waits now; False where `sky:0` means another one (SKYPROXY_URL, or one that `skyproxy up`
        saved), where it is in use already, and in processes that `multiprocessing` has started. A worker that nobody
        takes ends with this process, or when it connects to another one.

    Raises:
        WorkerStartError: the process cannot be started.

    Example:
        ```python
        import skyproxy

        skyproxy.start_early()
        import torch

        print(torch.ones(3, device="sky:0").sum().item())
        ```
    """
    if os.environ.get("SKYPROXY_URL") or _has_nodes() or _is_multiprocessing_child():
        return False
    try:
        if ContextStore().chosen() is not None:
            return False
    except SkyproxyError:  # the first use reports it
        return False
    EARLY_WORKER.begin("auto")
    return True


def _has_nodes() -> bool:
    nodes = sys.modules.get("skyproxy.nodes")
    return nodes is not None and bool(nodes.list_nodes())


def _is_multiprocessing_child() -> bool:
    """Return if this is a loader of data or the like, which runs the main file anew."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # While the main file runs in it, the process does not know its parent yet, but says that it is being set up.
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)
