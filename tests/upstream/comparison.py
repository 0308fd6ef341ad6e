"""What two runs of the same tests differ in, one on the CPU and one on a device, and which differences are known."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """What became of one test.

    Attributes:
        outcome: "failed" also where its preparation or its end failed.
        message: the last line of the error, or the reason why it was skipped.
    """

    outcome: Outcome
    message: str = ""


@dataclass
class Comparison:
    """What `compare` found.

    Attributes:
        counts: how many tests have each pair of outcomes, the CPU's first.
        unexpected: lines that name a test that is worse on the device, and say how.
        allowed: how many tests are worse on the device and stand in the table of known differences.
        outlived: patterns of that table that match tests that ran, none of which is worse.
        unfinished: tests that one of the runs did not reach, and what else did not come to its end.
        useless: how many tests fail on both sides, by what the CPU says.
    """

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    allowed: int = 0
    outlived: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    useless: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        """True if both runs did the same tests, at least one, and differ in what the table says and nothing else."""
        return bool(self.counts) and not (self.unexpected or self.outlived or self.unfinished)


def read_results(lines: Iterable[str]) -> dict[str, Result]:
    """Return the outcome of each test from the reports of its phases, as `device_plugin` writes them.

    Args:
        lines: JSON objects with "test", "phase", "outcome" and "message". A line that was not written to its end,
            by a process that died, is left out.
    """
    results: dict[str, Result] = {}
    for line in lines:
        try:
            report = json.loads(line)
        except json.JSONDecodeError:
            continue
        former = results.get(report["test"])
        # The call decides; a preparation that passed says nothing yet, and whatever fails makes the test fail.
        decides = report["outcome"] != "passed" or report["phase"] == "call"
        if decides and (former is None or former.outcome != "failed"):
            results[report["test"]] = Result(report["outcome"], report["message"])
    return results


def is_worse(cpu: Result, device: Result) -> bool:
    """Return True for a test that fails on the device only, or runs on the CPU only."""
    if device.outcome == "failed":
        return cpu.outcome != "failed"
    return device.outcome == "skipped" and cpu.outcome == "passed"


def compare(cpu: Mapping[str, Result], device: Mapping[str, Result], differences: Mapping[str, str]) -> Comparison:
    """Compare both runs test by test.

    Args:
        cpu: outcomes on the CPU, by test.
        device: outcomes on the remote device.
        differences: known differences: a reason for each pattern of tests, in the form of `fnmatch`, in which
            square brackets stand for themselves, since pytest's names are full of them.
    """
    found = Comparison()
    useful: dict[str, bool] = {}
    for test in sorted(cpu.keys() | device.keys()):
        if test not in cpu or test not in device:
            found.unfinished.append(test)
            continue
        here, there = cpu[test], device[test]
        pair = (here.outcome, there.outcome)
        found.counts[pair] = found.counts.get(pair, 0) + 1
        patterns = [pattern for pattern in differences if fnmatchcase(test, pattern.replace("[", "[[]"))]
        if pair == ("failed", "failed"):
            found.useless[here.message] += 1
        worse = is_worse(here, there)
        for pattern in patterns:
            useful[pattern] = useful.get(pattern, False) or worse
        if worse and patterns:
            found.allowed += 1
        elif worse:
            found.unexpected.append(f"{test}: {here.outcome} on the CPU, {there.outcome} here: {there.message}")
    found.outlived = [pattern for pattern, was_useful in useful.items() if not was_useful]
    return found
