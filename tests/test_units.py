"""Durations, sizes, quantities and settings, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from skyproxy.errors import ConfigurationError
from skyproxy.units import (
    MAX_DURATION_SECONDS,
    duration_seconds,
    duration_text,
    limit_seconds,
    plain_text,
    quantity,
    settings_from,
    size_bytes,
    size_text,
)

DURATIONS = [
    ("90", 90.0),
    ("0.5", 0.5),
    ("90s", 90.0),
    ("30m", 1800.0),
    ("1.5h", 5400.0),
    ("1.1h", 3960.0),
    ("1h30m", 5400.0),
    ("500ms", 0.5),
    ("2d", 172800.0),
    ("1d1h1m1s1ms", 90061.001),
]
NO_DURATIONS = [
    "soon",
    "1x",
    "-1s",
    "m",
    "1m1h",
    "1h1h",
    " 1m",
    "1m ",
    "1 m",
    "1w",
    "\u0663m",
    "1M",
    "1.h",
    ".5h",
    "1e3",
    "nan",
]


@pytest.mark.parametrize(("text", "seconds"), DURATIONS)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("number", [1, 0.25, 90.0])
def test_a_number_is_one_of_seconds(number: float) -> None:
    assert duration_seconds(number) == number


@pytest.mark.parametrize("text", [*NO_DURATIONS, "", True, float("nan")])
def test_what_is_no_duration_is_named_with_its_place_and_examples(text: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^timeout={re.escape(repr(text))} is not a duration.*1h30m"):
        duration_seconds(text, "timeout")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("0", "over before it begins"),
        ("0s", "over before it begins"),
        (0, "over before it begins"),
        (-1.0, "over before it begins"),
        ("99999999999d", "longer than ten years"),
        (float("inf"), "longer than ten years"),
        (MAX_DURATION_SECONDS + 1, "longer than ten years"),
    ],
)
def test_durations_that_nothing_can_take_are_refused(value: float | str, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^--timeout=.* is {fault}"):
        duration_seconds(value, "--timeout")


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("", None), ("1h", 3600.0), (5, 5.0)])
def test_a_limit_may_be_left_out(text: float | str | None, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds


@given(st.integers(1, MAX_DURATION_SECONDS))
def test_a_duration_is_read_as_it_was_written(seconds: int) -> None:
    assert duration_seconds(duration_text(seconds)) == seconds


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (0.2, "0s"), (59.6, "1m"), (90061, "1d1h1m1s")])
def test_durations_are_written_in_whole_seconds(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("field", ["idleTimeout", "maxLifetime"])
def test_the_custom_resource_has_the_same_grammar(field: str) -> None:
    """The API server refuses what we would refuse, and nothing else."""
    crd = yaml.safe_load((Path(__file__).resolve().parents[1] / "manifests/base/crd.yaml").read_text(encoding="utf-8"))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    pattern = re.compile(spec[field]["pattern"], re.ASCII)
    assert [text for text, _ in DURATIONS if not pattern.search(text)] == []
    assert [text for text in NO_DURATIONS if pattern.search(text)] == []
    assert pattern.search("")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1),
        ("1", 1),
        (1.5, "1.5"),
        ("500m", "0.5"),
        ("1u", "0.000001"),
        ("8Gi", 8 << 30),
        ("1.5Gi", 3 << 29),
        ("2k", 2000),
        ("1.5M", 1500000),
        ("1e3", 1000),
        ("1E", 10**18),
        ("1Ei", 1 << 60),
    ],
)
def test_quantities_are_read(value: object, number: object) -> None:
    assert quantity(value) == Decimal(str(number))


@pytest.mark.parametrize(
    "value", ["", "Gi", "1ki", "1K", "1 Gi", "-1", "1GiB", "1e", "1e999", True, None, "1mi", "\u00bc", "x", "1" * 31]
)
def test_others_are_no_quantities(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^memory=.* is not a quantity.*8Gi"):
        quantity(value, "memory")


@pytest.mark.parametrize(
    ("value", "count"),
    [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("8Gi", 8 << 30), ("500MB", 500_000_000), ("4096", 4096), (7, 7)],
)
def test_sizes_are_read(value: object, count: int) -> None:
    assert size_bytes(value) == count


@pytest.mark.parametrize("value", ["much", "", "8 GiBi", "8B", "-1", "1  Gi", "500mB"])
def test_others_are_no_sizes(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^uploads=.* is not a size.*8GiB"):
        size_bytes(value, "uploads")


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (80 << 30, "80.0 GiB"), (3 << 50, "3072.0 TiB")]
)
def test_sizes_are_written_in_binary_units(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("number", "text"), [("4", "4"), ("0.5", "0.5"), ("1E+3", "1000"), ("0.33333333333", "0.333333333")]
)
def test_numbers_for_other_programs_have_neither_exponent_nor_idle_zeros(number: str, text: str) -> None:
    assert plain_text(Decimal(number)) == text


@dataclass(frozen=True)
class Example:
    name: str = "a"
    count: int = 3
    seconds: float = 1.5
    wanted: bool = False
    owner: int | None = 7


def test_settings_come_from_the_environment() -> None:
    assert settings_from({"PATH": "/bin"}, "X_", Example) == Example()
    environ = {"X_NAME": "b", "X_COUNT": "0", "X_SECONDS": "2", "X_WANTED": "on", "X_OWNER": ""}
    assert settings_from(environ, "X_", Example) == Example("b", 0, 2.0, True, None)
    assert settings_from({"X_WANTED": "False", "X_OWNER": "9"}, "X_", Example) == Example(owner=9)


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("X_COUNT", "many", "is not a number"),
        ("X_COUNT", "", "is not a number"),
        ("X_COUNT", "1.5", "is not a number"),
        ("X_COUNT", "-1", "is not a number from 0"),
        ("X_SECONDS", "nan", "is not a number from 0"),
        ("X_OWNER", "me", "is not a number"),
        ("X_WANTED", "perhaps", "is neither true nor false"),
    ],
)
def test_a_setting_of_another_kind_is_named(variable: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{variable}={text!r} {problem}.*Example: {variable}="):
        settings_from({variable: text}, "X_", Example)
