"""One call of an op, taken apart: what the worker gets of it, and what the shape of the results depends on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import UnsupportedOpError
from skyproxy.protocol import commands
from skyproxy.tensor.core import known_values
from skyproxy.tensor.core.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.core.generators import device_of, slot_of
from skyproxy.tensor.core.known_values import KnownMeta
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.transfers import upload
from skyproxy.tensor.dispatch.mixed_devices import mixed_devices_error
from skyproxy.tensor.dispatch.number_classes import key_of, keys_of
from skyproxy.tensor.dispatch.op_info import FIXED, FIXED_TYPES, GENERATOR, NUMBER, TENSOR, TENSORS, OpInfo

Number = bool | int | float | complex | None
_MOST_MASKED = 1 << 14
"""Elements of a mask of the CPU that travels as positions: those of larger ones cost more than a round trip."""


class BoundCall:
    """One call of an op, taken apart: where it runs, what it looks like, what travels.

    Attributes:
        device: the device it runs on.
        has_values: whether a CPU tensor travels as a value.
        key: what the shape of its results depends on.
        operands: those that travel, without the op's number and the results' slots.
        templates: how the worker puts the operands together again.
        keyword_templates: the same for keywords.
        tensors: the remote tensors among the arguments, in order.
        known: those of their handles whose values were known, each with its look till then and the value.
        elements: those of their handles that are elements of storages whose bytes are known, each with that look.
    """

    __slots__ = (
        "args",
        "device",
        "elements",
        "has_values",
        "info",
        "key",
        "keyword_templates",
        "known",
        "kwargs",
        "operands",
        "templates",
        "tensors",
    )

    def __init__(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.has_values = False
        self.tensors: list[RemoteTensor] = []
        self.known: list[tuple[Handle, KnownMeta, torch.Tensor]] = []
        self.elements: list[tuple[Handle, KnownMeta]] = []
        self.device = self._find_device()
        if info.places_host_indices and len(args) > 1 and type(args[1]) in (list, tuple):
            self.args = args = (args[0], self._place_indices(*args[:3]), *args[2:])
        self.key: list[object] = [info]
        self.operands: list[object] = []
        writes = info.writes
        rows = zip(args, info.kinds, info.names)  # the schema may have more
        self.templates = tuple([self._bind(a, how, name in writes) for a, how, name in rows])
        self.keyword_templates: dict[str, object] = {}
        for name, a in kwargs.items():
            if name == "pin_memory":
                refuse_to_pin(a)
                continue
            self.key.append(name)
            self.keyword_templates[name] = self._bind(a, info.keyword_kinds[name], name in writes)

    def _find_device(self) -> SkyDevice:
        found: SkyDevice | None = None
        for a in (*self.args, *self.kwargs.values()):
            for item in a if type(a) is list or type(a) is tuple else (a,):
                if type(item) is RemoteTensor:
                    device = item._sky.device
                    if found is None:
                        found = device
                    elif device is not found:
                        DEVICES.check_sessions(found, device)
                        raise mixed_devices_error(self.info.name, found.torch_device, device.torch_device)
        asked = self.kwargs.get("device")
        if asked is not None and asked.type == "sky" and (found is None or asked.index not in (None, found.index)):
            return DEVICES.of(asked)
        if found is None:
            generator = self.kwargs.get("generator")
            return (device_of(generator) if generator is not None else None) or DEVICES.at(None)
        return found

    def _bind(self, a: Any, how: int, is_written: bool) -> object:
        """Add one argument to the key and the operands; return its template."""
        kind = type(a)
        if kind is RemoteTensor:
            handle = a._sky
            self.tensors.append(a)
            if handle.meta.known:
                self._forget(handle)
            self.key.append(handle.meta)
            self.operands.append(handle.slot)
            return commands.TENSOR
        if kind is int and how == NUMBER:  # the usual case of what follows
            self.key.append(a)
            self.operands.append(a)
            return commands.VALUE
        if isinstance(a, torch.Tensor):
            return self._bind_host_tensor(a, is_written)
        if how == TENSORS and a is not None:
            return self._bind_list(a, is_written)
        if how == GENERATOR and a is not None:
            self.key.append("generator")
            self.operands.append(slot_of(a, self.device))
            return commands.TENSOR
        if a is None and how == TENSOR:
            self.key.append(kind)
            self.operands.append(0)
            return commands.TENSOR
        if how in (FIXED, GENERATOR) or kind in FIXED_TYPES:
            constant = freeze(self._constant(a))
            self.key.append(tuple(a) if kind is list else a)
            return (commands.CONSTANT, *constant)
        if how == NUMBER:
            value = [_number(item) for item in a] if isinstance(a, list | tuple) else _number(a)
            # 1, True and 1.0 are equal as keys, but mean different things as arguments of arange.
            typed = value if kind is int or a is None else (kind, value)
            self.key.append(tuple(value) if type(value) is list else typed)
            self.operands.append(value)
            return commands.VALUE
        if isinstance(a, list | tuple):
            value = [_number(item) for item in a]
            self.key.append(keys_of(value))
            self.operands.append(value)
            return commands.VALUE
        value = _number(a)
        self.key.append(key_of(value))  # not of `a`: the fast path would send a symbol as it is
        self.operands.append(value)
        return commands.VALUE

    def _place_indices(
        self, indexed: object, indices: Sequence[torch.Tensor | None], put: object = None
    ) -> list[object]:
        """Indices with those of the CPU on the device, masks of the CPU as the positions that they choose.

        So shapes can be inferred, from remote tensors alone, and the call does not wait. A mask stays one where a
        number of another dtype is put there: PyTorch fills by a mask what it refuses to put at positions.

        Args:
            put: what an op puts there, which has tensors.
        """
        size = indexed._sky.meta.size if type(indexed) is RemoteTensor else ()
        fills = isinstance(put, torch.Tensor) and put.numel() == 1 and put.dtype is not getattr(indexed, "dtype", None)
        placed: list[object] = []
        at = 0
        for a in indices:
            is_mask = isinstance(a, torch.Tensor) and a.dtype in (torch.bool, torch.uint8)
            if not isinstance(a, torch.Tensor) or type(a) is RemoteTensor or a.device.type != "cpu":
                placed.append(a)
            elif (
                not fills
                and a.dtype is torch.bool
                and a.dim() > 0
                and a.numel() <= _MOST_MASKED
                and tuple(a.shape) == size[at : at + a.dim()]
            ):
                placed += [upload(positions, self.device) for positions in a.nonzero(as_tuple=True)]
            else:
                placed.append(upload(a, self.device))
            at += a.dim() if is_mask else 1  # type: ignore[union-attr]
        return placed

    def _forget(self, handle: Handle) -> None:
        meta: KnownMeta = handle.meta  # type: ignore[assignment]  # it is `known`
        if meta.copy is not None:
            self.elements.append((handle, meta))
            if not self.info.followed:
                handle.meta = meta.base
                return
        value = known_values.forget(handle)
        if value is not None:
            self.known.append((handle, meta, value))

    def _constant(self, a: object) -> list[object]:
        if isinstance(a, torch.device):
            a = DEVICES.of(a).worker_device if a.type == "sky" else a
        return torch_codec.encode_constant(a)

    def _bind_host_tensor(self, a: torch.Tensor, is_written: bool) -> object:
        """A tensor of the CPU among remote ones: a value if it has no dimensions, as PyTorch allows on every device.

        What the op writes is not a value: the worker would change a copy.
        """
        self.has_values = True
        if self.info.name.startswith("aten::_foreach_addc") and a.device.type == "cpu" and a.dim() == 1:
            self.key.append(("host", a.dtype, len(a)))
            self.operands.append(a.tolist())
            return (commands.HOST_SCALAR, torch_codec.DTYPE_NAMES[a.dtype])
        if is_written or a.device.type != "cpu" or a.dim() != 0 or a.layout is not torch.strided:
            raise mixed_devices_error(self.info.name, self.device.torch_device, a.device)
        name = torch_codec.DTYPE_NAMES[a.dtype]
        number = number_of(a)
        self.key.append(("host", name, key_of(number)))
        self.operands.append(number)
        return (commands.HOST_SCALAR, name)

    def _bind_list(self, items: Sequence[RemoteTensor | torch.Tensor | None], is_written: bool) -> object:
        slots: list[int] = []
        looks: list[Meta | None] = []
        for item in items:
            if item is None:
                slots.append(0)
                looks.append(None)
                continue
            if type(item) is not RemoteTensor:
                item = self._place_in_list(item, is_written)
            self.tensors.append(item)
            if item._sky.meta.known:
                self._forget(item._sky)
            slots.append(item._sky.slot)
            looks.append(item._sky.meta)
        self.key.append(tuple(looks))
        self.operands.append(slots)
        return commands.TENSORS

    def _place_in_list(self, item: object, is_written: bool) -> RemoteTensor:
        """A copy on the device of an item of the CPU. Lists of `_foreach` ops are taken apart instead, item by item."""
        if (
            not is_written
            and not self.info.for_each
            and isinstance(item, torch.Tensor)
            and item.device.type == "cpu"
            and item.dim() == 0
        ):
            return upload(item, self.device)
        place = getattr(item, "device", type(item).__name__)
        raise mixed_devices_error(self.info.name, self.device.torch_device, place)

    def argument(self, name: str) -> Any:
        """The value of an argument by its schema name; None where it was left out."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.info.names.index(name)
        return self.args[position] if position < len(self.args) else None


def is_host_number(info: OpInfo, position: int, a: torch.Tensor) -> bool:
    """Return whether a tensor of the CPU among remote ones is a number that travels as a value: see `BoundCall`."""
    return (
        a.dim() == 0
        and a.device.type == "cpu"
        and a.layout is torch.strided
        and (not info.writes or info.names[position] not in info.writes)
    )


def number_of(a: torch.Tensor) -> complex:
    """The number that a tensor of the CPU without dimensions holds.

    Composites that are divided here take conjugates of their operands, whose bits PyTorch no longer looks at there.
    """
    if not (a.is_conj() or a.is_neg()):
        return a.item()
    plain = torch.ops.aten._conj(a) if a.is_conj() else a
    plain = torch.ops.aten._neg_view(plain) if a.is_neg() else plain
    value: complex = plain.item()
    value = value.conjugate() if a.is_conj() else value
    return -value if a.is_neg() else value


def refuse_to_pin(wanted: object) -> None:
    """Raise what CUDA raises of `pin_memory=True`, without asking the worker.

    Raises:
        RuntimeError: it is wanted.
    """
    if wanted:
        raise RuntimeError("Only dense CPU tensors can be pinned")


SYMBOLS = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})
"""Types of numbers that PyTorch works with by name. Workers get the number."""


def _number(a: object) -> Number:
    if a is None or isinstance(a, bool | int | float | complex):
        return a
    if isinstance(a, torch.SymInt):
        if a.node.is_nested_int():
            raise UnsupportedOpError(
                f"{a}, the size of a dimension whose rows differ, is no number that a worker can take"
            )
        return int(a)
    if isinstance(a, torch.SymFloat | torch.SymBool):
        return float(a) if isinstance(a, torch.SymFloat) else bool(a)
    raise UnsupportedOpError(f"an argument of type {type(a).__name__} cannot be sent to a worker: {a!r:.80}")


def freeze(value: object) -> Any:
    """Return the value with tuples in place of lists, so that it can be hashed."""
    return tuple(freeze(item) for item in value) if isinstance(value, list) else value


def template_of(a: object, how: int, device: SkyDevice) -> object:
    """Return the form in which an argument without tensors travels."""
    kind = type(a)
    if how not in _CONSTANTS and kind not in FIXED_TYPES:
        return commands.TENSOR if a is None and how == TENSOR else commands.VALUE
    if kind is torch.device and a.type == "sky":  # type: ignore[attr-defined]
        return _constant_template(device.worker_device)
    if kind in _HASHED:
        return _constant_template(a)
    if kind is list and set(map(type, a)) == {bool}:  # type: ignore[call-overload]
        return _constant_template(tuple(a))  # type: ignore[arg-type]
    return (commands.CONSTANT, *freeze(torch_codec.encode_constant(a)))


_CONSTANTS = (FIXED, GENERATOR)
_HASHED = FIXED_TYPES | {type(None), bool, int}
"""Types of constants of which two that are equal, and of the same type, travel alike. Zeros of fractions have signs."""


@functools.lru_cache(1024, typed=True)
def _constant_template(constant: object) -> tuple[object, ...]:
    return (commands.CONSTANT, *freeze(torch_codec.encode_constant(constant)))


def number_of_signature(
    device: SkyDevice,
    name: str,
    arguments: tuple[object, ...],
    keywords: tuple[tuple[str, object], ...],
    outputs: tuple[object, ...],
) -> int:
    """The number on the wire of an op whose arguments and results travel in these forms."""
    structure = (name, arguments, keywords, outputs)
    number = device.session.known_signature(structure)
    if number is not None:
        return number
    return device.session.signature(
        structure,
        lambda: [name, [_as_lists(t) for t in arguments], {key: _as_lists(t) for key, t in keywords}, list(outputs)],
        commands.operand_count((*arguments, *(template for _, template in keywords), *outputs)),
    )


def _as_lists(template: object) -> object:
    return [_as_lists(item) for item in template] if isinstance(template, tuple) else template
