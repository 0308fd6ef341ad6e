"""Keeps the guard of CUDA's devices that fake tensors need where there is no CUDA, on PyTorch 2.11.

A build for CUDA without a driver sets it when a fake mode is entered. In 2.11 it belongs to the thread that did so
first, and every fake mode after that thread's end is a SIGSEGV: of a compiled training step the second graph.
"""

from __future__ import annotations

import threading
import time

import torch

from skyproxy.torch_versions import minor

_DAY_SECONDS = 86_400.0
_lock = threading.Lock()
_is_kept = False


def keep_guard() -> None:
    """Have a thread that lives as long as the process set the guard, if this PyTorch needs that. Idempotent."""
    global _is_kept
    set_guard = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if set_guard is None or torch.version.cuda is None or minor(torch.__version__) != (2, 11):
        return
    with _lock:
        if _is_kept:
            return
        is_set = threading.Event()

        def stay() -> None:
            try:
                set_guard()
            finally:
                is_set.set()
            while True:
                time.sleep(_DAY_SECONDS)

        threading.Thread(target=stay, name="skyproxy-guard", daemon=True).start()
        is_set.wait()
        _is_kept = True
