"""Each process's share of the data."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.instance import instance_info

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


class ShardOptions(TypedDict, total=False):
    """Options of `shard`."""

    shuffle: bool
    seed: int
    drop_last: bool
    rank: int | None
    world_size: int | None


@overload
def shard(one: T, /, **options: Unpack[ShardOptions]) -> T: ...
@overload
def shard(one: T, two: U, /, **options: Unpack[ShardOptions]) -> tuple[T, U]: ...
@overload
def shard(one: T, two: U, three: V, /, **options: Unpack[ShardOptions]) -> tuple[T, U, V]: ...
@overload
def shard(one: T, two: T, three: T, four: T, /, *more: T, **options: Unpack[ShardOptions]) -> tuple[T, ...]: ...
def shard(
    *arrays: object,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
) -> object:
    """Return the share that this process has of every array, of the same type as the array.

    Process r of w takes the items r, r + w, r + 2w, ... of the (shuffled) order, the same ones of every array, so that
    what belonged together still does. Nothing is lost, nothing comes twice. Outside a pool the share is the whole.

    Args:
        arrays: sequences, tensors, NumPy, JAX or sparse arrays, pandas and Arrow tables, datasets of Hugging Face and
            of torch, by their first dimension. A mapping or a named tuple is a table of columns: each of its values is
            sharded.
        shuffle: whether to take the items from an order that is random, and equal in every process.
        seed: of that order.
        drop_last: whether to leave out the last items where they do not go round, so that all shares are equally long.
        rank: whose share; of this process by default.
        world_size: among how many.

    Returns:
        The share of the one array, or a tuple with the shares of all. A share can be empty.

    Raises:
        ConfigurationError: the arrays are not equally long, or an array has no length or no order.

    Example:
        ```python
        inputs, labels = skyproxy.shard(list(range(10)), list("abcdefghij"))
        ```
    """
    if not arrays:
        raise ConfigurationError("shard() was given nothing to shard. Pass one or more arrays: shard(x, y).")
    if shuffle and not isinstance(seed, int):
        raise ConfigurationError(
            f"seed={seed!r} gives every process an order of its own, so shares would overlap. Pass an integer."
        )
    if rank is None or world_size is None:
        info = instance_info()
        rank = info.rank if rank is None else rank
        world_size = info.world_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"there is no share {rank} of {world_size}. Numbers begin with 0.")
    lengths = {f"argument {position + 1}": _length(array) for position, array in enumerate(arrays)}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length} items" for name, length in lengths.items())
        raise ConfigurationError(
            f"shard() needs arrays of equal length, item i of one belongs to item i of all: {told}."
        )
    total = lengths["argument 1"]
    end = total - total % world_size if drop_last else total
    picked: Sequence[int] | slice
    if shuffle:
        # Not NumPy's generator: where one process has NumPy and another has not, they still must agree.
        order = list(range(total))
        random.Random(seed).shuffle(order)
        picked = order[rank:end:world_size]
    else:
        picked = slice(rank, end, world_size)
    shares = tuple(_take(array, picked, total) for array in arrays)
    return shares[0] if len(shares) == 1 else shares


def _columns(array: object) -> Mapping[str, object] | None:
    """The columns of a mapping or a named tuple, None for everything else."""
    if isinstance(array, Mapping):
        return array
    if isinstance(array, tuple) and hasattr(array, "_fields"):
        return dict(zip(array._fields, array))
    return None


def _length(array: Any) -> int:
    columns = _columns(array)
    if columns is not None:
        lengths = {name: _length(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigurationError(f"the columns of a {type(array).__name__} are not equally long: {lengths}.")
        return next(iter(lengths.values()))
    if isinstance(array, set | frozenset):
        raise ConfigurationError("a set has no order, so processes would not agree on shares. Pass sorted(...).")
    shape = getattr(array, "shape", None)
    if shape is not None:
        if len(shape) == 0:
            raise ConfigurationError("an array without dimensions cannot be sharded; pass it to the function as it is.")
        return int(shape[0])
    try:
        return len(array)
    except TypeError:
        raise ConfigurationError(
            f"a {type(array).__name__} has no length, so it has no shares. Make a list of it first: list(...)."
        ) from None


def _take(array: Any, picked: Sequence[int] | slice, total: int) -> object:
    columns = _columns(array)
    if columns is not None:
        taken = {name: _take(column, picked, total) for name, column in columns.items()}
        return type(array)(**taken) if isinstance(array, tuple) else _rebuild(array, taken)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _take_tensor(torch, array, picked)
    if hasattr(array, "iloc"):
        return array.iloc[picked]
    indices = range(*picked.indices(total)) if isinstance(picked, slice) else picked
    for method in ("select", "take"):
        # `select` of Hugging Face's datasets, `take` of Arrow's tables. Arrays have one too, but are indexed below.
        if not hasattr(array, "dtype") and callable(getattr(array, method, None)):
            return getattr(array, method)(list(indices))
    if hasattr(array, "shape"):
        if isinstance(picked, slice):
            return array[picked]
        numpy = sys.modules["numpy"]
        return array[numpy.asarray(picked, dtype=numpy.intp)]
    if torch is not None and isinstance(array, torch.utils.data.Dataset):
        return torch.utils.data.Subset(array, list(indices))
    return _take_items(array, picked, indices)


def _take_tensor(torch: Any, array: Any, picked: Sequence[int] | slice) -> object:
    index = (
        picked if isinstance(picked, slice) else torch.as_tensor(list(picked), dtype=torch.long, device=array.device)
    )
    if isinstance(array, torch.nn.Parameter):
        # A copy: a Parameter is a leaf, and a view of another one is none.
        return torch.nn.Parameter(array.detach()[index].clone(), requires_grad=array.requires_grad)
    return array[index]


def _take_items(array: Any, picked: Sequence[int] | slice, indices: Sequence[int]) -> object:
    kind = type(array)
    if isinstance(picked, slice) and kind in (list, tuple, str, bytes, bytearray, range, memoryview):
        return array[picked]
    items = [array[index] for index in indices]
    if kind is list or kind is range or kind is memoryview:
        return items
    if isinstance(array, str):
        return kind("".join(items))
    if isinstance(array, bytes | bytearray):
        return kind(items)
    if hasattr(array, "typecode"):
        return kind(array.typecode, items)
    if hasattr(array, "maxlen"):
        return kind(items, array.maxlen)
    try:
        return kind(items)
    except TypeError:
        return items


def _rebuild(array: Any, columns: dict[str, object]) -> object:
    """A mapping like `array` with other columns; its own attributes stay where it knows how to copy itself."""
    try:
        rebuilt = array.copy()
        rebuilt.update(columns)
    except AttributeError:
        return type(array)(columns)
    return rebuilt
