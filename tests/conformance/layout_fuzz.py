"""Draws orders of memory for the tensors of many operations, each tensor its own, and holds inference against PyTorch.

The client says how results look before the worker has them. Here the operations of PyTorch's operator database, and
those that their gradients are made of, run on the local CPU while each is inferred too: sizes, strides, offsets and
dtypes have to be the same. No worker takes part, so a thousand operations take about a second. The sweep's layouts
(`layout_checks`) are a few, the same for all tensors of a call; these are drawn.

    make fuzz-layouts                                           # every operator, the usual seed
    make fuzz-layouts ARGS="--seed 7 --tries 20 --only conv"    # more of some
    make fuzz-layouts ARGS="--dtype bfloat16"
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from skyproxy.tensor.core.metadata import Meta, meta_of
from skyproxy.tensor.core.remote_tensor import make_tensor
from skyproxy.tensor.dispatch import inference
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import info_of
from tests.conformance.layout_checks import CRASHES_LOCALLY, LAYOUTS, Checks, Relayout, Sample
from tests.operator_database import op_db

_TRIES = 4
_SHOWN_OF_EACH = 3
_NOT_DRAWN = ("_empty_affine", "lu_unpack", "_segment_reduce", "embedding_bag", "_sobol")
"""Parts of the names of operations that end the process, or read what they should not, where strides are unusual."""


@dataclass
class Report:
    """What was found.

    Attributes:
        checked: for each operation, how many calls were compared.
        wrong: for each operation, what differed.
        failed: errors of inference, each with its count.
    """

    checked: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    failed: Counter[str] = field(default_factory=Counter)


class Layouts:
    """Orders of memory, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        drawn = (self._gapped, self._stretched, self._stretched_whole, self._permuted, self._permuted_idle)
        self._all: list[Relayout] = [*LAYOUTS.values(), *drawn]

    def draw(self) -> Relayout:
        """Return one of them."""
        return self._random.choice(self._all)

    def _gapped(self, x: torch.Tensor) -> torch.Tensor:
        """Part of a tensor that is longer, so that its memory does not begin where its storage does."""
        if x.dim() == 0 or x.numel() == 0:
            return x
        dim, sizes = self._random.randrange(x.dim()), list(x.shape)
        sizes[dim] += 2
        return x.new_zeros(sizes).narrow(dim, 1, x.shape[dim]).copy_(x)

    def _stretched(self, x: torch.Tensor) -> torch.Tensor:
        """Strides of zero in one dimension. Integers stay as they are: they may be indices that must differ."""
        if x.dim() == 0 or x.numel() == 0 or not x.is_floating_point():
            return x
        return x.narrow(self._random.randrange(x.dim()), 0, 1).expand_as(x)

    def _stretched_whole(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 0 or x.numel() == 0 or not x.is_floating_point():
            return x
        return x.reshape(-1)[:1].reshape([1] * x.dim()).expand(x.shape)

    def _permuted(self, x: torch.Tensor) -> torch.Tensor:
        order = self._random.sample(range(x.dim()), x.dim())
        return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])

    def _permuted_idle(self, x: torch.Tensor) -> torch.Tensor:
        """The same with any strides where the size is one, each its own."""
        x = self._permuted(x)
        strides = [self._random.choice([1, 3, 4096, s]) if n == 1 else s for n, s in zip(x.shape, x.stride())]
        return x.as_strided(x.shape, strides) if x.numel() else x


class Comparison(TorchDispatchMode):
    """While it is entered, every operation that runs is inferred and run again in other orders of memory."""

    def __init__(self, layouts: Layouts, tries: int, report: Report) -> None:
        super().__init__()
        self._layouts = layouts
        self._tries = tries
        self._report = report
        self._seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if self._is_compared(func, (args, kwargs)):
                for _ in range(self._tries):
                    self._compare(func, *self._laid_out((args, kwargs)))
        except Exception as error:  # ours; who runs the entry takes errors for PyTorch's refusals
            self._report.failed[f"comparing {func.name()}: {type(error).__name__}: {str(error)[:100]}"] += 1
        return func(*args, **kwargs)

    def _is_compared(self, func: Any, call: Sample) -> bool:
        info = info_of(func)
        if (
            info.special is not None
            or info.asks_worker_for_shape
            or info.writes
            or any(part in info.name for part in _NOT_DRAWN)
        ):
            return False
        found = _tensors(call)
        return bool(found) and all(x.layout is torch.strided and not x.is_conj() and not x.is_neg() for x in found)

    def _laid_out(self, call: Sample) -> Sample:
        chosen = {id(x): self._layouts.draw() for x in _tensors(call)}
        with torch.no_grad():
            laid_out = pytree.tree_map_only(torch.Tensor, lambda x: chosen[id(x)](x.detach()), call)
        return laid_out  # type: ignore[no-any-return]

    def _compare(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func.name()
        look = f"{name} {pytree.tree_map_only(torch.Tensor, _look, (args, kwargs))}"
        if look in self._seen:
            return
        self._seen.add(look)
        with torch.no_grad():
            try:
                said = inference.infer(
                    BoundCall(info_of(func), *pytree.tree_map_only(torch.Tensor, _remote, (args, kwargs)))
                )
            except Exception as error:
                self._report.failed[f"{name}: {type(error).__name__}: {str(error)[:100]}"] += 1
                return
            if said is None:
                return  # fake tensors are asked, and checked by the worker
            try:
                result = func(*args, **kwargs)
            except Exception:
                return  # refused by PyTorch: the worker says so
        self._report.checked[name] += 1
        expected = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for number, (x, meta) in enumerate(zip(expected, _metas(said))):
            if meta is not None and meta_of(x) is not meta:
                self._report.wrong[name].append(f"result {number}: {meta} instead of {meta_of(x)}\n      {look[:500]}")
                return


def fuzz(operators: Iterable[Any], *, seed: int = 0, tries: int = _TRIES, dtype: torch.dtype = torch.float32) -> Report:
    """Run samples of operators and their gradients, and compare each operation in layouts that are drawn.

    Args:
        operators: entries of PyTorch's operator database.
        tries: how many layouts are drawn for each operation that runs.
    """
    report = Report()
    layouts = Layouts(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators:
            if op.name in CRASHES_LOCALLY or not op.supports_dtype(dtype, "cpu"):
                continue
            for sample, differentiable in _samples(op, dtype):
                _run(op, sample, differentiable, Comparison(layouts, tries, report))
    return report


def _samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[Sample, Callable[[Any], Any]]]:
    """One sample with many dimensions, whole and cut to a batch of one."""
    checks = Checks(op, "cpu", inference=False, dtype=dtype)
    try:
        samples = checks.samples()[:1]
    except Exception:  # an entry that makes no samples of this dtype
        return
    for sample in samples:
        whole: Sample = ((sample.input, *sample.args), dict(sample.kwargs))
        for variant in (whole, checks.cut(whole)):
            if variant is not None:
                yield variant, sample.output_process_fn_grad


def _run(op: Any, sample: Sample, differentiable: Callable[[Any], Any], comparison: Comparison) -> None:
    """Run an entry forwards and, where it can, backwards; PyTorch's own refusals are not counted."""
    torch.manual_seed(0)
    try:
        with comparison:
            roots = [x for x in _tensors(differentiable(op(*sample[0], **sample[1]))) if x.requires_grad]
            leaves = [x for x in _tensors(sample) if x.requires_grad]
            if roots and leaves:
                torch.autograd.grad(roots, leaves, [torch.ones_like(x) for x in roots], allow_unused=True)
    except Exception:
        return


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _look(x: torch.Tensor) -> str:
    return f"<{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, strides {x.stride()}>"


_DEVICE = SimpleNamespace(torch_device=torch.device("sky:0"), worker_device=torch.device("cpu"))


def _remote(x: torch.Tensor) -> torch.Tensor:
    """A remote tensor that looks like a local one, of a device without a worker."""
    meta = meta_of(x)
    return make_tensor(meta, SimpleNamespace(meta=meta, slot=1, device=_DEVICE, root=None))  # type: ignore[arg-type]


def _metas(said: Any) -> list[Meta | None]:
    """Return what each tensor of a result was said to be; None for an argument that is handed back."""
    found: list[Meta | None] = []
    for output in said.outputs:
        if output.items is not None:
            found += [meta for meta, _ in output.items]
        elif output.meta is not None or output.tensor is not None:
            found.append(output.meta)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Fuzz what the command line names; return 1 if anything differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="what is drawn depends on it alone")
    parser.add_argument("--tries", type=int, default=_TRIES, help="layouts for each operation")
    parser.add_argument("--only", default="", help="operators whose names have this part")
    parser.add_argument("--dtype", default="float32", help="of the samples: float32, bfloat16, complex64 and so on")
    options = parser.parse_args(arguments)
    operators = [op for op in op_db if options.only in op.name]
    report = fuzz(operators, seed=options.seed, tries=options.tries, dtype=getattr(torch, options.dtype))
    for name, found in sorted(report.wrong.items(), key=lambda item: -len(item[1])):
        print(f"{name}: {len(found)} of {report.checked[name]}")
        print(*(f"    {line}" for line in found[:_SHOWN_OF_EACH]), sep="\n")
    for error, count in report.failed.most_common(20):
        print(f"{count} x {error}")
    print(f"{sum(report.checked.values()):,} calls of {len(report.checked)} operations, {len(report.wrong)} differ")
    return 1 if report.wrong or not report.checked else 0


if __name__ == "__main__":
    sys.exit(main())
