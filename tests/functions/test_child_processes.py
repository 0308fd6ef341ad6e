"""Processes that functions start get the functions and classes of the program, as they do in the program itself."""

from __future__ import annotations

import linecache
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyproxy

SCRIPT = "<a script of the program>"
TEXT = """
import dataclasses
import enum
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset


class Kind(enum.Enum):
    ODD = 1
    EVEN = 2


@dataclasses.dataclass
class Row:
    value: int
    kind: Kind

    def doubled(self):
        return 2 * self.value


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return row(number)


def row(number):
    return Row(number, Kind.ODD if number % 2 else Kind.EVEN)


def square(number):
    return number * number


def broken(number):
    return number / 0  # of the program


def as_they_are(rows):
    return rows


def map_in_a_pool(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(square, range(4))


def map_methods(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return list(pool.map(Row.doubled, map(row, range(3))))


def classes_of_results(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        found = list(pool.map(row, range(3)))
    return [one == row(number) and one.kind is row(number).kind for number, one in enumerate(found)]


def load(method):
    loader = DataLoader(Rows(), 2, num_workers=1, collate_fn=as_they_are, multiprocessing_context=method)
    return [[isinstance(one, Row) for one in rows] for rows in loader]


def fail(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.map(broken, range(1))


def spawn(method):
    torch.multiprocessing.start_processes(check, (9,), 1, start_method=method)
    return "ended"


def check(rank, expected):
    assert square(rank + 3) == expected


def end(method):
    process = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join(60)
    return process.exitcode


def local_function(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(lambda number: number, range(1))
"""
METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture
def program() -> Iterator[dict[str, Callable[[str], Any]]]:
    """The functions of a script, which are those of `__main__` there."""
    linecache.cache[SCRIPT] = (len(TEXT), None, TEXT.splitlines(keepends=True), SCRIPT)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(TEXT, SCRIPT, "exec"), namespace)
    yield namespace
    del linecache.cache[SCRIPT]


@pytest.mark.parametrize("method", METHODS)
def test_a_process_pool_maps_a_function_of_the_program(
    method: str, program: dict[str, Any], node: skyproxy.Node
) -> None:
    assert node.run(program["map_in_a_pool"], method) == [0, 1, 4, 9]


def test_methods_are_mapped_too(program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["map_methods"], "spawn") == [0, 2, 4]


@pytest.mark.parametrize("method", METHODS)
def test_what_comes_back_is_of_the_function_s_own_classes(
    method: str, program: dict[str, Any], node: skyproxy.Node
) -> None:
    assert node.run(program["classes_of_results"], method) == [True, True, True]


@pytest.mark.parametrize("method", METHODS)
def test_a_data_loader_has_a_data_set_of_the_program(method: str, program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["load"], method) == [[True, True], [True, True]]


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_process_ends_when_it_is_told_to(
    method: str, isolate: bool, program: dict[str, Any], node: skyproxy.Node
) -> None:
    assert node.submit(program["end"], method, isolate=isolate).result() == -signal.SIGTERM


@pytest.mark.parametrize("isolate", [False, True])
def test_processes_of_an_isolated_function_do_so_too(
    isolate: bool, program: dict[str, Any], node: skyproxy.Node
) -> None:
    assert node.submit(program["spawn"], "spawn", isolate=isolate).result() == "ended"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_error_in_a_process_shows_the_lines_of_the_program(
    method: str, program: dict[str, Any], node: skyproxy.Node
) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        node.run(program["fail"], method)
    line = TEXT.splitlines().index("def broken(number):") + 2
    shown = f'File "{SCRIPT}", line {line}, in broken\n    return number / 0  # of the program'
    assert shown in str(caught.value.__cause__)


def test_what_is_local_to_a_function_is_refused_as_in_any_program(program: dict[str, Any], node: skyproxy.Node) -> None:
    with pytest.raises(Exception, match="<lambda>"):
        node.run(program["local_function"], "spawn")
