"""A session as a document and its storages: what `save_snapshot` writes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from skyproxy.errors import SnapshotError, SnapshotNotNowError
from skyproxy.snapshots.documents import FORMAT, Row, Table
from skyproxy.torch_codec import DTYPE_NAMES, LAYOUT_NAMES, describe, encode_description
from skyproxy.torch_versions import software
from skyproxy_server.controls import Graph, HostEvent
from skyproxy_server.failures import Failed
from skyproxy_server.recordings import Recording
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.beliefs import encode_watch
from skyproxy_server.snapshots.names import named_part

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(slots=True)
class Captured:
    """A session at the boundary of a batch.

    Attributes:
        document: everything but the bytes of tensors.
        storages: the bytes: one-dimensional uint8 tensors that lie in the session's own memory.
    """

    document: Table
    storages: list[torch.Tensor]


def capture(state: SessionState, only: list[int] | None = None) -> Captured:
    """Return what the session is now. Call it on the session's thread; the bytes change with its next command.

    Args:
        state: the session.
        only: the slots of tensors to which this is limited, without operations and graphs: what another program can
            take into a session of its own.

    Raises:
        SnapshotNotNowError: something runs that no snapshot can hold.
        SnapshotError: a value is of a kind that no snapshot can hold.
    """
    if state.values.deferred_releases is not None:
        raise SnapshotNotNowError("a graph is being captured. Take the snapshot when the capture has ended")
    if state.profile is not None:
        raise SnapshotNotNowError("a profile is being recorded. Take the snapshot when it has ended")
    if state.cancellation.is_on:
        raise SnapshotNotNowError("operations are being cancelled. Take the snapshot afterwards")
    if state.calls is not None and state.calls.use_tensors(state.identity):
        raise SnapshotNotNowError(
            "a function runs that was given tensors of this session. Take the snapshot afterwards"
        )
    state.values.gates.wait_for_arrivals()
    return _Capture(state).capture_all() if only is None else _Capture(state).capture_slots(only)


class _Capture:
    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._storages: dict[int, int] = {}
        self._bytes: list[torch.Tensor] = []
        self._values: dict[int, int] = {}
        self._rows: list[Row] = []
        self._failures: dict[int, int] = {}
        self._failed: list[Row] = []
        self._kept_alive: list[object] = []  # so that no identity is given twice
        self._defined = {id(signature) for signature in state.ops.signatures.values()}

    def capture_all(self) -> Captured:
        state = self._state
        values = state.values
        parts = {
            "slots": [[slot, self.value(value)] for slot, value in values.slots.items() if slot],
            "graphs": [self._graph(recording) for recording in state.graphs.recordings],
            "graphs_of_slots": [[slot, one.number] for slot, one in state.graphs.recordings_by_slot.items()],
            "not_replayed": [
                [graph, self._failure(failed), self.value(memory)]
                for graph, failed, memory in values.not_replayed.values()
            ],
            "changes_that_failed": [
                [self._storage(storage), self._failure(failed)] for storage, failed in values.gates.failed_changes()
            ],
            "shrunk": [[self._storage(storage), former] for storage, former in values.gates.shrunk()],
            "unreported": [self._failure(failed) for failed in state.reports.unreported],
            **named_part(state.names, self.value),
        }
        return self._build_capture({"signatures": self._signatures(), **parts}, _places(state))

    def capture_slots(self, slots: list[int]) -> Captured:
        """The tensors of some slots, and the random states of their devices."""
        gates = self._state.values.gates
        pairs = [[slot, self.value(self._require_value(slot))] for slot in slots]
        ours = self._storages
        parts: Table = {key: [] for key in ("signatures", "graphs", "graphs_of_slots", "not_replayed", "unreported")}
        parts["slots"] = pairs
        failed, shrunk = gates.failed_changes(), gates.shrunk()
        parts["changes_that_failed"] = [
            [ours[key._cdata], self._failure(mark)] for key, mark in failed if key._cdata in ours
        ]
        parts["shrunk"] = [[ours[key._cdata], former] for key, former in shrunk if key._cdata in ours]
        used = {(storage.device.type, storage.device.index or 0) for storage in self._bytes}
        return self._build_capture(parts, [place for place in _places(self._state) if place in used])

    def _require_value(self, slot: int) -> torch.Tensor:
        value = self._state.values.slots.get(slot)
        if isinstance(value, Failed):
            raise SnapshotError(f"a value that is to be saved does not exist: {value.record['message']!s:.300}")
        if not isinstance(value, torch.Tensor):
            raise SnapshotError(f"a value that is to be saved is a {type(value).__name__}, and no tensor")
        return value

    def _build_capture(self, parts: Table, places: list[tuple[str, int]]) -> Captured:
        state, ours = self._state, software(str(torch.__version__))
        document = {
            "format": FORMAT,
            "skyproxy": ours["skyproxy"],
            "torch": ours["torch"],
            "devices": [list(place) for place in places],
            "sequence": state.reports.sequence,
            "random": self._random(places),
            "modes": dict(state.modes.record),
            "cancellations": state.cancellation.latest_mark,
            "max_bytes": state.max_bytes,
            "storages": [[t.numel(), *_place(t.device)] for t in self._bytes],
            "values": self._rows,
            "failures": self._failed,
            **parts,
        }
        return Captured(document, self._bytes)

    # --- values ------------------------------------------------------------------------------------------------------

    def value(self, value: object) -> int:
        """The number of a value's row; one that is met again has the same."""
        known = self._values.get(id(value))
        if known is not None:
            return known
        row = self._row(value)
        self._kept_alive.append(value)
        number = self._values[id(value)] = len(self._rows)
        self._rows.append(row)
        return number

    def _row(self, value: object) -> Row:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Failed):
            return ["failed", self._failure(value)]
        if isinstance(value, torch.Generator):
            return ["generator", *_place(value.device), _state_of(value)]
        if isinstance(value, HostEvent):
            return ["event", time.perf_counter() - value]
        if isinstance(value, list | tuple):
            return ["list", [self.value(item) for item in value]]
        if type(value) in _PLAIN:
            return ["plain", value]
        if isinstance(value, torch.cuda.Event):
            return ["cuda event"]
        if isinstance(value, Graph):
            raise SnapshotNotNowError(
                "the worker keeps derivatives of an operation on nested tensors. Take the snapshot after backward()"
            )
        raise SnapshotError(f"this session holds a {type(value).__name__}, which no snapshot can hold")

    def _tensor(self, tensor: torch.Tensor) -> Row:
        if tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized"
            raise SnapshotError(f"this session holds a {kind} tensor, which no snapshot can hold yet. Delete it first")
        if tensor.layout is torch.strided:
            return ["tensor", self._storage(tensor.untyped_storage()), *encode_description(describe(tensor))]
        layout, size, dtype = LAYOUT_NAMES[tensor.layout], list(tensor.shape), DTYPE_NAMES[tensor.dtype]
        if tensor.layout is torch.sparse_coo:
            parts, sorted_ = [tensor._indices(), tensor._values()], tensor.is_coalesced()
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts, sorted_ = [tensor.crow_indices(), tensor.col_indices(), tensor.values()], True
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts, sorted_ = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()], True
        else:
            raise SnapshotError(f"this session holds a tensor of layout {layout}, which no snapshot can hold")
        return ["sparse", layout, dtype, size, [self.value(part) for part in parts], sorted_]

    def _storage(self, storage: torch.UntypedStorage) -> int:
        number = self._storages.get(storage._cdata)
        if number is None:
            number = self._storages[storage._cdata] = len(self._bytes)
            self._bytes.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return number

    def _failure(self, failed: Failed) -> int:
        number = self._failures.get(id(failed))
        if number is None:
            number = self._failures[id(failed)] = len(self._failed)
            self._failed.append([failed.record, failed.delivered])
            self._kept_alive.append(failed)
        return number

    # --- what runs commands ------------------------------------------------------------------------------------------

    def _signatures(self) -> list[Row]:
        ops = self._state.ops
        return [
            [ops.definitions[number], signature.warns, signature.is_forgotten, encode_watch(signature.watch)]
            for number, signature in ops.signatures.items()
        ]

    def _graph(self, recording: Recording) -> Table:
        for step in recording.steps:
            if step.signature is not None and id(step.signature) not in self._defined:
                raise SnapshotError("this session holds a graph of operations that were defined anew. Capture it again")
        return {
            "number": recording.number,
            "stream": recording.stream,
            "exports": recording.exports,
            "modes": dict(recording.modes),
            "externals": [[slot, self.value(value)] for slot, value in recording.externals.items()],
            "dynamic": recording.dynamic,
            "places": recording.places,
            "intact": recording.intact,
        }

    def _random(self, places: list[tuple[str, int]]) -> list[Row]:
        random = self._state.random
        with random.exclusive():
            return [[*place, _state_of(random.generator(*place))] for place in places]


def _places(state: SessionState) -> list[tuple[str, int]]:
    return [(row["type"], row["index"] or 0) for row in state.devices]


def _place(device: torch.device) -> Row:
    return [device.type, device.index or 0]


def _state_of(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().tolist())
