"""`torch.sky.set_sync_debug_mode`: a warning or an error at each hidden wait, as `torch.cuda` has it for its own."""

from __future__ import annotations

import sys
import warnings

from skyproxy.session.requests import WAIT_OBSERVERS
from skyproxy.tensor.core.user_lines import user_frame

_NAMES = ("default", "warn", "error")
_ASKED_FOR = frozenset({"synchronize", "wait_event", "query_event"})
"""Waits that a program writes down as such, which CUDA does not report either."""
_mode = 0


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Chooses what a wait for a worker is, besides those in `synchronize`.

    Args:
        debug_mode: "default" or 0 for nothing, "warn" or 1 for a warning, "error" or 2 for a RuntimeError.

    Raises:
        RuntimeError: there is no such mode.
    """
    global _mode
    if debug_mode not in (*_NAMES, *range(len(_NAMES))):
        raise RuntimeError(f"invalid value of debug_mode, expected one of {', '.join(_NAMES)}, not {debug_mode!r}")
    _mode = _NAMES.index(debug_mode) if isinstance(debug_mode, str) else debug_mode
    if _mode and _observe not in WAIT_OBSERVERS:
        WAIT_OBSERVERS.append(_observe)
    elif not _mode and _observe in WAIT_OBSERVERS:
        WAIT_OBSERVERS.remove(_observe)


def get_sync_debug_mode() -> int:
    """The number of the mode that was chosen."""
    return _mode


def _observe(purpose: str) -> None:
    if purpose in _ASKED_FOR:
        return
    text = f"called a synchronizing sky operation ({purpose})"
    if _mode == _NAMES.index("error"):
        raise RuntimeError(text)
    frame = user_frame(sys._getframe(1))
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
