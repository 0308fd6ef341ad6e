"""Compiles op signatures: from a definition on the wire to a function that runs the op on slots.

The function is generated from a fixed grammar: its text holds positions and names of our own making, never text from
the client. Keyword names come from the op's schema.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, UnsupportedOpError
from skyproxy.protocol import commands
from skyproxy.protocol.commands import Handler
from skyproxy_server.allowed_ops import find_overload
from skyproxy_server.argument_checks import check_constant, enumeration_of, only_none
from skyproxy_server.op_functions import function_of
from skyproxy_server.sparse_indices import may_follow_indices, may_share_indices

_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split"),
        *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
        *("view_as_complex", "view_as_real", "_conj", "_neg_view"),
    )
)


@dataclass(slots=True)
class OpWatch:
    """The work for an op beyond running it, by the form of its inputs.

    Attributes:
        restrided: where the kernel gives other strides than the client believes in: what it believes of each output,
            and of each tensor that is written.
        owed: where the client's expectation was never held against a result, because the op failed: the operand of
            that EXPECT.
    """

    restrided: dict[Hashable, list[torch_codec.Description]] = field(default_factory=dict)
    owed: dict[Hashable, list[object]] = field(default_factory=dict)


class Signature:
    """One op in one form: which arguments are tensors, which are inline, which are constant.

    Attributes:
        name: "aten::add.Tensor".
        handler: runs the op.
        width: how many operands follow the op's number.
        draws: whether the op takes numbers from a generator.
        watch: what is done beyond running it; None as long as there is nothing.
        views: whether the op looks at no values: its result is another view of the same memory.
        reshapes: whether the op changes in place what a tensor looks like, and none of its values.
        hides_writes: whether the op may change any of its inputs or move its memory, whatever its schema says.
        fills_outs: whether the op writes to `out=` arguments, which it may resize.
        warns: whether its kernel is heard each time: it has warned of something, or may resize an `out=` argument.
        shares_indices: whether the op may give a dense tensor in the memory of a sparse one's indices, or take one.
        follows_indices: whether the op may look up what the indices of a sparse tensor lead to.
        is_forgotten: whether the client needs it no more.
        is_program: whether it is a compiled graph.
    """

    is_program = False

    def __init__(self, definition: list[Any], *, on_cpu: bool) -> None:
        """An op that is not allowed, or not known here, fails whenever it is called; the session goes on.

        Raises:
            ProtocolError: the definition is malformed.
        """
        try:
            name, positional, keywords, outputs = definition
        except (TypeError, ValueError):
            raise ProtocolError(f"an op definition has four parts: {definition!r:.100}") from None
        self._begin(name)
        try:
            overload = find_overload(name)
        except UnsupportedOpError as error:
            self._refuse(error, positional, keywords, outputs)
            return
        schema = overload._schema
        self._on_cpu = on_cpu
        self.views = name.partition(".")[0] in _VIEWS
        packet = schema.name.partition("::")[2]
        self.shares_indices, self.follows_indices = may_share_indices(packet), may_follow_indices(packet)
        # The source's memory moves where it must grow.
        self.hides_writes = packet == "set_" or schema.name in torch_codec.CHANGES_UNSAID
        self.draws = torch.Tag.nondeterministic_seeded in overload.tags
        self.reshapes = torch.Tag.inplace_view in overload.tags
        self.fills_outs = self.warns = any(argument.is_out for argument in schema.arguments)
        arguments = {argument.name: argument for argument in schema.arguments}
        names = list(arguments)
        if len(positional) > len(names):
            raise ProtocolError(f"{name} takes {len(names)} arguments, not {len(positional)}")
        refused: UnsupportedOpError | None = None
        parts: list[str] = []
        reserved: list[str] = []
        for position, (key, template) in enumerate((*zip(names, positional, strict=False), *keywords.items())):
            if key not in arguments:
                raise ProtocolError(f"{name} has no argument {key!r:.40}")
            try:
                text = self._schema_argument(arguments[key], template)
            except UnsupportedOpError as error:
                refused, text = error, "None"
            if position < len(positional):
                parts.append(text)
            elif keyword.iskeyword(key):
                reserved.append(f"{key!r}: {text}")
            else:
                parts.append(f"{key}={text}")
        if reserved:
            parts.append("**{" + ", ".join(reserved) + "}")
        function = function_of(name, overload, on_cpu=on_cpu)
        self._constants["op"] = function if refused is None else _refuser_of(refused)
        if len(outputs) != len(schema.returns):
            raise ProtocolError(f"{name} returns {len(schema.returns)} values, not {len(outputs)}")
        self.handler = self._compile(f"op({', '.join(parts)})", outputs)
        self.width = self._next_operand - 1

    def _schema_argument(self, argument: Any, template: object) -> str:
        """The text that stands for an argument in the call; a constant is held against the schema."""
        written = argument.alias_info is not None and argument.alias_info.is_write
        is_tensor = str(argument.real_type) in ("Tensor", "Optional[Tensor]")
        if template in (commands.TENSOR, commands.TENSORS) and not (is_tensor and template == commands.TENSOR):
            self.views = False  # what stands for a number, or a list of them, is read, if only for the error's text
        before = len(self._constants)
        text = self._argument(template, written, torch_codec.shapes_results(argument.type, self.name))
        if len(self._constants) > before and text in self._constants:
            check_constant(self.name, argument, self._constants[text], on_cpu=self._on_cpu)
        elif enumeration_of(argument) is not None:
            self._constants["only_none"] = only_none
            return f"only_none({text})"
        return text

    def _begin(self, name: str) -> None:
        self.name: str = name
        self._inputs: list[tuple[int, bool]] = []
        self._inline: list[tuple[int, bool]] = []
        self._outputs: list[tuple[int, bool]] = []
        self._writes: list[tuple[int, bool]] = []
        self._constants: dict[str, Any] = {"host": _host_scalar, "keep": _keep}
        self._next_operand = 1
        self.watch: OpWatch | None = None
        self.draws = self.views = self.warns = self.reshapes = self.fills_outs = False
        self.is_forgotten = self.hides_writes = self.shares_indices = False
        self.follows_indices = True
        self._on_cpu = True

    def _refuse(self, error: UnsupportedOpError, positional: Any, keywords: Any, outputs: Any) -> None:
        changed = _changed_arguments(self.name)
        makes_nothing = commands.NEW not in outputs and commands.NEW_LIST not in outputs
        for key, template in (*enumerate(positional), *keywords.items()):
            self._argument(template, makes_nothing if changed is None else key in changed, False)
        self._constants["op"] = _refuser_of(error)
        self.handler = self._compile("op()", outputs)
        self.width = self._next_operand - 1

    def _operand(self) -> str:
        text = f"L[i + {self._next_operand}]"
        self._next_operand += 1
        return text

    def _constant(self, value: object) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _argument(self, template: object, written: bool, shaping: bool) -> str:
        position = self._next_operand
        if template == commands.TENSOR:
            self._inputs.append((position, False))
            if written:
                self._writes.append((position, False))
            return f"S[{self._operand()}]"
        if template == commands.TENSORS:
            self._inputs.append((position, True))
            if written:
                self._writes.append((position, True))
            return f"[S[k] for k in {self._operand()}]"
        if template == commands.VALUE:
            self._inline.append((position, shaping))
            return self._operand()
        match template:
            case [commands.HOST_SCALAR, str(dtype)] if dtype in torch_codec.DTYPES:
                return f"host({self._operand()}, {self._constant(torch_codec.DTYPES[dtype])})"
            case [commands.CONSTANT, str(tag), value]:
                try:
                    return self._constant(torch_codec.decode_constant(tag, value))
                except (KeyError, ValueError, TypeError, RuntimeError) as error:
                    raise ProtocolError(f"{self.name}: bad constant {tag!r} {value!r:.60}") from error
        raise ProtocolError(f"{self.name}: unknown argument template {template!r:.60}")

    def _compile(self, call: str, outputs: list[object]) -> Handler:
        lines: list[str] = []
        several = len(outputs) > 1
        if not several and outputs == [commands.NEW]:
            self._outputs.append((self._next_operand, False))
            lines.append(f"S[{self._operand()}] = {call}")
        else:
            lines.append(f"r = {call}")
            for index, template in enumerate(outputs):
                result = f"r[{index}]" if several else "r"
                if template == commands.NEW:
                    self._outputs.append((self._next_operand, False))
                    lines.append(f"S[{self._operand()}] = {result}")
                elif template == commands.NEW_LIST:
                    self._outputs.append((self._next_operand, True))
                    lines.append(f"keep(S, {self._operand()}, {result})")
                elif template != commands.IGNORED:
                    raise ProtocolError(f"{self.name}: unknown output template {template!r:.60}")
        lines.append(f"return i + {self._next_operand}")
        parameters = ", ".join(["S", "L", "i", *(f"{name}={name}" for name in self._constants)])
        source = f"def handler({parameters}):\n " + "\n ".join(lines)
        scope = {"__name__": __name__, **self._constants}  # warnings name this module
        exec(compile(source, f"<skyproxy {self.name}>", "exec"), scope)
        handler: Handler = scope["handler"]
        return handler

    @staticmethod
    def _slots(places: list[tuple[int, bool]], stream: list[Any], position: int) -> list[int]:
        slots: list[int] = []
        for offset, several in places:
            operand = stream[position + offset]
            if several:
                slots += operand
            else:
                slots.append(operand)
        return slots

    def input_slots(self, stream: list[object], position: int) -> list[int]:
        """The slots that the op at `position` reads or writes, without None's."""
        return [slot for slot in self._slots(self._inputs, stream, position) if slot]

    @functools.cached_property
    def single_inputs(self) -> tuple[tuple[int, bool], ...] | None:
        """The place of each of the op's inputs, counted from its number, and whether the op writes to that one.

        None if some come in lists, or are written to unsaid.
        """
        if self.hides_writes or any(several for _, several in self._inputs):
            return None
        return tuple((offset, (offset, False) in self._writes) for offset, _ in self._inputs)

    def all_input_slots(self, stream: list[object], position: int) -> list[int]:
        """The same with None's, which are 0: where None stands makes another op of the others."""
        return self._slots(self._inputs, stream, position)

    def written_slots(self, stream: list[object], position: int) -> list[int]:
        """The slots whose tensors the op changes in place."""
        return [slot for slot in self._slots(self._writes, stream, position) if slot]

    @property
    def changes_inputs(self) -> bool:
        """True if afterwards a tensor that the op reads may look otherwise, or lie in another memory."""
        return bool(self._writes) or self.hides_writes

    def changed_slots(self, stream: list[object], position: int) -> list[int]:
        """The slots whose memory must be in nobody else's use while the op runs."""
        return (self.input_slots if self.hides_writes else self.written_slots)(stream, position)

    def output_slots(self, stream: list[object], position: int) -> list[int]:
        """The slots that the op fills."""
        return self._slots(self._outputs, stream, position)

    def inline_operands(self, stream: list[object], position: int) -> tuple[object, ...]:
        """Return what of the op's inline numbers can shape its results, hashable: the value of some, of others the
        type.
        """
        return tuple(_inline_key(stream[position + offset], shaping) for offset, shaping in self._inline)


def _changed_arguments(name: object) -> set[int | str] | None:
    """Return which arguments an operator changes in place, by their places and names; None where it is unknown here.

    Those of one that is refused are marked as all others are that an op should have changed: or nobody would be told.
    """
    packet, _, overload = str(name).partition(".")
    try:
        schema = torch._C._dispatch_find_schema_or_throw(packet, overload).schema()
    except RuntimeError:
        return None
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    places = {at for at, is_written in enumerate(written) if is_written}
    return places | {schema.arguments[at].name for at in places}


def _refuser_of(error: UnsupportedOpError) -> Callable[..., object]:
    def refuse(*args: object, **kwargs: object) -> object:
        raise UnsupportedOpError(str(error))

    return refuse


def _inline_key(value: object, shaping: bool) -> object:
    if isinstance(value, list):
        return tuple(value) if shaping else tuple(type(item) for item in value)
    return value if shaping else type(value)


def _host_scalar(value: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def _keep(values: dict[int, object], slots: list[int], results: Any) -> None:
    if len(slots) != len(results):
        raise ProtocolError(f"the op gave {len(results)} results, the client expected {len(slots)}")
    for slot, result in zip(slots, results, strict=True):
        values[slot] = result
