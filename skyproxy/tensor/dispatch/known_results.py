"""Operations on numbers whose values are known here: done here too, so that their results are known as well.

See `core.known_values`. Only the few operations below, which are exact on every device and share no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.session.recorder import Recorder
from skyproxy.tensor.core.host_copies import (
    escape,
    forget_uploads,
    forget_written,
    keep_values,
    sized_by,
    values_of,
    watch,
)
from skyproxy.tensor.core.known_values import DTYPES, KnownMeta, drop, forget, look_after_use
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import has_modes_or_transforms
from skyproxy.tensor.dispatch.entries import Entry, gives_parts, written_tensors
from skyproxy.tensor.dispatch.inference import MASKS
from skyproxy.tensor.dispatch.sparse_parts import SPARSE, note_parts, resizes_parts

if TYPE_CHECKING:
    from skyproxy.tensor.core.devices import Handle
    from skyproxy.tensor.dispatch.binding import BoundCall
    from skyproxy.tensor.dispatch.op_info import OpInfo


_EXACT_ON_CPUS = frozenset(
    {
        "aten::div.Tensor",
        "aten::div.Tensor_mode",
        "aten::floor_divide",
        "aten::reciprocal",
        "aten::remainder.Scalar",
        "aten::sqrt",
    }
)
_COMPARISONS = ("aten::eq.", "aten::ne.", "aten::lt.", "aten::le.", "aten::gt.", "aten::ge.")
_MOST_UNASKED = 16
_UNASKED_BY_CHANGE = 4
"""Uses of a value that nobody asks for, before it is forgotten, and what a change counts: some counters
are never read, such as those of batch norms, and an operation on a known value costs twice the time."""


def follow(call: BoundCall, record: Callable[[], object]) -> object:
    """Records an operation of `FOLLOWED`, and does it here too if the values of all its operands are known.

    Args:
        call: the call, whose operands' values were forgotten when it was taken apart.
        record: records it and gives its result.
    """
    recorder = call.device.recorder
    if type(recorder) is not Recorder or has_modes_or_transforms() or not _is_exact(call):
        return record()
    before = recorder.ops
    result = record()
    known = {id(handle): value for handle, _, value in call.known}
    if not all(id(tensor._sky) in known for tensor in call.tensors):
        if call.info.name.startswith(_COMPARISONS):
            _compare(call, known, result)
            if recorder.ops != before + 1 and type(result) is RemoteTensor:
                forget_written([result._sky])
        return result
    unasked = (_UNASKED_BY_CHANGE if call.info.writes else 1) + max(
        (meta.unasked for _, meta, _ in call.known), default=0
    )
    if unasked > _MOST_UNASKED:
        return result
    results: Sequence[Any] = result if isinstance(result, list | tuple) else (result,)
    if call.info.writes and call.elements:
        return result  # others share the memory of what was changed, perhaps
    targets = [*results] if not call.info.writes else _compute_writes(call)
    if not all(type(t) is RemoteTensor and t.dim() == 0 and t._sky.meta.plain for t in targets):
        return result
    try:
        values = _compute(call, {number: value.clone() for number, value in known.items()})
    except RuntimeError as error:  # it will fail on the worker too, and that error names a line
        if raised_by_handler(error):
            raise
        return result
    found = [
        (target._sky, KnownMeta(target._sky.meta, value, recorder, unasked))
        for target, value in zip(targets, values, strict=True)
        if value.dtype is target.dtype and value.dtype in DTYPES and not target._sky.meta.known
    ]
    changed = {id(target._sky) for target in targets}
    read = [(handle, meta, value) for handle, meta, value in call.known if id(handle) not in changed]
    if not call.info.writes:
        for _, meta in found:
            meta.sources = tuple(source for _, source, _ in read)
    for handle, meta, value in read:
        if meta.copy is None:
            meta.value = value
        meta.unasked = unasked
        found.append((handle, meta))
    for handle, meta in found:
        handle.meta = meta
        if recorder.ops != before + 1:  # another thread may have changed it meanwhile
            forget(handle)
    return result


def _compare(call: BoundCall, known: dict[int, torch.Tensor], result: object) -> None:
    """Know the bytes of a comparison with a known number, such as `timesteps == t`, if those of the other side are."""
    for tensor in call.tensors:
        if id(tensor._sky) not in known:
            values = values_of(tensor._sky)
            if values is None:
                return
            known[id(tensor._sky)] = values
    if type(result) is RemoteTensor and result._sky.root is None and result.is_contiguous():
        keep_values(result._sky, _compute(call, known)[0])


def nonzero(call: BoundCall) -> torch.Tensor | None:
    """Return the positions at which a tensor is not zero, if its bytes are known here. Elsewhere they lie otherwise."""
    if call.info.name != "aten::nonzero" or call.device.place[0] != "cpu" or has_modes_or_transforms():
        return None
    values = values_of(call.tensors[0]._sky)
    return values.nonzero() if values is not None else None


def sized_by_values(call: BoundCall) -> tuple[dict[object, object], object] | None:
    """Return where to keep, and under what, how a result looks whose size only masks decide, while those stay."""
    if call.has_values:
        return None
    name, tensors = call.info.name, call.tensors
    if name == "aten::index.Tensor":
        deciding = [tensor for tensor in tensors[1:] if tensor.dtype in MASKS]
    else:
        deciding = {"aten::nonzero": tensors, "aten::masked_select": tensors[1:]}.get(name, [])
    if not deciding or any(tensor._sky.meta.layout is not torch.strided for tensor in deciding):
        return None
    sizes = sized_by(deciding[0]._sky)
    others = tuple(watch(tensor._sky) for tensor in deciding[1:])  # others, as soon as something has written to them
    return None if sizes is None or None in others else (sizes, (*call.key, others))


def forget_written_by(call: BoundCall) -> None:
    """Forget what is known here of the bytes that a call changes."""
    handles = [tensor._sky for tensor in call.tensors]
    if any((handle.root or handle).copied for handle in handles):
        unsaid = not call.info.writes
        forget_written(handles if unsaid else [handles[number] for number in written_tensors(call)])
    if any(handle.meta.layout is not torch.strided for handle in handles) and any(
        resizes_parts(call, call.tensors[number]) for number in written_tensors(call)
    ):
        call.device.recorder.hidden_writes += 1


def forget_lists(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Forget the same of an op that changes other tensors than its first argument, for the fast path."""
    if info.changed_lists and not forget_uploads():
        return
    given = dict(zip(info.names, args, strict=False))
    if kwargs:
        given.update(kwargs)
    for name in info.writes or info.names:
        a = given.get(name)
        items = a if type(a) is list else (a,)
        forget_written(item._sky for item in items if type(item) is RemoteTensor)


def lend_memory(call: BoundCall) -> None:
    """Note that a result may lie in its arguments' memory, which it does not name: sparse and nested tensors may.

    Of sparse tensors nothing is known that depends on what is in that memory.
    """
    for tensor in call.tensors:
        if tensor._sky.meta.layout not in SPARSE:
            escape(tensor._sky)


def note_memory(call: BoundCall, result: Handle) -> None:
    """Note where a result that names none of its arguments may lie in their memory, or they in its own."""
    if result.meta.layout is not torch.strided:
        lend_memory(call)
        note_parts(call, result)
    elif gives_parts(call):
        escape(result)


def makes_a_number(call: BoundCall, entry: Entry) -> bool:
    """Return whether a call makes a tensor without dimensions of numbers alone."""
    made = entry.outputs[0].meta if not call.tensors and entry.outputs else None
    return made is not None and not made.size


def key_of_reader(
    info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None, key: list[object]
) -> tuple[object, ...] | None:
    """Return the key under which a call is kept that numbers with known values are operands of; None: there is none.

    It is for what neither changes them nor is followed. Their values are forgotten, as `BoundCall` does; elements of
    storages whose bytes are known stay so.
    """
    if KnownMeta not in map(type, key) or info.followed or info.writes:
        return None
    for a in (*args, *kwargs.values()) if kwargs else args:
        if type(a) is RemoteTensor:
            handle = a._sky
            meta = handle.meta
            if type(meta) is not KnownMeta:
                continue
            if meta.copy is None:
                drop(handle, meta)
            else:
                handle.meta = look_after_use(meta)
    return tuple([part.base if type(part) is KnownMeta else part for part in key])


def know_filled(handle: Handle, info: OpInfo, args: tuple[object, ...]) -> None:
    """Remember the value of a number that one of `FOLLOWED` has just made of sizes and options alone."""
    recorder, meta = handle.device.recorder, handle.meta
    if type(recorder) is Recorder and meta.dtype in DTYPES and not has_modes_or_transforms():
        fill = partial(info.func, *args, dtype=meta.dtype, device="cpu")
        handle.meta = KnownMeta(meta, fill, recorder, 1)


def _is_exact(call: BoundCall) -> bool:
    """Return whether every device computes the same: GPUs multiply by reciprocals, and multiply and add in one step."""
    if call.device.place[0] == "cpu":
        return True
    return call.info.name not in _EXACT_ON_CPUS and call.kwargs.get("alpha", 1) == 1


def _compute_writes(call: BoundCall) -> list[Any]:
    target = call.args[0]
    return list(target) if isinstance(target, list | tuple) else [target]


def _compute(call: BoundCall, values: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Compute what the targets of a call hold, by the values of its operands, which it may change."""

    def local(a: object) -> Any:
        if type(a) is RemoteTensor:
            return values[id(a._sky)]
        return [local(item) for item in a] if isinstance(a, list | tuple) else a

    options = {name: local(a) for name, a in call.kwargs.items() if name not in ("device", "pin_memory")}
    args = [local(a) for a in call.args]
    result = call.info.func(*args, **options)
    target = args[0] if call.info.writes else result
    return target if isinstance(target, list) else [target]
