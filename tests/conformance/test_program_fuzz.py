"""The fuzzer of programs: seeds that never change, and differences that are put there on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance import program_fuzz
from tests.conformance.conftest import Judge
from tests.conformance.op_checks import Tally
from tests.conformance.program_fuzz import CALLS, Comparison, Step, draw, fuzz, shorten

_PROGRAMS = 12
_PARTS = 8


@pytest.fixture(autouse=True)
def _states_are_left_as_found() -> Any:
    states = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(states)


@pytest.mark.parametrize("part", range(_PARTS))
def test_programs_do_the_same_as_on_the_cpu(part: int, judge: Judge, sky: str) -> None:
    def check() -> Tally:
        tally = Tally()
        tally.ran = _PROGRAMS
        first = 100_000 + part * _PROGRAMS
        tally.problems = [report for _, _, report in fuzz(range(first, first + _PROGRAMS), sky)]
        return tally

    judge("programs that are drawn", check, None)


def test_the_same_seed_draws_the_same_program() -> None:
    assert draw(7) == draw(7) != draw(8)


def test_a_program_is_shortened_to_what_differs(monkeypatch: pytest.MonkeyPatch, sky: str) -> None:
    """Zeros on one side and ones on the other, between calls that have nothing to do with it."""
    monkeypatch.setitem(
        CALLS, "lie", lambda d, x, y, z: torch.full((2,), float(d.device.type == "cpu"), device=d.device)
    )
    monkeypatch.setitem(CALLS, "negate", lambda d, x, y, z: x.neg())
    steps = [
        *(Step("make", seed, (0, 0, 0), seed) for seed in range(program_fuzz.SLOTS)),
        Step("lie", 0, (0, 0, 0), 3, around="no_grad"),
        Step("negate", 0, (2, 0, 0), 5),
        Step("negate", 0, (3, 0, 0), 3),
    ]
    found = Comparison(sky, every=99).difference(steps)
    assert found is not None
    shortened, difference = shorten(steps, found, sky)
    assert [step.name for step in shortened] == ["lie"]
    assert difference.kind == "lie: values"
    assert "lie of (0, 0, 0) into 3" in program_fuzz.told(shortened)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("error", lambda d, x, y, z: 1 // int(d.device.type == "cpu")),
        ("class of error", lambda d, x, y, z: [][1] if d.device.type == "cpu" else {}[1]),
        ("count", lambda d, x, y, z: [x, x][: 1 + (d.device.type == "cpu")]),
        ("result strides", lambda d, x, y, z: x.new_ones(2, 2).t() if d.device.type == "cpu" else x.new_ones(2, 2)),
        ("result dtype", lambda d, x, y, z: x.double() if d.device.type == "cpu" else x),
        ("result requires_grad", lambda d, x, y, z: x.clone().requires_grad_(d.device.type == "cpu")),
        ("version", lambda d, x, y, z: (x.add_(0), None)[1] if d.device.type == "cpu" else None),
        ("sharing", lambda d, x, y, z: x.view(1) if d.device.type == "cpu" else x.clone().view(1)),
    ],
)
def test_a_difference_is_found(kind: str, call: Any, monkeypatch: pytest.MonkeyPatch, sky: str) -> None:
    monkeypatch.setitem(CALLS, "lie", call)
    found = Comparison(sky).difference([Step("lie", 0, (0, 0, 0), 1)])
    assert found is not None
    assert found.kind == f"lie: {kind}"
