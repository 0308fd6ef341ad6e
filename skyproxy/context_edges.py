"""The edges of contexts that switch modes of PyTorch, where the handler of a signal must not raise.

`with torch.no_grad():` is left by a method in Python. A handler that raises as it begins keeps it from running:
gradients stay off for the rest of the program, or dispatch modes on, so that every later tensor is a fake one. The same
holds after a context has switched a mode and before it is entered, and where an optimizer's step turns gradients on
again itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Container
from types import CodeType, FrameType

_EDGES = ("__enter__", "__exit__")
_GENERATED = tuple(getattr(contextlib._GeneratorContextManager, name).__code__ for name in _EDGES)

_SWITCHING_PARTS = (
    *("amp", "backends", "fx", "nested", "nn/attention", "nn/utils", "utils/_device.py", "utils/_python_dispatch.py"),
    *("_dynamo", "_functorch", "_guards.py", "_higher_order_ops", "_ops.py", "_subclasses", "overrides.py"),
    *(f"autograd/{name}.py" for name in ("anomaly_mode", "forward_ad", "grad_mode", "graph")),
)
"""Parts of PyTorch whose contexts switch modes and never wait, unlike those of locks, profilers and process groups."""

_STEP = "_use_grad"
_STEP_FILE = os.path.join("torch", "optim", "optimizer.py")
"""The function that has gradients off for an optimizer's step, and turns them on again after other calls, without a
context."""


@functools.cache
def _switching_files() -> tuple[str, ...]:
    found = importlib.util.find_spec("torch")
    folder = os.path.dirname(found.origin) if found is not None and found.origin else ""
    return tuple(os.path.join(folder, *part.split("/")) for part in _SWITCHING_PARTS) if folder else ()


def is_edge(frame: FrameType, called: FrameType | None, ours: Container[CodeType]) -> bool:
    """Tell whether modes are just being switched, or a context that switches them is being entered or left.

    Args:
        frame: what runs.
        called: the frame of what it calls; None if it runs itself.
        ours: the code of generators that are such contexts, beside those of PyTorch.
    """
    code = frame.f_code
    if code.co_name == _STEP and code.co_filename.endswith(_STEP_FILE):
        return called is None or called.f_code.co_filename.startswith(_switching_files())
    if code.co_name not in _EDGES:
        return False
    if code in _GENERATED:
        generator = getattr(frame.f_locals.get("self"), "gen", None)
        code = getattr(generator, "gi_code", code)
    return code in ours or code.co_filename.startswith(_switching_files())


__all__ = ["is_edge"]
