"""The values of one session on a worker: what each slot holds, and why some of it cannot be used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from skyproxy.errors import InferenceMismatchError, ProtocolError
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import Gates, storage_key
from skyproxy_server.layouts import decode_all, restore_look
from skyproxy_server.lost_context import raise_if_lost
from skyproxy_server.reports import Reports
from skyproxy_server.signatures import Signature

_GONE = object()


class Values:
    """The values in the slots of a session.

    Attributes:
        slots: a tensor, a generator, a `Failed`, by slot; slot 0 holds None. During a replay, those of the graph.
        gates: the storages that are not simply usable.
        deferred_releases: while the client captures, the values that it released since, by slot; else None.
        not_replayed: the storages of results that no replay made yet, each with its graph, an error and itself.
    """

    def __init__(
        self, reports: Reports, idle: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        """Begin with empty slots.

        Args:
            reports: tells the client of failures.
            idle: entered while the client's bytes are waited for.
        """
        self._reports = reports
        self.slots: dict[int, object] = {0: None}
        self.gates = Gates(idle)
        self.deferred_releases: dict[int, object] | None = None
        self.not_replayed: dict[int, tuple[int, Failed, object]] = {}

    def get(self, slot: int, *, writes: bool = False, sizes: bool = True) -> Any:
        """Return what a slot holds, ready to use.

        Args:
            slot: where it is.
            writes: whether its values or its storage will change; then bytes that are still leaving are waited for.
            sizes: whether its storage must be large enough for it.

        Raises:
            PoisonedError: the command that should have made or changed it failed.
            RuntimeError: its storage was made too small for it.
            ProtocolError: the slot holds nothing.
        """
        try:
            value = self.slots[slot]
        except KeyError:
            raise ProtocolError(f"slot {slot} holds nothing") from None
        if isinstance(value, Failed):
            raise PoisonedError(value)
        if self.not_replayed and not writes:
            self._check_replayed(value)
        if self.gates:
            self.gates.wait_until_usable([value], [value] if writes else [], sizes=sizes)
        return value

    def _check_replayed(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            entry = self.not_replayed.get(storage_key(value) or 0)
            if entry is not None:
                raise PoisonedError(entry[1])

    def mark_not_replayed(self, graph: int, failed: Failed, memory: object) -> None:
        """No replay has made what lies in this tensor's storage."""
        key = storage_key(memory) if isinstance(memory, torch.Tensor) else None
        if key is None:
            raise ProtocolError("what no replay has made lies in no memory")
        self.not_replayed[key] = (graph, failed, memory)

    @contextlib.contextmanager
    def scope(self, slots: dict[int, object], graph: int) -> Iterator[None]:
        """Let commands find other values during the block: those of the graph that is being replayed."""
        outer, self.slots, self._reports.graph = self.slots, slots, graph
        try:
            yield
        finally:
            self.slots, self._reports.graph = outer, None

    def release(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        """Forget values: the handler of `RELEASE`. While the client captures, its graph may still read them."""
        deferred_releases = self.deferred_releases
        if deferred_releases is not None and self._reports.graph is None:
            deferred_releases.update(
                {slot: slots[slot] for slot in stream[position + 1] if slot in slots and slot not in deferred_releases}
            )
        for slot in stream[position + 1]:
            slots.pop(slot, None)
        return position + 2

    def wait_for_gates(self, signature: Signature, stream: list[object], at: int) -> None:
        """Wait until what the op at `at` reads and writes may be used.

        Raises:
            PoisonedError: a change of it failed and the client has not been told yet, or its bytes never came.
            RuntimeError: a storage was made too small for its tensor.
        """
        slots = self.slots
        places = signature.single_inputs
        if places is not None and self.gates.let_dense_pass(slots, stream, at, places):
            return
        self.gates.wait_until_usable(
            [slots.get(slot) for slot in signature.input_slots(stream, at)],
            [slots.get(slot) for slot in signature.changed_slots(stream, at)],
            sizes=not signature.views,
            by_one_op=True,
            by_program=signature.is_program,
            follows_indices=signature.follows_indices,
        )

    def poison(
        self, signature: Signature, stream: list[object], at: int, error: Exception, expected: list[object] | None
    ) -> int:
        """Poison the outputs of the op at `at`, and mark what it would have written; return the next op's position.

        Args:
            signature: the op's.
            stream: the commands.
            at: where the op stands.
            error: what went wrong.
            expected: what the client believes of its outputs and of what it writes, where the command says so.
        """
        failed = self._cause(signature, stream, at, error)
        outputs, written = signature.output_slots(stream, at), signature.written_slots(stream, at)
        # A result may be for the slot of an argument, which others hold, too.
        given = {slot: self.slots.get(slot) for slot in signature.input_slots(stream, at)}
        for slot in outputs:
            self.slots[slot] = failed
        for slot in written:
            self.gates.mark_failed(given.get(slot), failed)
        for slot, value in given.items():  # also where a compiled graph does not say that it writes there
            if self.gates.empty_without_memory(value):
                self.gates.mark_failed(value, failed)
                self.slots[slot] = failed
        if written and expected is not None:
            # The client changed what it believes of them when it recorded the op.
            may_change = not isinstance(error, InferenceMismatchError)
            for slot, description in zip(written, decode_all(expected)[len(outputs) :], strict=False):
                if not restore_look(given.get(slot), description, allowed=may_change):
                    self.slots[slot] = failed
        return at + 1 + signature.width

    def cancel(
        self,
        signature: Signature,
        stream: list[object],
        at: int,
        made: Failed,
        changed: Failed,
        expected: list[object] | None,
    ) -> None:
        """Poison the outputs of the op at `at`, which is not begun, and mark what it would have written.

        Args:
            signature: the op's.
            stream: the commands.
            at: where the op stands.
            made: what stands for its results.
            changed: what marks the tensors that it would have changed; they keep their values.
            expected: what the client believes of its outputs and of what it writes, where the command says so.
        """
        slots, outputs = self.slots, signature.output_slots(stream, at)
        given = {slot: slots.get(slot) for slot in signature.input_slots(stream, at)}
        cause = next((value for value in given.values() if isinstance(value, Failed) and not value.was_cancelled), None)
        written = signature.written_slots(stream, at)
        slots.update((slot, cause or made) for slot in outputs if slot)
        for slot in written:
            self.gates.mark_failed(given.get(slot), cause or changed)
        if not written:
            return
        if expected is None:
            # A tensor that it might have resized does not look as the client believes.
            slots.update((slot, cause or changed) for slot in written if signature.fills_outs)
            return
        for slot, description in zip(written, decode_all(expected)[len(outputs) :], strict=False):
            if not restore_look(given.get(slot), description, allowed=True):
                slots[slot] = cause or changed

    def _cause(self, signature: Signature, stream: list[object], at: int, error: Exception) -> Failed:
        """Return the failure behind an error of the op at `at`: one that it was handed, or a new one."""
        if isinstance(error, PoisonedError):
            return error.failed
        inputs = [self.slots.get(slot, _GONE) for slot in signature.input_slots(stream, at)]
        for value in inputs:
            if isinstance(value, Failed):
                return value
        if any(value is _GONE for value in inputs):
            error = ProtocolError(f"{signature.name} names a value that this session does not hold")
        return self._reports.failure(error, signature.name, at)

    def mark_reported(self, failed: Failed) -> None:
        """Note that the client knows of this failure: what it should have changed is usable again."""
        self._reports.mark_seen(failed)
        self.gates.note_delivery(failed)

    def refuse(self, request: int, failed: Failed) -> None:
        """Answer a question with this failure."""
        self.mark_reported(failed)
        self._reports.refuse(request, failed)

    def answer(self, request: int, position: int, op: str, give: Callable[[], None]) -> None:
        """Call `give`, which answers a question; where it fails, that is the answer.

        Args:
            request: the question's number.
            position: where it stands in its batch.
            op: its name.
            give: sends the answer.

        Raises:
            ContextLostError: the CUDA context of the process is lost.
        """
        try:
            give()
        except PoisonedError as error:
            self.refuse(request, error.failed)
        except ProtocolError:
            raise
        except Exception as error:
            failed = Failed(error, op, self._reports.sequence, position)
            raise_if_lost(error, failed)
            self.refuse(request, failed)

    def forget(self) -> None:
        """Forget all of it: the session is over."""
        self.deferred_releases = None
        self.slots.clear()
        self.gates = Gates()
