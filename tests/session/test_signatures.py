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


def made(most: int = 10) -> tuple[Signatures, Recorder]:
    recorder = Recorder(lambda batch: None, lambda: (0, 0), Settings())
    return Signatures(recorder, most), recorder


def test_a_structure_is_defined_once() -> None:
    signatures, recorder = made()
    numbers = [signatures.number(key, lambda key=key: [key], 2) for key in "abab"]  # type: ignore[misc]
    assert numbers == [FIRST, FIRST + 1, FIRST, FIRST + 1]
    assert recorder.stream == [commands.DEFINE, FIRST, ["a"], commands.DEFINE, FIRST + 1, ["b"]]
    assert recorder.widths == commands.width_table({FIRST: 2, FIRST + 1: 2})
    assert (signatures.known("b"), signatures.known("c")) == (FIRST + 1, None)
    assert signatures.structures == {FIRST: "a", FIRST + 1: "b"}


def test_a_definition_that_fails_leaves_the_number_to_the_next() -> None:
    signatures, recorder = made()

    def fail() -> list[Any]:
        raise ValueError("no form for this")

    with pytest.raises(ValueError, match="no form"):
        signatures.number("a", fail, 1)
    assert signatures.number("b", list, 1) == FIRST
    assert recorder.stream == [commands.DEFINE, FIRST, []]


def test_the_limit_is_a_clear_error_and_keeps_what_there_is() -> None:
    signatures, _ = made(most=1)
    signatures.number("a", list, 1)
    with pytest.raises(LimitExceededError, match="SKYPROXY_MAX_SIGNATURES"):
        signatures.number("b", list, 1)
    assert signatures.number("a", list, 1) == FIRST


def test_threads_agree_on_a_number() -> None:
    signatures, recorder = made()
    barrier = threading.Barrier(4)
    found: list[int] = []

    def ask() -> None:
        barrier.wait()
        found.append(signatures.number("a", list, 1))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [FIRST] * 4
    assert recorder.stream.count(commands.DEFINE) == 1
