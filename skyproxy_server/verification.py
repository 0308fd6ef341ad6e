"""Ops held against what the client inferred of them, once for each new form; afterwards its belief is kept true."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import LimitExceededError, ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.commands import Handler
from skyproxy.torch_codec import Description
from skyproxy_server.failures import Failed
from skyproxy_server.gates import storage_key
from skyproxy_server.global_modes import SessionModes
from skyproxy_server.layouts import check_inputs, conform, decode_all
from skyproxy_server.op_table import OpTable
from skyproxy_server.signatures import OpWatch, Signature
from skyproxy_server.values import Values

_CONFORMED_SHAPES = 65_536


class Verification:
    """The checks of one session's ops: the handler of `EXPECT`, and those of ops that need more than being run."""

    def __init__(self, ops: OpTable, values: Values, modes: SessionModes) -> None:
        self._ops = ops
        self._values = values
        self._modes = modes

    def expect(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        """Run the next op and hold it against what the client believes of it.

        First what it reads, then what it fills and what it wrote.
        """
        at = commands.op_at(stream, position)
        signature = self._ops.signatures.get(stream[at])
        if signature is None:
            raise ProtocolError("EXPECT must stand before an op")
        return self._verify(signature, slots, stream, at, stream[position + 1])

    def owe_check(self, signature: Signature, stream: list[Any], position: int) -> None:
        """Remember that the op behind the EXPECT at `position` failed, so that nothing was checked.

        The client will not say again what it expects: the next op with such inputs is checked in its place.
        """
        described, at = stream[position + 1], commands.op_at(stream, position)
        key = None
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the description is malformed
            key = self._believed_key(signature, stream, at, described)
        if key is None:
            return
        owed = self._watch_of(stream[at], signature).owed
        if len(owed) >= _CONFORMED_SHAPES:
            del owed[next(iter(owed))]
        owed[key] = described

    def _verify(
        self, signature: Signature, slots: dict[int, object], stream: list[Any], at: int, described: list[object]
    ) -> int:
        filled = [*signature.output_slots(stream, at), *signature.written_slots(stream, at)]
        if len(described) < len(filled):
            raise ProtocolError(f"{signature.name} has {len(filled)} outputs, {len(described)} were described")
        given = [slots.get(slot) if slot else None for slot in signature.all_input_slots(stream, at)]
        if len(described) > len(filled):
            check_inputs(signature.name, given, described[len(filled) :])
        # What nearly all results need nothing of: what an op does not change can be looked at afterwards, too.
        before = self._looks_of(signature, stream, at, given) if signature.changes_inputs else None
        following = self._ops.run_listening(signature, slots, stream, at)
        if not all(not slot or _is_believed(slots[slot], fields) for slot, fields in zip(filled, described)):
            key, memory = before or self._looks_of(signature, stream, at, given)
            expected = decode_all(described[: len(filled)])
            count = len(signature.output_slots(stream, at))
            mended = False
            for number, (slot, description) in enumerate(zip(filled, expected, strict=True)):
                if slot:
                    value = slots[slot]
                    known = isinstance(value, torch.Tensor) and storage_key(value) in memory
                    fresh = number < count and not known
                    mended |= conform(slots, slot, description, fresh=fresh, written=number >= count)
            if mended:
                self._conform_from_now_on(stream[at], signature, key, expected)
        return following

    def _looks_of(
        self, signature: Signature, stream: list[object], at: int, given: list[object]
    ) -> tuple[Hashable, set[int | None]]:
        """Return the key of an op's inputs, and the memory that they lie in."""
        memory = {storage_key(tensor) for tensor in given if isinstance(tensor, torch.Tensor)}
        return self._key_of(signature, stream, at, given), memory

    def _input_key(self, signature: Signature, stream: list[object], position: int) -> Hashable:
        """Return what the worker knows of an op's inputs that can shape its results."""
        slots = self._values.slots
        given = [slots.get(slot) if slot else None for slot in signature.all_input_slots(stream, position)]
        return self._key_of(signature, stream, position, given)

    def _key_of(self, signature: Signature, stream: list[object], position: int, given: list[object]) -> Hashable:
        looks = tuple(
            torch_codec.describe(value) if isinstance(value, torch.Tensor) and not value.is_nested else None
            for value in given
        )
        # Other modes may choose other kernels, which may lay out their results differently.
        return looks, signature.inline_operands(stream, position), self._modes.record

    def _believed_key(self, signature: Signature, stream: list[object], at: int, described: list[Any]) -> Hashable:
        """Return the same from what the client believes of the inputs; None if it did not say all of it."""
        count = len(signature.output_slots(stream, at)) + len(signature.written_slots(stream, at))
        rest = iter(described[count:])
        looks: list[Description | None] = []
        for slot in signature.all_input_slots(stream, at):
            if not isinstance(self._values.slots.get(slot), torch.Tensor | Failed):
                looks.append(None)
                continue
            fields = next(rest, None)
            if fields is None:
                return None
            looks.append(torch_codec.decode_description(fields))
        if next(rest, None) is not None:
            return None
        return tuple(looks), signature.inline_operands(stream, at), self._modes.record

    def _conform_from_now_on(
        self, number: int, signature: Signature, key: Hashable, expected: list[Description]
    ) -> None:
        """Let this op, on such inputs, give the strides that the client believes in from now on."""
        shapes = self._watch_of(number, signature).restrided
        if len(shapes) >= _CONFORMED_SHAPES:
            raise LimitExceededError(f"{signature.name} needed its strides mended for {len(shapes)} shapes")
        shapes[key] = expected

    def watch(self, number: int, signature: Signature, watch: OpWatch) -> None:
        """Go on with what was found out about an op.

        Raises:
            LimitExceededError: that is more than is ever found out.
        """
        if len(watch.restrided) > _CONFORMED_SHAPES or len(watch.owed) > _CONFORMED_SHAPES:
            raise LimitExceededError(f"{signature.name} needed its strides mended for too many shapes")
        signature.watch = watch
        self._ops.handlers[number] = self._watching_handler(number, signature, watch)

    def _watch_of(self, number: int, signature: Signature) -> OpWatch:
        """Return what is done about an op beyond running it; from the first time on, its handler asks."""
        if signature.watch is None:
            signature.watch = OpWatch()
            self._ops.handlers[number] = self._watching_handler(number, signature, signature.watch)
        return signature.watch

    def _watching_handler(self, number: int, signature: Signature, watch: OpWatch) -> Handler:
        ops = self._ops

        def handler(slots: dict[int, object], stream: list[object], position: int) -> int:
            key = self._input_key(signature, stream, position)
            owed = watch.owed.get(key)
            if owed is not None:
                following = self._verify(signature, slots, stream, position, owed)
                watch.owed.pop(key, None)
                if not watch.owed and not watch.restrided:
                    signature.watch, ops.handlers[number] = None, ops.first_run(number, signature)
                return following
            expected = watch.restrided.get(key)
            run = partial(ops.run_listening, signature) if signature.warns else signature.handler
            following = run(slots, stream, position)
            if expected is not None:
                outputs = signature.output_slots(stream, position)
                filled = [*outputs, *signature.written_slots(stream, position)]
                for i, (slot, description) in enumerate(zip(filled, expected, strict=True)):
                    if slot:
                        conform(slots, slot, description, fresh=i < len(outputs), written=i >= len(outputs))
            return following

        return handler


def _is_believed(value: object, fields: object) -> bool:
    return isinstance(value, torch.Tensor) and torch_codec.is_described(value, fields)
