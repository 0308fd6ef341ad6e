"""The commands that a session can run, by number: the built-in ones, and the ops that its client has defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.commands import Handler
from skyproxy_server.compiled import CompiledSignature
from skyproxy_server.gates import Gates
from skyproxy_server.kernel_warnings import KernelWarning, collect
from skyproxy_server.random_state import RandomState
from skyproxy_server.reports import Reports
from skyproxy_server.signatures import Signature


class OpTable:
    """The handlers of a session's commands, and the signatures of its ops.

    Attributes:
        handlers: by a command's number, what runs it; None where a number means nothing.
        signatures: by an op's number, what is known of it.
        definitions: the same as the client gave them.
        widths: how many operands each command takes, by number.
    """

    def __init__(
        self, reports: Reports, random: RandomState, gates: Gates, *, on_cpu: bool, max_signatures: int
    ) -> None:
        """Make the table of one session.

        Args:
            reports: tells the client of warnings.
            random: the session's random numbers.
            gates: look at sparse indices once an op is defined that may share their memory.
            on_cpu: whether the ops run on the CPU.
            max_signatures: how many of them there may be.
        """
        self._reports = reports
        self._random = random
        self._gates = gates
        self._on_cpu = on_cpu
        self._max_signatures = max_signatures
        self.signatures: dict[int, Signature] = {}
        self.definitions: dict[int, list[Any]] = {}
        self.widths = commands.width_table()
        self.handlers: list[Handler | None] = [None] * commands.FIRST_SIGNATURE
        self.handlers[commands.DEFINE] = self._define

    def add_built_in(self, handlers: Mapping[int, Handler]) -> None:
        """Add built-in commands, by number."""
        for number, handler in handlers.items():
            self.handlers[number] = handler

    def forget_definitions(self) -> None:
        """Forget all ops."""
        del self.handlers[commands.FIRST_SIGNATURE :]
        self.signatures.clear()
        self.definitions.clear()
        self.widths = commands.width_table()

    def define_next(self, definition: list[Any]) -> int:
        """Define an op as a client does; return its number.

        Raises:
            ProtocolError: the definition is malformed, or one too many.
        """
        number = len(self.handlers)
        self._define({}, [commands.DEFINE, number, definition], 0)
        return number

    def forget_program(self, number: int) -> None:
        """The client needs a compiled graph no more."""
        signature = self.signatures.get(number)
        if isinstance(signature, CompiledSignature):
            signature.forget()
            self.handlers[number] = signature.handler

    def _define(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        number, definition = stream[position + 1], stream[position + 2]
        if number == commands.FIRST_SIGNATURE:  # the client starts its table anew
            self.forget_definitions()
        if number != len(self.handlers):
            raise ProtocolError(f"signature {number} is defined out of order, expected {len(self.handlers)}")
        if number - commands.FIRST_SIGNATURE >= self._max_signatures:
            raise ProtocolError(f"more than {self._max_signatures} signatures")
        kind = CompiledSignature if definition and definition[0] == commands.COMPILED else Signature
        signature = kind(definition, on_cpu=self._on_cpu)
        if signature.shares_indices:
            self._gates.watch_indices()
        if signature.draws:
            signature.handler = self._random.guard(signature.handler)
        self.signatures[number], self.widths[number] = signature, signature.width
        self.definitions[number] = definition
        compiled = isinstance(signature, CompiledSignature)
        self.handlers.append(signature.handler if compiled else self.first_run(number, signature))
        return position + 3

    def first_run(self, number: int, signature: Signature) -> Handler:
        """Return a handler that listens for warnings, and makes way for the op's own if there are none."""

        def handler(slots: dict[int, object], stream: list[object], position: int) -> int:
            following = self.run_listening(signature, slots, stream, position)
            if not signature.warns and self.handlers[number] is handler:
                self.handlers[number] = signature.handler
            return following

        return handler

    def run_listening(self, signature: Signature, slots: dict[int, object], stream: list[object], position: int) -> int:
        """Run an op and tell the client of what its kernel warns of. An op that did so once is always listened to."""
        found: list[KernelWarning] = []
        try:
            return collect(lambda: signature.handler(slots, stream, position), found)
        finally:
            if found:
                signature.warns = True
                self._reports.warn(signature.name, found, position)
