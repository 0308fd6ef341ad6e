"""Durations and quantities."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyproxy_operator.quantities import duration_seconds, duration_text, quantity


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("1h30m", 5400), ("2d", 172800), ("90s", 90), ("1d1h1m1s", 90061), ("", None), ("0s", None)],
)
def test_durations_are_read(text: str, seconds: int | None) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["30", "m", "1m1h", "-1m", "1.5h", " 1m", "1m ", "1w", "٣m", "1M"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="30m"):
        duration_seconds(text)


@given(st.integers(1, 10**9))
def test_a_duration_is_read_as_it_was_written(seconds: int) -> None:
    assert duration_seconds(duration_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1),
        ("1", 1),
        ("500m", "0.5"),
        ("8Gi", 8 << 30),
        ("2k", 2000),
        ("1.5M", 1500000),
        ("1e3", 1000),
        ("1E", 10**18),
    ],
)
def test_quantities_are_read(value: object, number: object) -> None:
    assert quantity(value) == Decimal(str(number))


@pytest.mark.parametrize("value", ["", "Gi", "1ki", "1 Gi", "-1", "1Gib", "1e", "1e999", True, None, "1mi", "¼"])
def test_others_are_no_quantities(value: object) -> None:
    with pytest.raises(ValueError, match="quantity"):
        quantity(value)
