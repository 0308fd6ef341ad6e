"""Shape rules for what puts tensors together or a border around one, and for what takes one apart.

See `shapes.rules`; this module completes its table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import Ints, channels_last_stride, preserved_stride, result_dtype
from skyproxy.tensor.shapes.reductions import RULES
from skyproxy.tensor.shapes.rules import FLOATS, RuleResult, preserved, row_major, rule
from skyproxy.tensor.shapes.selections import are_integers, axis_of, plain
from skyproxy.tensor.shapes.strides import reshaped_stride, suggests_channels_last
from skyproxy.torch_codec import contiguous_stride

_Joined = tuple[Ints, torch.dtype, Ints]
"""Size, dtype and strides of what is put together."""


def _join(parts: list[Meta], dim: int) -> _Joined | None:
    """Return what `cat` makes of parts; None where that takes more thought."""
    counted: list[Meta] = []
    for part in parts:
        if type(part) is not Meta or not part.plain:
            return None
        if part.size != (0,):  # what is empty and has one dimension goes with anything
            counted.append(part)
    if not counted:
        return None
    first = counted[0]
    size, dtype = first.size, first.dtype
    rank = len(size)
    if rank == 0 or not -rank <= dim < rank:
        return None
    dim %= rank
    before, behind = size[:dim], size[dim + 1 :]
    length = 0
    for part in counted:
        own = part.size
        if own != size and (len(own) != rank or own[:dim] != before or own[dim + 1 :] != behind):
            return None
        length += own[dim]
    size = (*before, length, *behind)
    if 0 in size:
        return None
    if any(part.dtype is not dtype for part in parts):
        if any(part.dtype.is_complex for part in parts):
            return None
        dtype = result_dtype(parts)
    in_format = all(suggests_channels_last(part.size, part.stride) for part in parts)
    return size, dtype, (channels_last_stride if in_format else contiguous_stride)(size)


@rule("cat")
def _cat(parts: list[Meta], dim: int = 0) -> RuleResult:
    found = _join(parts, dim) if type(dim) is int else None
    if found is None:
        return None
    size, dtype, stride = found
    return [(plain_meta(size, dtype, stride), None)]


@rule("stack")
def _stack(parts: list[Meta], dim: int = 0) -> RuleResult:
    """Joined along a dimension that is there already, and viewed; or each with one more, where that is the last."""
    if not parts or any(type(part) is not Meta or not part.plain or part.size != parts[0].size for part in parts):
        return None
    size = parts[0].size
    rank = len(size) + 1
    if type(dim) is not int or not -rank <= dim < rank or 0 in size:
        return None
    dim %= rank
    if dim == len(size):
        deeper = [plain_meta((*part.size, 1), part.dtype, (*part.stride, 1), part.offset) for part in parts]
        return _cat(deeper, dim)
    found = _join(parts, dim)
    if found is None:
        return None
    joined, dtype, stride = found
    wanted = (*size[:dim], len(parts), *size[dim:])
    viewed = reshaped_stride(joined, stride, wanted)
    return None if viewed is None else [(plain_meta(wanted, dtype, viewed), None)]


@rule("block_diag")
def _diagonal_of_blocks(parts: list[Meta]) -> RuleResult:
    if not parts or not plain(*parts) or any(len(p.size) != 2 or p.dtype is not parts[0].dtype for p in parts):
        return None
    size = sum(p.size[0] for p in parts), sum(p.size[1] for p in parts)
    return [(plain_meta(size, parts[0].dtype), None)]


def _padded_size(x: Meta, pad: Sequence[int]) -> Ints | None:
    pairs = len(pad) // 2
    if not plain(x) or not are_integers(pad) or len(pad) % 2 or pairs > len(x.size):
        return None
    size = list(x.size)
    at = len(size) - 1
    for before, after in zip(pad[::2], pad[1::2], strict=True):
        n = size[at]
        size[at] = n + before + after
        if before + n <= 0 or n + after <= 0 or size[at] <= 0:
            return None
        at -= 1
    return tuple(size)


@rule("constant_pad_nd")
def _pad(x: Meta, pad: Sequence[int], value: object = 0) -> RuleResult:
    size = _padded_size(x, pad)
    if size is None or type(value) not in (int, float, bool):
        return None
    if max(pad, default=0) <= 0:  # only cut: a copy of a part, with that part's strides
        return [(plain_meta(size, x.dtype, preserved_stride(size, x.stride)), None)]
    stride = channels_last_stride(size) if suggests_channels_last(x.size, x.stride) else None
    return [(plain_meta(size, x.dtype, stride), None)]


@rule("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d")
def _mirror(x: Meta, pad: Sequence[int]) -> RuleResult:
    size = _padded_size(x, pad) if min(pad, default=0) >= 0 else None
    pairs = len(pad) // 2
    if size is None or x.dtype not in FLOATS or len(x.size) not in (pairs + 1, pairs + 2):
        return None
    fits = all(pad[2 * i + j] < x.size[-1 - i] for i in range(pairs) for j in (0, 1))
    in_format = pairs > 1 and suggests_channels_last(x.size, x.stride)
    return [(plain_meta(size, x.dtype, channels_last_stride(size) if in_format else None), None)] if fits else None


def _scatter_into(name: str, view: str) -> None:
    """Register a rule for an op that gives a copy of a tensor in which a view of it is another one."""

    @rule(name)
    def put(x: Meta, part: Meta, *place: object, **named: object) -> RuleResult:
        found = RULES["aten::" + view](x, *place, **named) if plain(x, part) and part.dtype is x.dtype else None
        if found is None or found[0][0].size != part.size:  # type: ignore[union-attr]
            return None
        if row_major(x) and not x.offset:
            return [(x, None)]
        # What repeats elements is copied; all others with the whole of their memory.
        look = preserved(x) if any(n > 1 and not s for n, s in zip(x.size, x.stride, strict=True)) else None
        return None if look is None else [(look, None)]


_scatter_into("select_scatter", "select.int")
_scatter_into("slice_scatter", "slice.Tensor")
_scatter_into("diagonal_scatter", "diagonal")


# --- parts -----------------------------------------------------------------------------------------------------------


def _parts(x: Meta, at: int, sizes: list[int]) -> RuleResult:
    found: list[tuple[Meta, int | None]] = []
    offset, step, dtype, stride = x.offset, x.stride[at], x.dtype, x.stride
    before, behind = x.size[:at], x.size[at + 1 :]
    last, size = -1, x.size
    for n in sizes:
        if n != last:  # those that are as long share their numbers
            last, size = n, (*before, n, *behind)
        found.append((plain_meta(size, dtype, stride, offset), 0))
        offset += n * step
    return [found]


@rule("split.Tensor unsafe_split.Tensor")
def _split(x: Meta, length: int, dim: int = 0) -> RuleResult:
    at = axis_of(x, dim)
    if at is None or not x.plain or 0 in x.size or type(length) is not int or length < 1:
        return None
    whole_parts, rest = divmod(x.size[at], length)
    return _parts(x, at, [length] * whole_parts + [rest] * (rest > 0))


@rule("split_with_sizes unsafe_split_with_sizes")
def _split_with_sizes(x: Meta, sizes: Sequence[int], dim: int = 0) -> RuleResult:
    at = axis_of(x, dim)
    if at is None or not x.plain or 0 in x.size or not are_integers(sizes) or min(sizes, default=0) < 1:
        return None
    return _parts(x, at, list(sizes)) if sum(sizes) == x.size[at] else None


@rule("split_with_sizes_copy")
def _split_with_sizes_copy(x: Meta, sizes: Sequence[int], dim: int = 0) -> RuleResult:
    at = axis_of(x, dim)
    if at is None or _split_with_sizes(x, sizes, dim) is None:
        return None
    return [[(plain_meta((*x.size[:at], n, *x.size[at + 1 :]), x.dtype), None) for n in sizes]]


@rule("unbind.int")
def _unbind(x: Meta, dim: int = 0) -> RuleResult:
    at = axis_of(x, dim)
    if at is None or not x.plain or 0 in x.size:
        return None
    size, stride = x.size[:at] + x.size[at + 1 :], x.stride[:at] + x.stride[at + 1 :]
    offset, step, dtype = x.offset, x.stride[at], x.dtype
    return [[(plain_meta(size, dtype, stride, offset + i * step), 0) for i in range(x.size[at])]]


__all__ = ["RULES"]
