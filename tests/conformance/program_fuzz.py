"""Draws whole programs, runs each on the CPU and on the device, statement by statement, and shortens what differs.

A program has eight tensors and changes, replaces and differentiates them in ten to sixty calls of PyTorch's public
names (`program_calls`, `program_effects`). After each call everything that a program could see must be the same on
either side: classes of errors, sizes, strides, dtypes, bits, versions, who shares memory with whom, names of gradient
functions, gradients, and values to the bit.

    make fuzz-programs                                   # 2,000 programs
    make fuzz-programs ARGS="--seed 7000 --programs 500"
    make fuzz-programs ARGS="--seed 7041 --programs 1"   # one of them again, shortened, with the calls that it makes
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from tests.conformance.program_calls import COPIES, POINTWISE, PRODUCTS, REDUCTIONS, VIEWS, Call
from tests.conformance.program_draws import Draws
from tests.conformance.program_effects import EFFECTS
from tests.conformance.program_looks import Apart, brief, counts_apart, has_history, metadata, said, values

SLOTS = 8
_LARGEST = 400
_GROUPS: tuple[tuple[dict[str, Call], int], ...] = (
    (VIEWS, 6),
    (COPIES, 4),
    (POINTWISE, 5),
    (REDUCTIONS, 3),
    (PRODUCTS, 2),
    (EFFECTS, 9),
)
CALLS: dict[str, Call] = {
    "make": lambda d, x, y, z: d.tensor(),
    **{f"{name}": call for group, _ in _GROUPS for name, call in group.items()},
}


MORE_THAN_THE_CPU = (
    ("transform", "more than one element of the written-to", "tangents of expanded tensors get memory of their own"),
    ("travel", "default implementation of __deepcopy__", "a plain subclass is copied with its class"),
    ("transform", "ProxyTorchDispatchMode", "tracing knows the device's tensors, and no other subclass"),
)
"""What the CPU refuses and the device does: a part of the call's name, a part of the refusal, and why."""


@dataclass(frozen=True)
class Step:
    """One statement of a program.

    Attributes:
        name: of its call.
        seed: of what is drawn for it.
        operands: the places of the pool that it reads.
        target: the place where its first result goes; others go to the next ones.
        around: the context that it runs in, if any.
    """

    name: str
    seed: int
    operands: tuple[int, int, int]
    target: int
    around: str = ""


@dataclass(frozen=True)
class Difference:
    """What was not the same.

    Attributes:
        step: the number of the statement after which it was seen.
        kind: what sort of difference it is; a shortened program must have the same.
        text: both sides, in words.
    """

    step: int
    kind: str
    text: str


def draw(seed: int) -> list[Step]:
    """Return a program, the same for the same seed."""
    chosen = random.Random(seed)
    steps = [Step("make", chosen.randrange(10**9), (0, 0, 0), slot) for slot in range(SLOTS)]
    groups, weights = [list(group) for group, _ in _GROUPS], [weight for _, weight in _GROUPS]
    for _ in range(chosen.randint(10, 60)):
        name = "make" if chosen.random() < 0.06 else chosen.choice(chosen.choices(groups, weights)[0])
        x, y, z = (chosen.randrange(SLOTS) for _ in range(3))
        operands = (x, x if chosen.random() < 0.15 else y, z)
        around = chosen.choices(list(AROUND), [12, *[1] * (len(AROUND) - 1)])[0]
        steps.append(Step(name, chosen.randrange(10**9), operands, chosen.randrange(SLOTS), around))
    return steps


@contextlib.contextmanager
def _deterministic(_: str) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _default_dtype(_: str) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Callable[[str], Any]] = {
    "": lambda device: contextlib.nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "no_grad ": lambda device: torch.no_grad(),
    "enable_grad": lambda device: torch.enable_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "deterministic": _deterministic,
    "float64": _default_dtype,
    "device": torch.device,
    "fork": lambda device: contextlib.nullcontext(),
}


class Side:
    """A program's tensors on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.pool = [torch.zeros((), device=device) for _ in range(SLOTS)]
        self.error: BaseException | None = None

    def run(self, step: Step) -> list[torch.Tensor]:
        """Run one statement; its error is kept in place of being raised."""
        self.error = None
        around = AROUND[step.around](self.device.split(":")[0] if step.around == "autocast" else self.device)
        try:
            with around:
                result = CALLS[step.name](Draws(step.seed, self.device), *(self.pool[slot] for slot in step.operands))
        except Exception as error:
            self.error = error
            return []
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)][:3]

    def keep(self, step: Step, results: list[torch.Tensor]) -> None:
        for number, result in enumerate(results):
            self.pool[(step.target + number) % SLOTS] = result


class Comparison:
    """Runs a program on the CPU and on a device, and compares.

    Args:
        device: the other side: "sky:0".
        every: values are compared after every so many statements, and at the end.
    """

    def __init__(self, device: str, every: int = 8) -> None:
        self._device = device
        self._every = every
        self._apart: list[Apart] = [{}] * SLOTS

    def difference(self, steps: list[Step]) -> Difference | None:
        """Return the first difference, None if there is none."""
        torch.manual_seed(0)
        ours, theirs = Side(self._device), Side("cpu")
        self._apart = [{}] * SLOTS
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, step in enumerate(steps):
                found = self._step(ours, theirs, step, look=number % self._every == self._every - 1)
                if found is not None:
                    return Difference(number, f"{step.name}: {found[0]}", found[1])
                if theirs.error is not None and may_be_half_done(step):
                    ours, theirs = Side(self._device), Side("cpu")
                    self._apart = [{}] * SLOTS
            found = values(ours.pool, theirs.pool)
        return None if found is None else Difference(len(steps) - 1, f"end: {found[0]}", found[1])

    @staticmethod
    def _is_known(step: Step, error: BaseException | None) -> bool:
        return any(step.name.startswith(name) and part in str(error) for name, part, _ in MORE_THAN_THE_CPU)

    def _step(self, ours: Side, theirs: Side, step: Step, *, look: bool) -> tuple[str, str] | None:
        expected, got = theirs.run(step), ours.run(step)
        heard = False
        if theirs.error is not None:
            late = heard_late([*got, *ours.pool])
            heard = ours.error is None
            ours.error, got = ours.error or late, []
        if (ours.error is None) is not (theirs.error is None) and not self._is_known(step, theirs.error):
            return "error", f"{said(ours.error)} instead of {said(theirs.error)}"
        if ours.error is not None and not _are_alike(ours.error, theirs.error):
            return "class of error", f"{said(ours.error)} instead of {said(theirs.error)}"
        if len(expected) != len(got):
            return "count", f"{len(got)} results instead of {len(expected)}"
        if any(x.numel() > _LARGEST for x in expected):
            expected, got = [], []
        apart = [counts_apart(a, b) for a, b in zip(got, expected)]
        results = metadata(got, expected, apart)
        if results is not None:
            return f"result {results[0]}", results[1]
        ours.keep(step, got)
        theirs.keep(step, expected)
        for number, row in enumerate(apart):
            self._apart[(step.target + number) % SLOTS] = row
        if step.name.startswith("out"):  # which may have been resized: how much memory is kept then is PyTorch's affair
            self._apart = [
                {**row, "bytes": counts_apart(a, b).get("bytes", 0)}
                for row, a, b in zip(self._apart, ours.pool, theirs.pool)
            ]
        if heard:  # what was begun counts as a change, also in graphs
            begun = [has_history(a) or has_history(b) for a, b in zip(ours.pool, theirs.pool)]
            for side in (ours, theirs):
                side.pool = [x.detach() if changed else x for x, changed in zip(side.pool, begun)]
            self._apart = [counts_apart(a, b) for a, b in zip(ours.pool, theirs.pool)]
        if theirs.error is not None and may_be_half_done(step):
            return None
        found = metadata(ours.pool, theirs.pool, self._apart)
        if found is None and (look or theirs.error is not None):
            found = values(ours.pool, theirs.pool)
        return found


def heard_late(tensors: list[torch.Tensor]) -> Exception | None:
    """The error of an earlier call: what depends on values is refused by the worker, and heard of where one is read."""
    heard = None
    for x in tensors:
        for _ in range(2):
            try:
                x.detach().cpu()
            except Exception as error:
                heard = heard or error
    for _ in range(3):
        with contextlib.suppress(Exception):  # of results that nobody has kept
            torch.sky.synchronize()  # type: ignore[attr-defined]
    return heard


def may_be_half_done(step: Step) -> bool:
    """Whether a refused call may have changed something on the CPU: it resizes `out=`, and takes one item of a list, or
    one parameter, after the other.
    """
    return step.name.startswith(("out", "foreach", "optimizer", "backward", "grad"))


def _are_alike(mine: BaseException | None, other: BaseException | None) -> bool:
    """Whether two errors are of one kind. Where there are two reasons to refuse a call, another one may be said: a
    kernel of the CPU says that it does not know a dtype before anything that comes after it.
    """
    if mine is None or other is None:
        return mine is other
    alike = isinstance(mine, type(other)) or isinstance(other, type(mine) | NotImplementedError)
    return alike or "InferenceMode" in str(mine) or "Dimension out of range" in str(other)


def shorten(steps: list[Step], found: Difference, device: str) -> tuple[list[Step], Difference]:
    """Leave out what the difference does not need."""
    comparison = Comparison(device, every=1)
    again = comparison.difference(steps)
    if again is None:
        return steps, found
    best = again
    steps = steps[: best.step + 1]
    size = max(len(steps) // 2, 1)
    while True:
        start = 0
        while start < len(steps) - 1:
            tried = steps[:start] + steps[start + size :]
            other = comparison.difference(tried) if tried else None
            if other is not None and other.kind == best.kind:
                steps, best = tried[: other.step + 1], other
            else:
                start += size
        if size == 1:
            break
        size //= 2
    for number, step in enumerate(steps):
        plain = [*steps[:number], replace(step, around=""), *steps[number + 1 :]]
        other = comparison.difference(plain) if step.around else None
        if other is not None and other.kind == best.kind:
            steps, best = plain, other
    return steps, best


class _Told(TorchFunctionMode):
    """Writes down the calls that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        told = [_told(a) for a in args] + [f"{key}={_told(v)}" for key, v in (kwargs or {}).items()]
        if not name.endswith(("__get__", ".dim", "torch.device")):
            self.lines.append(f"{name}({', '.join(told)})")
        return func(*args, **(kwargs or {}))


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return brief(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_told(v) for v in value) + "]"
    return repr(value)


def told(steps: list[Step]) -> str:
    """The program in words: for each statement, the calls that it makes on the CPU."""
    torch.manual_seed(0)
    side, lines = Side("cpu"), []
    for number, step in enumerate(steps):
        with warnings.catch_warnings(), _Told() as calls:
            warnings.simplefilter("ignore")
            results = side.run(step)
        side.keep(step, [] if any(x.numel() > _LARGEST for x in results) else results)
        inside = f" [{step.around.strip()}]" if step.around.strip() else ""
        end = f" raises {type(side.error).__name__}" if side.error else ""
        lines.append(f"  {number}: {step.name}{inside} of {step.operands} into {step.target}{end}")
        lines += [f"       {line[:300]}" for line in calls.lines[-6:]]
    return "\n".join(lines)


def fuzz(seeds: range, device: str = "sky:0", *, shortened: bool = True) -> Iterator[tuple[int, str, str]]:
    """Run programs; yield seed, kind and a report of each that differs."""
    comparison = Comparison(device)
    for seed in seeds:
        steps = draw(seed)
        found = comparison.difference(steps)
        if found is None:
            continue
        if shortened:
            steps, found = shorten(steps, found, device)
        yield seed, found.kind, f"seed {seed}, {found.kind}: {found.text}\n{told(steps)}"


def _run_here(seeds: range, *, shortened: bool) -> int:
    faulthandler.enable()
    kinds: Counter[str] = Counter()
    torch.set_num_threads(1)
    import skyproxy  # noqa: F401

    for seed in seeds:
        print(f"AT {seed}", file=sys.stderr, flush=True)
        for _, kind, report in fuzz(range(seed, seed + 1), shortened=shortened):
            kinds[kind] += 1
            print(report, flush=True)
    print(
        f"{len(seeds)} programs from {seeds.start}, {sum(kinds.values())} differ", dict(kinds.most_common()), flush=True
    )
    return 1 if kinds else 0


def main(arguments: list[str] | None = None) -> int:
    """Fuzz what the command line names; return 1 if anything differed, or a process died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--as-drawn", action="store_true", help="programs that differ are not shortened")
    parser.add_argument("--here", action="store_true", help="in this process, which a crash ends")
    options = parser.parse_args(arguments)
    first, failed = options.seed, False
    last = options.seed + options.programs
    if options.here:
        return _run_here(range(first, last), shortened=not options.as_drawn)
    while first < last:
        count = min(100, last - first)
        command = [
            sys.executable,
            "-m",
            __spec__.name if __spec__ else __name__,
            "--here",
            f"--seed={first}",
            f"--programs={count}",
        ]
        child = subprocess.run(
            [*command, *(["--as-drawn"] if options.as_drawn else [])], stderr=subprocess.PIPE, text=True
        )
        failed |= child.returncode != 0
        first += count
        if child.returncode not in (0, 1):
            at = [line for line in child.stderr.splitlines() if line.startswith("AT ")]
            died = int(at[-1].split()[1]) if at else first
            print(f"seed {died}: the process ended with {child.returncode}\n{child.stderr[-3000:]}", flush=True)
            first = died + 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
