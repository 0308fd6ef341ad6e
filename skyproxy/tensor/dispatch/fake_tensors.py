"""PyTorch's fake tensors: the mode in which they compute, the loading of what it needs, and one that looks as told."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator

import torch

from skyproxy import torch_codec
from skyproxy.collector import collect_loaded, collector_paused
from skyproxy.interrupts import shielded
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.torch_private import (
    DisableTorchFunction,
    FakeTensorMode,
    count_dispatch_modes,
    disable_current_modes,
    set_conjugate,
    set_negative,
)

_NOTHING = contextlib.nullcontext()

_LOADED_BY_FAKE_MODE = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""Parts of PyTorch that its first fake mode loads, which take nearly as long as torch itself; the deepest first.

Its dispatcher imports the third at the first operation on any tensor class, so those three are needed in any case.
"""


@functools.cache
def fake_mode() -> FakeTensorMode:
    """The mode in which shapes are inferred. The first call loads PyTorch's compiler, unless `prepare` did."""
    with _neutral_loading():
        return FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)


def prepare(until: Callable[[], bool]) -> None:
    """Load what the first fake tensor needs, piece by piece, while something else is waited for; then collect garbage.

    Args:
        until: asked before each piece: there is nothing to wait for any more. What is left is loaded when it is needed.
    """
    with _neutral_loading():
        for name in _LOADED_BY_FAKE_MODE:
            if until():
                return
            with contextlib.suppress(ImportError):  # another version of PyTorch, or one built without it
                importlib.import_module(name)
    if not until():
        fake_mode()
    if not until():
        collect_loaded()


@contextlib.contextmanager
@shielded
def _neutral_loading() -> Iterator[None]:
    """Let modules of PyTorch make their tensors as at the top of a program, whatever runs when they are loaded."""
    modes_off = disable_current_modes() if count_dispatch_modes() else _NOTHING
    with collector_paused(), modes_off, DisableTorchFunction(), torch.inference_mode(False):
        yield


def fake_tensor(meta: Meta, device: str = "cpu") -> torch.Tensor:
    """A tensor without values that looks like `meta`: with the fake mode entered, a fake of the CPU's.

    Never a fake of an accelerator: where this machine lacks it, that ends the process.

    Args:
        device: "cpu", or "meta" for a plain meta tensor, outside the mode.
    """
    if meta.layout is not torch.strided:
        raise NotImplementedError("sparse layouts are not faked")
    if meta.offset or (meta.dtype.is_complex and (meta.conjugate or meta.negative)):
        extent = torch_codec.storage_extent(meta.size, meta.stride, meta.offset)
        base = torch.empty(max(extent, meta.offset), dtype=meta.dtype, device=device)
        fake = torch.as_strided(base, meta.size, meta.stride, meta.offset)
    else:
        fake = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=device)
    if meta.conjugate:
        set_conjugate(fake, True)
    if meta.negative:
        set_negative(fake, True)
    return fake
