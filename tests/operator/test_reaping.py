"""When pods go by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.reaping import Report, idle_seconds, next_check_seconds, reaping
from tests.operator.makers import NOW, OPTIONS, at

SILENT = Report(problem="it cannot be asked")


def idle(*seconds: float) -> list[Report]:
    return [Report(value, {}) for value in seconds]


def test_all_nodes_must_be_idle() -> None:
    assert idle_seconds(idle(100, 20, 300)) == 20
    assert idle_seconds([*idle(100), SILENT]) is None
    assert idle_seconds([]) is None


@pytest.mark.parametrize(
    ("reports", "gone"),
    [
        (idle(59.9), False),
        (idle(60), True),
        (idle(1000, 60), True),
        (idle(1000, 0), False),
        ([SILENT], False),
        ([*idle(1000), SILENT], False),
        ([], False),
    ],
)
def test_the_idle_go_and_the_unknown_stay(reports: list[Report], gone: bool) -> None:
    found = reaping(ComputeSpec(idle_timeout_seconds=60), NOW, reports, NOW)
    assert (found is not None) == gone
    if found is not None:
        assert (found.reason, found.message) == ("IdleTimeout", "the worker had nothing to do for 1m")


def test_without_a_timeout_nobody_goes() -> None:
    assert reaping(ComputeSpec(), NOW, idle(10**9), at(10**9)) is None


def test_a_lifetime_ends_busy_or_not() -> None:
    spec = ComputeSpec(max_lifetime_seconds=3600)
    assert reaping(spec, NOW, idle(0), at(3599)) is None
    assert reaping(spec, None, idle(0), at(99999)) is None
    found = reaping(spec, NOW, [SILENT], at(3600))
    assert found is not None
    assert (found.reason, found.message) == ("MaxLifetime", "its lifetime of 1h is over")


@pytest.mark.parametrize(
    ("spec", "reports", "now", "seconds"),
    [
        (ComputeSpec(), idle(5), 0, 30),
        (ComputeSpec(idle_timeout_seconds=600), idle(5), 0, 30),
        (ComputeSpec(idle_timeout_seconds=60), idle(50), 0, 10),
        (ComputeSpec(idle_timeout_seconds=60), [SILENT], 0, 30),
        (ComputeSpec(idle_timeout_seconds=60), idle(59.99), 0, 1),
        (ComputeSpec(max_lifetime_seconds=100), idle(5), 90, 10),
        (ComputeSpec(max_lifetime_seconds=100), idle(5), 200, 1),
    ],
)
def test_the_next_look_comes_when_it_can_matter(
    spec: ComputeSpec, reports: list[Report], now: float, seconds: float
) -> None:
    options = replace(OPTIONS, probe_seconds=30.0)
    assert next_check_seconds(spec, NOW, reports, at(now), options) == pytest.approx(seconds)
