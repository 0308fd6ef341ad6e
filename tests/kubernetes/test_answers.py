"""Answers of an API server in which somebody has stored more than a parser takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyproxy.kubernetes.answers import MAX_DEPTH, TOO_DEEP, parse


def nested(depth: int, opening: str, closing: str, core: str = "1") -> str:
    return opening * depth + core + closing * depth


def depth_of(value: Any) -> int:
    depth = 0
    while isinstance(value, dict | list):
        value = next(iter(value.values() if isinstance(value, dict) else value))
        depth += 1
    assert value == TOO_DEEP
    return depth


@pytest.mark.parametrize(("opening", "closing"), [('{"a": ', "}"), ("[", "]"), ('{"]}": [', "]}")])
def test_what_is_too_deep_is_cut_and_its_neighbours_are_whole(opening: str, closing: str) -> None:
    deep = nested(9000, opening, closing)
    tricky = {"text": 'a "{[ quoted \\', "list": [1, {"b": None}], "after": "}]"}
    text = f'{{"items": [{json.dumps(tricky)}, {deep}, {json.dumps(tricky)}, {deep}, 5], "end": true}}'
    with pytest.raises(RecursionError):
        json.loads(text)
    answer = parse(text.encode())
    first, cut, second, other, five = answer["items"]
    assert first == second == tricky
    assert (five, answer["end"]) == (5, True)
    assert depth_of(cut) == depth_of(other) == MAX_DEPTH - 2


def test_what_the_parser_takes_is_not_changed() -> None:
    text = nested(MAX_DEPTH + 10, "[", "]", f'"{TOO_DEEP}"')
    assert parse(text.encode()) == json.loads(text)


@pytest.mark.parametrize("text", [b"", b"<html>", b'{"a": ', b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)
