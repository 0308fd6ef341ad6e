"""Packed sequences: their rows move by index, for lengths and batch sizes live on the CPU, on every device.

PyTorch moves rows block by block. Sequences of other lengths have other blocks, so that each step of a training would
bring many operations of forms that were never seen. By index each way is one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import rnn

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.host_copies import values_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload, has_modes_or_transforms
from skyproxy.tensor.core.transfers import upload
from skyproxy.tensor.dispatch.op_info import OpInfo, implements

_pad_rows = torch.ops.aten._pad_packed_sequence.default


@implements("aten::_pack_padded_sequence")
def _pack_padded_sequence(
    info: OpInfo, func: OpOverload, args: tuple[RemoteTensor, torch.Tensor, bool], kwargs: dict[str, object]
) -> object:
    """Packs by index: PyTorch's kernel, run here on row numbers, tells which rows go where."""
    padded, lengths, batch_first = args
    if type(lengths) is RemoteTensor:
        lengths = lengths.cpu()
    first, second = padded.shape[:2]
    rows, batch_sizes = func(torch.arange(first * second, device="cpu").view(first, second, 1), lengths, batch_first)
    places = upload(rows.flatten(), padded._sky.device)
    return padded.reshape(first * second, *padded.shape[2:]).index_select(0, places), batch_sizes


def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: Any, total_length: int = -1
) -> object:
    """Pads by index, likewise: one row more than there are holds the padding.

    Gradients are those of PyTorch's blocks, added to zeros. Sequences of one length are one block, which is not added.
    """
    count = data.size(0)
    remote = type(data) is RemoteTensor and batch_sizes.device.type == "cpu" and count > 0
    if not remote or count == len(batch_sizes) * int(batch_sizes[0]):
        return _pad_rows.decompose(data, batch_sizes, batch_first, padding_value, total_length)
    numbers = torch.arange(count, device="cpu").unsqueeze(1)
    rows, lengths = _pad_rows(numbers, batch_sizes, False, count, total_length)
    places = upload(rows.flatten(), data._sky.device)  # type: ignore[attr-defined]  # it is remote
    padding = data.new_full((1, *data.shape[1:]), padding_value)
    padded = torch.cat([data, padding]).index_select(0, places).view(*rows.shape[:2], *data.shape[1:])
    return (padded.transpose(0, 1) if batch_first else padded), lengths


@implements("aten::_pad_packed_sequence")
def _pad_undivided(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """In inference mode the op arrives here undecomposed."""
    return _pad_packed_sequence(*args, **kwargs)


def _invert_known(plain: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """Invert a permutation here where it is known here, so that its inverse is, too: `pad_packed_sequence` reads it."""

    @functools.wraps(plain)  # which TorchScript unwraps, and compiles PyTorch's own function
    def invert_permutation(permutation: torch.Tensor | None) -> torch.Tensor | None:
        is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        usual = type(permutation) is RemoteTensor and permutation.dim() == 1 and not is_traced
        if usual and not has_modes_or_transforms():
            order = values_of(permutation._sky)  # type: ignore[union-attr]  # it is remote
            if order is not None and order.dtype is torch.int64 and _permutes(order):
                return upload(plain(order), permutation._sky.device)  # type: ignore[union-attr,arg-type]
        return plain(permutation)

    return invert_permutation


def _permutes(order: torch.Tensor) -> bool:
    return torch.equal(order.sort()[0], torch.arange(len(order), device="cpu"))


def _install_inversion() -> None:
    if not patching.is_replaced(rnn, "invert_permutation"):
        patching.wrap(
            rnn,
            "invert_permutation",
            _invert_known,
            why="the order of packed sequences was sorted here; `pad_packed_sequence` would wait for its inverse",
            test="tests/tensor/ops/test_packed_sequences.py::test_steps_of_other_lengths_wait_for_nothing",
            when=patching.When.FIRST_DEVICE,
        )


def install(library: torch.library.Library) -> None:
    """Put padding by index in the place of PyTorch's blocks."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("_pad_packed_sequence", _pad_packed_sequence, key)
    DEVICES.before_new[_install_inversion] = None


__all__ = ["install"]
