"""Captured streams of commands, kept decoded and run again by their number: what `torch.sky.graph` is on the worker.

A recording runs in a scope of its own: the values that it reads from outside are kept as they were when it was
captured, what it makes in between is gone when it ends, and what the client still holds is put back into the
session's slots, in the very memory where it was before if anything else looks at that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import LimitExceededError, ProtocolError
from skyproxy_server.controls import CONTROLS
from skyproxy_server.cuda_graphs import replayer_for
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import storage_key
from skyproxy_server.recordings import Recording, Step

if TYPE_CHECKING:
    from skyproxy_server.executor import Executor

_MAX_GRAPHS = 4096
_NOT_REPLAYED = "this tensor is made by a graph that was captured, but not replayed yet. Call g.replay() first."
_ABANDONED = "this tensor was made in a graph capture that was given up, so it never existed. Make it again."


class Graphs:
    """The recordings of one session.

    Attributes:
        limbo: while the client captures, the values that it released since; else None.
        not_replayed: the storages of results that no replay made yet, each with its graph, an error and itself.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._recordings: dict[int, Recording] = {}
        self._filled_by: dict[int, Recording] = {}
        self._deferred: list[int] = []
        self.limbo: dict[int, Any] | None = None
        self.not_replayed: dict[int, tuple[int, Failed, Any]] = {}

    def __len__(self) -> int:
        return len(self._recordings)

    # --- capture -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The client captures: what it releases meanwhile may be read by the recording, so it is kept in `limbo`."""
        if self.limbo is not None:
            raise ProtocolError("a capture begins inside another one")
        self.limbo = {}

    def _end_limbo(self) -> dict[int, Any]:
        limbo, self.limbo = self.limbo, None
        if limbo is None:
            raise ProtocolError("a capture ends that never began")
        return limbo

    def define(
        self, number: int, stream: list[Any], exports: list[Any], places: list[list[Any]], modes: dict[str, Any]
    ) -> None:
        """Ends a capture: keeps what was recorded. Nothing runs before the first replay.

        Args:
            number: the recording's name from now on.
            stream: its commands.
            exports: slots whose values the client holds, each with the tensor's description, or None.
            places: the devices that it computes on, each `[type, index]`.
            modes: PyTorch's global modes when the capture began; each replay runs under them.
        """
        limbo = self._end_limbo()
        executor = self._executor
        slots = [slot for slot, _ in exports]
        if len(self._recordings) >= _MAX_GRAPHS:
            executor.values.update(dict.fromkeys(slots, self._placeholder(_ABANDONED)))
            raise LimitExceededError(f"this session holds {_MAX_GRAPHS} graphs, the limit. Reset those not needed.")
        if number in self._recordings:
            raise ProtocolError(f"graph {number} exists already")
        recording = Recording(number, stream, slots, torch_modes.decode(modes, cuda=executor.has_cuda))
        for slot in recording.decode(executor.handlers, executor.signatures):
            if slot in self._filled_by:
                recording.dynamic.append(slot)
            else:
                value = limbo.get(slot, executor.values.get(slot))
                recording.externals[slot] = self._placeholder(_ABANDONED) if value is None else value
        self._recordings[number] = recording
        device = executor.device_of(places[0]) if len(places) == 1 else None
        for slot, fields in exports:
            executor.values[slot] = self._unfilled(number, fields, device)
            self._filled_by[slot] = recording
        recording.replayer = replayer_for(places, recording, executor.random)
        self._forget_deferred()

    def abort(self, slots: list[int]) -> None:
        """Ends a capture that failed; `slots` are held by tensors that it would have made."""
        self._end_limbo()
        self._executor.values.update(dict.fromkeys(slots, self._placeholder(_ABANDONED)))
        self._forget_deferred()

    def _unfilled(self, number: int, fields: Any, device: torch.device | None) -> Any:
        """What stands for a result before the first replay: memory of its own, so that views of it can be made.

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
        self.not_replayed[storage_key(memory) or 0] = (number, failed, memory)
        tensor = torch.as_strided(memory, description.size, description.stride, description.offset)
        if description.conjugate:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if description.negative else tensor

    def _placeholder(self, text: str) -> Failed:
        return self._executor.quiet_failure(RuntimeError(text))

    # --- replay ------------------------------------------------------------------------------------------------------

    def replay(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        """The handler of `REPLAY`."""
        recording = self._recordings.get(stream[position + 1])
        if recording is None:
            raise ProtocolError(f"graph {stream[position + 1]!r:.40} does not exist")
        with self._executor.modes.during(recording.modes):
            if recording.replayer is None or not self._inputs_are_ready(recording, values):
                made, _ = self._made(recording, values, False)
            else:
                made = recording.replayer.replay(
                    self._inputs(recording, values), lambda strict: self._made(recording, values, strict)
                )
        self._publish(values, made)
        if self.not_replayed:
            self._replayed(recording.number)
        return position + 2

    def _replayed(self, number: int) -> None:
        for key in [key for key, (graph, _, _) in self.not_replayed.items() if graph == number]:
            del self.not_replayed[key]

    def check_replayed(self, value: Any) -> None:
        """Raises:
        PoisonedError: the value is a result of a graph that was never replayed, or a view of one.
        """
        if isinstance(value, torch.Tensor):
            entry = self.not_replayed.get(storage_key(value) or 0)
            if entry is not None:
                raise PoisonedError(entry[1])

    def _inputs_are_ready(self, recording: Recording, values: dict[int, Any]) -> bool:
        """Waits for bytes on their way. False where an input is poisoned: then the list must be run, op by op."""
        inputs, gates = self._inputs(recording, values), self._executor.gates
        if any(isinstance(value, Failed) for value in inputs):
            return False
        try:
            if gates:
                gates.pass_through(inputs, inputs)
        except PoisonedError:
            return False
        return True

    def _inputs(self, recording: Recording, values: dict[int, Any]) -> list[Any]:
        return [*recording.externals.values(), *(values.get(slot) for slot in recording.dynamic)]

    def _made(self, recording: Recording, values: dict[int, Any], strict: bool) -> tuple[dict[int, Any], bool]:
        scope = self.run_list(recording, values, strict=strict)
        return {slot: scope.get(slot) for slot in recording.exports}, recording.intact

    def run_list(self, recording: Recording, values: dict[int, Any], *, strict: bool = False) -> dict[int, Any]:
        """Runs the recording command by command; what it left behind, by slot.

        Args:
            recording: what to run.
            values: the session's values.
            strict: whether the first failure is raised, in place of poisoning what depends on it.
        """
        executor = self._executor
        scope: dict[int, Any] = {0: None, **recording.externals}
        for slot in recording.dynamic:
            scope[slot] = values.get(slot)
        stream, steps, intact = recording.stream, iter(recording.steps), True
        executor.values, executor.replaying = scope, recording.number
        try:
            while True:
                step: Step | None = None
                try:
                    if executor.gates:
                        for step in steps:
                            self._pass_gates(step, scope, stream)
                            step.handler(scope, stream, step.position)
                    else:
                        for step in steps:
                            step.handler(scope, stream, step.position)
                    break
                except Exception as error:
                    intact = False
                    if strict or isinstance(error, ProtocolError) or step is None or step.signature is None:
                        raise
                    expected = stream[step.position + 1] if step.checked else None
                    executor.poison(step.signature, stream, step.position + 2 * step.checked, error, expected)
        finally:
            executor.values, executor.replaying = values, None
        if intact and not recording.intact:
            recording.settle(executor.handlers, executor.signatures)
        elif not intact:
            recording.intact = False
        return scope

    def _pass_gates(self, step: Step, scope: dict[int, Any], stream: list[Any]) -> None:
        if step.signature is not None and self._executor.gates:
            at = step.position + 2 * step.checked
            self._executor.gates.pass_through(
                [scope.get(slot) for slot in step.signature.input_slots(stream, at)],
                [scope.get(slot) for slot in step.signature.written_slots(stream, at)],
                sizes=not step.signature.views,
            )

    def _publish(self, values: dict[int, Any], made: dict[int, Any]) -> None:
        """Puts results where the client finds them; in the old memory where somebody else looks at it."""
        gates = self._executor.gates
        for slot, new in made.items():
            old = values.get(slot)
            if new is None:
                new = self._placeholder("this tensor is no longer made by its graph: a command before it failed.")
            if old is new:
                continue
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _seen_elsewhere(old):
                if _same_memory(old, new):
                    continue
                if old.shape == new.shape and old.dtype == new.dtype and old.layout == new.layout:
                    if gates:
                        gates.pass_through([old], [old])
                    old.copy_(new)
                    continue
            values[slot] = new

    # --- the end of a recording --------------------------------------------------------------------------------------

    def forget(self, number: int) -> None:
        """The client's graph is gone. Values that it made stay as they are, for tensors and for other recordings."""
        if self.limbo is not None:
            self._deferred.append(number)
            return
        recording = self._recordings.pop(number, None)
        if recording is None:
            return
        self._replayed(number)
        for slot in recording.exports:
            self._filled_by.pop(slot, None)
        for other in self._recordings.values():
            for slot in [slot for slot in other.dynamic if slot not in self._filled_by]:
                other.dynamic.remove(slot)
                other.externals[slot] = self._executor.values.get(slot)

    def _forget_deferred(self) -> None:
        numbers, self._deferred = self._deferred, []
        for number in numbers:
            self.forget(number)

    def report(self) -> dict[str, int]:
        """How many recordings there are, and how many of them run as CUDA graphs."""
        live = sum(r.replayer is not None and r.replayer.is_live for r in self._recordings.values())
        return {"graphs": len(self._recordings), "cuda_graphs": live}

    def end(self) -> None:
        """The session is over."""
        self._recordings.clear()
        self._filled_by.clear()
        self.limbo = None


# --- who looks at a tensor's memory ----------------------------------------------------------------------------------


def _use_count(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_OWN_USES = _use_count(torch.empty(1))


def _seen_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether anything but its slot holds the tensor or shares its memory. Call with one other reference to it."""
    if tensor.layout is not torch.strided:
        return False
    # The slot, the caller's variable, our parameter, and the argument of getrefcount.
    return sys.getrefcount(tensor) > 4 or _use_count(tensor) > _OWN_USES


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


# --- controls --------------------------------------------------------------------------------------------------------


def _control(function: Callable[..., Any]) -> Callable[..., Any]:
    CONTROLS[function.__name__] = function
    return function


@_control
def graph_begin(executor: Executor) -> None:
    """The client begins to capture."""
    executor.graphs.begin()


@_control
def graph_define(
    executor: Executor,
    number: int,
    stream: list[Any],
    exports: list[Any],
    places: list[Any],
    modes: dict[str, Any],
) -> None:
    """Keep a graph that the client has captured."""
    executor.graphs.define(number, stream, exports, places, modes)


@_control
def graph_abort(executor: Executor, slots: list[int]) -> None:
    """The client gave a capture up."""
    executor.graphs.abort(slots)


@_control
def graph_forget(executor: Executor, number: int) -> None:
    """The client's graph is gone."""
    executor.graphs.forget(number)


@_control
def graph_report(executor: Executor) -> dict[str, int]:
    """What the session's graphs are."""
    return executor.graphs.report()


__all__ = ["Graphs"]
