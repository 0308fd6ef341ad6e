"""Trials of PyTorch's kernels, whether they take the dtypes of a call: once, on tensors of the CPU that hold nothing.

Shape rules and kernels without values let much pass that kernels refuse: a mean of integers, an index of floating
point, bits of a fraction. The worker would refuse it later than at its line. So where that may be, the kernel runs here
the first time that an operation comes with such dtypes; where it raises, the worker is asked, whose error comes at the
line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core.known_values import KnownMeta
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    has_modes_or_transforms,
)
from skyproxy.tensor.dispatch.number_classes import is_huge, key_of, keys_of
from skyproxy.tensor.dispatch.op_info import GENERATOR, OpInfo
from skyproxy.tensor.dispatch.tried_ops import trusts_sizes

_MOST_ELEMENTS = 1 << 12
"""Operands of more elements are tried on smaller ones."""
_FEW = 2
"""Number that stands for each one of which tensors are made."""
_CUT = 4
"""Elements along each dimension of these; elementwise operations do with fewer."""
_LARGEST_PRODUCT = 1 << 16
"""Numbers of the call may be sizes: where they are larger, a trial would cost too much."""
_MOST_DIMENSIONS = 64
_MOST_KINDS = 4096
_are_deterministic = torch.are_deterministic_algorithms_enabled
_only_warn = torch.is_deterministic_algorithms_warn_only_enabled
_taken: set[tuple[object, ...]] = set()
"""Kinds of calls that kernels took. Refused ones are tried again: it may have been for their sizes."""


def takes_dtypes(
    info: OpInfo, args: Sequence[object], kwargs: dict[str, Any], made: Sequence[Meta], *, is_guessed: bool = False
) -> bool:
    """Return whether a kernel takes the dtypes of a call, or that was not tried.

    Args:
        info: the operation.
        args: its arguments, with looks in the place of tensors.
        kwargs: the same by name.
        made: how its results look, as far as they are tensors.
        is_guessed: whether no rule knew of such a call, and kernels without values let it pass, which look at neither
            numbers nor dtypes: it is tried each time.
    """
    if info.name.startswith("aten::_foreach_addc") and _has_too_few_numbers(args):
        return False
    if not info.is_tried:
        return info.draws is None or all(look.dtype in info.draws for look in made)
    if info.creates:
        return _makes(info, args, kwargs, made[0].dtype)
    for a in args:
        if isinstance(a, Meta) and len(a.size) > _MOST_DIMENSIONS:
            return False  # some kernels refuse these, those without values do not
    is_deterministic = _are_deterministic() and not _only_warn()  # some kernels refuse that they are asked then
    if not is_guessed and not info.takes_whole_numbers and not is_deterministic:
        values = (*args, *kwargs.values()) if kwargs else args
        if _are_usual(values) and not ((info.for_each or info.shrinks) and _has_truth_values(args)):
            return True
    if info.for_each:
        args = _different_places(args)
    looks = _looks((*args, *kwargs.values()))
    if not looks and not is_guessed:
        return True
    dtypes = [look.dtype for look in looks]
    numbers = map(_key_of, (*args, *kwargs.values()))
    key = (info, is_deterministic, *dtypes, *[look.size and 0 in look.size for look in looks], *numbers, *kwargs)
    if key in _taken and not is_guessed:
        return True
    is_small = not info.for_each and all(_count(look) <= _MOST_ELEMENTS for look in (*looks, *made))
    most = None if is_small else 2 if info.shrinks or info.for_each else _CUT
    if torch.complex32 in dtypes:  # a trial would warn; few programs have it, so this asks
        return False
    if not all(look.plain and (most is None or _count(look, most) <= _MOST_ELEMENTS) for look in looks):
        return True
    if info.takes_masks and torch.uint8 in dtypes:  # which warns, too
        return not is_guessed
    if has_modes_or_transforms():
        return True
    if is_small or info.shrinks or info.for_each:
        if not any(_runs(info, args, kwargs, value, most) for value in info.trial_values):
            return False
        if is_guessed:
            return True
    elif key not in _taken and not _are_usual(looks) and _refuses_dtypes(info, args, kwargs):
        return False
    _remember(key)
    return True


def _makes(info: OpInfo, args: Sequence[object], kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    """Return whether a kernel that makes tensors of numbers alone makes one of this dtype, of few elements."""
    key = (info, dtype, *map(type, args))
    if key not in _taken and not has_modes_or_transforms():
        if not _runs(info, list(map(_small_number, args)), kwargs, 0):
            return False
        _remember(key)
    return True


def _small_number(a: Any) -> object:
    """Return what stands for a number, or a list of sizes, in the trial of what makes tensors of these."""
    if type(a) is list:
        return [min(n, _FEW) for n in a]
    return type(a)(_FEW) if type(a) is int or type(a) is float else a


def may_refuse_sign(info: OpInfo, args: Iterable[object]) -> bool:
    """Return whether the kernel may refuse a number for its sign, which the key of a call does not have.

    Args:
        info: the operation.
        args: its arguments, with looks in the place of tensors.
    """
    return info.name in _OF_ORDERS and any(0 in look.size for look in _looks(args))


_OF_ORDERS = frozenset({"aten::_foreach_norm.Scalar", "aten::linalg_vector_norm", "aten::norm.ScalarOpt_dim"})
"""Norms: of no elements there is none whose order is below zero."""


def _remember(key: tuple[object, ...]) -> None:
    if len(_taken) >= _MOST_KINDS:
        _taken.clear()
    _taken.add(key)


_USUAL = (torch.float32, torch.float64)
"""Dtypes that whatever takes numbers takes, alone; of halves, many kernels have none."""


def _are_usual(items: Iterable[object]) -> bool:
    """Return whether all looks have one dtype, a usual one; without generators, for each new shape is asked."""
    found = None
    for a in items:
        kind = type(a)
        if kind is Meta or kind is KnownMeta:
            if a.dtype is not found:  # type: ignore[attr-defined]
                if found is not None or a.dtype not in _USUAL:  # type: ignore[attr-defined]
                    return False
                found = a.dtype  # type: ignore[attr-defined]
        elif kind is str or kind is complex or ((kind is float or kind is int) and is_huge(a)):  # type: ignore[arg-type]
            return False
        elif kind is list or kind is tuple:
            types = set(map(type, a))  # type: ignore[call-overload]
            if complex in types or (float in types and any(is_huge(n) for n in a if type(n) is float)):  # type: ignore[attr-defined]
                return False
            for look in _looks(a):  # type: ignore[arg-type]
                if look.dtype is not found:
                    if found is not None or look.dtype not in _USUAL:
                        return False
                    found = look.dtype
    return True


def _key_of(a: object) -> object:
    """Return what an argument that is no tensor is in the key of what was tried: of names, the name."""
    if type(a) in (list, tuple):
        return keys_of(a)  # type: ignore[arg-type]
    return a if type(a) is str else key_of(a)


def _looks(items: Iterable[object]) -> list[Meta]:
    found: list[Meta] = []
    for a in items:
        kind = type(a)
        if kind is Meta or kind is KnownMeta:
            found.append(a)  # type: ignore[arg-type]
        elif (kind is list or kind is tuple) and a and type(a[0]) is not int:  # type: ignore[index]
            found += _looks(a)  # type: ignore[arg-type]
    return found


def _has_truth_values(args: Iterable[object]) -> bool:
    """Return whether there is a truth value among the numbers, also those of lists, which subtraction refuses."""
    return any(type(a) is bool or (type(a) in (list, tuple) and bool in map(type, a)) for a in args)  # type: ignore[call-overload]


def _has_too_few_numbers(args: Sequence[Any]) -> bool:
    """Return whether a tensor of numbers, one a place of the lists, has another number of them."""
    sizes = [a.size if isinstance(a, Meta) else a.shape for a in args if isinstance(a, (Meta, torch.Tensor))]
    return any(len(size) != 1 or size[0] != len(args[0]) for size in sizes)


def _different_places(args: Sequence[object]) -> list[object]:
    """Return the arguments of an operation on lists with one place of each kind: of a thousand weights, one."""
    columns = [a for a in args if type(a) in (list, tuple)]
    places: dict[tuple[object, ...], int] = {}
    for place, items in enumerate(zip(*columns, strict=False)):
        kind = tuple((a.dtype, not a.size, 0 in a.size) if isinstance(a, Meta) else key_of(a) for a in items)
        places.setdefault(kind, place)

    def reduced(a: Any) -> object:
        if type(a) in (list, tuple):
            return [a[n] for n in places.values()]
        if isinstance(a, (Meta, torch.Tensor)) and len(a.size if isinstance(a, Meta) else a.shape) == 1:
            return torch.ones(len(places), dtype=a.dtype, device="cpu")  # numbers, one a place
        return a

    return list(map(reduced, args))


def _count(look: Meta, most: int | None = None) -> int:
    """Count the elements of a tensor, each dimension cut to a size if one is given."""
    return math.prod(look.size if most is None else [min(n, most) for n in look.size])


def _refuses_dtypes(info: OpInfo, args: Sequence[object], kwargs: dict[str, Any]) -> bool:
    """Return whether small operands in the place of large ones are refused, and would not be if they were float32.

    Sizes that do not go together when they are cut, or with the call's numbers, are refused in both, and show nothing.
    """
    numbers = (n for a in (*args, *kwargs.values()) for n in (a if type(a) in (list, tuple) else [a]))
    if trusts_sizes(info.func) or math.prod(abs(n) for n in numbers if type(n) is int and n) > _LARGEST_PRODUCT:
        return False
    values = info.trial_values
    return not any(_runs(info, args, kwargs, value, _CUT) for value in values) and any(
        _runs(info, args, kwargs, value, _CUT, torch.float32) for value in values
    )


def _runs(
    info: OpInfo,
    args: Sequence[object],
    kwargs: dict[str, Any],
    value: int,
    most: int | None = None,
    dtype: torch.dtype | None = None,
) -> bool:
    """Return whether the kernel takes tensors that look so, of one value; cut to a size, and of a dtype, if given."""

    def stand_in(a: object) -> object:
        if isinstance(a, Meta):
            size = a.size if most is None else [min(n, most) for n in a.size]
            return torch.full(size, value, dtype=dtype or a.dtype, device="cpu")
        if type(a) in (list, tuple):
            return [stand_in(item) for item in a]  # type: ignore[attr-defined]
        if isinstance(a, torch.device):
            return torch.device("cpu")
        return a.clone() if isinstance(a, torch.Tensor) else a

    given = [stand_in(a) for a in args]
    named = {name: stand_in(a) for name, a in kwargs.items() if name != "pin_memory"}
    for position, (name, kind) in enumerate(info.keyword_kinds.items()):
        if kind == GENERATOR:  # the program's own numbers go on as if nothing had been drawn
            if position < len(given):
                given[position] = torch.Generator()
            else:
                named[name] = torch.Generator()
    try:
        with DisableTorchFunction(), torch.no_grad():
            info.func(*given, **named)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return False
    return True


def check_number(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a number that the tensor which is filled with it cannot hold: `x[0] = number` makes one of it, too.

    Raises:
        RuntimeError: the dtype has no such number; in PyTorch's words.
    """
    dtype = kwargs.get("dtype")
    if info.name in _FILLING and (dtype is not None or type(args[-1]) is complex):
        *sizes, value = args
        small = [[min(abs(math.prod(size)), 2)] for size in sizes]  # a kernel of its own fills one element
        key = (info, dtype, *map(tuple, small), type(value), value)
        if key in _taken:
            return
        with disable_current_modes(), DisableTorchFunction():
            info.func(*small, value, dtype=dtype, device="cpu")
        _remember(key)


_FILLING = frozenset({"aten::full", "aten::scalar_tensor"})
EVERY_NUMBER = frozenset({torch.float32, torch.float64, None})
"""Dtypes of tensors that are filled with any number but the largest, or as the number is."""

__all__ = ["EVERY_NUMBER", "check_number", "takes_dtypes"]
