"""Holds an entry on batches of one, and in other orders of memory, against the local CPU: bits, and all strides.

Strides of dimensions of size one address nothing, and PyTorch chooses memory formats and kernels by them all the same.
What a client believes of results is checked once for each look of an operation's arguments, so looks that differ in
nothing else follow each other here, in one order and then in the other.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from skyproxy.protocol import commands
from skyproxy.torch_codec import decode_description
from tests.conformance.op_checks import SEED, UNDEFINED_VALUES, Tally, leaves_of, settle
from tests.conformance.twins import Twins, plain_tree

_LOOKED_AT = 12
"""Samples among which those with the most dimensions are looked for."""
_TAKEN = 2
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CRASHES_LOCALLY = frozenset({"_segment_reduce", "lu_unpack", "nn.functional.embedding_bag"})
"""Ops that believe their lengths, offsets or pivots: cut, those end the process on the local CPU."""
_LEFT_UNFILLED = UNDEFINED_VALUES | {"resize_", "resize_as_"}

Relayout = Callable[[torch.Tensor], torch.Tensor]
Sample = tuple[Any, dict[str, Any]]


def _reversed(x: torch.Tensor) -> torch.Tensor:
    """The same values, the first dimension the fastest in memory."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def _through_tokens(x: torch.Tensor) -> torch.Tensor:
    """What vision models make of an image's tokens: (N, H*W, C) in memory, seen as (N, C, H, W)."""
    if x.dim() < 3 or x.numel() == 0:
        return x
    return x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).reshape(x.shape)


def _idle(x: torch.Tensor, stride: int) -> torch.Tensor:
    """The same memory with another stride in each dimension of size one."""
    strides = [stride if n == 1 else s for n, s in zip(x.shape, x.stride())]
    return torch.as_strided(x, x.shape, strides, x.storage_offset()) if x.numel() else x


def _formatted(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_FORMATS[x.dim()]) if x.dim() in _FORMATS else x


ORDERS: dict[str, Relayout] = {
    "reversed": _reversed,
    "tokens": _through_tokens,
    "channels-last": _formatted,
}
"""Orders of memory for whole samples."""
LAYOUTS: dict[str, Relayout] = {
    "as cut": lambda x: x,
    "idle strides of 1": lambda x: _idle(x, 1),
    "idle strides of 4096": lambda x: _idle(x, 4096),
    "reversed, idle strides of 3": lambda x: _idle(_reversed(x), 3),
    **ORDERS,
}
"""The same for samples with a dimension of size one."""


def check_layouts(op: Any, device: str, *, inference: bool = False) -> Tally:
    """Compares an entry on samples that are cut to a batch of one, and on whole ones in other orders of memory.

    Args:
        inference: whether to run in inference mode, where PyTorch hands over composites undivided: then one sample is
            taken, cut, and each layout comes once.
    """
    checks = Checks(op, device, inference=inference)
    if op.name not in CRASHES_LOCALLY:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = checks.samples()
            with torch.inference_mode(inference):
                for number, sample in enumerate(samples):
                    checks.sample(number, sample)
    return checks.tally


class Checks:
    """The checks of one entry, and what was found."""

    def __init__(self, op: Any, device: str, *, inference: bool, dtype: torch.dtype = torch.float32) -> None:
        self.tally = Tally()
        self._op = op
        self._device = device
        self._dtype = dtype
        self._gradients = op.supports_autograd and not inference
        self._once = inference

    def samples(self) -> list[Any]:
        """The samples with the most dimensions, of different kinds."""
        torch.manual_seed(SEED)
        found: dict[Any, Any] = {}
        made = self._op.sample_inputs("cpu", self._dtype, requires_grad=self._gradients)
        for sample in itertools.islice(made, _LOOKED_AT):
            tensors = _strided((sample.input, *sample.args, *sample.kwargs.values()))
            if any(tensor.dim() for tensor in tensors):
                found.setdefault((tuple(tensor.dim() for tensor in tensors), tuple(sample.kwargs)), sample)
        most = sorted(found.items(), key=lambda item: (-max(item[0][0]), -len(item[0][0])))
        return [sample for _, sample in most[: 1 if self._once else _TAKEN]]

    def sample(self, number: int, sample: Any) -> None:
        """Check one sample in all its layouts."""
        whole: Sample = ((sample.input, *sample.args), dict(sample.kwargs))
        cut = self.cut(whole)
        variants = [(f"a batch of one, {name}", x) for name, x in _laid_out(cut, LAYOUTS)] if cut is not None else []
        orders = [] if self._once else list(_laid_out(whole, ORDERS))
        again = [] if self._once else variants[::-1]
        for name, variant in (*variants, *orders, *again):
            self._compare(f"sample {number}, {name}", variant, sample.output_process_fn_grad)

    def cut(self, whole: Sample) -> Sample | None:
        """The sample with a first dimension of size one: of the first tensor, of those of equal length, or of all."""
        tensors = _strided(whole)
        first = tensors[0]
        if first.dim() == 0 or first.shape[0] < 1:
            return None
        chosen: list[Callable[[torch.Tensor], bool]] = [
            lambda x: x is first,
            lambda x: x.dim() > 0 and x.shape[0] == first.shape[0],
            lambda x: x.dim() > 0,
        ]
        for is_cut in chosen:
            cut = _relaid(whole, lambda x, is_cut=is_cut: x.narrow(0, 0, 1) if is_cut(x) and len(x) > 1 else x)
            try:
                self._run(cut, "cpu")
            except Exception:
                continue
            return cut
        return None

    def _run(self, sample: Sample, place: str) -> tuple[Any, list[torch.Tensor]]:
        """The results, and the arguments that require gradients."""
        twins = Twins(place)
        args, kwargs = twins.of(sample[0]), twins.of(sample[1])
        torch.manual_seed(SEED)
        return self._op(*args, **kwargs), leaves_of((args, kwargs))

    def _compare(self, what: str, sample: Sample, differentiable: Callable[[Any], Any]) -> None:
        try:
            expected, inputs = self._run(sample, "cpu")
        except Exception:
            return
        self.tally.ran += 1
        try:
            torch.sky.synchronize()
            result, ours = self._run(sample, self._device)
            self._note(what, differences(result, expected, values=self._op.name not in _LEFT_UNFILLED))
            if self._gradients:
                self._compare_gradients(what, sample, differentiable, (result, ours), (expected, inputs))
            torch.sky.synchronize()
        except Exception as error:
            self._note(what, [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"])
            settle()

    def _compare_gradients(
        self, what: str, sample: Sample, differentiable: Callable[[Any], Any], ours: Any, theirs: Any
    ) -> None:
        roots = leaves_of(differentiable(theirs[0]))
        if not roots:
            return
        generator = torch.Generator().manual_seed(SEED)
        try:
            weights = [torch.empty_like(root).uniform_(generator=generator) for root in roots]
            expected = torch.autograd.grad(roots, theirs[1], weights, allow_unused=True)
        except Exception:
            return
        self.tally.ran += 1
        sent = [weight.to(self._device) for weight in weights]
        result = torch.autograd.grad(leaves_of(differentiable(ours[0])), ours[1], sent, allow_unused=True)
        found = differences(result, expected)
        if found and differences(result, self._by_formulas_for_subclasses(sample, differentiable, weights)):
            self._note(f"gradients, {what}", found)

    def _by_formulas_for_subclasses(
        self, sample: Sample, differentiable: Callable[[Any], Any], weights: list[torch.Tensor]
    ) -> Any:
        """The gradients that local PyTorch gives for a tensor subclass: some of its formulas are others for those."""
        twins = Twins("cpu")
        args, kwargs = _wrapped((twins.of(sample[0]), twins.of(sample[1])))
        torch.manual_seed(SEED)
        roots = leaves_of(differentiable(self._op(*args, **kwargs)))
        inputs = leaves_of((args, kwargs))
        return _unwrapped(torch.autograd.grad(roots, inputs, _wrapped(weights), allow_unused=True))

    def _note(self, what: str, found: list[str]) -> None:
        self.tally.problems += [f"{what}: {difference}" for difference in found]


def differences(ours: Any, theirs: Any, *, values: bool = True) -> list[str]:
    """How tensors of two trees differ: in their looks here, in those on the worker, in any bit."""
    found = []
    pairs = zip(_tensors(ours), _tensors(theirs), strict=True)
    for number, (a, b) in enumerate(pairs):
        looks = [(tuple(t.shape), t.dtype, t.layout, t.layout is torch.strided and t.stride()) for t in (a, b)]
        if looks[0] != looks[1]:
            found.append(f"result {number}: {looks[0]} instead of {looks[1]}")
        elif a.layout is torch.strided and _on_worker(a) != a._sky.meta.description:  # type: ignore[attr-defined]
            found.append(f"result {number}: the worker has {_on_worker(a)}")
        elif values and not _equal(a.detach().cpu(), b.detach()):
            found.append(f"result {number}: other values")
    return found


def _on_worker(tensor: Any) -> Any:
    handle = tensor._sky
    ((fields, _),) = handle.device.session.request(
        "describe", lambda number: (commands.DESCRIBE, number, [handle.slot], [])
    )
    return decode_description(fields)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.dtype is torch.complex32:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(plain_tree(tree)) if isinstance(leaf, torch.Tensor)]


def _strided(tree: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in _tensors(tree) if leaf.layout is torch.strided and not leaf.is_conj() and not leaf.is_neg()
    ]


def _relaid(sample: Sample, relayout: Relayout) -> Sample:
    """The sample with each of its strided tensors laid out in another way."""
    strided = {id(leaf) for leaf in _strided(sample)}

    def leaf(x: Any) -> Any:
        if id(x) not in strided:
            return x
        with torch.no_grad():
            return relayout(x.detach() if x.requires_grad else x).requires_grad_(x.requires_grad)

    args, kwargs = pytree.tree_map(leaf, sample)
    return args, kwargs


def _laid_out(sample: Sample, layouts: dict[str, Relayout]) -> Iterator[tuple[str, Sample]]:
    """The sample in each layout that makes a difference."""
    seen = set()
    for name, relayout in layouts.items():
        laid_out = _relaid(sample, relayout)
        look = tuple((tuple(x.shape), x.stride()) for x in _strided(laid_out))
        if look not in seen:
            seen.add(look)
            yield name, laid_out


class _Wrapped(torch.Tensor):
    """A tensor subclass on the CPU that does what its tensor does."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _unwrapped((args, kwargs or {}))
        return _wrapped(func(*args, **kwargs))


def _wrapped(tree: Any) -> Any:
    def wrap(x: torch.Tensor) -> torch.Tensor:
        if x.layout is not torch.strided or isinstance(x, _Wrapped):
            return x
        made: Any = torch.Tensor._make_wrapper_subclass(
            _Wrapped, x.shape, x.stride(), x.storage_offset(), dtype=x.dtype, device="cpu"
        )
        made.held = x.detach()
        return made.requires_grad_(x.requires_grad)  # type: ignore[no-any-return]

    return pytree.tree_map_only(torch.Tensor, wrap, tree)


def _unwrapped(tree: Any) -> Any:
    return pytree.tree_map_only(_Wrapped, lambda x: x.held, tree)
