"""The C library's allocator, told to keep the memory of freed tensors for the next ones.

By default it gives larger pieces of memory back to the system at once and asks for them anew: each page costs a page
fault and is filled with zeros: a fifth of a small network's training step. A worker keeps it until its client asks
(`torch.sky.empty_cache`) or goes. Only for the C library of GNU; others are left as they are.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

_MAX_TRIM = 1 << 30
"""Freed bytes in one piece from which they are given back all the same."""
_MAX_KEPT_BLOCK = 256 << 20
"""Bytes of a block from which it is never kept."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of <malloc.h>


@functools.cache
def _c_library() -> Any:
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """From now on, memory that this process frees is used again. Before its threads start: they share one heap then."""
    library = _c_library()
    if library is not None:
        library.mallopt(_ARENA_MAX, 1)
        library.mallopt(_MMAP_THRESHOLD, _MAX_KEPT_BLOCK)
        library.mallopt(_TRIM_THRESHOLD, _MAX_TRIM)


def give_back_memory() -> None:
    """Gives what is free back to the system."""
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)
