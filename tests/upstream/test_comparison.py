"""What `make upstream` takes for a difference, and when it fails."""

from __future__ import annotations

import json

import pytest

from tests.upstream.comparison import Result, compare, read_results
from tests.upstream.differences import DIFFERENCES

PASSED, FAILED, SKIPPED = Result("passed"), Result("failed", "Error: no"), Result("skipped", "not here")


def report(test: str, phase: str, outcome: str, message: str = "") -> str:
    return json.dumps({"test": test, "phase": phase, "outcome": outcome, "message": message})


@pytest.mark.parametrize(
    ("cpu", "device", "good"),
    [
        (PASSED, PASSED, True),
        (PASSED, FAILED, False),
        (PASSED, SKIPPED, False),
        (FAILED, PASSED, True),
        (FAILED, FAILED, True),
        (FAILED, SKIPPED, True),
        (SKIPPED, PASSED, True),
        (SKIPPED, FAILED, False),
        (SKIPPED, SKIPPED, True),
    ],
)
def test_a_test_that_is_worse_on_the_device_is_a_difference(cpu: Result, device: Result, good: bool) -> None:
    found = compare({"a": cpu}, {"a": device}, {})
    assert found.good is good
    assert found.counts == {(cpu.outcome, device.outcome): 1}
    assert len(found.unexpected) == (not good)


def test_a_difference_is_told_with_its_test_and_its_error() -> None:
    assert compare({"t.py::a": PASSED}, {"t.py::a": FAILED}, {}).unexpected == [
        "t.py::a: passed on the CPU, failed here: Error: no"
    ]


def test_a_known_difference_is_allowed_and_counted() -> None:
    both = {"t.py::a[1-x]": PASSED, "t.py::b": PASSED}, {"t.py::a[1-x]": FAILED, "t.py::b": PASSED}
    for pattern in ("t.py::a[1-x]", "t.py::a[*", "*::a*"):
        found = compare(*both, {pattern: "why"})
        assert (found.good, found.allowed, found.unexpected) == (True, 1, [])
    assert not compare(*both, {"t.py::a1": "brackets are no set of characters"}).good


def test_a_known_difference_that_is_none_any_more_fails_the_run() -> None:
    found = compare({"a": PASSED, "b": PASSED}, {"a": PASSED, "b": FAILED}, {"a": "why", "b": "why", "c": "not run"})
    assert found.outlived == ["a"]
    assert not found.good


def test_a_pattern_is_good_for_several_tests_if_one_of_them_differs() -> None:
    assert compare({"a1": PASSED, "a2": PASSED}, {"a1": FAILED, "a2": PASSED}, {"a*": "why"}).good


def test_a_run_that_ended_early_fails() -> None:
    found = compare({"a": PASSED, "b": PASSED}, {"a": PASSED}, {})
    assert (found.good, found.unfinished) == (False, ["b"])
    assert not compare({}, {}, {}).good


def test_what_fails_on_both_sides_shows_nothing_and_is_counted_by_its_error() -> None:
    found = compare({"a": FAILED, "b": FAILED}, {"a": FAILED, "b": FAILED}, {})
    assert found.useless == {"Error: no": 2}


def test_the_outcome_of_a_test_is_that_of_its_call_unless_another_phase_failed() -> None:
    lines = [report("passes", phase, "passed") for phase in ("setup", "call", "teardown")]
    lines += [report("skips", "setup", "skipped", "why"), report("skips", "teardown", "passed")]
    lines += [
        report("fails", "setup", "passed"),
        report("fails", "call", "failed", "E"),
        report("fails", "teardown", "passed"),
    ]
    lines += [report("fails late", "call", "passed"), report("fails late", "teardown", "failed", "L")]
    lines += [report("fails twice", "call", "failed", "first"), report("fails twice", "teardown", "failed", "second")]
    lines += [report("died", "setup", "passed"), '{"test": "half a li']
    assert read_results(lines) == {
        "passes": Result("passed"),
        "skips": Result("skipped", "why"),
        "fails": Result("failed", "E"),
        "fails late": Result("failed", "L"),
        "fails twice": Result("failed", "first"),
    }


def test_every_known_difference_has_a_reason() -> None:
    assert all(reason for table in DIFFERENCES.values() for reason in table.values())
