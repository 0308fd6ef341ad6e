"""The end of pods that nobody asked for: nothing to do for too long, or a lifetime that is over."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyproxy.units import duration_text
from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.options import Options

IDLE = "IdleTimeout"
LIFETIME = "MaxLifetime"
SUSPENDED_IDLE = "SuspendedIdle"
_MIN_CHECK_SECONDS = 1.0


@dataclass(frozen=True)
class Report:
    """A worker's answer to a probe.

    Attributes:
        idle_seconds: for how long it had nothing to do; None where it did not answer.
        answer: all of it.
        problem: why it did not answer.
        reason: the same in one word, where somebody has to see to it: the token or the certificate was not accepted.
    """

    idle_seconds: float | None = None
    answer: Mapping[str, Any] | None = None
    problem: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Reaping:
    """The pods go now.

    Attributes:
        reason: IDLE, LIFETIME or SUSPENDED_IDLE.
        message: for people.
    """

    reason: str
    message: str


def idle_seconds(reports: Sequence[Report]) -> float | None:
    """For how long no node had anything to do; None as long as one of them does not say."""
    known = [report.idle_seconds for report in reports if report.idle_seconds is not None]
    return min(known) if known and len(known) == len(reports) else None


def reaping(
    spec: ComputeSpec, started: datetime.datetime | None, reports: Sequence[Report], now: datetime.datetime
) -> Reaping | None:
    """Decide whether the pods go now, and why.

    Args:
        spec: says after what time.
        started: when all nodes were ready for the first time.
        reports: one for each process, fresh; empty where nobody was asked. Who does not answer is not idle.
        now: the time.
    """
    if spec.max_lifetime_seconds is not None and started is not None:
        if (now - started).total_seconds() >= spec.max_lifetime_seconds:
            return Reaping(LIFETIME, f"its lifetime of {duration_text(spec.max_lifetime_seconds)} is over")
    idle = idle_seconds(reports)
    if spec.idle_timeout_seconds is not None and idle is not None and idle >= spec.idle_timeout_seconds:
        return Reaping(IDLE, f"the worker had nothing to do for {duration_text(idle)}")
    if spec.suspend_after_seconds is not None and idle is not None and idle >= spec.suspend_after_seconds:
        if not _would_lose(reports):
            return Reaping(SUSPENDED_IDLE, f"the worker had nothing to do for {duration_text(idle)}")
    return None


def _would_lose(reports: Sequence[Report]) -> bool:
    """Return whether a worker has sessions that cannot be suspended now: named ones, and those without a connection."""
    answers = [report.answer or {} for report in reports]
    return any(answer.get("detached") or answer.get("named") for answer in answers)


def next_check_seconds(
    spec: ComputeSpec,
    started: datetime.datetime | None,
    reports: Sequence[Report],
    now: datetime.datetime,
    options: Options,
) -> float:
    """After how many seconds the answer of `reaping` can be another one."""
    wait = options.probe_seconds
    for limit_seconds in (spec.idle_timeout_seconds, spec.suspend_after_seconds):
        if limit_seconds is not None:
            # One that was never idle for long cannot become so faster than time passes.
            idle = idle_seconds(reports)
            wait = min(wait, limit_seconds - (idle or 0.0))
    if spec.max_lifetime_seconds is not None and started is not None:
        wait = min(wait, spec.max_lifetime_seconds - (now - started).total_seconds())
    return max(wait, _MIN_CHECK_SECONDS)
