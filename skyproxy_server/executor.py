"""Runs the commands of one session, in order, on the thread that calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import InferenceMismatchError, LimitExceededError, ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Buffer, Failure, Message, Reply, RequestId, Warned
from skyproxy.settings import Settings
from skyproxy.torch_codec import Description
from skyproxy_server.allocator import give_back_memory
from skyproxy_server.argument_checks import MAX_DIMENSIONS, UNUSABLE_DTYPES, check_device
from skyproxy_server.blobs import Uploads
from skyproxy_server.compiled import CompiledSignature
from skyproxy_server.controls import CONTROLS
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import Gate, Gates, storage_key
from skyproxy_server.global_modes import SessionModes
from skyproxy_server.graphs import Graphs
from skyproxy_server.kernel_warnings import KernelWarning, collect
from skyproxy_server.profiling import WorkerProfile
from skyproxy_server.random_state import RandomState
from skyproxy_server.signatures import Handler, Signature, Watch
from skyproxy_server.transfers import TransferCancelledError, Transfers

if TYPE_CHECKING:
    from skyproxy_server.functions.registry import Calls

_REMEMBERED_FAILURES = 100
_CONFORMED_SHAPES = 65_536
_REPORTED_WARNINGS = 64
"""How often a session is told of the same warning of one operation; each comes with the line that recorded it."""
_DIFFERENT_WARNINGS = 1000
_MAX_WARNING_CHARACTERS = 2000


class Executor:
    """The values and the op table of one session.

    Attributes:
        values: what each slot holds: a tensor, a generator, a `Failed`; slot 0 holds None.
        devices: the worker's devices, as announced to the client.
        modes: the session's own global modes of PyTorch.
        random: the session's own random state.
        unseen: failures that the client was not given as an answer yet.
        graphs: captured streams of commands.
        profile: what watches the session, else None.
        replaying: the number of the graph that is being replayed, else None; `values` is its scope then.
        handlers, signatures: by number, what runs each command, and what is known of each op.
        session: the name of the session; empty in tests.
        calls: the functions of this worker; None where it runs none.
        streams: the CUDA streams that the ops run on, one a device.
        has_cuda: whether any of the devices is one of CUDA.
    """

    def __init__(
        self, devices: list[dict[str, Any]], send: Callable[[Message], None], transfers: Transfers, settings: Settings
    ) -> None:
        self.values: dict[int, Any] = {0: None}
        self.devices = devices
        self.modes = SessionModes()
        self.random = RandomState(self)
        self.gates = Gates(self._idle)
        self.unseen: list[Failed] = []
        self.max_bytes = 0
        self.commands_done = 0
        self.graphs = Graphs(self)
        self.replaying: int | None = None
        self.profile: WorkerProfile | None = None
        self.session = ""
        self.calls: Calls | None = None
        self.streams: list[Any] = []
        self.has_cuda = any(row["type"] == "cuda" for row in devices)
        self._on_cpu = all(row["type"] == "cpu" for row in devices)
        self._send = send
        self._transfers = transfers
        self._settings = settings
        self._signatures: dict[int, Signature] = {}
        self._buffers: list[Buffer] = []
        self._sequence = 0
        self._warned: dict[tuple[str, str], int] = {}
        self._handlers: list[Handler | None] = [None] * commands.FIRST_SIGNATURE
        for number, handler in (
            (commands.DEFINE, self._define),
            (commands.EXPECT, self._expect),
            (commands.RELEASE, self._release),
            (commands.UPLOAD, self._upload),
            (commands.RECEIVE, self._receive),
            (commands.FETCH, self._fetch),
            (commands.DESCRIBE, self._describe),
            (commands.CALL, self._call),
            (commands.DO, self._do),
            (commands.REPLAY, self.graphs.replay),
        ):
            self._handlers[number] = handler
        self.handlers, self.signatures = self._handlers, self._signatures

    def run(self, batch: Batch) -> None:
        """Executes a batch. Ops that fail poison their results; everything else goes on.

        Raises:
            ProtocolError: the batch is malformed; the session cannot go on.
        """
        stream, values, handlers = batch.stream, self.values, self._handlers
        self._sequence = batch.sequence
        self._buffers = list(reversed(batch.buffers))
        position, end, done = 0, len(stream), 0
        while position < end:
            try:
                if self.gates:
                    while position < end and self.gates:
                        position = self._run_gated(stream, position)
                        done += 1
                else:
                    while position < end:
                        position = handlers[stream[position]](values, stream, position)
                        done += 1
                        if self.gates:
                            break
            except ProtocolError:
                raise
            except Exception as error:
                position = self._after_failure(stream, position, error)
        self.commands_done += done
        if self.gates:
            self.gates.open_finished()
        values[0] = None  # an output that nobody wants goes there
        if len(values) > self._settings.max_handles + 1:
            raise ProtocolError(f"the session holds more than {self._settings.max_handles} values")

    def _run_gated(self, stream: list[Any], position: int) -> int:
        at = position + 2 if stream[position] == commands.EXPECT else position
        signature = self._signatures.get(stream[at])
        if signature is not None:
            values = self.values
            self.gates.pass_through(
                [values.get(slot) for slot in signature.input_slots(stream, at)],
                [values.get(slot) for slot in signature.written_slots(stream, at)],
                sizes=not signature.views,
            )
        handler = self._handlers[stream[position]]
        assert handler is not None
        following: int = handler(self.values, stream, position)
        return following

    def end(self) -> None:
        """Forgets every value."""
        if self.profile is not None:
            self.profile.abandon()
        self.graphs.end()
        self.values.clear()
        self.gates = Gates()
        self.random.forget()
        give_back_memory()

    # --- failure -----------------------------------------------------------------------------------------------------

    def _after_failure(self, stream: list[Any], position: int, error: Exception) -> int:
        try:
            return self._failed(stream, position, error)
        except (TypeError, ValueError, KeyError, IndexError, RecursionError) as problem:
            raise ProtocolError(f"the command at {position} is malformed: {problem!r:.200}") from error

    def _failed(self, stream: list[Any], position: int, error: Exception) -> int:
        """Poisons what the failed op should have made, marks what it should have changed; the next op's position."""
        at = position
        number = stream[at]
        expected = None
        if number == commands.EXPECT:
            expected = stream[at + 1] if at + 1 < len(stream) else None
            at += 2
            number = stream[at] if at < len(stream) else -1
        signature = self._signatures.get(number)
        if signature is None or at + signature.width >= len(stream):
            known = number in commands.OPERANDS or signature is not None
            what = "is malformed" if known else "was never defined"
            raise ProtocolError(f"command {number} at {at} {what}: {error!r:.200}") from error
        if at != position:
            self._owe_check(signature, stream, position)
        return self.poison(signature, stream, at, error, expected)

    def poison(
        self, signature: Signature, stream: list[Any], at: int, error: Exception, expected: list[Any] | None
    ) -> int:
        """Poison the outputs of the op at `at`, and mark what it would have written; return the next op's position.

        Args:
            signature: the op's.
            stream: the commands.
            at: where the op stands.
            error: what went wrong.
            expected: what the client believes of its outputs and of what it writes, where the command says so.
        """
        inputs = [self.values.get(slot, _GONE) for slot in signature.input_slots(stream, at)]
        failed = error.failed if isinstance(error, PoisonedError) else None
        if failed is None:
            failed = next((value for value in inputs if isinstance(value, Failed)), None)
        if failed is None:
            if any(value is _GONE for value in inputs):
                error = ProtocolError(f"{signature.name} names a value that this session does not hold")
            failed = self.new_failure(error, signature.name, at)
        outputs, written = signature.output_slots(stream, at), signature.written_slots(stream, at)
        for slot in outputs:
            self.values[slot] = failed
        for slot in written:
            self.gates.mark_failed(self.values.get(slot), failed)
            if _emptied_if_without_memory(self.values.get(slot)):
                self.values[slot] = failed
        if written and expected is not None:
            # The client has changed what it believes of them when it recorded the op.
            may_change = not isinstance(error, InferenceMismatchError)
            for slot, description in zip(written, _decoded(expected)[len(outputs) :], strict=False):
                if not self._made_to_look(slot, description, allowed=may_change):
                    self.values[slot] = failed
        return at + 1 + signature.width

    def _made_to_look(self, slot: int, description: Description, *, allowed: bool) -> bool:
        """Make the tensor that a failed op was to resize or restride look as the client believes; return if it does.

        It keeps its memory, which grows if it must.

        Args:
            slot: where the tensor is.
            description: what it should look like.
            allowed: whether it may be changed.
        """
        value = self.values.get(slot)
        if not isinstance(value, torch.Tensor):
            return True  # poisoned anyway
        actual = torch_codec.describe(value)
        if actual == description or _same_but_idle_strides(actual, description):
            return True
        if not (allowed and _differs_in_place_only(actual, description)):
            return False
        extent = torch_codec.storage_extent(description.size, description.stride, description.offset)
        try:
            storage = value.untyped_storage()
            if extent * value.element_size() > storage.nbytes():
                storage.resize_(extent * value.element_size())
            value.as_strided_(description.size, description.stride, description.offset)
        except Exception:
            return False
        return True

    def new_failure(self, error: Exception, op: str, position: int, sequence: int | None = None) -> Failed:
        """Remembers a failure and tells the client at once, while it still knows which line recorded the command.

        Args:
            error: what went wrong.
            op: the command's name.
            position: where it stands in its batch.
            sequence: the batch; by default the one that is being executed.
        """
        failed = Failed(error, op, self._sequence if sequence is None else sequence, position)
        if self.replaying is not None:  # the position is in the graph's own stream
            failed.record["graph"] = self.replaying
        if len(self.unseen) < _REMEMBERED_FAILURES:
            self.unseen.append(failed)
        self._send(Failure(RequestId(0), failed.record))
        return failed

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Keep nothing from other sessions during the block, in which this one waits for its client."""
        with self.random.lent(), self.modes.idle():
            yield

    @property
    def blobs(self) -> Uploads | None:
        """Where this worker keeps uploads."""
        return self._transfers.blobs

    def quiet_failure(self, error: Exception) -> Failed:
        """What stands for a value that is not there, and fails whoever asks for it; until then, nobody is told."""
        return Failed(error, "", self._sequence, 0)

    def told(self, failed: Failed) -> None:
        """The client knows of this failure, or is just about to."""
        failed.delivered = True
        if failed in self.unseen:
            self.unseen.remove(failed)
        self.gates.delivered(failed)

    def deliver(self, request: int, failed: Failed) -> None:
        """Answers a question with this failure."""
        self.told(failed)
        self._send(Failure(RequestId(request), failed.record))

    def _answer(self, request: int, position: int, op: str, answer: Callable[[], None]) -> None:
        try:
            answer()
        except PoisonedError as error:
            self.deliver(request, error.failed)
        except ProtocolError:
            raise
        except Exception as error:
            self.deliver(request, Failed(error, op, self._sequence, position))

    def value(self, slot: int, *, writes: bool = False, sizes: bool = True) -> Any:
        """What a slot holds, ready to use.

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
            value = self.values[slot]
        except KeyError:
            raise ProtocolError(f"slot {slot} holds nothing") from None
        if isinstance(value, Failed):
            raise PoisonedError(value)
        if self.graphs.not_replayed and not writes:
            self.graphs.check_replayed(value)
        if self.gates:
            self.gates.pass_through([value], [value] if writes else [], sizes=sizes)
        return value

    # --- built-in commands -------------------------------------------------------------------------------------------

    def _define(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        number, definition = stream[position + 1], stream[position + 2]
        if number == commands.FIRST_SIGNATURE:  # the client starts its table anew
            del self._handlers[commands.FIRST_SIGNATURE :]
            self._signatures.clear()
        if number != len(self._handlers):
            raise ProtocolError(f"signature {number} is defined out of order, expected {len(self._handlers)}")
        if number - commands.FIRST_SIGNATURE >= self._settings.max_signatures:
            raise ProtocolError(f"more than {self._settings.max_signatures} signatures")
        kind = CompiledSignature if definition and definition[0] == commands.COMPILED else Signature
        signature = kind(definition, on_cpu=self._on_cpu)
        if signature.draws:
            signature.handler = self.random.guarded(signature.handler)
        self._signatures[number] = signature
        compiled = isinstance(signature, CompiledSignature)
        self._handlers.append(signature.handler if compiled else self._first_run(number, signature))
        return position + 3

    def _release(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        limbo = self.graphs.limbo
        if limbo is not None and self.replaying is None:
            limbo.update({slot: values[slot] for slot in stream[position + 1] if slot in values and slot not in limbo})
        for slot in stream[position + 1]:
            values.pop(slot, None)
        return position + 2

    def device_of(self, fields: Any) -> torch.device:
        """A device of this worker by `[type, index]`.

        Raises:
            UnsupportedOpError: the worker does not offer it.
        """
        kind, index = fields
        device = torch.device(kind, index) if index is not None else torch.device(kind)
        check_device(device, on_cpu=self._on_cpu)
        return device

    def _upload(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        slot, fields, device = stream[position + 1 : position + 4]
        description = torch_codec.decode_description(fields)
        buffer = self._buffers.pop() if self._buffers else b""
        check_packed(description)
        byte_count = torch_codec.byte_count(description)
        if byte_count != len(buffer):  # before there is memory for it
            raise ProtocolError(f"an upload of {byte_count} bytes came with {len(buffer)}")
        target = torch_codec.empty_packed(description)
        view = torch_codec.byte_view(target)
        if len(view):
            view[:] = buffer
        place = self.device_of(device)
        values[slot] = self._or_failure("upload", position, lambda: target if place.type == "cpu" else target.to(place))
        return position + 4

    def _receive(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        slot, fields, device, number = stream[position + 1 : position + 5]
        description = torch_codec.decode_description(fields)
        check_packed(description)
        if not torch_codec.is_dense(description.size, description.stride):
            raise ProtocolError("the bytes of an upload lie without gaps or overlaps")
        place = self.device_of(device)
        sequence = self._sequence

        def allocate() -> torch.Tensor:
            transfer = self._transfers.arrival(number, torch_codec.byte_count(description))
            if transfer.target is None:
                transfer.wait()  # raises: there was no memory, or nothing comes any more
            assert transfer.target is not None
            staging = torch.as_strided(transfer.target.view(description.dtype), description.size, description.stride)
            if place.type == "cpu":
                value = staging
            else:
                value = torch.empty_strided(description.size, description.stride, dtype=description.dtype, device=place)
                self._transfers.pass_on(transfer, value)

            def land() -> None:
                try:
                    if value is staging:
                        transfer.wait()
                    else:
                        transfer.settle(value, staging)
                except Exception as error:
                    # Nothing else can have this storage: whoever wanted it had to pass through here.
                    if values.get(slot) is value:
                        values[slot] = failed = self._upload_failure(error, sequence, position)
                    else:
                        failed = Failed(error, "upload", sequence, position)
                    raise PoisonedError(failed) from None

            self.gates.close(value, Gate(None, transfer.finished, land))
            return value

        try:
            values[slot] = allocate()
        except ProtocolError:
            raise
        except Exception as error:
            values[slot] = self._upload_failure(error, sequence, position)
        return position + 5

    def _upload_failure(self, error: Exception, sequence: int, position: int) -> Failed:
        if isinstance(error, TransferCancelledError):  # the client knows
            return Failed(error, "upload", sequence, position)
        return self.new_failure(error, "upload", position, sequence)

    def _or_failure(self, op: str, position: int, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ProtocolError:
            raise
        except Exception as error:
            return self.new_failure(error, op, position)

    def _fetch(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        request, slot, transfer = stream[position + 1 : position + 4]

        def answer() -> None:
            value = self.value(slot)
            tensor = packed(value)
            if not transfer:
                self._send(Reply(request, None, (torch_codec.byte_view(tensor.cpu()),)))
                return
            departure = self._transfers.depart(transfer, tensor)
            if storage_key(tensor) == storage_key(value):  # no copy was made: later writers must wait
                self.gates.close(tensor, Gate(None, departure.finished, departure.wait, blocks_reads=False))

        self._answer(request, position, "fetch", answer)
        return position + 4

    def _describe(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        request, outputs, inputs = stream[position + 1 : position + 4]

        def answer() -> None:
            tensors = [self.value(slot, sizes=False) for slot in outputs]
            held = [values.get(slot) for slot in inputs]
            keys = [storage_key(value) if isinstance(value, torch.Tensor) else None for value in held]

            def row(value: Any) -> list[Any]:
                if isinstance(value, list | tuple):
                    return ["list", [row(item) for item in value]]
                if not isinstance(value, torch.Tensor):
                    return [None, value]
                key = storage_key(value)
                alias = keys.index(key) if key is not None and key in keys else -1
                if value.is_nested:
                    return [torch_codec.encode_nested(value), alias]
                return [torch_codec.encode_description(torch_codec.describe(value)), alias]

            self._send(Reply(request, [row(tensor) for tensor in tensors]))

        self._answer(request, position, "describe", answer)
        return position + 4

    def _call(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        request, name, arguments = stream[position + 1 : position + 4]

        def answer() -> None:
            self._send(Reply(request, self._control(name)(self, *arguments)))

        self._answer(request, position, name, answer)
        return position + 4

    def _do(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        name, arguments = stream[position + 1 : position + 3]
        try:
            self._control(name)(self, *arguments)
        except ProtocolError:
            raise
        except PoisonedError:
            pass  # the failure is known already
        except Exception as error:
            self.new_failure(error, name, position)
        return position + 3

    @staticmethod
    def _control(name: str) -> Callable[..., Any]:
        try:
            return CONTROLS[name]
        except (KeyError, TypeError):
            raise ProtocolError(f"unknown control {name!r:.40}") from None

    # --- warnings ----------------------------------------------------------------------------------------------------

    def _first_run(self, number: int, signature: Signature) -> Handler:
        """Return a handler that listens for warnings, and makes way for the op's own if there are none."""

        def handler(values: dict[int, Any], stream: list[Any], position: int) -> int:
            following = self._run_listening(signature, values, stream, position)
            if not signature.warns and self._handlers[number] is handler:
                self._handlers[number] = signature.handler
            return following

        return handler

    def _run_listening(self, signature: Signature, values: dict[int, Any], stream: list[Any], position: int) -> int:
        """Run an op and tell the client of what its kernel warns of. An op that did so once is always listened to."""
        found: list[KernelWarning] = []
        try:
            return collect(lambda: signature.handler(values, stream, position), found)
        finally:
            if found:
                signature.warns = True
                self._report_warnings(signature.name, found, position)

    def _report_warnings(self, op: str, found: list[KernelWarning], position: int) -> None:
        for category, message in found:
            key = op, message
            if key not in self._warned and len(self._warned) >= _DIFFERENT_WARNINGS:
                continue
            self._warned[key] = self._warned.get(key, 0) + 1
            if self._warned[key] > _REPORTED_WARNINGS:
                continue
            place = {"sequence": self._sequence, "position": position}
            if self.replaying is not None:  # the position is in the graph's own stream
                place["graph"] = self.replaying
            self._send(Warned(category, message[:_MAX_WARNING_CHARACTERS], place))

    # --- verification ------------------------------------------------------------------------------------------------

    def _expect(self, values: dict[int, Any], stream: list[Any], position: int) -> int:
        """Runs the next op and holds it against what the client believes of it: first what it reads, then what it
        fills and what it wrote."""
        signature = self._signatures.get(stream[position + 2])
        if signature is None:
            raise ProtocolError("EXPECT must stand before an op")
        return self._verified(signature, values, stream, position + 2, stream[position + 1])

    def _verified(
        self, signature: Signature, values: dict[int, Any], stream: list[Any], at: int, described: list[Any]
    ) -> int:
        outputs = signature.output_slots(stream, at)
        written = signature.written_slots(stream, at)
        count = len(outputs) + len(written)
        if len(described) < count:
            raise ProtocolError(f"{signature.name} has {count} outputs, {len(described)} were described")
        expected = _decoded(described[:count])
        key = self._input_key(signature, stream, at)
        read = [values.get(slot) for slot in signature.input_slots(stream, at)]
        if len(described) > count:
            _check_inputs(signature.name, read, described[count:])
        memory = {storage_key(tensor) for tensor in read if isinstance(tensor, torch.Tensor)}
        following = self._run_listening(signature, values, stream, at)
        mended = False
        for number, (slot, description) in enumerate(zip([*outputs, *written], expected, strict=True)):
            if slot:
                fresh = number < len(outputs) and storage_key(values[slot]) not in memory
                mended |= _conform(values, slot, description, fresh=fresh, written=number >= len(outputs))
        if mended:
            self._conform_from_now_on(stream[at], signature, key, expected)
        return following

    def _input_key(self, signature: Signature, stream: list[Any], position: int) -> Hashable:
        """What the worker knows of an op's inputs that can shape its results."""
        looks = tuple(
            torch_codec.describe(value)
            if isinstance(value := self.values.get(slot), torch.Tensor) and not value.is_nested
            else None
            for slot in signature.all_input_slots(stream, position)
        )
        # Under other modes, other kernels run, which may lay out their results in another way.
        return looks, signature.inline_operands(stream, position), self.modes.record

    def _believed_key(self, signature: Signature, stream: list[Any], at: int, described: list[Any]) -> Hashable:
        """The same from what the client believes of the inputs; None if it did not say all of it."""
        count = len(signature.output_slots(stream, at)) + len(signature.written_slots(stream, at))
        rest = iter(described[count:])
        looks: list[Description | None] = []
        for slot in signature.all_input_slots(stream, at):
            if not isinstance(self.values.get(slot), torch.Tensor | Failed):
                looks.append(None)
                continue
            fields = next(rest, None)
            if fields is None:
                return None
            looks.append(torch_codec.decode_description(fields))
        if next(rest, None) is not None:
            return None
        return tuple(looks), signature.inline_operands(stream, at), self.modes.record

    def _owe_check(self, signature: Signature, stream: list[Any], position: int) -> None:
        """The op behind this EXPECT failed, so nothing was checked; the client will not say again what it expects.

        The next op with such inputs is checked in its place.
        """
        described, at = stream[position + 1], position + 2
        key = None
        with contextlib.suppress(ValueError, KeyError, TypeError):  # of a malformed description
            key = self._believed_key(signature, stream, at, described)
        if key is None:
            return
        owed = self._watched(stream[at], signature).owed
        if len(owed) >= _CONFORMED_SHAPES:
            del owed[next(iter(owed))]
        owed[key] = described

    def _conform_from_now_on(
        self, number: int, signature: Signature, key: Hashable, expected: list[Description]
    ) -> None:
        """From now on, this op on such inputs gives the strides that the client believes in."""
        shapes = self._watched(number, signature).conformed
        if len(shapes) >= _CONFORMED_SHAPES:
            raise LimitExceededError(f"{signature.name} needed its strides mended for {len(shapes)} shapes")
        shapes[key] = expected

    def _watched(self, number: int, signature: Signature) -> Watch:
        """What is done about an op beyond running it; from the first time on, its handler asks."""
        if signature.watch is None:
            signature.watch = Watch()
            self._handlers[number] = self._watching(number, signature, signature.watch)
        return signature.watch

    def _watching(self, number: int, signature: Signature, watch: Watch) -> Handler:
        def handler(values: dict[int, Any], stream: list[Any], position: int) -> int:
            key = self._input_key(signature, stream, position)
            owed = watch.owed.get(key)
            if owed is not None:
                following = self._verified(signature, values, stream, position, owed)
                watch.owed.pop(key, None)
                if not watch.owed and not watch.conformed:
                    signature.watch, self._handlers[number] = None, self._first_run(number, signature)
                return following
            expected = watch.conformed.get(key)
            run = partial(self._run_listening, signature) if signature.warns else signature.handler
            following = run(values, stream, position)
            if expected is not None:
                outputs = signature.output_slots(stream, position)
                slots = [*outputs, *signature.written_slots(stream, position)]
                for i, (slot, description) in enumerate(zip(slots, expected, strict=True)):
                    if slot:
                        _conform(values, slot, description, fresh=i < len(outputs), written=i >= len(outputs))
            return following

        return handler


_GONE = object()


def _decoded(expected: Any) -> list[Description]:
    """Decode the descriptions of an EXPECT command.

    Raises:
        ProtocolError: they are malformed.
    """
    try:
        return [torch_codec.decode_description(fields) for fields in expected]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"malformed descriptions: {expected!r:.100}") from error


def check_packed(description: Description) -> None:
    """Raises:
    ProtocolError: nothing that looks like this can be uploaded: sizes that are none, or strides with gaps or overlaps.
    """
    numbers = (*description.size, *description.stride)
    if len(description.size) != len(description.stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ProtocolError(f"no tensor has the sizes {description.size!r:.60} and strides {description.stride!r:.60}")
    if len(description.size) > MAX_DIMENSIONS or description.layout is not torch.strided:
        raise ProtocolError("an upload is a strided tensor of up to 64 dimensions")
    if description.dtype in UNUSABLE_DTYPES:
        raise ProtocolError(f"tensors of {description.dtype} cannot live on a worker")


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values on its device, in the strides in which they travel."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if torch_codec.is_dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous()


def _check_inputs(name: str, read: list[Any], believed: list[Any]) -> None:
    """Hold what an op reads against what the client believes of it.

    Raises:
        InferenceMismatchError: they differ; then what the client inferred from it would rest on nothing.
    """
    tensors = [value for value in read if isinstance(value, torch.Tensor | Failed)]
    for tensor, fields in zip(tensors, believed, strict=False):
        if isinstance(tensor, torch.Tensor):
            actual, expected = torch_codec.describe(tensor), torch_codec.decode_description(fields)
            if actual != expected:
                raise _mismatch(f"{name} was given", actual, expected)


def _conform(values: dict[int, Any], slot: int, expected: Description, *, fresh: bool, written: bool) -> bool:
    """Give the value in a slot the strides that the client believes in; return False if it had them.

    Strides of dimensions of size one, and of empty tensors, address nothing: there the same memory is looked at in
    another way. For others, a fresh value is copied.

    Args:
        fresh: whether the op made the value, with a memory of its own.
        written: whether the op changed the value in place.

    Raises:
        InferenceMismatchError: it differs in more than that.
    """
    value = values[slot]
    actual = torch_codec.describe(value) if isinstance(value, torch.Tensor) else None
    if actual == expected:
        return False
    if actual is not None and _same_but_idle_strides(actual, expected):
        place = expected.size, expected.stride, expected.offset
        if written:
            value.as_strided_(*place)
        else:
            values[slot] = torch.as_strided(value, *place)
        return True
    if fresh and actual is not None and _differs_in_strides_only(actual, expected):
        values[slot] = _restrided(value, expected)
        return True
    raise _mismatch("the operation gave", actual, expected)


def _mismatch(what: str, actual: Description | None, expected: Description) -> InferenceMismatchError:
    return InferenceMismatchError(
        f"{what} {actual}, but the client had inferred {expected}. This is a bug of skyproxy; please report it. "
        "Until then, compute this operation on the CPU: x.cpu()"
    )


def _differs_in_strides_only(actual: Description, expected: Description) -> bool:
    bits = actual.conjugate or actual.negative
    return not bits and actual._replace(stride=(), offset=0) == expected._replace(stride=(), offset=0)


def _emptied_if_without_memory(value: Any) -> bool:
    """Empty a tensor whose sizes reach beyond its memory; return if they did.

    PyTorch sets the sizes first, then fails to get the memory: whoever reads such a tensor reads the process's memory.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    extent = torch_codec.storage_extent(tuple(value.shape), value.stride(), int(value.storage_offset()))
    if extent * value.element_size() <= value.untyped_storage().nbytes():
        return False
    value.as_strided_((0,), (1,), 0)
    return True


def _differs_in_place_only(actual: Description, expected: Description) -> bool:
    """Whether both are strided tensors of one kind, so that one can be made of the other's memory."""
    return actual.layout is torch.strided and actual._replace(size=(), stride=(), offset=0) == expected._replace(
        size=(), stride=(), offset=0
    )


def _same_but_idle_strides(actual: Description, expected: Description) -> bool:
    """Whether both address the same elements of a memory: strides of dimensions of size one, and all of an empty
    tensor's, address nothing."""
    if 0 in actual.size:
        return actual._replace(stride=(), offset=0) == expected._replace(stride=(), offset=0)
    if actual._replace(stride=()) != expected._replace(stride=()):
        return False
    return all(n == 1 or a == e for n, a, e in zip(actual.size, actual.stride, expected.stride, strict=True))


def _restrided(tensor: torch.Tensor, description: Description) -> torch.Tensor:
    size, stride, offset, dtype = description[:4]
    if offset:
        memory = torch.zeros(torch_codec.storage_extent(size, stride, offset), dtype=dtype, device=tensor.device)
        target = memory.as_strided(size, stride, offset)
    else:
        target = torch.empty_strided(size, stride, dtype=dtype, device=tensor.device)
    return target.copy_(tensor)
