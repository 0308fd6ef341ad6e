"""A document and its storages as the values of an empty session: what `load_snapshot` does.

All is made and checked first, and put into the session in the end; a document that is refused changes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import ConfigurationError, ProtocolError, SnapshotError, UnsupportedOpError
from skyproxy.snapshots.documents import (
    Row,
    Table,
    data,
    entry,
    flag,
    real,
    refuse,
    rows,
    table,
    text,
    whole_number,
    whole_numbers,
)
from skyproxy.snapshots.origin import check_origin
from skyproxy.torch_codec import DTYPES, LAYOUTS, decode_description
from skyproxy_server.argument_checks import MAX_DIMENSIONS, UNUSABLE_DTYPES
from skyproxy_server.controls import HostEvent
from skyproxy_server.failures import Failed
from skyproxy_server.named_sessions import NamedSession
from skyproxy_server.random_state import set_state
from skyproxy_server.recordings import Recording
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.beliefs import decode_watch
from skyproxy_server.snapshots.names import read_named, use_named

_RECORD_TEXTS = ("type", "message", "traceback", "op")
_RECORD_NUMBERS = ("sequence", "position", "graph")
_MAX_GENERATOR_BYTES = 1 << 16
_MAX_DEPTH = 32


def is_empty(state: SessionState) -> bool:
    """Return whether nothing was made in this session."""
    return len(state.values.slots) <= 1 and not state.ops.signatures and not state.graphs.recordings


def restore(state: SessionState, document: Table, storages: list[torch.Tensor], max_handles: int) -> int:
    """Make an empty session what another one was.

    Args:
        state: the session.
        document: what `capture` made, or anything else: nothing in it is believed.
        storages: its bytes, each one-dimensional uint8 on the CPU, in memory that nobody else uses.
        max_handles: how many values there may be.

    Returns:
        The number of the batch after which it was captured.

    Raises:
        SnapshotError: the document is refused; the session is as empty as before.
        ProtocolError: the session is not empty.
    """
    if not is_empty(state):
        raise ProtocolError("a snapshot is loaded into a session that holds something already")
    try:
        with _refusals():
            _check_origin(document, state)
            sequence = whole_number(entry(document, "sequence"), "its batch", 1 << 53)
            _Restoration(state, document, storages, max_handles).prepared()()
    except SnapshotError:
        _clear(state)
        raise
    return sequence


class Adoptable(NamedTuple):
    """Tensors of a snapshot that a session may make its own.

    Attributes:
        tensors: by the slots that they had.
        install: puts those of them that are chosen into the session: `install({new slot: tensor})`.
    """

    tensors: dict[int, torch.Tensor]
    install: Callable[[dict[int, torch.Tensor]], None]


def restore_values(state: SessionState, document: Table, storages: list[torch.Tensor], max_handles: int) -> Adoptable:
    """Make the tensors of a snapshot beside what a session holds; nothing of the session changes yet.

    Args:
        state, document, storages, max_handles: as for `restore`.

    Raises:
        SnapshotError: the document is refused.
    """
    with _refusals():
        _check_origin(document, state)
        return _Restoration(state, document, storages, max_handles - len(state.values.slots)).adoptable()


def restore_named(state: SessionState, document: Table, storages: list[torch.Tensor], max_handles: int) -> NamedSession:
    """Make the named session of a snapshot, for a session that will use it; nobody finds it yet.

    Args:
        state, document, storages, max_handles: as for `restore`.

    Raises:
        SnapshotError: the document is refused.
    """
    with _refusals():
        _check_origin(document, state)
        return _Restoration(state, document, storages, max_handles).named()


def _check_origin(document: Table, state: SessionState) -> None:
    check_origin(document, torch.__version__, {(row["type"], row["index"] or 0) for row in state.devices})


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn whatever a document that nobody has written may raise into a refusal.

    Raises:
        SnapshotError: something was raised.
    """
    try:
        yield
    except SnapshotError:
        raise
    except (ProtocolError, ConfigurationError, UnsupportedOpError) as error:
        raise refuse(str(error)) from error
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError, AttributeError) as error:
        raise refuse(f"{type(error).__name__}: {error!s:.200}") from error
    except (RuntimeError, MemoryError) as error:  # a version of PyTorch in which it cannot be created
        raise SnapshotError(
            f"this snapshot could not be brought back: {error!s:.300}. It is untouched, and nothing was changed; try a "
            "worker with more memory, or an older snapshot"
        ) from error


def _clear(state: SessionState) -> None:
    state.graphs.end()
    state.ops.forget_definitions()
    state.values.slots.clear()  # the executor has it at hand
    state.values.slots[0] = None
    state.values.not_replayed.clear()
    state.values.gates.forget_all()


class _Restoration:
    def __init__(self, state: SessionState, document: Table, storages: list[torch.Tensor], max_handles: int) -> None:
        self._state = state
        self._document = document
        self._max_handles = max_handles
        self._storages = self._on_devices(storages)
        self._shrunk: list[tuple[torch.UntypedStorage, int, int]] = []
        for row in rows(entry(document, "shrunk"), "what shrank", 2):
            self._shrunk.append(self._restore_former_size(*row))
        self._failed = [self._failure(*row) for row in rows(entry(document, "failures"), "the failures", 2)]
        self._values: Row = []

    def prepared(self) -> Callable[[], None]:
        """Check and make everything; the function that puts it into the session."""
        document, state = self._document, self._state
        for row in rows(entry(document, "values"), "the values"):
            self._values.append(self._value(row))
        slots = self._slots(entry(document, "slots"))
        modes = torch_modes.decode(entry(document, "modes"), cuda=state.devices.has_cuda)
        random = [self._generator_state(*row) for row in rows(entry(document, "random"), "the random states", 3)]
        met = whole_number(entry(document, "cancellations"), "its cancellations", 1 << 53)
        max_bytes = whole_number(entry(document, "max_bytes"), "the bytes that it held")
        named = read_named(state, document, self._value_at)
        steps: list[Callable[[], object]] = [
            self._define,
            partial(state.values.slots.update, slots),
            self._add_graphs,
            self._add_marks,
            partial(state.cancellation.go_on_behind, met),
        ]

        def install() -> None:
            for carry_out in steps:
                carry_out()
            state.modes.switch(modes)
            self._draw_from(random)
            state.max_bytes = max_bytes
            use_named(state, named)  # last: others find it from here on

        return install

    def adoptable(self) -> Adoptable:
        """Check and make the tensors."""
        document, gates = self._document, self._state.values.gates
        for row in rows(entry(document, "values"), "the values"):
            self._values.append(self._value(row))
        tensors = self._slots(entry(document, "slots"))
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise refuse("one of what it saved is no tensor")
        random = [self._generator_state(*row) for row in rows(entry(document, "random"), "the random states", 3)]
        failed = [
            (self._storage(storage), self._failure_at(number))
            for storage, number in rows(entry(document, "changes_that_failed"), "the changes that failed", 2)
        ]

        def install(chosen: dict[int, torch.Tensor]) -> None:
            self._state.values.slots.update(chosen)
            for storage, mark in failed:
                gates.mark_storage_failed(storage, mark)
            for shrunk, own, former in self._shrunk:
                shrunk.resize_(own)
                gates.mark_shrunk(shrunk, former)
            self._draw_from(random)

        return Adoptable(tensors, install)  # type: ignore[arg-type]

    def named(self) -> NamedSession:
        """Check and make what stands under names."""
        document, gates = self._document, self._state.values.gates
        for row in rows(entry(document, "values"), "the values"):
            self._values.append(self._value(row))
        session = read_named(self._state, document, self._value_at)
        if session is None:
            raise refuse("it is of no named session")
        for storage, failed in rows(entry(document, "changes_that_failed"), "the changes that failed", 2):
            gates.mark_storage_failed(self._storage(storage), self._failure_at(failed))
        for shrunk, own, former in self._shrunk:
            shrunk.resize_(own)
            gates.mark_shrunk(shrunk, former)
        return session

    def _draw_from(self, states: list[tuple[tuple[str, int], torch.Tensor]]) -> None:
        random = self._state.random
        with random.exclusive():
            for (kind, index), bits in states:
                random.generator(kind, index).set_state(bits)

    # --- storages and failures ---------------------------------------------------------------------------------------

    def _on_devices(self, given: list[torch.Tensor]) -> list[torch.UntypedStorage]:
        described = rows(entry(self._document, "storages"), "the storages", 3)
        if len(described) != len(given):
            raise refuse(f"it has {len(described)} storages, and the bytes of {len(given)}")
        made = []
        for (byte_count, kind, index), tensor in zip(described, given, strict=True):
            if whole_number(byte_count, "the size of a storage") != tensor.numel():
                raise refuse(f"a storage has {tensor.numel()} bytes and should have {byte_count}")
            device = self._device(kind, index)
            made.append((tensor if device.type == "cpu" else tensor.to(device)).untyped_storage())
        return made

    def _restore_former_size(self, number: object, former: object) -> tuple[torch.UntypedStorage, int, int]:
        """Give a storage that was made smaller its former size, for the tensors that were made before."""
        storage = self._storage(number)
        own = storage.nbytes()
        if any(storage is shrunk for shrunk, _, _ in self._shrunk):
            # In the end it would have the size of the first row, and in it memory that was never written.
            raise refuse("a storage was made smaller twice")
        storage.resize_(whole_number(former, "the former size of a storage", least=own))
        return storage, own, storage.nbytes()

    def _device(self, kind: object, index: object) -> torch.device:
        return self._state.devices.find(
            [text(kind, "a device", 10), whole_number(index, "the number of a device", 1 << 10)]
        )

    def _failure(self, record: object, delivered: object) -> Failed:
        record = table(record, "a failure")
        plain: Table = {name: text(entry(record, name), f"a failure's {name}") for name in _RECORD_TEXTS}
        for name in _RECORD_NUMBERS:
            if name in record:
                plain[name] = whole_number(record[name], f"a failure's {name}", 1 << 53)
        if not {"sequence", "position"} <= plain.keys():
            raise refuse("a failure does not say where it happened")
        return Failed.of_record(plain, delivered=flag(delivered, "whether a failure was told"))

    def _failure_at(self, number: object) -> Failed:
        return self._failed[whole_number(number, "the number of a failure", len(self._failed) - 1)]

    def _storage(self, number: object) -> torch.UntypedStorage:
        return self._storages[whole_number(number, "the number of a storage", len(self._storages) - 1)]

    # --- values ------------------------------------------------------------------------------------------------------

    def _value_at(self, number: object) -> object:
        return self._values[whole_number(number, "the number of a value", len(self._values) - 1)]

    def _slots(self, given: object) -> dict[int, object]:
        pairs = rows(given, "the slots", 2)
        if len(pairs) > self._max_handles:
            raise refuse(f"it holds {len(pairs)} values, and this worker allows {self._max_handles} a session")
        return {whole_number(slot, "a slot", 1 << 53, least=1): self._value_at(number) for slot, number in pairs}

    def _value(self, row: object) -> object:
        match row:
            case ["tensor", storage, *fields]:
                return self._tensor(self._storage(storage), fields)
            case ["failed", number]:
                return self._failure_at(number)
            case ["generator", kind, index, state]:
                made = torch.Generator(self._device(kind, index))
                set_state(made, _bits(state))
                return made
            case ["event", age]:
                return HostEvent(time.perf_counter() - real(age, "the age of an event"))
            case ["cuda event"]:
                return self._event()
            case ["list", numbers]:
                return [self._value_at(number) for number in rows(numbers, "a list")]
            case ["plain", value] if value is None or type(value) in (bool, int, float, complex, str):
                return value
            case ["sparse", layout, dtype, size, parts, is_sorted]:
                parts = [self._value_at(part) for part in rows(parts, "the parts of a tensor")]
                return self._sparse(layout, dtype, size, parts, is_sorted)
        raise refuse(f"it holds a value of an unknown kind, {row!r:.60}")

    def _tensor(self, storage: torch.UntypedStorage, fields: Row) -> torch.Tensor:
        d = decode_description(fields)
        sizes, strides = whole_numbers(list(d.size), "a size"), whole_numbers(list(d.stride), "a stride")
        offset = whole_number(d.offset, "an offset")
        if len(sizes) != len(strides) or len(sizes) > MAX_DIMENSIONS or d.layout is not torch.strided:
            raise refuse("a tensor has other strides than sizes, or too many")
        _check_dtype(d.dtype)
        # `set_` would make the storage larger.
        if max(torch_codec.storage_extent(sizes, strides, offset), 0) * d.dtype.itemsize > storage.nbytes():
            raise refuse("a tensor reaches beyond its storage")
        tensor = torch.empty(0, dtype=d.dtype, device=storage.device)
        tensor.set_(storage, offset, sizes, strides)
        if flag(d.conjugate, "a conjugate bit"):
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if flag(d.negative, "a negative bit") else tensor

    def _sparse(self, layout: object, dtype: object, size: object, parts: Row, is_sorted: object) -> torch.Tensor:
        self._state.values.gates.watch_indices()  # a dense tensor may lie in the same memory
        kind, sizes = LAYOUTS[text(layout, "a layout", 40)], whole_numbers(size, "a size")
        if not all(isinstance(part, torch.Tensor) for part in parts) or len(sizes) > MAX_DIMENSIONS:
            raise refuse("a sparse tensor has no tensors as its parts")
        if parts[-1].dtype != DTYPES[text(dtype, "a dtype", 40)]:
            raise refuse("a sparse tensor has values of another dtype than it should")
        if kind is torch.sparse_coo:
            indices, values = parts
            coalesced = flag(is_sorted, "whether a tensor is sorted")
            return torch.sparse_coo_tensor(
                indices, values, sizes, is_coalesced=coalesced, check_invariants=True, device=values.device
            )
        first, second, values = parts
        return torch.sparse_compressed_tensor(first, second, values, sizes, layout=kind, check_invariants=True)

    def _event(self) -> object:
        if not self._state.devices.has_cuda:
            raise refuse("it holds an event of a GPU, and this worker has none")
        event = torch.cuda.Event()
        event.record()
        return event

    def _generator_state(self, kind: object, index: object, state: object) -> tuple[tuple[str, int], torch.Tensor]:
        device = self._device(kind, index)
        bits = _bits(state)
        set_state(torch.Generator(device), bits)
        return (device.type, device.index or 0), bits

    # --- what runs commands ------------------------------------------------------------------------------------------

    def _define(self) -> None:
        state = self._state
        for definition, warns, is_forgotten, belief in rows(entry(self._document, "signatures"), "the operations", 4):
            number = state.ops.define_next(definition)
            signature = state.ops.signatures[number]
            signature.warns = flag(warns, "whether an operation warns")
            watch = decode_watch(belief, cuda=state.devices.has_cuda)
            if watch is not None:
                state.verification.watch(number, signature, watch)
            if flag(is_forgotten, "whether a compiled graph was forgotten"):
                state.ops.forget_program(number)

    def _add_graphs(self) -> None:
        document, graphs = self._document, self._state.graphs
        for row in rows(entry(document, "graphs"), "the graphs"):
            row = table(row, "a graph")
            number = whole_number(entry(row, "number"), "the number of a graph", 1 << 53)
            exports = whole_numbers(entry(row, "exports"), "what a graph makes", 1 << 53)
            modes = torch_modes.decode(entry(row, "modes"), cuda=self._state.devices.has_cuda)
            recording = Recording(number, rows(entry(row, "stream"), "a graph's commands"), exports, modes)
            pairs = rows(entry(row, "externals"), "what a graph reads", 2)
            recording.externals = {
                whole_number(slot, "a slot", 1 << 53): self._value_at(value) for slot, value in pairs
            }
            recording.dynamic = whole_numbers(entry(row, "dynamic"), "what a graph reads of others", 1 << 53)
            places = rows(entry(row, "places"), "the devices of a graph", 2)
            graphs.restore(recording, places, intact=flag(entry(row, "intact"), "whether a graph has run"))
        for slot, number in rows(entry(document, "graphs_of_slots"), "what graphs made", 2):
            graphs.fill(whole_number(slot, "a slot", 1 << 53), whole_number(number, "the number of a graph", 1 << 53))

    def _add_marks(self) -> None:
        document, values = self._document, self._state.values
        for graph, failed, memory in rows(entry(document, "not_replayed"), "what no replay made yet", 3):
            values.mark_not_replayed(
                whole_number(graph, "the number of a graph", 1 << 53), self._failure_at(failed), self._value_at(memory)
            )
        for storage, failed in rows(entry(document, "changes_that_failed"), "the changes that failed", 2):
            values.gates.mark_storage_failed(self._storage(storage), self._failure_at(failed))
        for shrunk, own, former in self._shrunk:
            shrunk.resize_(own)
            values.gates.mark_shrunk(shrunk, former)
        unreported = whole_numbers(
            entry(document, "unreported"), "the failures that were not told", len(self._failed) - 1
        )
        self._state.reports.unreported[:] = [self._failure_at(number) for number in unreported]


def _bits(state: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(data(state, "a random state", _MAX_GENERATOR_BYTES)), dtype=torch.uint8)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype in UNUSABLE_DTYPES:
        raise refuse(f"it holds a tensor of {dtype}, which no session can")
