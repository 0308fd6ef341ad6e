"""Functions that are in no file of the worker's show their lines there, as where they were written."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator

import pytest
import torch

import skyproxy

CELL = "<the cell of a notebook>"
TEXT = """
def helper(x):
    return 1 / x  # of the helper

def work(x):
    return helper(x)
"""


@pytest.fixture
def work() -> Iterator[Callable[[float], float]]:
    linecache.cache[CELL] = (len(TEXT), None, TEXT.splitlines(keepends=True), CELL)
    namespace: dict[str, Callable[[float], float]] = {}
    exec(compile(TEXT, CELL, "exec"), {"__name__": "__main__"}, namespace)
    namespace["work"].__globals__.update(namespace)
    yield namespace["work"]
    del linecache.cache[CELL]


def _scripted(x: float) -> float:
    @torch.jit.script
    def half(y: float) -> float:
        return y / 2

    return half(x)  # type: ignore[no-any-return]


def test_torchscript_compiles_a_function_that_is_made_there(node: skyproxy.Node) -> None:
    assert node.run(_scripted, 3.0) == 1.5


def _source_there(function: Callable[..., object]) -> str:
    return inspect.getsource(function)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_traceback_shows_the_lines(work: Callable[[float], float], isolate: bool, node: skyproxy.Node) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        node.submit(work, 0, isolate=isolate).result()
    trace = str(caught.value.__cause__)
    assert f'File "{CELL}", line 6, in work\n    return helper(x)' in trace
    assert f'File "{CELL}", line 3, in helper\n    return 1 / x  # of the helper' in trace


def test_a_call_of_a_function_that_is_known_there_shows_them_too(
    work: Callable[[float], float], node: skyproxy.Node
) -> None:
    assert [node.run(work, 2) for _ in range(3)] == [0.5] * 3
    with pytest.raises(ZeroDivisionError) as caught:
        node.run(work, 0)
    assert "return 1 / x  # of the helper" in str(caught.value.__cause__)


def test_a_function_can_read_the_source_of_another(work: Callable[[float], float], node: skyproxy.Node) -> None:
    assert node.run(_source_there, work) == inspect.getsource(work)
