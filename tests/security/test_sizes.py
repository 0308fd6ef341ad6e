"""Attacks by sizes that a tensor has with no memory behind them: after a failure, or by way of another session."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.settings import SETTINGS
from skyproxy_server.executor import Executor
from skyproxy_server.gates import Gate
from skyproxy_server.named_sessions import NamedSessions, NamedValueRequests
from skyproxy_server.snapshots.requests import SessionSnapshots
from skyproxy_server.snapshots.unused_names import save_unused
from tests.security.test_operations import CPU, FIRST, Worker
from tests.server.test_named_sessions import FakeHolder

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


@pytest.mark.parametrize(
    "node", [["aten::resize_", [["node", 0], ["", [5000]]], {}], ["aten::neg_", [["node", 0]], {}]]
)
def test_a_graph_that_hides_what_it_writes_waits_for_who_reads_that_memory(worker: Worker, node: list[Any]) -> None:
    """A transfer reads on a thread of its own: memory that was moved meanwhile would be somebody else's."""
    graph, seen = OTHER, []
    fields = {"nodes": [node], "outputs": [1], "writes": []}
    worker.run(commands.DEFINE, graph, ["sky::compiled", ["t"], fields, ["n"]], ONES, [3], 1)
    tensor = worker.executor.state.values.slots[1]
    assert isinstance(tensor, torch.Tensor)
    leaving = Gate(None, lambda: False, lambda: seen.append(tensor.tolist()), blocks_reads=False)
    worker.executor.state.values.gates.close(tensor, leaving)
    worker.run(graph, 1, 2)
    assert seen == [[1, 1, 1]]
    assert isinstance(worker.executor.state.values.slots[2], torch.Tensor)


@pytest.mark.parametrize(
    "moving",
    [
        [commands.DO, "view_storage", [5, 1, "float32", 0, [5000], [1]]],
        [commands.DO, "set_storage", [2, 1, 0, [5000], [1]]],
        [commands.DO, "resize_storage", [1, 20000]],
        [OTHER, 2, 1, 0, [5000], [1], 5],
        [GROW, 1, [5000], 5],
    ],
)
def test_memory_that_a_transfer_reads_is_not_moved(worker: Worker, moving: list[Any]) -> None:
    set_, seen = ["aten::set_.source_Tensor_storage_offset", ["t", "t", "v", "v", "v"], {}, ["n"]], []
    worker.run(commands.DEFINE, OTHER, set_, ONES, [3], 1, ONES, [3], 2)
    tensor = worker.executor.state.values.slots[1]
    assert isinstance(tensor, torch.Tensor)
    place = tensor.untyped_storage().data_ptr()
    leaving = Gate(None, lambda: False, lambda: seen.append(tensor.untyped_storage().data_ptr()), blocks_reads=False)
    worker.executor.state.values.gates.close(tensor, leaving)
    worker.run(*moving)
    assert seen == [place]
    assert tensor.untyped_storage().nbytes() == 20000


def test_a_graph_that_writes_is_not_differentiated(worker: Worker) -> None:
    fields = {"nodes": [["aten::resize_", [["node", 0], ["", [HUGE]]], {}]], "outputs": [1], "writes": []}
    worker.run(commands.DEFINE, OTHER, ["sky::compiled", ["t"], fields, ["n"]], ONES, [3], 1)
    with pytest.raises(ProtocolError, match="changes nothing"):
        worker.run(commands.DO, "differentiated", [9, [1], [OTHER, 1, 2]])
    assert sizes_fit(worker.executor)


def test_memory_that_is_made_small_and_large_again_hides_no_sizes(worker: Worker) -> None:
    worker.run(ONES, [3], 1, ADD, 1, 1, 2)
    worker.run(commands.DO, "resize_storage", [1, 0], GROW, 1, [HUGE], 0, commands.DO, "resize_storage", [2, 12])
    tell_failures(worker)
    worker.run(commands.DO, "resize_storage", [2, 12])
    assert sizes_fit(worker.executor)


@pytest.mark.parametrize("replays", [1, 3])
def test_a_replay_that_makes_a_storage_smaller_reads_nothing_behind_it(worker: Worker, replays: int) -> None:
    shrinking = [commands.DO, "resize_storage", [1, 0], TAKE, 1, 4, 5]
    worker.run(ONES, [1000], 1, ADD, 1, 1, 2, PLACES, [1], 900, 4)
    worker.run(commands.DO, "graph_begin", [], commands.DO, "graph_define", [7, shrinking, [[5, None]], [CPU], {}])
    for _ in range(replays):
        worker.run(commands.REPLAY, 7)
        assert "was resized to 0 bytes" in worker.error(5)


def test_what_a_failed_op_makes_of_its_result_is_not_written_beyond_its_memory(worker: Worker) -> None:
    out = OTHER
    worker.run(commands.DEFINE, out, ["aten::empty.out", ["v"], {"out": "t"}, ["n"]])
    worker.run(ONES, [3], 2, out, [HUGE], 2, 3)
    tell_failures(worker)
    assert sizes_fit(worker.executor)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_no_session_hands_sizes_without_memory_to_the_next_one(is_sparse: bool) -> None:
    store, (first, second) = NamedSessions(SETTINGS, time.monotonic), (Worker(), Worker())
    for worker in (first, second):
        worker.executor.state.names = NamedValueRequests(store, "alice", FakeHolder())
    for number, definition in enumerate(
        [
            ["aten::ones", ["v"], {}, ["n"]],
            ["aten::_to_sparse", ["t"], {}, ["n"]],
            ["aten::_values", ["t"], {}, ["n"]],
        ]
    ):
        first.run(commands.DEFINE, FIRST + number, definition)
    first.run(FIRST, [1000], 1, FIRST + 1, 1, 2, FIRST + 2, 2, 3)
    kept, memory = (2, 3) if is_sparse else (1, 1)
    first.run(commands.CALL, 1, "hold_named", ["work", False])
    first.run(commands.CALL, 2, "put_named", ["key", b"document", [kept]])
    first.run(commands.DO, "resize_storage", [memory, 0])
    second.run(commands.CALL, 1, "hold_named", ["work", True])
    second.run(commands.CALL, 2, "adopt_named", ["key", 1, [5]])
    second.run(commands.DEFINE, FIRST, ["aten::sum", ["t"], {}, ["n"]], FIRST, 5, 6)
    assert "was resized to 0 bytes" in second.error(6)


def test_a_named_value_without_memory_is_saved_and_comes_back_without(tmp_path: Path) -> None:
    (first, second), devices = (Worker(), Worker()), [{"type": "cpu", "index": 0, "name": "CPU"}]
    for worker in (first, second):
        worker.executor.state.names = NamedValueRequests(NamedSessions(SETTINGS, time.monotonic), "alice", FakeHolder())
    first.run(commands.DEFINE, FIRST, ["aten::ones", ["v"], {}, ["n"]], FIRST, [1000], 1)
    first.run(commands.CALL, 1, "hold_named", ["work", False])
    first.run(commands.CALL, 2, "put_named", ["key", b"document", [1]])
    first.run(commands.DO, "resize_storage", [1, 0])
    names = first.executor.state.names
    assert names is not None
    assert names.held is not None
    assert save_unused([names.held], names.store, tmp_path, devices, SETTINGS) == []
    second.executor.state.snapshots = SessionSnapshots(tmp_path, "alice", lambda number: None, SETTINGS)
    second.run(commands.CALL, 1, "hold_named", ["work", True])
    second.run(commands.CALL, 2, "adopt_named", ["key", 1, [5]])
    second.run(commands.DEFINE, FIRST, ["aten::sum", ["t"], {}, ["n"]], FIRST, 5, 6)
    assert "was resized to 0 bytes" in second.error(6)
    second.run(commands.DO, "resize_storage", [5, 4000], FIRST, 5, 7)
    assert float(second.executor.state.values.slots[7]) == 0  # type: ignore[arg-type]


def test_nothing_of_memory_that_is_gone_is_read_for_a_views_error(worker: Worker) -> None:
    """A list is of no use to a view, and PyTorch writes the numbers of its tensors into the error."""
    worker.executor.state.values.slots[1] = torch.ones(1 << 20)
    worker.run(SPLIT, 1, 1 << 19, 2)
    worker.run(commands.DO, "resize_storage", [1, 0])
    worker.run(EXPAND, 2, [1], 3)
    assert "was resized to 0 bytes" in worker.error(3)
