"""Compiled graphs: programs of ops that a client ships once and calls like one op.

A program comes as a list of nodes, each an op on the allow-list, never as code; its arguments are held against the op's
schema, and its arithmetic is bounded, see `graph_checks`. It is run op by op, or compiled with inductor where the
machine can, and where the compiler leaves nothing unchecked.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.fx

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, UnsupportedOpError
from skyproxy.fake_guard import keep_guard
from skyproxy.protocol import commands
from skyproxy_server.allowed_ops import find_overload
from skyproxy_server.argument_checks import check_constant, enumeration_of
from skyproxy_server.cuda_staging import on_streams
from skyproxy_server.graph_checks import (
    MOST_NODES,
    NUMBER,
    TENSOR,
    Numbers,
    as_number,
    check_plain,
    compiled_name,
    compiles_unchecked,
    plain_text,
    runs_one_by_one,
)
from skyproxy_server.kernel_checks import CHECKS
from skyproxy_server.op_functions import function_of, is_checked
from skyproxy_server.op_overrides import CPU_OVERRIDES
from skyproxy_server.signatures import Signature
from skyproxy_server.sparse_indices import may_share_indices

logger = logging.getLogger("skyproxy.server")

_MAX_VARIANTS = 8
"""The number of sets of sizes that one program is compiled for; further ones run op by op."""
_compiling = threading.Lock()
_MODES = ("auto", "eager", "inductor")


def compiler_problem(kind: str) -> str:
    """Return why inductor cannot compile for a kind of device here; empty if it can."""
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "triton is not installed, or does not support this GPU"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        found = shutil.which(get_cpp_compiler())
    except Exception as error:
        return f"no C++ compiler was found: {error!s:.200}"
    return "" if found else "no C++ compiler was found"


class CompiledGraph:
    """One compiled graph.

    Attributes:
        draws: whether it takes random numbers.
        writes: whether one of its ops changes a tensor, which may be one that the graph is given.
        shares_indices: as that of an op; then it writes nothing.
        ran: how it ran so far: "eager", "inductor", or "" before the first call.
        trouble: why it is not compiled although that was wished for.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        fields: dict[str, Any],
        *,
        on_cpu: bool,
        numbers: frozenset[int] = frozenset(),
    ) -> None:
        """Check a program, and prepare to run it.

        Args:
            inputs: how many arguments it has.
            outputs: how many results.
            fields: see `protocol.commands`.
            on_cpu: whether it runs on the CPU.
            numbers: which of its arguments are numbers; the others are tensors.

        Raises:
            ProtocolError: the program is malformed.
            UnsupportedOpError: it uses an op that is not allowed, or unknown here.
        """
        options = fields.get("options") or {}
        self._mode: str = options.get("worker", "auto")
        self._dynamic = bool(options.get("dynamic"))
        self._varies = self._dynamic or not compiles_unchecked()
        self._kind = "cpu" if on_cpu else "cuda"
        if self._mode not in _MODES:
            raise ProtocolError(f"a graph cannot run as {self._mode!r:.40}")
        self.draws = self.writes = self.shares_indices = False
        self.ran = ""
        self.trouble = ""
        self._checked: dict[torch.fx.Node, Callable[..., object]] = {}
        self._module = self._build(inputs, numbers, fields, on_cpu)
        if self.shares_indices and self.writes:
            # Sparse indices are looked at before an op, not within one.
            raise UnsupportedOpError(
                "a compiled graph cannot have indices of sparse tensors and change memory in place"
            )
        self._eager: Callable[..., object] = self._as_checked().forward
        self._single = outputs == 1
        self._variants: dict[object, Callable[..., object]] = {}
        self._fixed: Callable[..., Any] | None = None

    def _build(
        self, inputs: int, scalars: frozenset[int], fields: dict[str, Any], on_cpu: bool
    ) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        made: list[Any] = [graph.placeholder(f"a{i}") for i in range(inputs)]
        numbers = Numbers()
        for i in range(inputs):
            numbers.add(NUMBER if i in scalars else TENSOR)

        def node(number: object) -> torch.fx.Node:
            if type(number) is not int or not 0 <= number < len(made):
                raise ProtocolError(f"a compiled graph names the value {number!r:.40} before it is made")
            found: torch.fx.Node = made[number]
            return found

        try:
            if len(fields["nodes"]) > MOST_NODES:
                raise UnsupportedOpError(f"a compiled graph of {len(fields['nodes'])} operations; {MOST_NODES} may be")
            for name, arguments, keywords in fields["nodes"]:
                checked: Callable[..., object] | None = None
                if name in torch_codec.GRAPH_FUNCTIONS:
                    if keywords:
                        raise ProtocolError(f"{name} takes no keywords")
                    numbers.add_call(name, arguments)
                    function: Callable[..., object] = torch_codec.GRAPH_FUNCTIONS[name]
                    names = [""] * len(arguments)
                else:
                    names = [argument.name for argument in find_overload(compiled_name(name))._schema.arguments]
                    function, checked = self._functions(name, arguments, keywords, numbers, on_cpu)
                made.append(
                    graph.call_function(
                        function,
                        tuple(self._argument(name, key, a, node) for key, a in zip(names, arguments, strict=False)),
                        {key: self._argument(name, key, a, node) for key, a in keywords.items()},
                    )
                )
                if checked is not None:
                    self._checked[made[-1]] = checked
            graph.output(tuple(node(number) for number in fields["outputs"]))
        except (KeyError, ValueError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"a compiled graph is malformed: {error!r:.200}") from error
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    def _as_checked(self) -> torch.fx.GraphModule:
        """The program as it runs op by op: each op in the form that checks what a client sends."""
        if not self._checked:
            return self._module
        graph = torch.fx.Graph()
        places: dict[torch.fx.Node, Any] = {}
        graph.output(graph.graph_copy(self._module.graph, places))
        for node, function in self._checked.items():
            places[node].target = function
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    def _functions(
        self, name: Any, arguments: list[object], keywords: dict[str, Any], numbers: Numbers, on_cpu: bool
    ) -> tuple[Callable[..., object], Callable[..., object] | None]:
        """Return what a compiler gets of an op, and what runs it op by op if that is a checked form.

        Its arguments are held against its schema.
        """
        overload = find_overload(compiled_name(name))
        schema = overload._schema
        known = {argument.name: argument for argument in schema.arguments}
        if len(arguments) > len(known) or not known.keys() >= keywords.keys():
            raise ProtocolError(f"{name} does not take these arguments")
        for argument, (tag, value) in (
            *zip(schema.arguments, arguments, strict=False),
            *((known[key], given) for key, given in keywords.items()),
        ):
            if tag not in (torch_codec.NODE, torch_codec.LIST):
                check_constant(name, argument, torch_codec.decode_constant(tag, value), on_cpu=on_cpu)
            elif enumeration_of(argument) is not None:
                raise ProtocolError(f"{name}: {argument.name} cannot be computed")
        numbers.add_op(overload)
        self.shares_indices = self.shares_indices or may_share_indices(schema.name.partition("::")[2])
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in overload.tags
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self.writes = self.writes or writes or schema.name in torch_codec.CHANGES_UNSAID
        traced = CPU_OVERRIDES.get(name, overload) if on_cpu else overload
        name = compiled_name(name)
        checked = function_of(name, overload, on_cpu=on_cpu) if is_checked(name, overload) else None
        settled = compiles_unchecked() or _is_settled(overload, arguments, keywords)
        if runs_one_by_one(name) or (checked is not None and not settled):
            self._mode, self.trouble = "eager", self.trouble or f"{name} is only checked where it runs"
        return traced, checked

    @staticmethod
    def _argument(op: str, name: str, fields: Any, node: Callable[[object], object]) -> Any:
        """An argument of a node, and of a constant only what may stand in generated code."""

        def checked(fields: Any) -> None:
            tag, value = fields
            if tag == torch_codec.LIST:
                for item in value:
                    checked(item)
            elif tag == torch_codec.PLAIN:
                check_plain(value)

        checked(fields)
        tag, value = fields
        if tag == torch_codec.PLAIN and type(value) is str:
            return plain_text(op, name, value)
        if "str" in _types_in(fields):
            raise UnsupportedOpError(f"{op}: a list of strings cannot be part of a compiled graph")
        return torch_codec.decode_graph_argument(fields, node)

    def __call__(self, *args: object) -> object:
        """Runs the program; its one result, or all of them in order."""
        run = self._fixed
        if run is None:
            run = self._choose(args)
        results = run(*args)
        return results[0] if self._single else results

    def _choose(self, args: tuple[object, ...]) -> Callable[..., Any]:
        if self._mode == "auto" and not self.trouble:
            self.trouble = compiler_problem(self._kind)
        if self._mode == "eager" or (self._mode == "auto" and self.trouble):
            self.ran = self.ran or "eager"
            self._fixed = self._eager
            return self._eager
        # A compiled form does not look at its arguments: it is for those that look like the ones it was made for.
        key = tuple(_look(a) for a in args) if self._varies else None
        known = self._variants.get(key)
        if known is not None:
            return known
        if self._variants and not self._dynamic:
            return self._eager
        if len(self._variants) >= _MAX_VARIANTS:
            self.trouble = self.trouble or f"it was called with more than {_MAX_VARIANTS} sets of sizes"
            return self._eager
        try:
            compiled = _compile(self._module, args)
        except Exception as error:
            if self._mode == "inductor":
                raise
            self.trouble = f"inductor failed: {error!s:.300}"
            logger.warning("a graph runs op by op: %s", self.trouble)
            self.ran, self._fixed = "eager", self._eager
            return self._eager
        self.ran = "inductor"
        self._variants[key] = compiled
        if not self._varies:
            self._fixed = compiled
        return compiled


def _is_settled(overload: torch._ops.OpOverload, arguments: list[object], keywords: dict[str, Any]) -> bool:
    """Return whether an op's check has passed for good: all that it looks at are constants."""
    check = CHECKS.get(overload._schema.name.removeprefix("aten::"))
    names = [argument.name for argument in overload._schema.arguments]
    fields = {**dict(zip(names, arguments, strict=False)), **keywords}
    if check is None or any(tag in (torch_codec.NODE, torch_codec.LIST) for tag, _ in fields.values()):
        return False
    try:
        check({name: torch_codec.decode_constant(tag, value) for name, (tag, value) in fields.items()})
    except RuntimeError:
        return False
    return True


def _is_input(template: object) -> bool:
    host = isinstance(template, list) and template[:1] == [commands.HOST_SCALAR]
    return host or template in (commands.TENSOR, commands.VALUE)


def _types_in(fields: Any) -> set[str]:
    """The names of the types of all constants in an argument."""
    tag, value = fields
    if tag == torch_codec.LIST:
        return {name for item in value for name in _types_in(item)}
    if tag != torch_codec.PLAIN:
        return set()
    flat = value if isinstance(value, list) else [value]
    return {type(item).__name__ for item in flat}


def _look(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), value  # True is 1 as a key, and not in a program


def _compile(module: torch.fx.GraphModule, args: tuple[Any, ...]) -> Callable[..., object]:
    """The module, compiled by inductor for arguments that look like these.

    On a thread of its own: the executor's runs below autograd's dispatch keys, where nothing can be traced.
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            from torch._inductor import config
            from torch._inductor.compile_fx import compile_fx

            # The same random numbers as eager mode, and no pool of compiling processes in a worker on the CPU.
            changes: dict[str, object] = {"fallback_random": True}
            if not torch.cuda.is_available():
                changes["compile_threads"] = 1
            with on_streams(()), torch.no_grad(), config.patch(changes):  # tuning computes, too
                # The module is changed by compiling.
                copy = torch.fx.GraphModule(torch.nn.Module(), _copy_graph(module.graph))
                outcome.append(compile_fx(copy, list(args)))
        except BaseException as error:
            outcome.append(error)

    with _compiling:
        keep_guard()
        thread = threading.Thread(target=work, name="skyproxy-compile", daemon=True)
        thread.start()
        thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    compiled: Callable[..., object] = outcome[0]
    return compiled


def _copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    fresh = torch.fx.Graph()
    fresh.output(fresh.graph_copy(graph, {}))
    return fresh


class CompiledSignature(Signature):
    """A program as an op: its results are kept, checked and poisoned like those of any other."""

    is_program = True

    def __init__(self, definition: list[Any], *, on_cpu: bool) -> None:
        """Read the definition, and make the program.

        Raises:
            ProtocolError: the definition is malformed.
        """
        try:
            name, templates, fields, outputs = definition
            written = frozenset(fields.get("writes", ()))
        except (TypeError, ValueError, AttributeError):
            raise ProtocolError("the definition of a compiled graph has four parts") from None
        self._begin(name)
        self.program: CompiledGraph | None = None
        if not isinstance(templates, list) or not all(map(_is_input, templates)):
            raise ProtocolError(f"a compiled graph takes tensors and numbers, not {templates!r:.100}")
        scalars = frozenset(i for i, template in enumerate(templates) if template == commands.VALUE)
        parts = [self._argument(template, i in written, True) for i, template in enumerate(templates)]
        parts = [f"number({part})" if i in scalars else part for i, part in enumerate(parts)]
        self._constants["number"] = as_number
        try:
            self.program = CompiledGraph(len(templates), len(outputs), fields, on_cpu=on_cpu, numbers=scalars)
            self.draws, self.shares_indices = self.program.draws, self.program.shares_indices
            # Which arguments it changes is what the client says of it; they are not moved while others read them.
            self.hides_writes = self.program.writes
            self._constants["op"] = self.program
        except UnsupportedOpError as error:
            self._constants["op"] = _raiser_of(error)
        self.handler = self._compile(f"op({', '.join(parts)})", outputs)
        self.width = self._next_operand - 1

    def forget(self) -> None:
        """The client needs the program no more."""
        self.program, self.is_forgotten = None, True
        error = RuntimeError("this compiled graph was forgotten")
        self.handler = lambda values, stream, position: _raiser_of(error)()


def _raiser_of(error: Exception) -> Callable[..., NoReturn]:
    def fail(*args: object) -> NoReturn:
        raise error

    return fail
