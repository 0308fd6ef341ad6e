"""Checks of what the nodes of a compiled graph may say, beside naming allowed ops.

A graph reaches a code generator: of strings it takes what nobody can leave a literal with. And it computes with
Python's integers, which have no bound: how large they can get is told from the program, before anything runs.
"""

from __future__ import annotations

import re
from typing import Any

from skyproxy.errors import ProtocolError, UnsupportedOpError
from skyproxy.torch_codec import GRAPH_FUNCTIONS, NODE, PLAIN

MOST_NODES = 100_000
"""Operations of a graph: more than any model has."""
_MOST_BITS = 4096
_INPUT_BITS = 64
_PLAIN_STRING = re.compile(r"[\w .,:;>+*/()\[\]-]{0,200}", re.ASCII)
_NOT_PLAIN = re.compile(r"[^\w .,:;<>=+*/()\[\]-]", re.ASCII)
_MESSAGES = ("assert_msg", "msg")
_ONE_BY_ONE = frozenset(
    f"aten::{name}"
    for name in (
        # inductor takes their sizes, strides and offsets as they are
        *("as_strided", "as_strided_", "as_strided_scatter", "as_strided_copy", "_reshape_alias", "set_", "resize_"),
        *("_sparse_coo_tensor_unsafe", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
        # whatever lies in memory
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_as_"),
    )
)
"""Ops that are checked where they run, and not by a compiler."""
_CHECKED_TWINS = {
    "aten::_unsafe_index.Tensor": "aten::index.Tensor",
    "aten::_unsafe_index_put": "aten::index_put",
    "aten::_unsafe_view": "aten::view",
}
"""The ops that a graph uses instead: a compiler leaves out the bounds of the former."""


class _Process:
    """Knowledge of this process about its clients."""

    all_run_code = False


def trust_clients() -> None:
    """Let compilers have every op: all clients of this process may run code in it anyway."""
    _Process.all_run_code = True


def compiles_unchecked() -> bool:
    """Return if a compiler may have ops whose arguments it would not check as the op by op form does."""
    return _Process.all_run_code


NUMBER, TENSOR, SEVERAL = "number", "tensor", "several"


def compiled_name(name: str) -> str:
    """The op that stands for `name` in a graph."""
    return _CHECKED_TWINS.get(name, name)


def runs_one_by_one(name: str) -> bool:
    """Return whether a graph with this op runs op by op, because a compiler would not check it."""
    return name.partition(".")[0] in _ONE_BY_ONE


def plain_text(op: str, argument: str, text: str) -> str:
    """A string that may stand in generated code; of a message for people, what is left of it then.

    Raises:
        UnsupportedOpError: it holds more than names and numbers.
    """
    if argument in _MESSAGES:
        return _NOT_PLAIN.sub("?", text[:500])
    if _PLAIN_STRING.fullmatch(text) is None:
        raise UnsupportedOpError(f"{op}: {argument}={text!r:.60} cannot be part of a compiled graph")
    return text


class Numbers:
    """The kinds of values that a program's nodes have, and the bounds of its integers."""

    def __init__(self) -> None:
        self._kinds: list[str] = []
        self._bits: list[int] = []

    def add(self, kind: str, bits: int = _INPUT_BITS) -> None:
        """The next value: a `NUMBER`, of at most so many bits if it is an integer, a `TENSOR` or `SEVERAL`."""
        self._kinds.append(kind)
        self._bits.append(bits)

    def add_op(self, overload: Any) -> None:
        """The result of an op."""
        returns = [str(result.type) for result in overload._schema.returns]
        if len(returns) != 1 or "List" in returns[0]:
            self.add(SEVERAL)
        else:
            self.add(TENSOR if "Tensor" in returns[0] else NUMBER)

    def add_call(self, name: str, arguments: list[object]) -> None:
        """The result of one of `GRAPH_FUNCTIONS`.

        Raises:
            ProtocolError: it is called with what it is not for.
            UnsupportedOpError: its result could be too large a number.
        """
        function = name.removeprefix("python::")
        if name not in GRAPH_FUNCTIONS:
            raise ProtocolError(f"{name!r:.40} is not a function of a graph")
        if function == "getitem":
            self._add_item(arguments)
            return
        numbers = [self._number(name, argument) for argument in arguments]
        if function == "pow":
            bits = self._bits_of_power(arguments, numbers)
        elif function == "mul":
            bits = sum(numbers)
        else:
            bits = max(numbers, default=0) + 1
        if bits > _MOST_BITS:
            raise UnsupportedOpError(f"{name}: a graph may compute integers of up to {_MOST_BITS} bits")
        self.add(NUMBER, bits)

    def _add_item(self, arguments: list[Any]) -> None:
        if len(arguments) != 2 or arguments[0][0] != NODE or self._kinds[arguments[0][1]] is not SEVERAL:
            raise ProtocolError("getitem takes one of several results")
        if arguments[1][0] != PLAIN or type(arguments[1][1]) is not int:
            raise ProtocolError("getitem takes the number of a result")
        # An op with several results returns tensors, and a few numbers beside them: neither grows by itself.
        self.add(TENSOR)

    def _number(self, name: str, argument: Any) -> int:
        """The bits of a number."""
        tag, value = argument
        if tag == NODE:
            if self._kinds[value] is SEVERAL:
                raise ProtocolError(f"{name} takes numbers, not several results at once")
            return int(self._bits[value])
        if tag == PLAIN and type(value) in (bool, int):
            return int(value).bit_length()
        if tag == PLAIN and type(value) in (float, complex):
            return 0
        raise ProtocolError(f"{name} takes numbers, not {value!r:.40}")

    @staticmethod
    def _bits_of_power(arguments: list[Any], bits: list[int]) -> int:
        if len(arguments) != 2:
            raise ProtocolError("pow takes two numbers")
        (base_tag, base), (tag, exponent) = arguments
        if base_tag == PLAIN and type(base) in (float, complex):
            return 0
        if tag == PLAIN and type(exponent) in (float, complex):
            return 0
        if tag != PLAIN or not -(1 << 16) < exponent < 1 << 16:
            raise UnsupportedOpError("python::pow: a graph may raise integers to small constant powers only")
        return bits[0] * int(abs(exponent))


def check_plain(value: object, depth: int = 0) -> object:
    """A constant of a node: None, a number, a string, or a list of these.

    Raises:
        ProtocolError: it is something else.
    """
    if value is None or type(value) in (bool, int, float, complex, str):
        return value
    if type(value) is list and depth < 3:
        return [check_plain(item, depth + 1) for item in value]
    raise ProtocolError(f"a {type(value).__name__} is not a constant of a graph")


def as_number(value: object) -> object:
    """An operand of a graph that is a number, or None.

    Raises:
        TypeError: it is not.
    """
    if value is None or type(value) in (bool, int, float, complex):
        return value
    raise TypeError(f"a compiled graph takes tensors and numbers, not {value!r:.40}")
