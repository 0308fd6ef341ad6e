"""The numbers of signatures: one for each structure, in order, and no more than allowed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from skyproxy.errors import LimitExceededError
from skyproxy.protocol import commands
from skyproxy.session.recorder import Recorder
from skyproxy.session.signatures import Signatures
from skyproxy.settings import Settings

FIRST = commands.FIRST_SIGNATURE
DEFINITION = [[commands.TENSOR], {}, [commands.NEW]]
"""An op's, behind its name."""


def define() -> list[Any]:
    """Make a definition."""
    return ["a", *DEFINITION]


def made(most: int = 10) -> tuple[Signatures, Recorder]:
    recorder = Recorder(lambda batch: None, lambda: (0, 0), Settings())
    return Signatures(recorder, most), recorder


def test_a_structure_is_defined_once() -> None:
    signatures, recorder = made()
    numbers = [signatures.number(key, lambda key=key: [key, *DEFINITION], 2) for key in "abab"]  # type: ignore[misc]
    assert numbers == [FIRST, FIRST + 1, FIRST, FIRST + 1]
    assert recorder.stream == [
        commands.DEFINE,
        FIRST,
        ["a", *DEFINITION],
        commands.DEFINE,
        FIRST + 1,
        ["b", *DEFINITION],
    ]
    assert recorder.widths == commands.width_table({FIRST: 2, FIRST + 1: 2})
    assert (signatures.known("b"), signatures.known("c")) == (FIRST + 1, None)
    assert signatures.structures == {FIRST: "a", FIRST + 1: "b"}


def test_operands_that_may_be_numbers_are_noted_with_the_definition() -> None:
    signatures, recorder = made()
    value, number = commands.VALUE, [commands.HOST_SCALAR, "float32"]
    constant = [commands.CONSTANT, "none", None]
    arguments = [commands.TENSOR, constant, value, commands.TENSORS]
    keywords = {"alpha": value, "other": commands.TENSOR}
    op = signatures.number("op", lambda: ["aten::op", arguments, keywords, [commands.NEW]], 6)
    fields = {"nodes": value}
    graph = signatures.number("graph", lambda: [commands.COMPILED, [commands.TENSOR, number], fields, []], 2)
    signatures.number("slots only", define, 2)
    assert recorder.repeats.number_places == {op: (2, 4), graph: (2,)}


def test_a_definition_that_fails_leaves_the_number_to_the_next() -> None:
    signatures, recorder = made()

    def fail() -> list[Any]:
        raise ValueError("no form for this")

    with pytest.raises(ValueError, match="no form"):
        signatures.number("a", fail, 1)
    assert signatures.number("b", define, 1) == FIRST
    assert recorder.stream == [commands.DEFINE, FIRST, define()]


def test_the_limit_is_a_clear_error_and_keeps_what_there_is() -> None:
    signatures, _ = made(most=1)
    signatures.number("a", define, 1)
    with pytest.raises(LimitExceededError, match="SKYPROXY_MAX_SIGNATURES"):
        signatures.number("b", define, 1)
    assert signatures.number("a", define, 1) == FIRST


def test_threads_agree_on_a_number() -> None:
    signatures, recorder = made()
    barrier = threading.Barrier(4)
    found: list[int] = []

    def ask() -> None:
        barrier.wait()
        found.append(signatures.number("a", define, 1))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [FIRST] * 4
    assert recorder.stream.count(commands.DEFINE) == 1
