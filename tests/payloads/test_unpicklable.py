"""The part of a value that cannot be pickled is named."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace

import pytest

from skyproxy.payloads.unpicklable import first_unpicklable


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": 1}, ""),
        (threading.Lock(), "x"),
        ([1, {"lock": threading.Lock()}], "x[1]['lock']"),
        (SimpleNamespace(a=1, inner=(threading.Lock(),)), "x.inner[0]"),
    ],
)
def test_the_innermost_part_is_named(value: object, place: str) -> None:
    assert first_unpicklable({"first": 0, "x": value}, pickle.dumps) == place


def test_what_holds_itself_has_a_place_all_the_same() -> None:
    value: list[object] = [threading.Lock()]
    value.insert(0, value)
    assert first_unpicklable({"x": value}, pickle.dumps).startswith("x[0]")
