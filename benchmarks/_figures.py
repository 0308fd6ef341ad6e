"""How figures are taken, and what one is: samples of both sides, their ratio, and the target it should meet."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Minimum, median and maximum of several samples: the figure and its noise."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        """The spread of at least one sample."""
        return cls(min(samples), statistics.median(samples), max(samples))


def interleaved(functions: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each function's figures, taken in turn so that drift hits all alike; every other round in reverse order."""
    figures: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds):
        for name in list(functions) if number % 2 == 0 else reversed(functions):
            figures[name].append(functions[name]())
    return figures


def medians(functions: dict[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Minimum, median and maximum of each function's figure."""
    return {name: tuple(Spread.of(samples)) for name, samples in interleaved(functions, rounds).items()}


def microseconds_each(call: Callable[[], object], count: int, before: Callable[[], object] | None = None) -> float:
    """Microseconds of one call, over `count` calls in a row."""
    if before is not None:
        before()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count * 1e6


def latencies(call: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each of `count` calls, sorted."""
    figures = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        figures.append((time.perf_counter() - started) * 1e6)
    return sorted(figures)


def percentile(ordered: list[float], percent: float) -> float:
    """The smallest of the sorted figures that so many percent of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True)
class Target:
    """What a figure should reach.

    Attributes:
        of: "ratio" or "value".
        bound: the limit, in the row's unit if it is of the value.
        at_most: whether the figure may not exceed the limit; else it may not fall short of it.
    """

    of: str
    bound: float
    at_most: bool

    def met(self, row: Row) -> bool:
        """Whether the row's median reaches it."""
        figure = row.ratio.middle if self.of == "ratio" and row.ratio is not None else row.spread.middle
        return figure <= self.bound if self.at_most else figure >= self.bound

    def text(self, unit: str) -> str:
        """As the table shows it."""
        return f"{'≤' if self.at_most else '≥'} {number(self.bound)}" + ("x" if self.of == "ratio" else f" {unit}")


def ratio_at_most(bound: float) -> Target:
    return Target("ratio", bound, True)


def ratio_at_least(bound: float) -> Target:
    return Target("ratio", bound, False)


def value_at_most(bound: float) -> Target:
    return Target("value", bound, True)


def value_at_least(bound: float) -> Target:
    return Target("value", bound, False)


@dataclass
class Row:
    """One figure of one link.

    Attributes:
        group: which benchmark it belongs to.
        name: of the figure.
        link: the way to the worker on which it was taken.
        unit: of the samples.
        sky: samples of the remote device.
        other: samples of what it is compared with, round by round; None where the figure stands alone.
        against: what `other` is.
        targets: what should be reached.
    """

    group: str
    name: str
    link: str
    unit: str
    sky: list[float]
    other: list[float] | None = None
    against: str = ""
    targets: tuple[Target, ...] = ()

    @property
    def spread(self) -> Spread:
        """Of the remote device."""
        return Spread.of(self.sky)

    @property
    def ratio(self) -> Spread | None:
        """Of the ratios, each of one round, so that a machine's drift cancels; None where nothing is compared."""
        if self.other is None:
            return None
        return Spread.of([sky / other for sky, other in zip(self.sky, self.other, strict=True)])

    @property
    def met(self) -> bool | None:
        """Whether all targets are met; None where there are none."""
        return all(target.met(self) for target in self.targets) if self.targets else None

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "group": self.group,
            "name": self.name,
            "link": self.link,
            "unit": self.unit,
            "sky": self.sky,
            "other": self.other,
            "against": self.against,
            "ratio": self.ratio and list(self.ratio),
            "targets": [target.text(self.unit) for target in self.targets],
            "met": self.met,
        }


@dataclass
class Skipped:
    """A figure that could not be taken, and why."""

    name: str
    link: str
    reason: str


@dataclass
class Table:
    """All figures of one run."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    quiet: bool = False

    def add(self, row: Row) -> Row:
        """Keeps and prints one figure."""
        self.rows.append(row)
        if not self.quiet:
            print(describe(row), flush=True)
        return row

    def skip(self, name: str, link: str, reason: str) -> None:
        """Notes what is missing."""
        self.skipped.append(Skipped(name, link, reason))
        if not self.quiet:
            print(f"  {name:<44} skipped: {reason}", flush=True)

    def row(self, name: str, link: str) -> Row | None:
        """The figure of that name on that link, if it was taken."""
        return next((row for row in self.rows if row.name == name and row.link == link), None)


def number(value: float) -> str:
    """A figure with as many digits as mean something."""
    if value and abs(value) < 0.095:
        return f"{value:.3f}"
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def spread_text(spread: Spread | None) -> str:
    """Median, and the range around it."""
    if spread is None:
        return ""
    if spread.low == spread.high:
        return number(spread.middle)
    return f"{number(spread.middle)} ({number(spread.low)} to {number(spread.high)})"


def describe(row: Row) -> str:
    """One line for the terminal."""
    text = f"  {row.name:<44} {number(row.spread.middle):>9} {row.unit:<8}"
    if row.ratio is not None and row.other is not None:
        text += f" {row.against:<34} {number(Spread.of(row.other).middle):>9}   ratio {spread_text(row.ratio)}"
    if row.targets:
        text += f"   [{verdict(row)}]"
    return text


def verdict(row: Row) -> str:
    """The targets, and which of them are missed."""
    return ", ".join(target.text(row.unit) + (" ok" if target.met(row) else " MISSED") for target in row.targets)


__all__ = [
    "Row",
    "Skipped",
    "Spread",
    "Table",
    "Target",
    "describe",
    "interleaved",
    "latencies",
    "medians",
    "microseconds_each",
    "number",
    "percentile",
    "ratio_at_least",
    "ratio_at_most",
    "spread_text",
    "value_at_least",
    "value_at_most",
    "verdict",
]
