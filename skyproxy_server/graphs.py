"""Captured streams of commands, kept decoded and run again by their number: what `torch.sky.graph` is on the worker.

A recording runs in a scope of its own: the values that it reads from outside are kept as they were when it was
captured, what it makes in between is gone when it ends, and what the client still holds is put back into the
session's slots, in the very memory where it was before if anything else looks at that.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import LimitExceededError, ProtocolError
from skyproxy.protocol import commands
from skyproxy_server.cuda_graphs import replayer_for
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import storage_key
from skyproxy_server.global_modes import SessionModes
from skyproxy_server.op_table import OpTable
from skyproxy_server.random_state import RandomState
from skyproxy_server.recordings import Recording, Step
from skyproxy_server.reports import Reports
from skyproxy_server.values import Values

_MAX_GRAPHS = 4096
_NOT_REPLAYED = "this tensor is made by a graph that was captured, but not replayed yet. Call g.replay() first."
_ABANDONED = "this tensor was made in a graph capture that was given up, so it never existed. Make it again."


class Graphs:
    """The recordings of one session."""

    def __init__(
        self,
        values: Values,
        ops: OpTable,
        reports: Reports,
        modes: SessionModes,
        random: RandomState,
        devices: WorkerDevices,
    ) -> None:
        self._values = values
        self._ops = ops
        self._reports = reports
        self._modes = modes
        self._random = random
        self._devices = devices
        self._recordings: dict[int, Recording] = {}
        self._recordings_by_slot: dict[int, Recording] = {}
        self._deferred: list[int] = []

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def recordings(self) -> list[Recording]:
        """The recordings, in the order in which they were captured."""
        return list(self._recordings.values())

    @property
    def recordings_by_slot(self) -> dict[int, Recording]:
        """The recording whose replays fill a slot, by slot."""
        return self._recordings_by_slot

    # --- capture -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a capture: what the client releases meanwhile may be read by the recording, so it is kept."""
        if self._values.deferred_releases is not None:
            raise ProtocolError("a capture begins inside another one")
        self._values.deferred_releases = {}

    def _end_deferring(self) -> dict[int, object]:
        deferred_releases, self._values.deferred_releases = self._values.deferred_releases, None
        if deferred_releases is None:
            raise ProtocolError("a capture ends that never began")
        return deferred_releases

    def define(
        self,
        number: int,
        stream: list[object],
        exports: list[Any],
        places: list[list[object]],
        modes: dict[str, object],
    ) -> None:
        """Ends a capture: keeps what was recorded. Nothing runs before the first replay.

        Args:
            number: the recording's name from now on.
            stream: its commands.
            exports: slots whose values the client holds, each with the tensor's description, or None.
            places: the devices that it computes on, each `[type, index]`.
            modes: PyTorch's global modes when the capture began; each replay runs under them.
        """
        deferred_releases = self._end_deferring()
        held = self._values.slots
        slots = [slot for slot, _ in exports]
        if len(self._recordings) >= _MAX_GRAPHS:
            held.update(dict.fromkeys(slots, self._placeholder(_ABANDONED)))
            raise LimitExceededError(f"this session holds {_MAX_GRAPHS} graphs, the limit. Reset those not needed.")
        if number in self._recordings:
            raise ProtocolError(f"graph {number} already exists")
        recording = Recording(number, stream, slots, torch_modes.decode(modes, cuda=self._devices.has_cuda))
        for slot in recording.decode(self._ops.handlers, self._ops.signatures, self._ops.widths):
            if slot in self._recordings_by_slot:
                recording.dynamic.append(slot)
            else:
                value = deferred_releases.get(slot, held.get(slot))
                recording.externals[slot] = self._placeholder(_ABANDONED) if value is None else value
        self._recordings[number] = recording
        device = self._devices.find(places[0]) if len(places) == 1 else None
        for slot, fields in exports:
            held[slot] = self._find_unfilled(number, fields, device)
            self._recordings_by_slot[slot] = recording
        recording.places = places
        recording.replayer = replayer_for(places, recording, self._random)
        self._forget_deferred()

    def restore(self, recording: Recording, places: list[list[object]], *, intact: bool) -> None:
        """Keep a recording that another session captured.

        Args:
            recording: its stream is not decoded yet; what it reads from outside is there.
            places: the devices that it computes on.
            intact: whether its commands succeeded there, so that they need not be checked any more.

        Raises:
            ProtocolError: it reads what is not there, or cannot be one of ours.
            LimitExceededError: there are too many.
        """
        if len(self._recordings) >= _MAX_GRAPHS or recording.number in self._recordings:
            raise LimitExceededError(f"graph {recording.number} is there already, or one too many")
        outside = recording.decode(self._ops.handlers, self._ops.signatures, self._ops.widths)
        if not recording.externals.keys() | set(recording.dynamic) >= set(outside):
            raise ProtocolError(f"graph {recording.number} reads what nobody has")
        for place in places:
            self._devices.find(place)
        recording.places = places
        recording.replayer = replayer_for(places, recording, self._random)
        if intact:
            recording.settle(self._ops.handlers, self._ops.signatures)
        self._recordings[recording.number] = recording

    def fill(self, slot: int, number: int) -> None:
        """Note that the replays of a recording fill a slot.

        Raises:
            KeyError: there is no such recording.
        """
        self._recordings_by_slot[slot] = self._recordings[number]

    def abort(self, slots: list[int]) -> None:
        """Ends a capture that failed; `slots` are held by tensors that it would have made."""
        self._end_deferring()
        self._values.slots.update(dict.fromkeys(slots, self._placeholder(_ABANDONED)))
        self._forget_deferred()

    def _find_unfilled(self, number: int, fields: Any, device: torch.device | None) -> Any:
        """Return what stands for a result before the first replay: memory of its own, so that views of it can be made.

        Its values cannot be asked for, see `not_replayed`; what is computed of them is not a number.
        """
        failed = self._placeholder(_NOT_REPLAYED)
        description = torch_codec.decode_description(fields) if fields is not None else None
        if device is None or description is None or description.layout is not torch.strided:
            return failed
        extent = torch_codec.storage_extent(description.size, description.stride, description.offset)
        memory = torch.zeros(max(extent, description.offset), dtype=description.dtype, device=device)
        if description.dtype.is_floating_point or description.dtype.is_complex:
            memory.fill_(float("nan"))
        self._values.not_replayed[storage_key(memory) or 0] = (number, failed, memory)
        tensor = torch.as_strided(memory, description.size, description.stride, description.offset)
        if description.conjugate:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if description.negative else tensor

    def _placeholder(self, text: str) -> Failed:
        return self._reports.silent_failure(RuntimeError(text))

    # --- replay ------------------------------------------------------------------------------------------------------

    def replay(self, values: dict[int, object], stream: list[Any], position: int) -> int:
        """The handler of `REPLAY`."""
        recording = self._recordings.get(stream[position + 1])
        if recording is None:
            raise ProtocolError(f"graph {stream[position + 1]!r:.40} does not exist")
        with self._modes.use_for_block(recording.modes):
            if recording.replayer is None or not self._inputs_are_ready(recording, values):
                made, _ = self._make(recording, values, False)
            else:
                made = recording.replayer.replay(
                    self._inputs(recording, values), lambda strict: self._make(recording, values, strict)
                )
        self._values.gates.note_writes(made.values())
        if self._values.not_replayed:
            self._replay(recording.number)  # first: it holds their memory, which counts as somebody who looks at it
        self._publish(values, made)
        return position + 2

    def cancel(self, number: int, changed: Failed) -> None:
        """Mark what a replay would have changed, which is not begun: its results, and what it writes to.

        Raises:
            ProtocolError: there is no such graph.
        """
        recording = self._recordings.get(number)
        if recording is None:
            raise ProtocolError(f"graph {number!r:.40} does not exist")
        held, gates = self._values.slots, self._values.gates
        for slot in recording.exports:
            gates.mark_failed(held.get(slot), changed)
        for step in recording.steps:
            if step.signature is None:
                continue
            at = commands.op_at(recording.stream, step.position)
            for slot in step.signature.written_slots(recording.stream, at):
                value = recording.externals.get(slot)
                gates.mark_failed(held.get(slot) if slot in recording.dynamic else value, changed)

    def _replay(self, number: int) -> None:
        for key in [key for key, (graph, _, _) in self._values.not_replayed.items() if graph == number]:
            del self._values.not_replayed[key]

    def _inputs_are_ready(self, recording: Recording, values: dict[int, object]) -> bool:
        """Waits for bytes on their way. False where an input is poisoned: then the list must be run, op by op."""
        inputs, gates = self._inputs(recording, values), self._values.gates
        if any(isinstance(value, Failed) for value in inputs):
            return False
        try:
            if gates:
                gates.wait_until_usable(inputs, inputs)
        except PoisonedError:
            return False
        return True

    def _inputs(self, recording: Recording, values: dict[int, object]) -> list[object]:
        return [*recording.externals.values(), *(values.get(slot) for slot in recording.dynamic)]

    def _make(self, recording: Recording, values: dict[int, object], strict: bool) -> tuple[dict[int, object], bool]:
        scope = self.run_list(recording, values, strict=strict)
        return {slot: scope.get(slot) for slot in recording.exports}, recording.intact

    def run_list(self, recording: Recording, values: dict[int, object], *, strict: bool = False) -> dict[int, object]:
        """Runs the recording command by command; what it left behind, by slot.

        Args:
            recording: what to run.
            values: the session's values.
            strict: whether the first failure is raised, in place of poisoning what depends on it.
        """
        ops, closed = self._ops, self._values.gates.closed
        scope: dict[int, object] = {0: None, **recording.externals}
        for slot in recording.dynamic:
            scope[slot] = values.get(slot)
        stream, steps, intact = recording.stream, iter(recording.steps), True
        with self._values.scope(scope, recording.number):
            while True:
                step: Step | None = None
                try:
                    for step in steps:
                        if closed:  # looked at before each: a step may make a storage smaller
                            self._wait_for_gates(step, stream)
                        step.handler(scope, stream, step.position)
                    break
                except Exception as error:
                    intact = False
                    if strict or isinstance(error, ProtocolError) or step is None or step.signature is None:
                        raise
                    expected = stream[step.position + 1] if step.checked else None
                    at = commands.op_at(stream, step.position)
                    self._values.poison(step.signature, stream, at, error, expected)
        if intact and not recording.intact:
            recording.settle(ops.handlers, ops.signatures)
        elif not intact:
            recording.intact = False
        return scope

    def _wait_for_gates(self, step: Step, stream: list[object]) -> None:
        if step.signature is not None:
            self._values.wait_for_gates(step.signature, stream, commands.op_at(stream, step.position))

    def _publish(self, values: dict[int, object], made: dict[int, object]) -> None:
        """Puts results where the client finds them; in the old memory where somebody else looks at it."""
        gates = self._values.gates
        for slot, new in made.items():
            old = values.get(slot)
            if new is None:
                new = self._placeholder("this tensor is no longer made by its graph: a command before it failed.")
            if old is new:
                continue
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _is_shared(old):
                if _same_memory(old, new):
                    continue
                if old.shape == new.shape and old.dtype == new.dtype and old.layout == new.layout:
                    if gates:
                        gates.wait_until_usable([old], [old])
                    old.copy_(new)
                    continue
            values[slot] = new

    # --- the end of a recording --------------------------------------------------------------------------------------

    def forget(self, number: int) -> None:
        """The client's graph is gone. Values that it made stay as they are, for tensors and for other recordings."""
        if self._values.deferred_releases is not None:
            self._deferred.append(number)
            return
        recording = self._recordings.pop(number, None)
        if recording is None:
            return
        self._replay(number)
        for slot in recording.exports:
            self._recordings_by_slot.pop(slot, None)
        for other in self._recordings.values():
            for slot in [slot for slot in other.dynamic if slot not in self._recordings_by_slot]:
                other.dynamic.remove(slot)
                other.externals[slot] = self._values.slots.get(slot)

    def _forget_deferred(self) -> None:
        numbers, self._deferred = self._deferred, []
        for number in numbers:
            self.forget(number)

    def report(self) -> dict[str, int]:
        """Return how many recordings there are, and how many of them run as CUDA graphs."""
        live = sum(r.replayer is not None and r.replayer.is_live for r in self._recordings.values())
        return {"graphs": len(self._recordings), "cuda_graphs": live}

    def end(self) -> None:
        """The session is over."""
        self._recordings.clear()
        self._recordings_by_slot.clear()


# --- who looks at a tensor's memory ----------------------------------------------------------------------------------


def _use_count(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_OWN_USES = _use_count(torch.empty(1))


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether anything but its slot holds the tensor or shares its memory. Call with one more reference."""
    if tensor.layout is not torch.strided:
        return False
    # The slot, the caller's variable, our parameter, and the argument of getrefcount.
    return sys.getrefcount(tensor) > 4 or _use_count(tensor) > _OWN_USES


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
