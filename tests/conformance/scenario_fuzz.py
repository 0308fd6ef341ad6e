"""Draws programs of certain kinds, runs each on the CPU and then on the device, and compares what they saw.

Programs of `program_fuzz` are lists of calls that are compared after each. Those here are functions with loops,
threads, hooks and refusals, whose decisions are drawn: a kind is a function of a `Run`, which draws the same on either
side and is told what the program sees.

    make fuzz-scenarios                                          # a hundred programs of each kind
    make fuzz-scenarios ARGS="--kind writes --seed 700 --programs 500"
    make fuzz-scenarios ARGS="--kind writes --seed 712 --programs 1"   # one of them again
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.program_draws import Draws
from tests.conformance.program_looks import bits, is_made_again, look, said

_DIFFERENT = 3
"""The status of a process that found differences; Python's own for an exception is 1."""
Scenario = Callable[["Run"], None]
_COUNTS = ("version", "bytes")
"""What of a tensor's look is no promise: how often something was written, and how much memory is kept."""


class DifferentError(AssertionError):
    """What a program saw on the device is not what it saw on the CPU."""


class Run(Draws):
    """One run of a program: draws its decisions, and keeps what it saw, or compares it with another run.

    Args:
        seed: of the program.
        device: where it runs.
        expected: the run on the CPU that this one is compared with; None: this is it.
        disturb: called before each fact, with its number.
    """

    def __init__(
        self,
        seed: int,
        device: str,
        expected: Run | None = None,
        disturb: Callable[[int], object] = lambda number: None,
    ) -> None:
        super().__init__(seed, device)
        self.seed = seed
        self.facts: list[tuple[str, Any, torch.Tensor | None]] = []
        self.told: list[str] = []
        self.parts: list[Run] = []
        self._expected = expected
        self._disturb = disturb
        self._reads = random.Random(seed + 1)
        self._waiting: list[tuple[int, torch.Tensor]] = []

    def see(self, what: str, value: Any) -> None:
        """Note a value that the program saw.

        Args:
            what: it is called in reports.
            value: a tensor, whose look and bits count, or what `repr` tells all about.

        Raises:
            DifferentError: the other run saw something else.
        """
        self._disturb(len(self.facts))
        if not isinstance(value, torch.Tensor):
            self._note(what, value if isinstance(value, dict) else repr(value), None)
            return
        whole = look(value)
        row = {name: part for name, part in whole.items() if name not in _COUNTS}
        if self._expected is None:
            self._note(what, row, bits(value.detach()).clone())
            return
        number = len(self.facts)
        self._note(what, row, None)
        if self._reads.random() < 0.4:
            self._compare_bits(number, value)
        else:
            self._waiting.append((number, value.detach().clone()))

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """Call something that may be refused: None then, and the class of its error is a fact."""
        self.told.append(what)
        try:
            result, error = call(), None
        except DifferentError:
            raise
        except Exception as refused:
            result, error = None, refused
        expected = self._expected
        if expected is None:
            self.facts.append((f"error of {what}", error, None))
            return result
        number = len(self.facts)
        name, wanted, _ = self._at(number, f"error of {what}")
        if wanted is not None and error is None:
            error, result = _heard_late(result), None
        if (wanted is None) is not (error is None) or not _are_alike(error, wanted):
            raise DifferentError(f"{name}: {said(error)} instead of {said(wanted)}{_trace(error)}")
        self.facts.append((name, error, None))
        return result

    def end(self) -> None:
        """Compare what has not been read yet."""
        for number, value in self._waiting:
            self._compare_bits(number, value)
        if self._expected is not None and len(self.facts) != len(self._expected.facts):
            raise DifferentError(f"{len(self.facts)} facts instead of {len(self._expected.facts)}")

    def part(self, number: int) -> Run:
        """A run of its own for a thread, compared with that of the same number."""
        expected = None if self._expected is None else self._expected.parts[number]
        made = Run(self.seed * 1000 + number, str(self.device), expected)
        self.parts.append(made)
        return made

    def _at(self, number: int, what: str) -> tuple[str, Any, torch.Tensor | None]:
        assert self._expected is not None
        if number >= len(self._expected.facts):
            raise DifferentError(f"{what} instead of the end")
        found = self._expected.facts[number]
        if found[0] != what:
            raise DifferentError(f"fact {number} is {what} instead of {found[0]}")
        return found

    def _note(self, what: str, value: Any, found: torch.Tensor | None) -> None:
        if self._expected is not None:
            _, wanted, _ = self._at(len(self.facts), what)
            if isinstance(wanted, dict):
                for name, each in wanted.items():
                    if value.get(name) != each and not is_made_again(name, value, each, wanted.get("grad_fn")):
                        raise DifferentError(f"{what}: {name} is {value.get(name)} instead of {each}")
            elif value != wanted:
                raise DifferentError(f"{what} is {value} instead of {wanted}")
        self.facts.append((what, value, found))

    def _compare_bits(self, number: int, value: torch.Tensor) -> None:
        assert self._expected is not None
        what, _, wanted = self._expected.facts[number]
        assert wanted is not None
        try:
            got = bits(value.detach().cpu())
        except Exception as error:
            raise DifferentError(f"{what} (fact {number}) cannot be read: {said(error)}") from error
        if not torch.equal(got, wanted):
            raise DifferentError(
                f"{what} (fact {number}) is\n{value.detach().cpu()}, bits {got.tolist()[:20]}\n"
                f"instead of bits {wanted.tolist()[:20]}"
            )


def _trace(error: BaseException | None) -> str:
    return "" if error is None else "\n" + "".join(traceback.format_exception(error)[-6:])


def _heard_late(result: Any) -> Exception | None:
    """The error of what was refused by the worker alone: it is heard of where something is read."""
    found: Exception | None = None
    for _ in range(3):
        try:
            if isinstance(result, torch.Tensor) and found is None:
                result.detach().cpu()
            torch.sky.synchronize()  # type: ignore[attr-defined]
        except Exception as error:
            found = found or error
    return found


def _are_alike(mine: BaseException | None, other: BaseException | None) -> bool:
    if mine is None or other is None:
        return mine is other
    return isinstance(mine, type(other)) or isinstance(other, type(mine) | NotImplementedError)


def difference(scenario: Scenario, seed: int, device: str, disturb: Callable[[int], object] = lambda _: None) -> str:
    """Run a program on both sides; return how they differ, "" if they do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        here = Run(seed, "cpu")
        scenario(here)
        torch.manual_seed(seed)
        there = Run(seed, device, here, disturb)
        try:
            scenario(there)
            there.end()
        except DifferentError as error:
            return f"{error}\n  after {there.told[-12:]}"
        except Exception as error:
            return f"{said(error)}{_trace(error)}\n  after {there.told[-12:]}"
    return ""


def kinds() -> dict[str, Scenario]:
    """The kinds of programs by name."""
    from tests.conformance.scenario_kinds import KINDS

    return KINDS


def fuzz(kind: str, seeds: range, device: str = "sky:0") -> Iterator[tuple[int, str]]:
    """Run programs of a kind; yield seed and report of each that differs."""
    for seed in seeds:
        found = difference(kinds()[kind], seed, device)
        if found:
            yield seed, f"{kind} {seed}: {found}"


def _run_here(kind: str, seeds: range) -> int:
    faulthandler.enable()
    torch.set_num_threads(1)
    import skyproxy  # noqa: F401

    count = 0
    for seed in seeds:
        print(f"AT {seed}", file=sys.stderr, flush=True)
        for _, report in fuzz(kind, range(seed, seed + 1)):
            count += 1
            print(report, flush=True)
    print(f"{kind}: {len(seeds)} programs from {seeds.start}, {count} differ", flush=True)
    return _DIFFERENT if count else 0


def main(arguments: list[str] | None = None) -> int:
    """Fuzz what the command line names; return 1 if anything differed, or a process died or hung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=[*kinds()], help="by default all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=100, help="of each kind")
    parser.add_argument("--here", action="store_true", help="in this process, which a crash ends")
    options = parser.parse_args(arguments)
    ended: Counter[int] = Counter()
    for kind in options.kind or kinds():
        first, last = options.seed, options.seed + options.programs
        if options.here:
            ended[_run_here(kind, range(first, last))] += 1
            continue
        while first < last:
            count = min(100, last - first)
            command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--here"]
            command += [f"--kind={kind}", f"--seed={first}", f"--programs={count}"]
            child = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            ended[child.returncode] += 1
            first += count
            if child.returncode not in (0, _DIFFERENT):
                at = [line for line in child.stderr.splitlines() if line.startswith("AT ")]
                died = int(at[-1].split()[1]) if at else first
                print(f"{kind} {died}: the process ended with {child.returncode}\n{child.stderr[-3000:]}", flush=True)
                first = died + 1
    return 0 if set(ended) <= {0} else 1


if __name__ == "__main__":
    sys.exit(main())
