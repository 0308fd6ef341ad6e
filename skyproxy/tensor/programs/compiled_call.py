"""Calls of a compiled graph: one flat, generated function that makes the result tensors and records one command."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.fx

from skyproxy import torch_codec
from skyproxy.errors import UnsupportedOpError
from skyproxy.protocol import commands
from skyproxy.session.session import Session
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.tensor.core.metadata import intern_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload, load_expression_printer, unset_fake_temporarily
from skyproxy.tensor.core.transfers import download, upload
from skyproxy.tensor.core.user_lines import user_frame
from skyproxy.tensor.dispatch.capture import is_capturing
from skyproxy.tensor.dispatch.recording import new_tensor
from skyproxy.tensor.programs.compiler_ir import GraphProgram, value_of
from skyproxy.torch_codec import Description

_Printer = load_expression_printer()

_numbers = itertools.count(1)
_getframe = sys._getframe
_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


class CompiledCall:
    """A graph as a function of its inputs.

    The graph is defined for a session when it is first called with tensors of it; a call is then one command, whose
    operands are the slots of the inputs and of the results. What the results look like was inferred when the graph was
    compiled, and the worker checks it with each new set of sizes.

    Attributes:
        source: the generated function's text, for people.
    """

    def __init__(self, program: GraphProgram, options: dict[str, object]) -> None:
        """Generate the function of a graph.

        Raises:
            UnsupportedOpError: an input or result is of a kind that cannot travel.
        """
        self._program = program
        self._key = ("compiled graph", next(_numbers))
        self._index = next(iter(program.devices))
        self._constants: list[RemoteTensor] = []
        self._checked: set[object] = set()
        self._scope: dict[str, Any] = {
            "number": 0,
            "call": self,
            "new_tensor": new_tensor,
            "_getframe": _getframe,
            "user_frame": user_frame,
            "upload_aside": _upload_aside,
            "as_number": _as_number,
            "download": download,
            "device_now": None,
            "checked": self._checked,
        }
        self._templates: list[object] = []
        self._read: list[str] = []
        self._outputs = 0
        self._symbols = _symbols(program)
        self._options = {**options, "dynamic": bool(self._symbols)}
        self.source = self._generate()
        exec(compile(self.source, "<skyproxy compiled graph>", "exec"), self._scope)
        self._run: Callable[[Sequence[object]], tuple[object, ...]] = self._scope["run"]

    def boxed(self) -> Callable[[list[object]], tuple[object, ...]]:
        """The graph as a function of one list, which it empties: how PyTorch wants to call it."""
        run = self._run

        def call(args: list[object]) -> tuple[object, ...]:
            result = run(args)
            args.clear()
            return result

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    # --- definition --------------------------------------------------------------------------------------------------

    def define(self, device: SkyDevice) -> None:
        """Makes the graph known to a device's session; called by the generated function."""
        with unset_fake_temporarily():
            self._constants = [
                constant if type(constant) is RemoteTensor else _place(constant, device)
                for constant in self._program.constants
            ]
        program = self._program
        fields = {
            "nodes": program.nodes,
            "outputs": [program.numbers[node] for node in self._sent_results],
            "writes": [program.inputs.index(node) for node in program.written if node in program.inputs],
            "options": self._options,
        }
        templates = [*self._templates, *([commands.TENSOR] * len(self._constants))]
        definition = [commands.COMPILED, templates, fields, [commands.NEW] * self._outputs]
        session = device.session
        number = session.signature(self._key, lambda: definition, len(templates) + self._outputs)
        self._checked.clear()
        self._scope["number"] = number
        self._scope["constants"] = [constant._sky.slot for constant in self._constants]
        self._scope["device_now"] = device
        weakref.finalize(self, _forget, weakref.ref(session), number).atexit = False

    def expect(self, key: object, results: list[object], written: list[object], read: list[Any]) -> tuple[object, ...]:
        """The command that makes the worker check a call with sizes that were not checked before."""
        if len(self._checked) >= SETTINGS.max_cached_shapes:
            self._checked.clear()
        if not is_capturing():  # the worker checks it when the graph is replayed, if it ever is
            self._checked.add(key)
        return commands.EXPECT, [tensor._sky.meta.encoded for tensor in (*results, *written, *read, *self._constants)]

    # --- generation --------------------------------------------------------------------------------------------------

    def _generate(self) -> str:
        program = self._program
        lines: list[str] = []
        operands = [self._operand(i, node, lines) for i, node in enumerate(program.inputs)]
        first = next((i for i, node in enumerate(program.inputs) if _is_remote(value_of(node))), None)
        device = f"a[{first}]._sky.device" if first is not None else f"device_at({self._index})"
        self._scope["device_at"] = DEVICES.at
        body = [f"device = {device}", "if device is not device_now:", " call.define(device)", *lines]
        self._sent_results: list[torch.fx.Node] = []
        names: dict[torch.fx.Node, str] = {}
        returned = [self._result(j, item, body, names) for j, item in enumerate(program.results)]
        self._outputs = len(self._sent_results)
        made = [names[node] for node in self._sent_results]
        slots = [f"{name}._sky.slot" for name in made]
        written = [f"a[{i}]" for i, node in enumerate(program.inputs) if node in program.written]
        believed = [f"[{', '.join(texts)}]" for texts in (made, written, self._read)]
        sizes = "".join(f"{text}, " for text in self._symbols.values())
        body += [
            "recorder = device.recorder",
            f"sizes = ({sizes}device.modes)" if sizes else "sizes = device.modes",
            f"check = () if sizes in checked else call.expect(sizes, {', '.join(believed)})",
            "try:",
            f" recorder.emit((*check, number, {', '.join([*operands, '*constants', *slots])}))",
            "finally:",  # not before: another thread could ask for a value in between
            " recorder.hidden_writes += 1",
            "frame = user_frame(_getframe(1))",
            "recorder.emit_line((frame.f_code, frame.f_lasti))",
            "recorder.send_if_due()",
            f"return ({''.join(text + ', ' for text in returned)})",
        ]
        declared = " global number, device_now, constants\n"
        return "def run(a):\n" + declared + "".join(f" {line}\n" for line in body)

    def _operand(self, i: int, node: torch.fx.Node, lines: list[str]) -> str:
        value = value_of(node)
        if isinstance(value, _SCALARS):
            self._templates.append(commands.VALUE)
            is_symbol = isinstance(value, torch.SymInt)
            return f"a[{i}] if type(a[{i}]) is int else as_number(a[{i}])" if is_symbol else f"a[{i}]"
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise UnsupportedOpError(f"an input of type {type(value).__name__} cannot be sent to a worker")
        if _is_remote(value):
            self._templates.append(commands.TENSOR)
            self._read.append(f"a[{i}]")
            return f"a[{i}]._sky.slot"
        if value.device.type != "cpu":
            raise UnsupportedOpError(f"a graph mixes tensors on {value.device} with tensors on sky")
        if value.dim() == 0:
            self._templates.append([commands.HOST_SCALAR, torch_codec.DTYPE_NAMES[value.dtype]])
            return f"a[{i}].item()"
        self._templates.append(commands.TENSOR)
        lines.append(f"h{i} = upload_aside(a[{i}], device)")
        self._read.append(f"h{i}")
        return f"h{i}._sky.slot"

    def _result(self, j: int, item: object, body: list[str], names: dict[torch.fx.Node, str]) -> str:
        """The text that gives one result; what must be made first is added to the body."""
        if not isinstance(item, torch.fx.Node):
            return repr(item)
        item = _resolve_input(item)
        value = value_of(item)
        if item in self._program.inputs:
            return f"a[{self._program.inputs.index(item)}]"
        if isinstance(value, _SCALARS):
            return self._number(value)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise UnsupportedOpError(f"a result of type {type(value).__name__} cannot come from a worker")
        if value.device.type not in ("sky", "cpu"):
            raise UnsupportedOpError(f"a result on {value.device} cannot come from a worker")
        if item not in names:
            names[item] = f"o{j}"
            self._sent_results.append(item)
            own = "device" if value.device.index == self._index or value.device.type == "cpu" else None
            own = own or f"device_at({value.device.index})"
            body.append(f"o{j} = new_tensor({own}, {self._meta(j, value)})")
        return names[item] if value.device.type == "sky" else f"download({names[item]})"

    def _meta(self, j: int, value: torch.Tensor) -> str:
        place = (tuple(value.shape), value.stride(), value.storage_offset())
        if not any(isinstance(n, torch.SymInt) for n in (*place[0], *place[1], place[2])):
            self._scope[f"m{j}"] = intern_meta(torch_codec.describe(value))
            return f"m{j}"
        self._scope.update({"intern_meta": intern_meta, "Description": Description, f"t{j}": value.dtype})
        size, stride = ("".join(f"{self._number(n)}, " for n in row) for row in place[:2])
        return f"intern_meta(Description(({size}), ({stride}), {self._number(place[2])}, t{j}))"

    def _number(self, value: object) -> str:
        """Text that computes a symbolic number from the inputs."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return repr(value)
        expression = value.node.expr
        missing = [symbol for symbol in expression.free_symbols if symbol not in self._symbols]
        if missing:
            raise UnsupportedOpError(f"the size {expression} of a result is known to the worker only")
        replaced = {symbol: sympy.Symbol(f"({text})", integer=True) for symbol, text in self._symbols.items()}
        self._scope.setdefault("math", __import__("math"))
        return str(_Printer().doprint(expression.xreplace(replaced)))


def _as_number(value: object) -> object:
    """Return what a worker gets for a graph's input that stands for a size, on calls where that is a symbol.

    The size of rows that differ is one. Nothing is computed with it but other such sizes, and those are made here.
    """
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.nested_int() if value.node.is_nested_int() else int(value)


def _is_remote(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "sky"


def _symbols(program: GraphProgram) -> dict[sympy.Symbol, str]:
    """For each symbolic size, how it is read off the inputs."""
    found: dict[sympy.Symbol, str] = {}
    values = [value_of(node) for node in program.inputs]
    for i, value in enumerate(values):
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found[value.node.expr] = f"a[{i}]"
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        rows: tuple[tuple[str, Sequence[object]], ...] = (("size", value.shape), ("stride", value.stride()))
        for kind, row in rows:
            for dim, n in enumerate(row):
                if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol:
                    found.setdefault(n.node.expr, f"a[{i}].{kind}({dim})")
    return found


def _resolve_input(node: torch.fx.Node) -> torch.fx.Node:
    """The input that a node hands back after changing it, or the node itself."""
    while (
        isinstance(node.target, OpOverload)
        and node.target._schema.returns
        and node.target._schema.returns[0].alias_info is not None
        and node.target._schema.returns[0].alias_info.is_write
        and isinstance(node.args[0], torch.fx.Node)
    ):
        node = node.args[0]
    return node


def _upload_aside(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    """A CPU tensor on the worker's CPU, where the graph wants it."""
    return _place(tensor, device)


def _place(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    if device.place[0] == "cpu":
        return upload(tensor, device)
    aside = next((d for d in DEVICES.alive() if d.session is device.session and d.place[0] == "cpu"), None)
    if aside is None:
        raise UnsupportedOpError("this worker does not offer its CPU, which the graph computes on")
    return upload(tensor, aside)


def _forget(session: weakref.ref[Session], number: int) -> None:
    owner = session()
    if owner is not None and owner.lost is None:
        # Emitted directly: this may run in a destructor, which must not wait.
        owner.recorder.emit((commands.DO, "forget_compiled", [number]))


__all__ = ["CompiledCall"]
