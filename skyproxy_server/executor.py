"""Runs the commands of one session, in order, on the thread that calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Message
from skyproxy.settings import Settings
from skyproxy_server import graph_controls, name_controls
from skyproxy_server.cancelling import CommandSkipper
from skyproxy_server.controls import CONTROLS
from skyproxy_server.failures import Failed, PoisonedError, is_out_of_memory
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.lost_context import CONTEXT, ContextLostError
from skyproxy_server.reports import Deferred
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots import controls as snapshot_controls
from skyproxy_server.tensor_commands import TensorCommands
from skyproxy_server.transfers import Transfers

graph_controls.install()
name_controls.install()
snapshot_controls.install()


class Executor:
    """The loop over the commands of one session, and what becomes of those that fail.

    Attributes:
        state: the parts of the session.
        commands_done: how many commands were executed, up to the latest whole batch.
        make_room: called where memory is short; frees what nobody uses now, and returns whether there was any.
    """

    def __init__(
        self, devices: list[DeviceRow], send: Callable[[Message], None], transfers: Transfers, settings: Settings
    ) -> None:
        self.state = state = SessionState(devices, send, transfers, settings)
        self.commands_done = 0
        self.make_room: Callable[[], bool] = lambda: False
        self._values, self._ops, self._reports = state.values, state.ops, state.reports
        self._max_handles = settings.max_handles
        self._tensors = TensorCommands(state.values, state.reports, transfers, state.devices)
        self._verification = state.verification
        self._dropping = CommandSkipper(
            state.cancellation,
            state.ops,
            state.values,
            state.reports,
            state.graphs,
            self._verification.owe_check,
            self._after_failure,
        )
        state.ops.add_built_in(
            {
                **self._tensors.handlers,
                commands.EXPECT: self._verification.expect,
                commands.RELEASE: state.values.release,
                commands.CALL: self._call,
                commands.DO: self._do,
                commands.REPLAY: state.graphs.replay,
            }
        )

    def run(self, batch: Batch) -> None:
        """Execute a batch. Ops that fail poison their results, as those do that the client cancels; the rest goes on.

        Raises:
            ProtocolError: the batch is malformed; the session cannot go on.
            ContextLostError: nor can it without the CUDA context of the process, which is lost.
        """
        stream, slots, gates, handlers = batch.stream, self._values.slots, self._values.gates, self._ops.handlers
        closed = gates.closed
        self._reports.sequence = batch.sequence
        self._tensors.buffers = list(reversed(batch.buffers))
        position, end = 0, len(stream)
        done = 0
        cancellation = self.state.cancellation
        while position < end:
            if closed and cancellation.is_on:
                position = self._dropping.drop(stream, position)
                continue
            error = self._wait_for_gates(stream, position) if closed else None
            if error is None:
                position, count, error = commands.execute(stream, position, handlers, slots, closed)
                done += count
            if error is not None and not (is_out_of_memory(error) and self._can_run_again(stream, position)):
                position = self._after_failure(stream, position, error)
        self.commands_done += done
        if closed:
            gates.open_finished()
        slots[0] = None  # outputs that nobody wants are put there
        if len(slots) > self._max_handles + 1:
            raise ProtocolError(f"the session holds more than {self._max_handles} values")

    def end(self) -> None:
        """Forget every value."""
        self.state.end()

    def _wait_for_gates(self, stream: list[Any], position: int) -> Exception | None:
        """Wait until the command at `position` can run; return why it cannot."""
        try:
            at = commands.op_at(stream, position)
            signature = self._ops.signatures.get(stream[at])
            if signature is not None:
                self._values.wait_for_gates(signature, stream, at)
        except Exception as error:
            return error
        return None

    def _can_run_again(self, stream: list[Any], position: int) -> bool:
        """Return whether there is room now for the op at `position`, which found none and has changed nothing."""
        at = commands.op_at(stream, position)
        signature = self._ops.signatures.get(stream[at])
        unchanged = signature is not None and not signature.draws and not signature.changes_inputs
        return unchanged and self.make_room()

    def _after_failure(self, stream: list[object], position: int, error: Exception) -> int:
        """Poison what the command at `position` should have made; return the next one's position.

        Raises:
            ProtocolError: the command is malformed.
            ContextLostError: the CUDA context of the process is lost.
        """
        if isinstance(error, ProtocolError | ContextLostError):
            raise error
        try:
            return self._poison(stream, position, error)
        except (TypeError, ValueError, KeyError, IndexError, RecursionError) as problem:
            raise ProtocolError(f"the command at {position} is malformed: {problem!r:.200}") from error

    def _poison(self, stream: list[Any], position: int, error: Exception) -> int:
        at = commands.op_at(stream, position)
        expected = None
        if at != position:
            expected = stream[position + 1] if position + 1 < len(stream) else None
        number = stream[at] if at < len(stream) else -1
        signature = self._ops.signatures.get(number)
        if signature is None or at + signature.width >= len(stream):
            known = number in commands.OPERANDS or signature is not None
            what = "is malformed" if known else "was never defined"
            raise ProtocolError(f"command {number!r:.40} at {at} {what}: {error!r:.200}") from error
        if at != position:
            self._verification.owe_check(signature, stream, position)
        return self._values.poison(signature, stream, at, error, expected)

    # --- controls ----------------------------------------------------------------------------------------------------

    def _call(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        request, name, arguments = stream[position + 1 : position + 4]

        def give() -> None:
            result = _control(name)(self.state, *arguments)
            if isinstance(result, Deferred):
                self._defer(result, request, name, position)
            else:
                self._reports.reply(request, result)

        self._values.answer(request, position, name, give)
        return position + 4

    def _defer(self, answer: Deferred, request: int, name: str, position: int) -> None:
        """Let another thread answer a question, whose batch may be long over then."""
        reports, sequence = self._reports, self._reports.sequence

        def refuse(error: Exception) -> None:
            CONTEXT.note(error)
            reports.refuse(request, Failed(error, name, sequence, position))

        answer.tell(partial(reports.reply, request), refuse)

    def _do(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        name, arguments = stream[position + 1 : position + 3]
        try:
            _control(name)(self.state, *arguments)
        except (ProtocolError, ContextLostError):
            raise
        except PoisonedError as error:  # the failure is known already
            self._poison_results(name, arguments, error.failed)
        except Exception as error:
            self._poison_results(name, arguments, self._reports.failure(error, name, position))
        return position + 3

    def _poison_results(self, name: str, arguments: list[Any], failed: Failed) -> None:
        """Let the slots that a control should have filled hold its failure, and not what was there before."""
        _, fills = commands.RECORDABLE.get(name, ((), ()))
        for number in fills:
            filled = arguments[number]
            for slot in filled if isinstance(filled, list) else (filled,):
                self._values.slots[slot] = failed


def _control(name: str) -> Callable[..., object]:
    try:
        return CONTROLS[name]
    except (KeyError, TypeError):
        raise ProtocolError(f"unknown control {name!r:.40}") from None
