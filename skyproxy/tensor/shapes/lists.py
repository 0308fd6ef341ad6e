"""Shape rules for ops on lists of tensors, as optimizers use them: what holds for one place holds for those that look
the same, so thousands of parameters of a few shapes cost a few answers.

See `shapes.rules`; this module completes its table.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import TypeVar

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import elementwise, preserved_stride
from skyproxy.tensor.shapes.gradients import RULES
from skyproxy.tensor.shapes.rules import FLOATS, RuleAnswer, RuleResult, keeps_target, rule

_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
_BINARY = "add sub mul div clamp_min clamp_max maximum minimum pow"
_IN_PLACE_ANSWER: RuleAnswer = []
_KINDS = {float: 1.5, int: 2}
"""Numbers that stand for all of their type; neither equals the other, nor a truth value."""
_NUMBERS = frozenset({bool, *_KINDS})
Answer = TypeVar("Answer")
_Column = Callable[..., Meta | None]


def _decide_columns(decide: Callable[..., Answer | None], args: tuple[object, ...]) -> list[Answer] | None:
    """Collect what `decide` answers for each place of lists; None if it does so for one, or the lists are not alike.

    Numbers count by their type only.
    """
    length = -1
    columns: list[object] = []
    for a in args:
        if type(a) is not list:
            columns.append(repeat(_KINDS.get(type(a), a)))
            continue
        if length != len(a):
            if length != -1:
                return None
            length = len(a)
        columns.append([_KINDS.get(type(item), item) for item in a] if length and type(a[0]) in _NUMBERS else a)
    if length < 1:
        return None
    answers: dict[object, Answer | None] = {}
    found: list[Answer] = []
    for place in zip(*columns, strict=False):
        answer = answers.get(place)
        if answer is None:
            answers[place] = answer = decide(*place)
            if answer is None or answer is False:
                return None
        found.append(answer)
    return found


def _floats(*operands: object) -> bool:
    """Return whether these are tensors of fractions and real numbers, the first a tensor."""
    if type(operands[0]) is not Meta:
        return False
    for a in operands:
        if type(a) is Meta:
            if a.dtype not in FLOATS:
                return False
        elif type(a) not in _KINDS:
            return False
    return True


def _elementwise(first: Meta, *others: object) -> Meta | None:
    if not _floats(first, *others) or any(type(a) is Meta and a.dtype is not first.dtype for a in others):
        return None
    found = elementwise((first, *others))
    return None if found is None else plain_meta(found[0], first.dtype, found[1])


def _works_in_place(*operands: object) -> bool:
    return _floats(*operands) and keeps_target(*operands)


def _works_in_place_of_one_dtype(first: Meta, *others: object) -> bool:
    return _works_in_place(first, *others) and all(type(a) is not Meta or a.dtype is first.dtype for a in others)


def _register(name: str, column: _Column, writes: Callable[..., bool] = _works_in_place) -> None:
    """Register rules for an op on lists, and for its in-place form."""

    def fresh(*args: object, **kwargs: object) -> RuleResult:
        found = _decide_columns(column, args) if _is_plain(kwargs) else None
        return None if found is None else [[(meta, None) for meta in found]]

    def in_place(*args: object, **kwargs: object) -> RuleResult:
        fits = _is_plain(kwargs) and _decide_columns(writes, args)
        return _IN_PLACE_ANSWER if fits else None

    packet, _, overload = name.partition(".")
    for end, function in (("", fresh), ("_", in_place)):
        full = f"_foreach_{packet}{end}" + (f".{overload}" if overload else "")
        rule(full)(function)


def _is_plain(kwargs: dict[str, object]) -> bool:
    """Return whether keywords are a factor of an operand at most."""
    return not kwargs or all(name in ("alpha", "value", "weight") and type(a) in _KINDS for name, a in kwargs.items())


def _without_number(first: Meta, other: object) -> Meta | None:
    return _elementwise(first) if _floats(first, other) else None


def _power(first: Meta, exponent: object) -> Meta | None:
    if type(first) is Meta and first.plain and first.dtype is torch.bool and type(exponent) in _NUMBERS:
        # Kernels without values take another dtype for truth values, and one for a list of exponents of several types.
        dtype = {bool: torch.bool, int: torch.int64}.get(type(exponent)) or torch.get_default_dtype()
        return plain_meta(first.size, dtype, preserved_stride(first.size, first.stride))
    return _without_number(first, exponent)


_WITH_NUMBER: dict[str, _Column] = {
    **dict.fromkeys(("clamp_min", "clamp_max", "maximum", "minimum"), _without_number),
    "pow": _power,
}
"""Binary ops that take a number as it is, and do not make a tensor of it first."""
for _name in _UNARY.split():
    _register(_name, _elementwise)
for _name in _BINARY.split():
    _register(f"{_name}.List", _elementwise)
    for _overload in ("Scalar", "ScalarList"):
        _register(f"{_name}.{_overload}", _WITH_NUMBER.get(_name, _elementwise))


def _with_one_tensor(first: Meta, other: object) -> Meta | None:
    return _elementwise(first, other) if type(other) is Meta and other.size == () else None


def _works_in_place_with_one_tensor(first: object, other: object) -> bool:
    return type(other) is Meta and other.size == () and _works_in_place(first, other)


for _name in ("add", "mul", "div"):
    _register(f"{_name}.Tensor", _with_one_tensor, _works_in_place_with_one_tensor)


def _with_value(first: Meta, second: object, third: object, value: object = 1) -> Meta | None:
    return _elementwise(first, second, third) if type(value) in _KINDS else None


for _name in ("addcmul", "addcdiv"):
    for _overload in ("Scalar", "ScalarList"):
        _register(f"{_name}.{_overload}", _with_value, _works_in_place_of_one_dtype)
_register("lerp.List", _elementwise, _works_in_place_of_one_dtype)


def _lerp(first: Meta, end: object, weight: object) -> Meta | None:
    return _elementwise(first, end) if type(weight) in _KINDS else None


for _overload in ("Scalar", "ScalarList"):
    _register(f"lerp.{_overload}", _lerp, _works_in_place_of_one_dtype)


@rule("_foreach_norm.Scalar _foreach_powsum.Scalar")
def _norms(items: list[Meta], order: object = 2, dtype: torch.dtype | None = None) -> RuleResult:
    fits = type(order) in (int, float) and (dtype is None or dtype in FLOATS)
    if not items or not fits or not all(a.plain and a.dtype in FLOATS and 0 not in a.size for a in set(items)):
        return None
    one = {a: (plain_meta((), a.dtype if dtype is None else dtype), None) for a in set(items)}
    if dtype is not None and any(a.dtype.itemsize > dtype.itemsize for a in one):
        return None
    return [[one[a] for a in items]]


@rule("_foreach_max")
def _maxima(items: list[Meta]) -> RuleResult:
    if not items or not all(a.plain and a.dtype in FLOATS and 0 not in a.size for a in set(items)):
        return None
    one = {a: (plain_meta((), a.dtype), None) for a in set(items)}
    return [[one[a] for a in items]]


@rule("_foreach_copy_")
def _copies(targets: list[Meta], sources: list[Meta], non_blocking: bool = False) -> RuleResult:
    def works(target: Meta, source: Meta) -> bool:
        return target.dtype is source.dtype and keeps_target(target, source)

    return _IN_PLACE_ANSWER if _decide_columns(works, (targets, sources)) else None


@rule("_foreach_zero_")
def _zeros(targets: list[Meta]) -> RuleResult:
    return _IN_PLACE_ANSWER if targets and all(keeps_target(target) for target in set(targets)) else None


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(targets: list[Meta], found_inf: object, inv_scale: object) -> RuleResult:
    scalars = (found_inf, inv_scale)
    single = all(type(a) is Meta and a.plain and a.dtype is torch.float32 and a.size in ((), (1,)) for a in scalars)
    fits = single and targets and all(a.dtype in FLOATS and keeps_target(a) for a in set(targets))
    return _IN_PLACE_ANSWER if fits else None


_FUSED = "_fused_adam_ _fused_adamw_ _fused_adagrad_ _fused_sgd_"


@rule(" ".join(f"{name} {name}.tensor_lr" for name in _FUSED.split()))
def _fuse(targets: list[Meta], *lists: list[Meta | None], **kwargs: object) -> RuleResult:
    """Infer a fused optimizer's results: a parameter, its gradient and its states have one form, steps their own."""
    for others in lists:
        if type(others) is not list or len(others) not in (0, len(targets)):
            return None
    steps = [others for others in lists if others and all(a is not None and a.size == () for a in set(others))]
    alike = [others for others in lists if others and others not in steps]
    scalars = all(
        a is None or type(a) in _KINDS or (type(a) is Meta and a.plain and a.dtype in FLOATS and a.size in ((), (1,)))
        for a in kwargs.values()
    )
    if not scalars or not targets or any(others != targets for others in alike):
        return None
    fits = all(a.dtype in FLOATS and keeps_target(a) for a in set(targets)) and all(
        a.plain and a.dtype is torch.float32  # type: ignore[union-attr]  # no step is None
        for others in steps
        for a in set(others)
    )
    return _IN_PLACE_ANSWER if fits else None


__all__ = ["RULES"]
