"""Holds an entry whose tensors are on several devices against the local CPU: right, or refused for its devices.

What must never happen is a write that goes nowhere. CUDA, which is the model, takes CPU tensors without dimensions for
numbers in elementwise operations, and positions from the CPU where something is indexed; the rest it refuses at once.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo
from torch.utils import _pytree as pytree

from tests.conformance.op_checks import SEED, UNDEFINED_VALUES, Tally, settle
from tests.conformance.program_looks import bits
from tests.conformance.twins import Twins

_CRASHES_LOCALLY = frozenset({"_chunk_cat"})
"""Ops that end the process on the local CPU when their tensors have no dimensions."""
_READ_BEYOND = frozenset(
    {"_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm", "nn.functional.batch_norm"}
)
"""Ops that read beyond a tensor without dimensions in the place of a weight, on the local CPU. Workers refuse that."""
_GROW = frozenset({"resize_", "resize_as_"})
"""Ops whose results may hold whatever the memory held."""
_INDEXED = {"__getitem__": slice(1, None), "index_put": slice(1, -1)}
"""Ops whose positions may be on the CPU, and which of their tensors are positions."""
_DEVICES_DIFFER = ("device", "type) should be the same")
"""What is in an error that says so; convolutions name types, as "CPUComplexFloatType" is one."""
_LOOKED_AT = 8
"""Samples among which those with the most tensors are looked for."""


class Arguments:
    """One sample's arguments as a flat list, so that each tensor can be put on a device of its own.

    Attributes:
        tensors: the places of its tensors.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def on(self, device: str, others: dict[int, str] | None = None) -> tuple[Any, dict[str, Any]]:
        """Copies of the arguments on a device, but for tensors at the places in `others`, which go where it says."""
        others = others or {}
        twins = {place: Twins(place) for place in (device, *others.values())}
        leaves = [twins[others.get(i, device)].of(leaf, requires_grad=False) for i, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def without_dimensions(self, only: int | None = None) -> Arguments:
        """The same with the first element of each tensor in its place, or of the one at the place that is given."""

        def first(place: int, leaf: Any) -> Any:
            chosen = only is None or place == only
            if chosen and isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
                return leaf.detach().flatten()[0].clone()
            return leaf

        leaves = [first(place, leaf) for place, leaf in enumerate(self.leaves)]
        return Arguments(*pytree.tree_unflatten(leaves, self._spec))


def check_mixed(
    op: Any, device: str, other: str, *, dtype: torch.dtype = torch.float32, limit: int = 2, looked_at: int = _LOOKED_AT
) -> Tally:
    """Check each form of an entry with each of its tensors, and each result that is given, elsewhere than the others.

    Args:
        op: the entry.
        device: where most tensors are.
        other: another worker's device, for targets there.
        dtype: of the samples.
        limit: how many samples are taken, those with the most tensors first.
        looked_at: the samples that those are taken from.
    """
    checks = _Checks(op, device, other)
    for number, arguments in enumerate(_chosen(op, dtype, limit, looked_at)):
        # PyTorch hands composites over undivided in inference mode.
        with warnings.catch_warnings(), torch.no_grad(), torch.inference_mode(number % 2 == 1):
            warnings.simplefilter("ignore")
            checks.sample(arguments, f"sample {number}")
            if op.name not in _CRASHES_LOCALLY:
                checks.sample(arguments.without_dimensions(), f"sample {number} without dimensions")
    return checks.tally


def _chosen(op: Any, dtype: torch.dtype, limit: int, looked_at: int) -> list[Arguments]:
    """The samples with the most tensors among the first ones."""
    torch.manual_seed(SEED)
    samples = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), looked_at)
    found = [Arguments((sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
    return sorted(found, key=lambda arguments: -len(arguments.tensors))[:limit]


class _Checks:
    """The checks of one entry, and what was found."""

    def __init__(self, op: Any, device: str, other: str) -> None:
        self.tally = Tally()
        self._op = op
        self._device = device
        self._other = other

    def sample(self, arguments: Arguments, what: str) -> None:
        """Check one sample in all its forms."""
        if not arguments.tensors:
            return
        if len(arguments.tensors) > 1:
            self._operands(arguments, what)
            self._inplace(arguments, f"in-place, {what}")
        if self._op.supports_out and "out" not in arguments.on("cpu")[1]:
            self._out(arguments, f"out=, {what}")

    def _operands(self, arguments: Arguments, what: str) -> None:
        op = self._op
        for form, run in self._forms():
            for place in arguments.tensors:
                for sample, size in self._sizes(arguments, place):
                    leaf = sample.leaves[place]
                    # What elementwise ops of two tensors take for a number must be taken, and positions anywhere.
                    number = isinstance(op, BinaryUfuncInfo) and leaf.dim() == 0
                    places = arguments.tensors[_INDEXED.get(op.name, slice(0))]
                    position = place in places and leaf.dtype is torch.int64
                    self._right_or_refused(
                        f"{form}, {what}, tensor {place} on the cpu{size}",
                        run,
                        sample.on("cpu"),
                        lambda sample=sample, place=place: sample.on(self._device, {place: "cpu"}),
                        must_work=number or position,
                    )

    def _sizes(self, arguments: Arguments, place: int) -> Iterator[tuple[Arguments, str]]:
        """The arguments as they are, and with the tensor at a place without dimensions where it had some."""
        yield arguments, ""
        if arguments.leaves[place].dim() and self._op.name not in _READ_BEYOND:
            changed = arguments.without_dimensions(place)
            if changed.leaves[place].dim() == 0:  # it is dense, and has elements
                yield changed, " without dimensions"

    def _forms(self) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """The ways to ask for the same: as a function, a method, an operator of Python."""
        op = self._op
        yield "function", lambda on: op(*on[0], **on[1])
        for form, asked in (("method", op.method_variant), ("operator", op.operator_variant)):
            if asked is not None:
                yield form, lambda on, asked=asked: asked(*on[0], **on[1])

    def _inplace(self, arguments: Arguments, what: str) -> None:
        if arguments.tensors[0] != 0 or not isinstance(arguments.on("cpu")[0][0], torch.Tensor):
            return
        for form, inplace in (("method", self._op.inplace_variant), ("operator", self._op.inplace_operator_variant)):
            if inplace is None:
                continue

            def run(on: Any, inplace: Any = inplace) -> Any:
                result = inplace(*on[0], **on[1])
                return result, on[0][0]

            for place in ("cpu", self._other):
                self._right_or_refused(
                    f"{form}, {what}, target on {place}",
                    run,
                    arguments.on("cpu"),
                    lambda place=place: arguments.on(self._device, {0: place}),
                    target=lambda on: on[0][0],
                )
            for place in arguments.tensors[1:]:
                for sample, size in self._sizes(arguments, place):
                    self._right_or_refused(
                        f"{form}, {what}, tensor {place} on the cpu{size}",
                        run,
                        sample.on("cpu"),
                        lambda sample=sample, place=place: sample.on(self._device, {place: "cpu"}),
                        target=lambda on: on[0][0],
                        must_work=isinstance(self._op, BinaryUfuncInfo) and sample.leaves[place].dim() == 0,
                    )

    def _out(self, arguments: Arguments, what: str) -> None:
        op = self._op
        try:
            torch.manual_seed(SEED)
            result = _call(op, arguments.on("cpu"))
        except Exception:
            return
        fresh = list(result) if isinstance(result, tuple | list) else [result]
        if not all(isinstance(item, torch.Tensor) and item.layout is torch.strided for item in fresh):
            return
        several = isinstance(result, tuple | list)

        def filled(place: str, places: list[str]) -> Any:
            args, kwargs = arguments.on(place)
            out = [torch.ones_like(item).to(where) for item, where in zip(fresh, places)]
            return args, kwargs, out

        def run(on: Any) -> Any:
            args, kwargs, out = on
            return op(*args, **kwargs, out=tuple(out) if several else out[0]), out

        count = len(fresh)
        for where in ("cpu", self._other):
            for chosen in {(0,), (count - 1,), tuple(range(count))}:
                places = [where if i in chosen else self._device for i in range(count)]
                self._right_or_refused(
                    f"{what}, results {chosen} of {count} on {where}",
                    run,
                    filled("cpu", ["cpu"] * count),
                    lambda places=places: filled(self._device, places),
                    target=lambda on, chosen=chosen: [on[2][i] for i in chosen],
                )
        for place in arguments.tensors:

            def crossed(place: int = place) -> Any:
                args, kwargs = arguments.on(self._device, {place: "cpu"})
                return args, kwargs, [torch.ones_like(item).to(self._device) for item in fresh]

            self._right_or_refused(
                f"{what}, tensor {place} on the cpu",
                run,
                filled("cpu", ["cpu"] * count),
                crossed,
                target=lambda on: on[2],
            )

    def _right_or_refused(
        self,
        what: str,
        run: Callable[[Any], Any],
        local: Any,
        mixed: Callable[[], Any],
        *,
        target: Callable[[Any], Any] = lambda on: [],  # what must not change if it is refused
        must_work: bool = False,
    ) -> None:
        try:
            torch.manual_seed(SEED)
            expected = run(local)
        except Exception:
            return
        self.tally.ran += 1
        on = mixed()
        before = [(leaf, leaf.clone()) for leaf in pytree.tree_leaves(target(on))]
        try:
            torch.manual_seed(SEED)
            result = run(on)
        except Exception as error:
            text = " ".join(str(error).split())
            if must_work or not any(words in text.lower() for words in _DEVICES_DIFFER):
                self.tally.problems.append(f"{what}: {type(error).__name__}: {text[:300]}")
            settle()
            for leaf, copy in before:
                if leaf.shape != copy.shape or not torch.equal(bits(_local(leaf)), bits(_local(copy))):
                    self.tally.problems.append(f"{what}: refused, and changed all the same")
            return
        if self._op.name in UNDEFINED_VALUES or self._op.name in _GROW:
            return
        try:
            ours, theirs = (
                [leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, torch.Tensor)]
                for side in (result, expected)
            )
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(_local(a), _local(b), rtol=0, atol=0, equal_nan=True)
        except Exception as error:
            self.tally.problems.append(f"{what}: wrong: {' '.join(str(error).split())[:300]}")
            settle()


def _call(op: Any, on: tuple[Any, dict[str, Any]]) -> Any:
    return op(*on[0], **on[1])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()
