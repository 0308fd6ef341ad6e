"""Holds one entry of PyTorch's operator database against the local device, sample by sample."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.reference import REFERENCE
from tests.conformance.twins import Twins, tree_differences

SEED = 7
DIFFERENTIABLE = frozenset({torch.float32, torch.bfloat16, torch.complex64})
UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
"""Ops whose results hold whatever the memory held: only their metadata can be compared."""


class Tally:
    """What was found on one entry.

    Attributes:
        ran: checks that were made: samples, gradients and variants that work locally.
        problems: one line for each that differs, or fails on the device only.
    """

    def __init__(self) -> None:
        self.ran = 0
        self.problems: list[str] = []

    def check(
        self,
        what: str,
        locally: Callable[[], Any],
        on_device: Callable[[], Any],
        *,
        values: bool = True,
        memory: bool = True,
    ) -> Any:
        """Runs the same on both sides; what fails locally is not held against the remote device.

        Args:
            what: what is checked, in words.
            locally: gives the expected results.
            on_device: gives the results.
            values: whether values are compared.
            memory: whether strides and the like are.

        Returns:
            Both results, or None where there is no pair.
        """
        try:
            torch.manual_seed(SEED)
            torch.sky.synchronize()
            expected = locally()
        except Exception:
            return None
        self.ran += 1
        try:
            torch.manual_seed(SEED)
            result = on_device()
            differences = tree_differences(result, expected, values=values, memory=memory)
            torch.sky.synchronize()
        except Exception as error:
            text = " ".join(str(error).split())
            self.problems.append(f"{what}: {type(error).__name__}: {text[:300]}")
            settle()
            return None
        self.problems += [f"{what}: {difference}" for difference in differences]
        return result, expected


def settle() -> None:
    """Takes errors that are still under way, so that the next sample starts clean."""
    for _ in range(20):
        try:
            torch.sky.synchronize()
        except Exception:
            continue
        return


def entry_name(op: Any) -> str:
    """The entry's name with its variant's, unique in the database."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def check_op(
    op: Any,
    dtype: torch.dtype,
    device: str,
    *,
    limit: int | None = None,
    gradients: bool = True,
    variants: bool = True,
    inference: bool = False,
) -> Tally:
    """Compares forward, gradients, in-place and out= forms of an entry.

    Args:
        limit: samples to take; None takes all.
        gradients: whether to compare gradients, for dtypes that have them.
        variants: whether to compare in-place and out= forms.
        inference: whether to run in inference mode, where PyTorch hands over composites undivided.
    """
    tally = Tally()
    differentiable = gradients and not inference and op.supports_autograd and dtype in DIFFERENTIABLE
    with warnings.catch_warnings(), torch.inference_mode(inference):
        warnings.simplefilter("ignore")
        for number, sample in enumerate(itertools.islice(_samples(op, dtype, differentiable), limit)):
            _check_sample(tally, op, sample, device, f"sample {number}", differentiable)
            if variants:
                _check_inplace(tally, op, sample, device, f"in-place, sample {number}", differentiable)
                _check_out(tally, op, sample, device, f"out=, sample {number}")
    return tally


def _samples(op: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
    torch.manual_seed(SEED)
    with torch.inference_mode(False):
        return iter(list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad)))


def arguments_of(sample: Any, twins: Twins, *, requires_grad: bool | None = None) -> tuple[Any, dict[str, Any]]:
    arguments = twins.of((sample.input, *sample.args), requires_grad=requires_grad)
    return arguments, twins.of(dict(sample.kwargs), requires_grad=requires_grad)


def leaves_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _check_sample(tally: Tally, op: Any, sample: Any, device: str, what: str, differentiable: bool) -> None:
    inputs: list[Any] = []

    def run(place: str) -> Callable[[], Any]:
        def call() -> Any:
            args, kwargs = arguments_of(sample, Twins(place))
            inputs.append(leaves_of((args, kwargs)))
            # A factory without a `device` makes its result where the surrounding block says.
            with torch.device(place) if _makes_from_nothing(args, kwargs) else contextlib.nullcontext():
                return op(*args, **kwargs)

        return call

    pair = tally.check(what, run(REFERENCE), run(device), values=op.name not in UNDEFINED_VALUES)
    if pair is not None and differentiable:
        _check_gradients(tally, sample, pair, inputs, device, what)


def _makes_from_nothing(args: Any, kwargs: Any) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return "device" not in kwargs and not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _check_gradients(tally: Tally, sample: Any, pair: Any, inputs: list[Any], device: str, what: str) -> None:
    result, expected = (sample.output_process_fn_grad(side) for side in pair)
    ours, theirs = leaves_of(result), leaves_of(expected)
    if not theirs or len(ours) != len(theirs):
        return
    generator = torch.Generator().manual_seed(SEED)
    weights = [torch.rand(side.shape, generator=generator, dtype=torch.float64).to(side.dtype) for side in theirs]
    tally.check(
        f"gradients, {what}",
        lambda: torch.autograd.grad(theirs, inputs[0], [w.to(REFERENCE) for w in weights], allow_unused=True),
        lambda: torch.autograd.grad(ours, inputs[1], [w.to(device) for w in weights], allow_unused=True),
        # A few of PyTorch's derivative formulas avoid in-place steps for tensor subclasses: same values, other strides.
        memory=False,
    )


def _check_inplace(tally: Tally, op: Any, sample: Any, device: str, what: str, differentiable: bool) -> None:
    inplace = op.get_inplace()
    if inplace is None or not isinstance(sample.input, torch.Tensor):
        return
    inputs: list[Any] = []

    def run(place: str) -> Callable[[], Any]:
        def call() -> Any:
            args, kwargs = arguments_of(sample, Twins(place), requires_grad=None if differentiable else False)
            inputs.append(leaves_of((args, kwargs)))
            target = args[0].clone()
            result = inplace(target, *args[1:], **kwargs)
            return result, target

        return call

    pair = tally.check(what, run(REFERENCE), run(device), values=op.name not in UNDEFINED_VALUES)
    if pair is not None and differentiable and op.supports_inplace_autograd:
        _check_gradients(tally, sample, (pair[0][0], pair[1][0]), inputs, device, what)


def _several(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _out_like(like: torch.Tensor, form: str) -> torch.Tensor:
    """A tensor to be filled: as large as the result, or empty, or with gaps between its elements."""
    if form == "same" or like.layout is not torch.strided:
        return torch.ones_like(like)
    if form == "empty":
        return torch.empty((0,), dtype=like.dtype)
    if like.dim() == 0:
        return torch.ones((2,), dtype=like.dtype)[1]
    return torch.ones((*like.shape[:-1], 2 * like.shape[-1]), dtype=like.dtype)[..., : like.shape[-1]]


def _check_out(tally: Tally, op: Any, sample: Any, device: str, what: str) -> None:
    if not op.supports_out:
        return
    try:
        torch.manual_seed(SEED)
        args, kwargs = arguments_of(sample, Twins(REFERENCE), requires_grad=False)
        shape = op(*args, **kwargs)
    except Exception:
        return
    if not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(shape)) or "out" in sample.kwargs:
        return

    def outs(place: str, form: str) -> Any:
        made = pytree.tree_map(lambda like: _out_like(like, form), tuple(shape) if _several(shape) else shape)
        return Twins(place).of(made)

    def run(place: str, form: str) -> Callable[[], Any]:
        def call() -> Any:
            args, kwargs = arguments_of(sample, Twins(place), requires_grad=False)
            out = outs(place, form)
            result = op(*args, **kwargs, out=out)
            return result, out

        return call

    for form in ("same", "empty", "strided"):
        tally.check(f"{what}, {form}", run(REFERENCE, form), run(device, form), values=op.name not in UNDEFINED_VALUES)
