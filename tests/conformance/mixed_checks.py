"""Holds an entry whose tensors are on several devices against the local CPU: right, or refused for its devices.

What must never happen is a write that goes nowhere.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo
from torch.utils import _pytree as pytree

from tests.conformance.op_checks import SEED, UNDEFINED_VALUES, Tally, settle
from tests.conformance.twins import Twins

_CRASHES_LOCALLY = frozenset({"_chunk_cat"})
"""Ops that end the process on the local CPU when their tensors have no dimensions."""
_LOOKED_AT = 8
"""Samples among which those with the most tensors are looked for."""


class Arguments:
    """One sample's arguments as a flat list, so that each tensor can be put on a device of its own.

    Attributes:
        tensors: the places of the tensors in the list.
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

    def without_dimensions(self) -> Arguments:
        """The same with the first element of each tensor in its place."""

        def first(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
                return leaf.detach().flatten()[0].clone()
            return leaf

        args, kwargs = pytree.tree_unflatten([first(leaf) for leaf in self.leaves], self._spec)
        return Arguments(args, kwargs)


def check_mixed(op: Any, device: str, other: str) -> Tally:
    """Check in-place and out= forms with a target elsewhere than the operands, and operands elsewhere than the rest.

    Args:
        op: the entry.
        device: where most tensors are.
        other: another worker's device, for targets there.
    """
    checks = _Checks(op, device, other)
    for number, arguments in enumerate(_chosen(op)):
        # PyTorch hands composites over undivided in inference mode.
        with warnings.catch_warnings(), torch.no_grad(), torch.inference_mode(number > 0):
            warnings.simplefilter("ignore")
            checks.sample(arguments, f"sample {number}")
            if op.name not in _CRASHES_LOCALLY:
                checks.sample(arguments.without_dimensions(), f"sample {number} without dimensions")
    return checks.tally


def _chosen(op: Any) -> list[Arguments]:
    """The sample with the most tensors among the first ones, and the one behind it."""
    torch.manual_seed(SEED)
    samples = itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), _LOOKED_AT)
    found = [Arguments((sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
    return sorted(found, key=lambda arguments: -len(arguments.tensors))[:2]


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
        first, last = arguments.tensors[0], arguments.tensors[-1]
        for place in dict.fromkeys((first, last)):
            # What elementwise ops of two tensors take for a number must be taken.
            leaf = arguments.leaves[place]
            number = isinstance(op, BinaryUfuncInfo) and leaf.dim() == 0
            self._right_or_refused(
                f"{what}, tensor {place} on the cpu",
                lambda on: _call(op, on),
                arguments.on("cpu"),
                lambda place=place: arguments.on(self._device, {place: "cpu"}),
                must_work=number,
            )

    def _inplace(self, arguments: Arguments, what: str) -> None:
        inplace, first = self._op.get_inplace(), arguments.tensors[0]
        if inplace is None or first != 0 or not isinstance(arguments.on("cpu")[0][0], torch.Tensor):
            return

        def run(on: Any) -> Any:
            result = inplace(*on[0], **on[1])
            return result, on[0][0]

        for place in ("cpu", self._other):
            self._right_or_refused(
                f"{what}, target on {place}",
                run,
                arguments.on("cpu"),
                lambda place=place: arguments.on(self._device, {0: place}),
                target=lambda on: on[0][0],
            )
        last = arguments.tensors[-1]
        self._right_or_refused(
            f"{what}, tensor {last} on the cpu",
            run,
            arguments.on("cpu"),
            lambda: arguments.on(self._device, {last: "cpu"}),
            target=lambda on: on[0][0],
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
            if must_work or "device" not in text.lower():
                self.tally.problems.append(f"{what}: {type(error).__name__}: {text[:300]}")
            settle()
            for leaf, copy in before:
                if leaf.shape != copy.shape or not torch.equal(leaf.isnan(), copy.isnan()) or not _close(leaf, copy):
                    self.tally.problems.append(f"{what}: refused, and changed all the same")
            return
        if self._op.name in UNDEFINED_VALUES:
            return
        try:
            ours, theirs = (
                [leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, torch.Tensor)]
                for side in (result, expected)
            )
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(_local(a), _local(b), equal_nan=True)
        except Exception as error:
            self.tally.problems.append(f"{what}: wrong: {' '.join(str(error).split())[:300]}")
            settle()


def _call(op: Any, on: tuple[Any, dict[str, Any]]) -> Any:
    return op(*on[0], **on[1])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_local(a).nan_to_num(), _local(b).nan_to_num())
