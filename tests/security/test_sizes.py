"""Attacks by sizes that a tensor has after an operation failed, with no memory behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy import torch_codec
from skyproxy.protocol import commands
from skyproxy_server.executor import Executor
from tests.security.test_operations import FIRST, Worker

HUGE = 1 << 50
"""More elements than any machine has memory for."""
ONES, GROW, ADD, TAKE, SPLIT, EXPAND, CUT, PLACES = range(FIRST, FIRST + 8)
OTHER = FIRST + 8


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    for number, definition in {
        ONES: ["aten::ones", ["v"], {}, ["n"]],
        GROW: ["aten::resize_", ["t", "v"], {}, ["n"]],
        ADD: ["aten::add_.Scalar", ["t", "v"], {}, ["n"]],
        TAKE: ["aten::take", ["t", "t"], {}, ["n"]],
        SPLIT: ["aten::split.Tensor", ["t", "v"], {}, ["n"]],
        EXPAND: ["aten::expand", ["t", "v"], {}, ["n"]],
        CUT: ["aten::split_copy.Tensor_out", ["t", "v"], {"out": "t"}, []],
        PLACES: ["aten::full", ["v", "v"], {"dtype": ["c", "dtype", "int64"]}, ["n"]],
    }.items():
        made.run(commands.DEFINE, number, definition)
    return made


def tell_failures(worker: Worker) -> None:
    """Ask until all failures are told, after which what they would have changed can be used again."""
    for request in range(10):
        worker.run(commands.CALL, request + 1, "synchronize", [])


def sizes_fit(executor: Executor) -> bool:
    def fits(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(fits, value))
        if not isinstance(value, torch.Tensor):
            return True
        extent = torch_codec.storage_extent(tuple(value.shape), value.stride(), int(value.storage_offset()))
        return extent * value.element_size() <= value.untyped_storage().nbytes()

    return all(map(fits, executor.state.values.slots.values()))


@pytest.mark.parametrize("result", [0, 1, 2, 3])
def test_a_tensor_that_found_no_memory_has_no_sizes_under_any_name(worker: Worker, result: int) -> None:
    worker.run(ONES, [3], 1, ADD, 1, 1, 2)
    worker.run(GROW, 1, [HUGE], result)
    tell_failures(worker)
    assert sizes_fit(worker.executor)
    worker.run(PLACES, [1], 1000, 4, TAKE, 2, 4, 5)
    assert not isinstance(worker.executor.state.values.slots[5], torch.Tensor)


def test_a_list_whose_parts_found_no_memory_has_no_sizes(worker: Worker) -> None:
    worker.run(ONES, [2], 1, SPLIT, 1, 1, 2, ONES, [1], 3, EXPAND, 3, [HUGE], 4)
    worker.run(CUT, 4, HUGE // 2, 2)
    tell_failures(worker)
    assert sizes_fit(worker.executor)


@pytest.mark.parametrize("writes", [[], [0]])
def test_a_graph_that_hides_what_it_writes_leaves_no_sizes(worker: Worker, writes: list[int]) -> None:
    fields: dict[str, Any] = {
        "nodes": [["aten::resize_", [["node", 0], ["", [HUGE]]], {}]],
        "outputs": [1],
        "writes": writes,
    }
    graph = OTHER
    worker.run(commands.DEFINE, graph, ["sky::compiled", ["t"], fields, ["n"]], ONES, [3], 1, graph, 1, 2)
    tell_failures(worker)
    assert worker.error(2).startswith("RuntimeError")
    assert sizes_fit(worker.executor)


def test_memory_that_is_made_small_and_large_again_hides_no_sizes(worker: Worker) -> None:
    worker.run(ONES, [3], 1, ADD, 1, 1, 2)
    worker.run(commands.DO, "resize_storage", [1, 0], GROW, 1, [HUGE], 0, commands.DO, "resize_storage", [2, 12])
    tell_failures(worker)
    worker.run(commands.DO, "resize_storage", [2, 12])
    assert sizes_fit(worker.executor)


def test_what_a_failed_op_makes_of_its_result_is_not_written_beyond_its_memory(worker: Worker) -> None:
    out = OTHER
    worker.run(commands.DEFINE, out, ["aten::empty.out", ["v"], {"out": "t"}, ["n"]])
    worker.run(ONES, [3], 2, out, [HUGE], 2, 3)
    tell_failures(worker)
    assert sizes_fit(worker.executor)
