"""Tensors beside a payload: by value as raw bytes of their storages, or as a reference.

A tensor is a row in a table, and the payload names the row. So tensors that share memory, or are one object, do so
again on the other side, whichever way they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.payloads.pieces import plain_memory
from skyproxy.torch_codec import Description

VALUE = "value"
REFERENCE = "reference"
_ALIGNMENT_BYTES = 16

Row = list[Any]
"""`[VALUE or REFERENCE, description, requires gradients, is a parameter, ...]`; then the number of the storage, or
whatever the one who made the reference put there."""

Refer = Callable[[torch.Tensor], list[object] | None]
"""For a tensor that goes by reference, what its row ends with; None for one that goes by value."""


class _Storage:
    """A storage that travels by value, and how much of it is needed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.number = 0
        self.storage = tensor.untyped_storage()
        self.low, self.high = self.storage.nbytes(), 0

    def need(self, description: Description, item_bytes: int) -> None:
        high = torch_codec.storage_extent(description.size, description.stride, description.offset) * item_bytes
        if high:
            low = description.offset * item_bytes
            self.low, self.high = min(self.low, low - low % _ALIGNMENT_BYTES), max(self.high, high)

    def content(self) -> torch.Tensor:
        low = min(self.low, self.high)
        everything = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        part: torch.Tensor = everything[low : self.high].cpu()
        return part


class TensorTable:
    """The tensors of a payload that is being written.

    Attributes:
        rows: one for each tensor.
        references: the tensors that go by reference, in the order of their rows.
    """

    def __init__(self, refer: Refer) -> None:
        self.rows: list[Row] = []
        self.references: list[torch.Tensor] = []
        self._refer = refer
        self._numbers: dict[int, int] = {}
        self._met: list[torch.Tensor] = []
        self._storages: dict[int, _Storage] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has a row."""
        return id(tensor) in self._numbers

    def add(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's row; None for one that is made of others and goes by value."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        ending = self._refer(tensor)
        if ending is None and not _is_plain(tensor):
            return None
        description = torch_codec.describe(tensor)
        row = [
            VALUE if ending is None else REFERENCE,
            torch_codec.encode_description(description),
            bool(tensor.requires_grad),
            isinstance(tensor, torch.nn.Parameter),
        ]
        if ending is None:
            key = tensor.untyped_storage()._cdata
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(tensor)
                storage.number = len(self._storages) - 1
            storage.need(description, tensor.element_size())
            row.append(storage.number)
        else:
            row += ending
            self.references.append(tensor)
        number = self._numbers[id(tensor)] = len(self.rows)
        self._met.append(tensor)  # so that its id stays its own
        self.rows.append(row)
        return number

    def contents(self) -> list[torch.Tensor]:
        """Return the bytes of the storages that travel; those of a device are copied here."""
        return [storage.content() for storage in self._storages.values()]

    def bases(self) -> list[int]:
        """Return, for each of these, which byte of its storage it begins with."""
        return [min(storage.low, storage.high) for storage in self._storages.values()]


class TensorReader:
    """The tensors of a payload that came.

    Args:
        rows: one for each tensor.
        bases: for each of `contents`, which byte of its storage it begins with.
        contents: the bytes of storages.
        referred: for a row of a reference and its number among references, the tensor.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        bases: Sequence[int],
        contents: Sequence[torch.Tensor],
        referred: Callable[[Row, int], torch.Tensor],
    ) -> None:
        self._rows = rows
        self._bases = bases
        self._contents = contents
        self._referred = referred
        self._made: dict[int, torch.Tensor] = {}
        self._order: dict[int, int] = {}
        for number, row in enumerate(rows):
            if row[0] == REFERENCE:
                self._order[number] = len(self._order)

    def get(self, number: int) -> torch.Tensor:
        """Return the tensor of a row, the same one each time.

        Raises:
            ProtocolError: what came with the row cannot be such a tensor.
        """
        tensor = self._made.get(number)
        if tensor is None:
            row = self._rows[number]
            tensor = self._decode_value(row) if row[0] == VALUE else self._referred(row, self._order[number])
            self._made[number] = tensor
        return tensor

    def _decode_value(self, row: Row) -> torch.Tensor:
        description = torch_codec.decode_description(row[1])
        content, base = self._contents[row[4]], self._bases[row[4]]
        _check_view(description, content, base)
        tensor = torch.empty(0, dtype=description.dtype, device="cpu")
        if 0 in description.size:
            tensor = torch.empty_strided(description.size, description.stride, dtype=description.dtype, device="cpu")
        else:
            offset = description.offset - base // description.dtype.itemsize
            tensor.set_(content.untyped_storage(), offset, description.size, description.stride)
        if description.conjugate:
            tensor = torch._conj(tensor)
        if description.negative:
            tensor = torch._neg_view(tensor)
        return as_leaf(tensor, row)


def _check_view(description: Description, content: torch.Tensor, base: Any) -> None:
    """Refuse a view that reaches beyond its bytes: PyTorch would make its storage larger, as large as a peer says."""
    numbers = (*description.size, *description.stride, description.offset, base)
    item_bytes = description.dtype.itemsize
    sound = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    if sound and len(description.size) == len(description.stride) and 0 not in description.size:
        low = description.offset * item_bytes - base
        high = torch_codec.storage_extent(description.size, description.stride, description.offset) * item_bytes - base
        sound = low >= 0 and high <= content.nbytes and base % item_bytes == 0
    if not sound or len(description.size) != len(description.stride):
        raise ProtocolError(
            f"a tensor of the size {description.size!r:.100} does not fit into the bytes that came for it"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is nothing but values in a storage; PyTorch itself takes the others apart."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def is_strided_nested(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is made of others, of different sizes, and not of the jagged layout."""
    return tensor.is_nested and tensor.layout is torch.strided


def memory_for(tables: dict[str, Any], count: int) -> Callable[[int, int], tuple[Any, memoryview]]:
    """An `allocate` for the pieces of a payload: the bytes of storages come into tensors.

    Args:
        tables: what travels with the pieces.
        count: how many there are.
    """
    if not tables["bases"]:
        return plain_memory
    first = count - len(tables["bases"])

    def allocate(index: int, size: int) -> tuple[Any, memoryview]:
        if index < first:
            return plain_memory(index, size)
        content = torch.empty(size, dtype=torch.uint8, device="cpu")
        return content, torch_codec.byte_view(content)

    return allocate


def as_leaf(tensor: torch.Tensor, row: Row) -> torch.Tensor:
    """The tensor as a leaf that wants gradients, or as a parameter, if its row says so."""
    _, _, requires_grad, is_parameter = row[:4]
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
