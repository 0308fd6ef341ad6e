"""Numbers on a worker whose values are known here, so that asking for them does not wait.

An optimizer counts its steps in tensors, and reads them on the host. Where they live on a worker, as after
`torch.load(map_location="sky:0")`, each reading would be a round trip. But the client uploaded them, or made them with
`zeros`, or asked for them before, and it recorded every `add_` since: it does the same addition on a copy here.

A tensor whose value is known has a look of its own (`KnownMeta`). No cache of shapes has seen that look, so that each
operation on the tensor takes the careful way through `recording.Call`, which forgets the value first. Only the few
operations below, which are exact on every device and share no memory, let it be known again. What writes without being
an operation on the tensor (replays of graphs, compiled graphs, functions) makes all values of the session unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from skyproxy.session.recorder import Recorder
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor

if TYPE_CHECKING:
    from skyproxy.tensor.core.devices import Handle
    from skyproxy.tensor.dispatch.recording import Call

_IN_PLACE = (
    "add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar mul_.Tensor mul_.Scalar fill_.Scalar fill_.Tensor zero_ copy_ "
    "_foreach_add_.Scalar _foreach_add_.List _foreach_add_.Tensor _foreach_add_.ScalarList _foreach_sub_.Scalar "
    "_foreach_mul_.Scalar _foreach_mul_.ScalarList _foreach_mul_.List _foreach_copy_ _foreach_zero_"
)
_FRESH = (
    "clone _to_copy zeros ones full add.Tensor sub.Tensor rsub.Scalar mul.Tensor neg abs ceil floor "
    "trunc maximum minimum logical_not logical_and logical_or eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor "
    "ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar div.Tensor div.Tensor_mode floor_divide "
    "remainder.Scalar"
)
_EXACT_ON_CPUS = frozenset(
    {"aten::div.Tensor", "aten::div.Tensor_mode", "aten::floor_divide", "aten::remainder.Scalar"}
)
FOLLOWED = frozenset("aten::" + name for name in (*_IN_PLACE.split(), *_FRESH.split()))
"""Operations whose results are known where their operands are: never a view, and exact, see `_is_exact`."""
_DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    }
)  # fmt: skip
_MOST_UNASKED = 16
_UNASKED_BY_CHANGE = 4
"""How often a value is used without being asked for, before it is forgotten, and what a change counts: some counters
are never read, such as those of batch norms, and an operation on a known value costs twice the time."""
MOST_BYTES = 16
"""Storages of files up to this size may hold a number."""
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.maybe_current_level


class KnownMeta(Meta):
    """The look of one tensor whose value is known.

    Attributes:
        base: the look that it shares with other tensors.
        value: a tensor of the CPU that equals it; None once something else may have changed it.
        recorder: what records the session's commands.
        epoch: `recorder.hidden_writes` when the value was right.
        unasked: how often the value was used since somebody asked for it.
        heir: for the bytes of a storage: the look of the one tensor that was made of them.
        sources: the looks of what it was computed of; who asks for it asks for them.
    """

    __slots__ = ("base", "epoch", "heir", "recorder", "sources", "unasked", "value")
    known = True

    def __init__(self, base: Meta, value: torch.Tensor, recorder: Any, unasked: int = 0) -> None:
        self.description, self.size, self.stride, self.offset = base.description, base.size, base.stride, base.offset
        self.dtype, self.layout, self.plain, self.large = base.dtype, base.layout, base.plain, base.large
        self.conjugate, self.negative, self.encoded = base.conjugate, base.negative, base.encoded
        self.base = base
        self.value: torch.Tensor | None = value
        self.recorder = recorder
        self.epoch = recorder.hidden_writes
        self.unasked = unasked
        self.heir: KnownMeta | None = None
        self.sources: tuple[KnownMeta, ...] = ()

    def asked(self) -> None:
        """Notes that somebody wants the value."""
        self.unasked = 0
        sources, self.sources = self.sources, ()  # told once, or a number counted anew each time would keep all before
        for source in sources:
            source.asked()


def know(handle: Handle, value: torch.Tensor) -> None:
    """Remembers the value of a tensor that shares its memory with no other one.

    Args:
        handle: the tensor's.
        value: an equal tensor on the CPU, which nobody else changes.
    """
    recorder = handle.device.recorder
    if type(recorder) is Recorder and value.dtype in _DTYPES and not handle.meta.known:
        handle.meta = KnownMeta(handle.meta, value, recorder)


def forget(handle: Handle) -> torch.Tensor | None:
    """Makes a tensor's value unknown, and that of the tensor made of its bytes; the value that was known, if any."""
    meta = handle.meta
    if not meta.known:
        return None
    handle.meta = meta.base
    value: torch.Tensor | None = meta.value if meta.epoch == meta.recorder.hidden_writes else None
    meta.value = None
    if meta.heir is not None:
        meta.heir.value = None
    return value


def value_of(handle: Handle) -> torch.Tensor | None:
    """The value of a tensor, where it is known; not to be changed."""
    meta = handle.meta
    if not meta.known or meta.epoch != meta.recorder.hidden_writes or type(handle.device.recorder) is not Recorder:
        return None
    meta.asked()
    value: torch.Tensor | None = meta.value
    return value


def inherit(root: Handle, handle: Handle) -> None:
    """Lets a tensor that was just made of a storage's bytes be known as they are, if it is the first and takes all."""
    lender = root.meta
    if not lender.known:
        return
    meta: Meta = handle.meta
    fits = lender.heir is None and meta.size == () and meta.plain and meta.offset == 0
    value = value_of(root)
    if not fits or value is None or value.numel() != meta.dtype.itemsize or meta.dtype not in _DTYPES:
        forget(root)
        return
    know(handle, value.clone().view(meta.dtype).reshape(()))
    if handle.meta.known:
        lender.heir = handle.meta


def follow(call: Call, record: Callable[[], Any]) -> Any:
    """Records an operation of `FOLLOWED`, and does it here too if the values of all its operands are known.

    Args:
        call: the call, whose operands' values were forgotten when it was taken apart.
        record: records it and gives its result.
    """
    recorder = call.device.recorder
    if type(recorder) is not Recorder or _modes() or _transforms() is not None or not _is_exact(call):
        return record()
    before = recorder.ops
    result = record()
    known = {id(handle): value for handle, _, value in call.known}
    if len(known) != len({id(tensor._sky) for tensor in call.tensors}):
        return result
    unasked = (_UNASKED_BY_CHANGE if call.plan.writes else 1) + max(
        (meta.unasked for _, meta, _ in call.known), default=0
    )
    if unasked > _MOST_UNASKED:
        return result
    results: Sequence[Any] = result if isinstance(result, list | tuple) else (result,)
    targets = [*results] if not call.plan.writes else _written(call)
    if not all(type(t) is RemoteTensor and t.dim() == 0 and t._sky.meta.plain for t in targets):
        return result
    try:
        values = _computed(call, {number: value.clone() for number, value in known.items()})
    except RuntimeError:  # it will fail there too, and that error has a line
        return result
    found = [
        (target._sky, KnownMeta(target._sky.meta, value, recorder, unasked))
        for target, value in zip(targets, values, strict=True)
        if value.dtype is target.dtype and value.dtype in _DTYPES and not target._sky.meta.known
    ]
    changed = {id(target._sky) for target in targets}
    read = [(handle, meta, value) for handle, meta, value in call.known if id(handle) not in changed]
    if not call.plan.writes:
        for _, meta in found:
            meta.sources = tuple(source for _, source, _ in read)
    for handle, meta, value in read:
        meta.value, meta.unasked = value, unasked
        found.append((handle, meta))
    for handle, meta in found:
        handle.meta = meta
        if recorder.ops != before + 1:  # another thread may have changed it meanwhile
            forget(handle)
    return result


def _is_exact(call: Call) -> bool:
    """Whether every device computes the same: GPUs multiply by reciprocals, and multiply and add in one step."""
    if call.device.place[0] == "cpu":
        return True
    return call.plan.name not in _EXACT_ON_CPUS and call.kwargs.get("alpha", 1) == 1


def _written(call: Call) -> list[Any]:
    target = call.args[0]
    return list(target) if isinstance(target, list | tuple) else [target]


def _computed(call: Call, values: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """What the targets of a call hold, by the values of its operands, which it may change."""

    def local(a: Any) -> Any:
        if type(a) is RemoteTensor:
            return values[id(a._sky)]
        return [local(item) for item in a] if isinstance(a, list | tuple) else a

    options = {name: local(a) for name, a in call.kwargs.items() if name not in ("device", "pin_memory")}
    args = [local(a) for a in call.args]
    result = call.plan.func(*args, **options)
    target = args[0] if call.plan.writes else result
    return target if isinstance(target, list) else [target]


__all__ = ["FOLLOWED", "KnownMeta", "follow", "forget", "inherit", "know", "value_of"]
