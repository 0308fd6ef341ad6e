"""Inference of what the results of an op will look like, without running it.

Three ways, tried in this order: a rule of our own (`shapes.rules`, for hot ops whose shapes change every step),
PyTorch's fake tensors, and asking the worker (`recording` does that when `infer` gives None). Whatever was inferred is
checked once by the worker, the first time it is used.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core.metadata import Meta, intern_meta, meta_of, plain_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ExcludedKeys,
    FakeTensor,
    count_dispatch_modes,
    disable_current_modes,
    has_kernel,
    pytree,
)
from skyproxy.tensor.dispatch.entries import Entry, Output, numbers_of, written_tensors
from skyproxy.tensor.dispatch.fake_tensors import fake_mode, fake_tensor
from skyproxy.tensor.dispatch.op_info import TENSOR, OpInfo
from skyproxy.tensor.shapes.elementwise import broadcast_sizes, preserved_stride
from skyproxy.tensor.shapes.kernel_strides import corrected, corrected_lists
from skyproxy.tensor.shapes.rules import TARGET, Look, RuleAnswer, is_written_twice, keeps_target, row_major

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skyproxy.tensor.core.devices import SkyDevice
    from skyproxy.tensor.dispatch.binding import BoundCall


_MOST_REFUSED = 4096
_refused: set[tuple[object, ...]] = set()
"""Keys of calls whose fakes changed what the op may not change. PyTorch caches what fake tensors do, but not this."""


def _refuse(key: tuple[object, ...]) -> None:
    if len(_refused) >= _MOST_REFUSED:
        _refused.clear()
    _refused.add(key)


_ANSWERS_DEPEND_ON_VALUES = frozenset(
    {
        *("aten::is_set_to", "aten::_nested_tensor_from_mask_left_aligned", "torchvision::nms"),
        *("aten::nonzero", "aten::masked_select", "aten::bincount", "aten::allclose"),
        *("aten::_unique", "aten::_unique2", "aten::unique_dim"),
        *("aten::unique_consecutive", "aten::unique_dim_consecutive"),
        *("aten::_to_sparse_csr", "aten::_to_sparse_csc", "aten::_to_sparse_bsr", "aten::_to_sparse_bsc"),
    }
)
"""Ops whose answers, also those into `out=`, would be guessed wrong: fake tensors know nothing of values, nor of shared
storages. Of those whose sizes depend on values they would say nothing, after more than a millisecond.
"""


_FILLS_EMPTY = frozenset({"aten::_fused_moving_avg_obs_fq_helper"})
"""Ops that give tensors which they write a size, where those have none yet: observers of each channel."""

_FILL_NO_EMPTY = frozenset({"aten::normal.Tensor_float_out"})
"""Ops that refuse a target of another size than their operands, be it empty."""

_MASKED = frozenset({"aten::native_batch_norm_backward", "aten::batch_norm_backward"})
"""Ops whose fake kernels give a gradient also where `output_mask` says that nobody wants it."""

_HALF_COMPLEX = frozenset({torch.complex32, getattr(torch, "bcomplex32", torch.complex32)})


_HALVES = (torch.float16, torch.bfloat16)
MASKS = (torch.bool, torch.uint8)


def infer(call: BoundCall) -> Entry | None:
    """Infer what the results of `call` look like; None where only the worker can tell."""
    packet = call.info.name.partition(".")[0]
    if packet in _ANSWERS_DEPEND_ON_VALUES or (packet == "aten::index" and _has_mask(call)):
        return None
    if call.info.rule is not None:
        found = _ask_rule(call)
        if found is None:  # not `or`: the answer for what only changes its target is an empty one
            found = _ask_rule_of_marked(call)
        if found is not None:
            entry = Entry.of_rule(found, has_tensors=bool(call.tensors))
            entry.nothing &= not call.info.synchronizes
            return entry
    if call.info.turned is not None and len(call.tensors) == 1:
        found = call.info.turned(*_looks(call.args))
        if found is not None:
            return _turn(call, found)
    if call.info.writes and (_outgrows_target(call) or tuple(call.key) in _refused):
        return None
    if call.info.name in _FILLS_EMPTY and any(0 in call.tensors[i]._sky.meta.size for i in written_tensors(call)):
        return None
    if call.info.columns:
        return _infer_columns(call)
    return _infer_by_fake(call)


def infer_filled(call: BoundCall) -> Entry | None:
    """Infer an `out=` form whose targets have the sizes and dtypes of its results, or are empty; else None.

    Empty ones (`torch.empty(0)`) take the size of the result. They lie row by row where a fresh one would, too; where
    it would not, that depends on the kernel.
    """
    if call.info.unfilled is None or call.has_values or kind_decides(call.info, call.device, call.tensors):
        return None
    found = resized_targets(call.info, *looks_of(call))
    if found is None:
        return None
    changed = [(position, look) for name, look in found for position in numbers_of(call, (name,))]
    return Entry([Output(argument=name) for name in call.info.returns], changed).settle(call)


def resized_targets(info: OpInfo, looks: list[Any], named: dict[str, Any]) -> list[tuple[str, Meta]] | None:
    """Return which targets of an `out=` form with a rule are resized, and what they look like then; None: nobody knows.

    Args:
        info: the form.
        looks: its arguments, with looks in the place of tensors.
        named: the same by name.
    """
    assert info.unfilled is not None
    found = info.unfilled(*looks, **{name: a for name, a in named.items() if name not in info.writes})
    if not found or len(found) != len(info.writes):
        return None
    resized: list[tuple[str, Meta]] = []
    for look, name in zip(found, info.writes, strict=True):
        made, own = look[0] if type(look) is tuple else None, named.get(name)
        if made is None or not isinstance(own, Meta) or made.dtype is not own.dtype or not keeps_target(own):
            return None
        if made.size == own.size:
            continue
        if own.size != (0,) or 0 in made.size or own.offset or not row_major(made) or info.name in _FILL_NO_EMPTY:
            return None
        resized.append((name, made))
    return resized


def depends_on_kind(call: BoundCall) -> bool:
    """Return whether only the worker can tell what the results look like, which nothing here knows of its device."""
    info = call.info
    if kind_decides(info, call.device, call.tensors):
        return True
    if info.asks_worker_for_halves and any(t.dtype in _HALVES for t in call.tensors):
        return info.rule is None or _ask_rule(call) is None
    if info.takes_one_dtype and len({t.dtype for t in call.tensors}) > 1:
        return True  # the mistake that people make most, whose error should come at its line
    return info.asks_worker_for_shape


def kind_decides(info: OpInfo, device: SkyDevice, args: Iterable[object]) -> bool:
    """Return whether the kind of the worker's device decides what results look like, and it is none that rules know."""
    kind = device.row["type"]
    if info.asks_cuda_for_shape and kind == "cuda":
        return True
    return info.asks_worker_for_halves and kind != "cpu" and any(getattr(a, "dtype", None) in _HALVES for a in args)


def _turn(call: BoundCall, found: RuleAnswer) -> Entry:
    """The entry of an op that makes a tensor another view of its memory."""
    meta = found[0][0]
    assert type(meta) is Meta
    output = Output(argument=call.info.names[0])
    if meta is call.tensors[0]._sky.meta:
        return Entry([output]).settle(call)
    return Entry.of_change(output, meta)


def _outgrows_target(call: BoundCall) -> bool:
    """Return whether operands do not fit into the changed tensor, or it overlaps itself: only the worker refuses."""
    if call.info.reshapes or call.info.writes != call.info.names[:1]:
        return False
    written = call.args[0] if call.info.for_each else call.tensors[:1]
    if any(is_written_twice(target._sky.meta) for target in written if type(target) is RemoteTensor):
        return True  # kernels refuse that, those without values do not
    rows = zip(*(a for a in call.args if type(a) in (list, tuple))) if call.info.for_each else [call.tensors]
    sizes = ([a.shape for a in row if isinstance(a, torch.Tensor)] for row in rows)
    return any(broadcast_sizes(row) not in (None, row[0]) for row in sizes if row)


def _has_mask(call: BoundCall) -> bool:
    """Return whether values choose how much is taken, which fake tensors find out for a millisecond."""
    return any(tensor.dtype in MASKS for tensor in call.tensors[1:])


def _ask_rule(call: BoundCall) -> RuleAnswer | None:
    assert call.info.rule is not None
    if not call.has_values:
        return call.info.rule(*_looks(call.args), **{name: _look(a) for name, a in call.kwargs.items()})
    # CPU tensors that travel as values count as tensors without dimensions. Rules number the tensors whose memory a
    # result shares, and do not count these.
    if call.kwargs or any(isinstance(a, torch.Tensor) and type(a) is not RemoteTensor and a.dim() for a in call.args):
        return None
    found = call.info.rule(*(meta_of(a) if type(a) is torch.Tensor else _look(a) for a in call.args))
    return found if found is not None and is_fresh(found) else None


def is_fresh(found: RuleAnswer) -> bool:
    """Return whether all results are tensors with a memory of their own."""
    return found is not TARGET and not any(type(item) is list or item[1] is not None for item in found)


_READS_BITS = frozenset({"aten::view_as_real", "aten::view_as_complex", "aten::view.dtype"})
"""Views that there are none of where numbers are to be conjugated or negated first."""


def _ask_rule_of_marked(call: BoundCall) -> RuleAnswer | None:
    """The same where tensors are marked as conjugates or negatives: views keep the marks, others first make copies."""
    info = call.info
    metas = [tensor._sky.meta for tensor in call.tensors]
    apart = [meta for meta in metas if meta.conjugate or meta.negative]
    if not apart or info.writes or call.has_values or any(meta.layout is not torch.strided for meta in metas):
        return None
    assert info.rule is not None
    bare = {
        meta: plain_meta(
            meta.size,
            meta.dtype,
            meta.stride if info.is_view else preserved_stride(meta.size, meta.stride),
            meta.offset if info.is_view else 0,
        )
        for meta in apart
    }

    def without_mark(a: object) -> object:
        if type(a) is list:
            return [without_mark(item) for item in a]
        return bare.get(a, a) if type(a) is Meta else a

    given = [without_mark(a) for a in _looks(call.args)], {n: without_mark(_look(a)) for n, a in call.kwargs.items()}
    if not info.is_view:
        found = info.rule(*given[0], **given[1])
        fresh = found and all(type(look) is tuple and look[1] is None for look in found)
        return found if fresh else None
    if info.name in _READS_BITS or len(metas) != 1:
        return None
    found = info.rule(*given[0], **given[1])
    if found is None:
        return None

    def marked(look: Look) -> tuple[Meta, int | None]:
        assert look[0] is not None
        description = look[0].description._replace(conjugate=metas[0].conjugate, negative=metas[0].negative)
        return intern_meta(description), look[1]

    return [[marked(item) for item in look] if isinstance(look, list) else marked(look) for look in found]


def _infer_columns(call: BoundCall) -> Entry | None:
    """The same for an op that treats each place of its lists alike: places that look alike are inferred once."""
    lists = [a for a in call.args if type(a) in (list, tuple)]
    length = max(map(len, lists), default=0)
    named = any(type(a) in (list, tuple) for a in call.kwargs.values())
    numbers = [a for a in call.args if isinstance(a, torch.Tensor) and type(a) is not RemoteTensor and a.dim() == 1]
    if named or length == 0 or any(len(a) not in (0, length) for a in (*lists, *numbers)):
        return _infer_by_fake(call)
    first: dict[tuple[object, ...], int] = {}
    column_of = [
        first.setdefault(column, len(first))
        for column in zip(*([_column_key(item) for item in a] for a in lists if len(a)), strict=True)
    ]
    if len(first) == length:
        return _infer_by_fake(call)
    chosen = [column_of.index(number) for number in range(len(first))]

    def reduced(a: object) -> object:
        if (type(a) is list or type(a) is tuple) and len(a):
            return [a[at] for at in chosen]
        if isinstance(a, torch.Tensor) and type(a) is not RemoteTensor and a.dim() == 1:
            return a[torch.tensor(chosen, device="cpu")]
        return a

    entry = _infer_by_fake(type(call)(call.info, tuple(map(reduced, call.args)), call.kwargs))
    if entry is None:
        return None
    for output in entry.outputs:
        if output.items is not None:
            output.items = [output.items[number] for number in column_of]
    return Entry(entry.outputs).settle(call)


def _column_key(item: object) -> object:
    return item._sky.meta if type(item) is RemoteTensor else type(item)


def _looks(args: tuple[object, ...]) -> list[object]:
    return [_look(a) for a in args]


def looks_of(call: BoundCall) -> tuple[list[object], dict[str, object]]:
    """Return the arguments of a call, and those by name, with looks in the place of remote tensors."""
    return _looks(call.args), {name: _look(a) for name, a in call.kwargs.items()}


def _look(a: object) -> object:
    if type(a) is RemoteTensor:
        return a._sky.meta
    if isinstance(a, (list, tuple)) and any(type(item) is RemoteTensor for item in a):
        return [_look(item) for item in a]
    return a


class _InferenceLogFilter(logging.Filter):
    """Keeps PyTorch from logging what goes wrong while we infer: the worker's error is the one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.state = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self.state, "inferring", False)


_quiet = _InferenceLogFilter()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_quiet)
_CASTS = DispatchKeySet(DispatchKey.AutocastCPU)
"""`torch.autocast("cpu")` is not for remote tensors, and so not for their stand-ins."""

_NOTHING = contextlib.nullcontext()


def _infer_by_fake(call: BoundCall) -> Entry | None:
    """Runs the op on tensors without values: on meta tensors where it may be, which takes a quarter of the time."""
    entry = _run_without_values(call, "meta") if call.info.takes_meta else None
    if entry is None and not call.info.is_view:
        entry = _run_without_values(call, "cpu")
    if entry is not None:
        entry.is_guessed = True
    return entry


def _run_without_values(call: BoundCall, place: str) -> Entry | None:
    """Runs the op on stand-ins. Whatever fails means: ask the worker, whose error is the true one.

    Args:
        place: "meta" for meta tensors, "cpu" for PyTorch's fake tensors of the CPU.
    """
    fakes: list[torch.Tensor] = []

    def stand_in(a: object) -> object:
        if type(a) is RemoteTensor:
            fakes.append(fake_tensor(a._sky.meta, place))
            return fakes[-1]
        if isinstance(a, torch.device):
            return torch.device(place)
        if isinstance(a, torch.Generator):
            return None
        return a

    def empty(a: object) -> object:
        """Make an empty stand-in, which is resized without a warning: that is the worker's to give."""
        if type(a) is not RemoteTensor:
            return stand_in(a)
        fakes.append(fake_tensor(plain_meta((0,), a.dtype), place))
        return fakes[-1]

    # What they look like in the end the worker is asked for.
    outs = call.info.writes if call.info.asks_worker_for_shape else ()
    _quiet.state.inferring = True
    try:
        # Without the user's modes, which would take our stand-ins for the program's own tensors.
        watched = count_dispatch_modes() > 0
        mode = DisableTorchFunction() if place == "meta" else fake_mode()
        with disable_current_modes() if watched else _NOTHING, mode, torch.no_grad(), ExcludedKeys(_CASTS):
            args = [pytree.tree_map(stand_in, a) for a in call.args]
            kwargs = {
                name: pytree.tree_map(empty if name in outs else stand_in, a)
                for name, a in call.kwargs.items()
                if name != "pin_memory"
            }
            result = call.info.func(*args, **kwargs)
            return _entry_of(call, result, fakes)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return None
    finally:
        _quiet.state.inferring = False


def _entry_of(call: BoundCall, result: object, fakes: list[torch.Tensor]) -> Entry | None:
    if len(fakes) != len(call.tensors):
        return None
    results = result if isinstance(result, tuple) else (result,)
    returns = call.info.returns
    if not returns:
        results = ()
    if len(results) != len(returns):
        return None
    if call.info.name in _MASKED:
        results = tuple(item if wanted else None for item, wanted in zip(results, call.argument("output_mask")))
    storages = {fake.untyped_storage()._cdata: i for i, fake in reversed(list(enumerate(fakes)))}
    makes = _makes_results(call.info)
    outputs = [_output_of(item, name, fakes, storages, makes) for item, name in zip(results, returns, strict=True)]
    if any(output is None for output in outputs) or _halves_complex_numbers(outputs, fakes):
        return None
    _correct_strides(call, [output for output in outputs if output is not None])
    changed = []
    reshaped = numbers_of(call, call.info.reshapes)
    for i, (fake, tensor) in enumerate(zip(fakes, call.tensors, strict=True)):
        meta = meta_of(fake)
        if meta is not tensor._sky.meta:
            if i not in reshaped:  # the fake kernel resizes what the real one refuses to
                _refuse(tuple(call.key))
                return None
            changed.append((i, meta))
    return Entry([output for output in outputs if output is not None], changed).settle(call)


def _halves_complex_numbers(outputs: list[Output | None], fakes: list[torch.Tensor]) -> bool:
    """Return True if a result is complex of half precision, and no argument is.

    Kernels and fake kernels disagree on what a real tensor and a complex number make under a default dtype of half
    precision, in most versions of PyTorch for float16, from 2.15 on for bfloat16.
    """
    found = {
        described[0].dtype
        for output in outputs
        if output is not None
        for described in (output.items or ([(output.meta, None)] if output.meta is not None else ()))
    }
    return any(dtype in _HALF_COMPLEX and all(fake.dtype is not dtype for fake in fakes) for dtype in found)


def _correct_strides(call: BoundCall, outputs: list[Output]) -> None:
    fresh = [output.meta if output.shares is None else None for output in outputs]
    if call.info.for_each:
        args = _looks(call.args)
        for output in outputs:
            if output.items and all(shares is None for _, shares in output.items):
                items = corrected_lists(call.info.func, args, [meta for meta, _ in output.items])
                output.items = [(meta, None) for meta in items]
    if any(meta is not None for meta in fresh):
        looks = _looks(call.args), {name: _look(a) for name, a in call.kwargs.items()}
        operands = _operands(call.info, *looks)
        for output, meta in zip(outputs, corrected(call.info.func, *looks, operands, fresh), strict=True):
            output.meta = output.meta if meta is None else meta


def _operands(info: OpInfo, args: list[object], kwargs: dict[str, object]) -> list[object]:
    """The looks of a call's tensors and lists of tensors, and the numbers that stand in the place of tensors."""
    named = [*zip(info.kinds, args, strict=False), *((info.keyword_kinds[name], a) for name, a in kwargs.items())]
    return [
        a
        for kind, a in named
        if isinstance(a, Meta)
        or (kind == TENSOR and a is not None)
        or (isinstance(a, list | tuple) and any(isinstance(item, Meta) for item in a))
    ]


def _makes_results(info: OpInfo) -> bool:
    """Return whether an op's kernels make new tensors, by its schema; composites may hand on what they are given."""
    handed_on = any(result.alias_info is not None for result in info.func._schema.returns)
    return not (handed_on or info.name == "aten::lift" or has_kernel(info.name, "CompositeImplicitAutograd"))


def _output_of(
    item: object, name: str | None, fakes: list[torch.Tensor], storages: dict[int, int], makes: bool
) -> Output | None:
    if name is not None:
        return Output(argument=name)
    if isinstance(item, torch.Tensor):
        for i, fake in enumerate(fakes):
            if item is fake and not makes:
                return Output(tensor=i)
            if item is fake:  # PyTorch's formula gives its argument where a number says that nothing changes: a copy
                return Output(meta=meta_of(item)) if item.is_contiguous() else None
        described = _describe_fake(item, storages)
        return Output(meta=described[0], shares=described[1]) if described is not None else None
    if isinstance(item, list | tuple):
        rows = [_describe_fake(part, storages) for part in item]
        return Output(items=[row for row in rows if row is not None]) if None not in rows else None
    if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    return Output(value=item)


def _describe_fake(item: torch.Tensor, storages: dict[int, int]) -> tuple[Meta, int | None] | None:
    if not (isinstance(item, FakeTensor) or item.device.type == "meta") or any(
        isinstance(n, torch.SymInt) for n in item.shape
    ):
        return None
    return meta_of(item), storages.get(item.untyped_storage()._cdata)


__all__ = ["infer", "intern_meta", "looks_of"]
