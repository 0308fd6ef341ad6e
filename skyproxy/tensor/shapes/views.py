"""Shape rules for views: what a tensor looks like that shares another one's storage.

See `shapes.rules`. Every rule answers for plain strided tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, intern_meta, plain_meta
from skyproxy.tensor.shapes.strides import reshaped_stride

RuleResult = list[tuple[Meta, int | None]] | None
Rule = Callable[..., RuleResult]
VIEW_RULES: dict[str, Rule] = {}
_BITS = frozenset({torch.bool, torch.complex32})
"""Dtypes of which not every pattern of bits is a value, or that few kernels take."""
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtype of the real and of the imaginary part."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            VIEW_RULES["aten::" + name] = function
        return function

    return register


def _view(a: Meta, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> RuleResult:
    return [(plain_meta(size, a.dtype, stride, offset), 0)]


def _dim(a: Meta, dim: int, extra: int = 0) -> int | None:
    rank = len(a.size) + extra
    return dim % rank if a.plain and type(dim) is int and -rank <= dim < rank else None


@_rule("detach", "alias")
def _alias(a: Meta) -> RuleResult:
    return _view(a, a.size, a.stride, a.offset) if a.plain else None


@_rule("view", "_unsafe_view")
def _reshape(a: Meta, size: Sequence[int]) -> RuleResult:
    if not a.plain or not all(type(n) is int and n >= -1 for n in size):
        return None
    count = math.prod(a.size)
    known = math.prod(n for n in size if n >= 0)
    if -1 in size:
        if list(size).count(-1) > 1 or known == 0 or count % known:
            return None
        size = [count // known if n == -1 else n for n in size]
    elif known != count:
        return None
    size = tuple(size)
    stride = reshaped_stride(a.size, a.stride, size)
    return None if stride is None else _view(a, size, stride, a.offset)


@_rule("t")
def _t(a: Meta) -> RuleResult:
    if not a.plain or len(a.size) > 2:
        return None
    return _view(a, a.size[::-1], a.stride[::-1], a.offset)


@_rule("transpose.int")
def _transpose(a: Meta, dim0: int, dim1: int) -> RuleResult:
    first, second = _dim(a, dim0), _dim(a, dim1)
    if first is None or second is None:
        return None
    size, stride = [*a.size], [*a.stride]
    size[first], size[second] = size[second], size[first]
    stride[first], stride[second] = stride[second], stride[first]
    return _view(a, tuple(size), tuple(stride), a.offset)


@_rule("permute")
def _permute(a: Meta, dims: Sequence[int]) -> RuleResult:
    if not a.plain:
        return None
    order = [_dim(a, d) for d in dims]
    known = [d for d in order if d is not None]
    if len(known) != len(a.size) or len(order) != len(known) or len(set(known)) != len(known):
        return None
    return _permutation(a, known)


def _permutation(a: Meta, order: list[int]) -> RuleResult:
    size, stride = a.size, a.stride
    return _view(a, tuple([size[d] for d in order]), tuple([stride[d] for d in order]), a.offset)


@_rule("unsqueeze")
def _unsqueeze(a: Meta, dim: int) -> RuleResult:
    at = _dim(a, dim, 1)
    if at is None:
        return None
    stride = a.size[at] * a.stride[at] if at < len(a.size) else 1
    return _view(a, (*a.size[:at], 1, *a.size[at:]), (*a.stride[:at], stride, *a.stride[at:]), a.offset)


@_rule("squeeze.dim")
def _squeeze(a: Meta, dim: int) -> RuleResult:
    at = _dim(a, dim)
    if at is None:
        return None
    if a.size[at] != 1:
        return _view(a, a.size, a.stride, a.offset)
    return _view(a, a.size[:at] + a.size[at + 1 :], a.stride[:at] + a.stride[at + 1 :], a.offset)


@_rule("squeeze")
def _squeeze_all(a: Meta) -> RuleResult:
    return _drop_dimensions(a, range(len(a.size))) if a.plain else None


@_rule("squeeze.dims")
def _squeeze_several(a: Meta, dims: Sequence[int]) -> RuleResult:
    places = [_dim(a, dim) for dim in dims]
    return None if not a.plain or None in places or len(set(places)) != len(places) else _drop_dimensions(a, places)


def _drop_dimensions(a: Meta, places: Iterable[int | None]) -> RuleResult:
    """The tensor without those of its dimensions that are of size one and in these places."""
    kept = [i for i in range(len(a.size)) if a.size[i] != 1 or i not in places]
    return _permutation(a, kept)


@_rule("diagonal")
def _diagonal(a: Meta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> RuleResult:
    first, second = _dim(a, dim1), _dim(a, dim2)
    if first is None or second is None or first == second or type(offset) is not int:
        return None
    length = min(a.size[first] + min(offset, 0), a.size[second] - max(offset, 0))
    if length <= 0:
        return None
    start = a.offset + (offset * a.stride[second] if offset >= 0 else -offset * a.stride[first])
    kept = [i for i in range(len(a.size)) if i not in (first, second)]
    size = (*(a.size[i] for i in kept), length)
    return _view(a, size, (*(a.stride[i] for i in kept), a.stride[first] + a.stride[second]), start)


@_rule("unfold")
def _unfold(a: Meta, dim: int, length: int, step: int) -> RuleResult:
    at = _dim(a, dim)
    if at is None or type(length) is not int or type(step) is not int or step < 1 or not 0 < length <= a.size[at]:
        return None
    size = (*a.size[:at], (a.size[at] - length) // step + 1, *a.size[at + 1 :], length)
    return _view(a, size, (*a.stride[:at], a.stride[at] * step, *a.stride[at + 1 :], a.stride[at]), a.offset)


@_rule("as_strided")
def _as_strided(a: Meta, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> RuleResult:
    """Within the part of the storage that is surely there: where the tensor itself begins and ends."""
    numbers = (*size, *stride, 0 if offset is None else offset)
    if not a.plain or 0 in a.size or len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        return None
    start = a.offset if offset is None else offset
    end = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    last = a.offset + sum((n - 1) * s for n, s in zip(a.size, a.stride, strict=True))
    return _view(a, tuple(size), tuple(stride), start) if 0 not in size and a.offset <= start and end <= last else None


@_rule("select.int")
def _select(a: Meta, dim: int, index: int) -> RuleResult:
    at = _dim(a, dim)
    if at is None or type(index) is not int or not -a.size[at] <= index < a.size[at]:
        return None
    offset = a.offset + (index % a.size[at]) * a.stride[at]
    return _view(a, a.size[:at] + a.size[at + 1 :], a.stride[:at] + a.stride[at + 1 :], offset)


@_rule("slice.Tensor")
def _slice(a: Meta, dim: int = 0, start: object = None, end: object = None, step: int = 1) -> RuleResult:
    at = _dim(a, dim)
    if at is None or type(step) is not int or step < 1:
        return None
    first, last, _ = slice(start, end).indices(a.size[at])
    last = max(first, last)
    length = (last - first + step - 1) // step
    offset = a.offset + first * a.stride[at]
    size = (*a.size[:at], length, *a.size[at + 1 :])
    return _view(a, size, (*a.stride[:at], a.stride[at] * step, *a.stride[at + 1 :]), offset)


@_rule("expand")
def _expand(a: Meta, size: Sequence[int], *, implicit: bool = False) -> RuleResult:
    if not a.plain or implicit or len(size) < len(a.size) or not all(type(n) is int for n in size):
        return None
    extra = len(size) - len(a.size)
    new_size: list[int] = []
    new_stride: list[int] = []
    for i, n in enumerate(size):
        if i < extra:
            if n < 0:
                return None
            new_size.append(n)
            new_stride.append(0)
            continue
        own, stride = a.size[i - extra], a.stride[i - extra]
        if n in (-1, own):
            new_size.append(own)
            new_stride.append(stride)
        elif own == 1 and n >= 0:
            new_size.append(n)
            new_stride.append(0)
        else:
            return None
    if (
        extra and a.size
    ):  # PyTorch gives fresh leading dimensions of size one the stride that a row-major tensor would have
        for i in range(extra - 1, -1, -1):
            if new_size[i] == 1:
                new_stride[i] = new_size[i + 1] * new_stride[i + 1] if i + 1 < len(new_size) else 1
    return _view(a, tuple(new_size), tuple(new_stride), a.offset)


def _mark(a: Meta, *, conjugates: bool) -> RuleResult:
    conjugate, negative = (not a.conjugate, a.negative) if conjugates else (a.conjugate, not a.negative)
    return [(intern_meta(a.description._replace(conjugate=conjugate, negative=negative)), 0)]


@_rule("_conj")
def _conjugate(a: Meta) -> RuleResult:
    """Marked, and not computed."""
    return _mark(a, conjugates=True) if a.layout is torch.strided and a.dtype in _PARTS else None


@_rule("_neg_view")
def _negative(a: Meta) -> RuleResult:
    return _mark(a, conjugates=False) if a.layout is torch.strided and a.dtype is not torch.bool else None


@_rule("view.dtype")
def _view_as_dtype(a: Meta, dtype: torch.dtype) -> RuleResult:
    """As many bytes of another kind: of another width, the last dimension has more or fewer, as `view` says."""
    if not a.plain or type(dtype) is not torch.dtype or dtype in _BITS or a.dtype in _BITS:
        return None
    own, other = a.dtype.itemsize, dtype.itemsize
    if own == other:
        return [(plain_meta(a.size, dtype, a.stride, a.offset), 0)]
    if not a.size or 0 in a.size or a.stride[-1] != 1:
        return None
    if own > other:
        ratio = own // other
        size, stride = (*a.size[:-1], a.size[-1] * ratio), (*(s * ratio for s in a.stride[:-1]), 1)
        return [(plain_meta(size, dtype, stride, a.offset * ratio), 0)]
    ratio = other // own
    if a.offset % ratio or a.size[-1] % ratio or any(s % ratio for s in a.stride[:-1]):
        return None
    size, stride = (*a.size[:-1], a.size[-1] // ratio), (*(s // ratio for s in a.stride[:-1]), 1)
    return [(plain_meta(size, dtype, stride, a.offset // ratio), 0)]


@_rule("view_as_real")
def _view_as_real(a: Meta) -> RuleResult:
    if not a.plain or a.dtype not in _PARTS:
        return None
    stride = (*(2 * n for n in a.stride), 1)
    return [(plain_meta((*a.size, 2), _PARTS[a.dtype], stride, 2 * a.offset), 0)]


@_rule("view_as_complex")
def _view_as_complex(a: Meta) -> RuleResult:
    whole = next((whole for whole, part in _PARTS.items() if part is a.dtype), None)
    fits = a.plain and whole is not None and len(a.size) > 0 and a.size[-1] == 2 and a.stride[-1] == 1
    if not fits or whole is None or a.offset % 2 or any(n % 2 for n in a.stride[:-1]):
        return None
    return [(plain_meta(a.size[:-1], whole, tuple(n // 2 for n in a.stride[:-1]), a.offset // 2), 0)]


def _add_copy_rule(view: str, copy: str) -> None:
    """Register a rule for the form of a view that gives a row-major copy."""
    looks = VIEW_RULES["aten::" + view]

    @_rule(copy)
    def copies(a: Meta, *args: object, **named: object) -> RuleResult:
        found = looks(a, *args, **named) if 0 not in a.size and a.dtype not in _BITS else None
        return None if found is None else [(plain_meta(found[0][0].size, found[0][0].dtype), None)]


_WITH_COPIES = (
    "alias detach view t transpose.int permute unsqueeze squeeze squeeze.dim squeeze.dims diagonal unfold select.int "
    "slice.Tensor expand"
)
for _name in _WITH_COPIES.split():
    _packet, _, _overload = _name.partition(".")
    _add_copy_rule(_name, f"{_packet}_copy" + (f".{_overload}" if _overload else ""))
