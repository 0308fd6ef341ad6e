"""The fuzzer of scenarios: seeds that never change, and differences that are put there on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.conformance.conftest import Judge
from tests.conformance.op_checks import Tally
from tests.conformance.scenario_fuzz import Run, difference, fuzz
from tests.conformance.scenario_kinds import KINDS

_PROGRAMS = 10


@pytest.fixture(autouse=True)
def _states_are_left_as_found() -> Iterator[None]:
    states = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(states)


@pytest.mark.parametrize("kind", KINDS)
def test_scenarios_see_the_same_as_on_the_cpu(kind: str, judge: Judge, sky: str) -> None:
    def check() -> Tally:
        tally = Tally()
        tally.ran = _PROGRAMS
        tally.problems = [report for _, report in fuzz(kind, range(100_000, 100_000 + _PROGRAMS), sky)]
        return tally

    judge("scenarios that are drawn", check, None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_scenario(kind: str) -> None:
    first, second = Run(7, "cpu"), Run(7, "cpu")
    for run in (first, second):
        torch.manual_seed(7)
        KINDS[kind](run)
    assert first.told == second.told
    assert [name for name, _, _ in first.facts] == [name for name, _, _ in second.facts]


def _is_here(r: Run) -> bool:
    return r.device.type == "cpu"


@pytest.mark.parametrize(
    ("said", "scenario"),
    [
        ("number is 2 instead of 1", lambda r: r.see("number", 1 if _is_here(r) else 2)),
        ("x (fact 0) is", lambda r: r.see("x", torch.zeros(2, device=r.device) + _is_here(r))),
        ("x (fact 0) is", lambda r: r.see("x", torch.zeros(2, device=r.device) * (1 if _is_here(r) else -1))),
        ("dtype is", lambda r: r.see("x", torch.zeros(2, device=r.device, dtype=torch.int8 if _is_here(r) else None))),
        ("ZeroDivisionError: ", lambda r: r.attempt("a division", lambda: 1 // int(_is_here(r)))),
        ("no error instead of ", lambda r: r.attempt("a division", lambda: 1 // int(not _is_here(r)))),
        ("1 facts instead of 2", lambda r: [r.see("fact", 0) for _ in range(1 + _is_here(r))]),
        ("fact 0 is a instead of b", lambda r: r.see("b" if _is_here(r) else "a", 0)),
        ("IndexError", lambda r: None if _is_here(r) else [][0]),
    ],
)
def test_a_difference_is_found(said: str, scenario: Callable[[Run], Any], sky: str) -> None:
    assert said in difference(scenario, 0, sky)


def test_what_the_worker_alone_refuses_counts_as_refused(sky: str) -> None:
    def scenario(r: Run) -> None:
        x = torch.zeros(2, dtype=torch.long, device=r.device)
        r.attempt("a division by zero", lambda: x // torch.zeros_like(x))
        r.see("x", x + 1)

    assert difference(scenario, 0, sky) == ""
