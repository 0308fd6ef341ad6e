"""What is known of an op before it is called: how each of its arguments travels, what it writes, who handles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyproxy.torch_codec import FORBIDDEN_OPS

# How an argument travels, and what of it counts for the shape of the result.
TENSOR = 0
"""A tensor, or a number in its place."""
TENSORS = 1
"""A list of tensors."""
SCALAR = 2
"""A number whose type counts, but whose value does not."""
NUMBER = 3
"""A number, or a list of numbers, whose value counts: sizes, dimensions, bounds."""
FIXED = 4
"""Part of the op's signature: flags, names, dtypes, layouts, devices."""
GENERATOR = 5
"""A random generator."""

_KINDS = {
    "Tensor": TENSOR,
    "Tensor[]": TENSORS,
    "List[Tensor]": TENSORS,
    "List[Optional[Tensor]]": TENSORS,
    "number": SCALAR,
    "float": SCALAR,
    "complex": SCALAR,
    "List[number]": SCALAR,
    "List[float]": NUMBER,
    "int": NUMBER,
    "SymInt": NUMBER,
    "List[int]": NUMBER,
    "List[SymInt]": NUMBER,
    "Generator": GENERATOR,
}
_VALUES_SHAPE_RESULT = ("aten::arange", "aten::range", "aten::linspace", "aten::logspace")
_INDEXING = frozenset(
    {
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index_put",
    }
)

Special = Callable[..., Any]
SPECIALS: dict[str, Special] = {}
"""Ops that are not simply recorded, by name; `special_ops` and its neighbours fill it."""


def implements(*names: str) -> Callable[[Special], Special]:
    """Registers a function for overloads: `f(plan, func, args, kwargs)`, called in place of recording."""

    def register(function: Special) -> Special:
        for name in names:
            SPECIALS[name] = function
        return function

    return register


class Plan:
    """What is known of one overload.

    Attributes:
        name: "aten::add.Tensor".
        kinds: for each argument of the schema, how it travels.
        keyword_kinds: the same by name.
        writes: positions and names of the arguments that the op changes.
        returns: for each result, the name of the argument that it is (for in-place and out= forms), or None.
        special: who handles the op instead, or None.
        places_host_indices: whether CPU tensors are allowed as indices, as PyTorch allows on every device.
        waits: whether the op exists for its exception only, so that it must be waited for.
    """

    __slots__ = (
        "func",
        "keyword_kinds",
        "kinds",
        "name",
        "names",
        "places_host_indices",
        "returns",
        "special",
        "waits",
        "writes",
    )

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.name = func.name()
        shaping = self.name.startswith(_VALUES_SHAPE_RESULT)
        self.kinds = tuple(_kind(argument.type, shaping) for argument in schema.arguments)
        self.names = tuple(argument.name for argument in schema.arguments)
        self.keyword_kinds = dict(zip(self.names, self.kinds, strict=True))
        written = {
            frozenset(argument.alias_info.before_set): argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.writes = tuple(written.values())
        self.returns = tuple(
            written.get(frozenset(result.alias_info.before_set)) if result.alias_info is not None else None
            for result in schema.returns
        )
        self.places_host_indices = self.name.partition(".")[0] in _INDEXING
        self.waits = not self.returns and not self.writes
        self.special = SPECIALS.get(self.name)
        if self.name.partition(".")[0] in FORBIDDEN_OPS and self.special is None:
            self.special = SPECIALS["refused"]

    def __repr__(self) -> str:
        return f"<plan of {self.name}>"


def _kind(kind: Any, shaping: bool) -> int:
    text = str(kind)
    while text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    found = _KINDS.get(text, FIXED)
    return NUMBER if found == SCALAR and shaping else found


def plan_of(func: Any) -> Plan:
    """The plan of an overload, made once and kept on it: an attribute is twice as fast as a table."""
    try:
        plan: Plan = func._sky_plan
    except AttributeError:
        plan = func._sky_plan = Plan(func)
    return plan
