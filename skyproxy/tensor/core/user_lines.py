"""The line of the user's program that called an operation: the innermost one that is neither PyTorch's nor ours."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any


class _Foreign(dict[str, bool]):
    """For a source file's name, whether it is PyTorch's or ours, so that errors can name the user's line."""

    _ROOTS = tuple(
        os.path.join(os.path.abspath(sys.modules[package].__path__[0]), "") for package in ("torch", "skyproxy")
    )

    def __missing__(self, name: str) -> bool:
        foreign = name.startswith((*self._ROOTS, "<frozen ", "<eval_with_key>")) or name == "<string>"
        self[name] = foreign
        return foreign


FOREIGN = _Foreign()


class _Outermost:
    """A stand-in for a frame where C++ calls on a thread of its own, as autograd does deep within backward."""

    f_code = _Foreign.__missing__.__code__
    f_lasti = 0
    f_back = None


OUTERMOST: Any = _Outermost
"""For `f_code`, `f_lasti` and `f_back` of a caller that is none."""


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither PyTorch's nor ours, from `frame` on outwards."""
    while FOREIGN[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame
