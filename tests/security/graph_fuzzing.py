"""Compiled graphs as no client of ours makes them: any nodes, in any order, with any arguments, for `fuzzing`.

`python -m tests.security.graph_fuzzing --graphs 20000` runs them op by op; with `--mode inductor`, each is handed to
the compiler, which refuses most of them; with `--mode compiled`, they are those of `compiled_graph_fuzzing`, which are
compiled, in seconds each. A graph is known by its number: `--seed 7 --graphs 1` repeats.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyproxy import torch_codec
from skyproxy.protocol import commands
from tests.security import fuzzing
from tests.security.fuzzing import Call, Pool

MODES = ("eager", "inductor", "compiled")
_INTS = (0, 1, 2, 3, -1, -2, 7, 64, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63), 2**64, 10**400)
_TEXTS = ("mean", "trunc", "", '"); abort(); //', "\\", "%n%s", "{0}", "\0", "a\nb", "x" * 300, "s0", "tmp0", "in_ptr0")
_NAMES = (
    *("aten::", "::", "aten", "aten::__class__", "aten::neg; abort()", "os::system", "python::eval", "python::pow"),
    *("aten::from_file", "aten::set_.source_Storage", "prims::_make_token", "sky::compiled", "inductor::resize", ""),
)
_UNARY = ("neg", "exp", "relu", "abs", "sin", "sqrt", "sigmoid", "clone", "logical_not", "isnan", "t", "detach")
_BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "eq.Tensor", "pow.Tensor_Tensor")
_CHANGING = ("add_.Tensor", "mul_.Tensor", "copy_", "sub_.Tensor")
_CHANGING_ALONE = ("neg_", "zero_", "relu_", "exp_", "sigmoid_")
_PYTHON = sorted(torch_codec.GRAPH_FUNCTIONS)


class GraphMaker:
    """Makes one graph: most of its nodes could run, and some could not.

    Args:
        chance: decides everything.
        inputs: how many values the graph is given.
    """

    def __init__(self, chance: random.Random, inputs: int) -> None:
        self._chance = chance
        self._values = inputs
        self.nodes: list[list[Any]] = []

    def propose(self) -> list[Any]:
        """Make a node that could be the next one."""
        make = self._chance.choices(
            (self._plain, self._view, self._indexing, self._reduction, self._new, self._changing, self._any_op)
            + (self._python,),
            (30, 14, 10, 10, 6, 10, 12, 8),
        )[0]
        return make()

    def add(self) -> None:
        """Add a node."""
        node = self.propose()
        if self._chance.random() < 0.06:
            node = self._spoilt(node)
        self.nodes.append(node)
        self._values += 1

    def _node(self) -> list[Any]:
        """A value that is there; now and then one that is not, or comes later, or is the node itself."""
        if self._chance.random() < 0.015:
            return ["node", self._chance.choice((-1, self._values, self._values + 1, 2**40, "0", None, 0.0, True, [0]))]
        # The latest ones more often: chains of changes to aliases of one another.
        return ["node", max(self._chance.randrange(self._values), self._chance.randrange(self._values))]

    def _int(self) -> list[Any]:
        return ["", self._chance.choice((0, 1, 2, -1) if self._chance.random() < 0.7 else _INTS)]

    def _ints(self) -> list[Any]:
        return ["", [self._int()[1] for _ in range(self._chance.choice((0, 1, 1, 2, 2, 3, 5)))]]

    def _plain(self) -> list[Any]:
        chance = self._chance
        if chance.random() < 0.4:
            return [f"aten::{chance.choice(_UNARY)}", [self._node()], {}]
        if chance.random() < 0.2:
            return ["aten::matmul", [self._node(), self._node()], {}]
        if chance.random() < 0.2:
            return [
                "aten::cat",
                [["list", [self._node() for _ in range(chance.choice((0, 1, 2, 3)))]], self._int()],
                {},
            ]
        if chance.random() < 0.15:
            return ["aten::where.self", [self._node(), self._node(), self._node()], {}]
        return [f"aten::{chance.choice(_BINARY)}", [self._node(), self._node()], {}]

    def _view(self) -> list[Any]:
        chance, value = self._chance, self._node()
        return chance.choice(
            (
                ["aten::view", [value, self._ints()], {}],
                ["aten::reshape", [value, self._ints()], {}],
                ["aten::expand", [value, self._ints()], {}],
                ["aten::permute", [value, self._ints()], {}],
                ["aten::slice.Tensor", [value, self._int(), self._int(), self._int(), self._int()], {}],
                ["aten::select.int", [value, self._int(), self._int()], {}],
                ["aten::squeeze.dim", [value, self._int()], {}],
                ["aten::unsqueeze", [value, self._int()], {}],
                ["aten::transpose.int", [value, self._int(), self._int()], {}],
                ["aten::as_strided", [value, self._ints(), self._ints(), self._int()], {}],
                ["aten::view.dtype", [value, self._dtype()], {}],
                ["aten::narrow", [value, self._int(), self._int(), self._int()], {}],
                ["aten::unbind.int", [value, self._int()], {}],
                ["aten::split.Tensor", [value, self._int(), self._int()], {}],
                ["aten::unfold", [value, self._int(), self._int(), self._int()], {}],
                ["aten::constant_pad_nd", [value, self._ints(), ["", 0]], {}],
            )
        )

    def _indexing(self) -> list[Any]:
        value, index = self._node(), self._node()
        return self._chance.choice(
            (
                ["aten::index.Tensor", [value, ["list", [index]]], {}],
                ["aten::_unsafe_index.Tensor", [value, ["list", [index]]], {}],
                ["aten::index_select", [value, self._int(), index], {}],
                ["aten::gather", [value, self._int(), index], {}],
                ["aten::scatter.src", [value, self._int(), index, self._node()], {}],
                ["aten::scatter_add", [value, self._int(), index, self._node()], {}],
                ["aten::index_put", [value, ["list", [index]], self._node()], {}],
                ["aten::_unsafe_index_put", [value, ["list", [index]], self._node()], {}],
                ["aten::index_add", [value, self._int(), index, self._node()], {}],
                ["aten::embedding", [value, index], {}],
                ["aten::take", [value, index], {}],
                ["aten::masked_select", [value, index], {}],
            )
        )

    def _reduction(self) -> list[Any]:
        name = self._chance.choice(("sum.dim_IntList", "mean.dim", "amax", "var.correction", "prod.dim_int", "argmax"))
        last = self._int() if name in ("prod.dim_int", "argmax") else self._ints()
        return self._chance.choice(
            (
                [f"aten::{name}", [self._node(), last], {}],
                ["aten::cumsum", [self._node(), self._int()], {}],
                ["aten::sort", [self._node(), self._int()], {}],
                ["aten::topk", [self._node(), self._int(), self._int()], {}],
                ["aten::_softmax", [self._node(), self._int(), ["", False]], {}],
                ["aten::native_layer_norm", [self._node(), self._ints(), self._node(), self._node(), ["", 1e-5]], {}],
            )
        )

    def _new(self) -> list[Any]:
        device = {"device": ["device", ["cpu", None]], "pin_memory": ["", False]}
        return self._chance.choice(
            (
                ["aten::empty.memory_format", [self._ints()], device],
                ["aten::full", [self._ints(), self._int()], device],
                ["aten::zeros_like", [self._node()], {}],
                ["aten::empty_like", [self._node()], {}],
                ["aten::new_empty", [self._node(), self._ints()], {}],
                ["aten::arange.start_step", [self._int(), self._int(), self._int()], device],
                ["aten::rand_like", [self._node()], {}],
                ["aten::to.dtype", [self._node(), self._dtype()], {}],
                ["aten::repeat", [self._node(), self._ints()], {}],
            )
        )

    def _changing(self) -> list[Any]:
        if self._chance.random() < 0.5:
            return [f"aten::{self._chance.choice(_CHANGING_ALONE)}", [self._node()], {}]
        if self._chance.random() < 0.1:
            return ["aten::resize_", [self._node(), self._ints()], {}]
        return [f"aten::{self._chance.choice(_CHANGING)}", [self._node(), self._node()], {}]

    def _any_op(self) -> list[Any]:
        name = self._chance.choice(_ops())
        arguments: list[Any] = []
        for argument in fuzzing._overload(name)._schema.arguments:
            if argument.kwarg_only or (argument.has_default_value() and self._chance.random() < 0.5):
                break
            arguments.append(self._argument(str(argument.real_type)))
        return [name, arguments, {}]

    def _argument(self, kind: str) -> list[Any]:
        optional = kind.startswith("Optional[")
        kind = kind[len("Optional[") : -1] if optional else kind
        if optional and self._chance.random() < 0.5:
            return ["", None]
        makers: dict[str, Callable[[], list[Any]]] = {
            "Tensor": self._node,
            "List[Tensor]": lambda: ["list", [self._node(), self._node()]],
            "List[Optional[Tensor]]": lambda: ["list", [self._node(), ["", None]]],
            "int": self._int,
            "SymInt": self._int,
            "List[int]": self._ints,
            "List[SymInt]": self._ints,
            "bool": lambda: ["", self._chance.random() < 0.5],
            "str": lambda: ["", self._chance.choice(_TEXTS)],
            "ScalarType": self._dtype,
        }
        return makers.get(kind, self._constant)()

    def _constant(self) -> list[Any]:
        return ["", self._chance.choice((None, True, 0.5, float("nan"), float("inf"), 1e308, [[1], [2]], *_INTS))]

    def _dtype(self) -> list[Any]:
        if self._chance.random() < 0.15:
            return ["", self._chance.choice((6, 100000, -1))]
        return ["dtype", self._chance.choice(("float32", "float64", "int64", "int32", "bool", "bfloat16", "complex64"))]

    def _python(self) -> list[Any]:
        chance = self._chance
        count = chance.choice((1, 2, 2, 3))
        return [chance.choice(_PYTHON), [chance.choice((self._node, self._int, self._int))() for _ in range(count)], {}]

    def _spoilt(self, node: list[Any]) -> Any:
        """A node with something that no client of ours sends."""
        chance = self._chance
        name, arguments, keywords = node
        match chance.randrange(9):
            case 0:
                return [chance.choice(_NAMES), arguments, keywords]
            case 1:
                return [name, [*arguments, self._constant()], keywords]
            case 2:
                return [name, arguments[:-1], keywords]
            case 3:
                return [name, arguments, {chance.choice(("self", "out", "dim", "__class__", "")): self._node()}]
            case 4:
                return [name, [["", chance.choice(_TEXTS)], *arguments[1:]], keywords]
            case 5:
                return chance.choice(([], [name], [name, arguments], name, None, [name, {}, []], [None, [], {}]))
            case 6:
                deep: Any = self._node()
                for _ in range(chance.choice((2, 50, 5000))):
                    deep = ["list", [deep]]
                return [name, [deep, *arguments[1:]], keywords]
            case 7:
                tag = chance.choice(("device", "layout", "memory_format", "dtype", "node", "list", "?", None))
                return [name, [[tag, chance.choice(("cuda", ["cuda", 7], "strided", 3, None, ["xla", 0]))]], keywords]
            case _:
                return [name, [arguments] * 3, keywords]

    def outputs(self) -> list[Any]:
        """The values that the graph returns: some twice, some never, now and then one that is not there."""
        chance = self._chance
        found: list[Any] = [chance.randrange(self._values) for _ in range(chance.choice((1, 1, 2, 3)))]
        if chance.random() < 0.2:
            found.append(found[0])
        if chance.random() < 0.03:
            found[0] = chance.choice((-1, self._values, 2**63, "0", None))
        return found


def make_graph(mode: str, seed: int) -> tuple[Call, Pool]:
    """The graph of this number as a call, and the values in the slots that it names."""
    chance = random.Random(f"graph {seed}")
    pool = Pool(chance)
    templates: list[Any] = []
    operands: list[Any] = []
    for _ in range(chance.choice((1, 2, 2, 3, 4))):
        if chance.random() < 0.15:
            templates.append(commands.VALUE)
            operands.append(chance.choice((*_INTS[:-2], 0.5, True, None, "x", [1, 2])))
        else:
            templates.append(commands.TENSOR)
            value = pool.tensor(pool.values.get(1))
            operands.append(pool.add(value) if chance.random() < 0.9 or not pool.values else 1)
    maker = GraphMaker(chance, len(templates))
    for _ in range(chance.choice((1, 2, 3, 5, 8, 13))):
        maker.add()
    outputs = maker.outputs()
    fields: dict[str, Any] = {"nodes": maker.nodes, "outputs": outputs, "options": {"worker": mode}}
    if chance.random() < 0.3:
        fields["writes"] = [chance.choice((0, 1, 5, -1, 2**40, "0"))]
    if chance.random() < 0.2:
        fields["options"]["dynamic"] = chance.choice((True, 1, "yes"))
    if chance.random() < 0.02:
        fields[chance.choice(("nodes", "outputs", "writes"))] = chance.choice((None, 0, "x", [[]], {}))
    if chance.random() < 0.02:
        fields["options"] = chance.choice(("x", 7, [1], {"worker": "fast"}, {"worker": ["eager"]}))
    operands += [900 + number for number in range(len(outputs))]
    return Call([commands.COMPILED, templates, fields, [commands.NEW] * len(outputs)], operands), pool


_known: list[str] = []


def _ops() -> list[str]:
    if not _known:
        _known.extend(fuzzing.names())
    return _known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=20_000, help="how many graphs to run")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first one")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--guard", type=Path, help="the library made of tests/security/guard_pages.c")
    arguments = parser.parse_args()
    calls = ((f"graph:{arguments.mode}", arguments.seed + number) for number in range(arguments.graphs))
    report = fuzzing.fuzz(calls, lambda line: print(line, flush=True), guard=arguments.guard)
    print(report.outcomes)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
