"""Captured streams on the worker: what they read, what they leave, and what breaks the protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server.executor import Executor
from skyproxy_server.failures import Failed
from skyproxy_server.transfers import Transfers

DEFINE, DO, EXPECT, FETCH, RELEASE, REPLAY = (
    commands.DEFINE,
    commands.DO,
    commands.EXPECT,
    commands.FETCH,
    commands.RELEASE,
    commands.REPLAY,
)
ADD, ADD_, PICK = range(commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 3)
CPU = ["cpu", None]
TWO = encode_description(describe(torch.zeros(2)))


class Worker:
    """An executor with three ops, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.executor = Executor(
            [{"type": "cpu", "index": 0, "name": "CPU"}], self.sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS
        )
        self._sequence = 0
        self.run(DEFINE, ADD, ["aten::add.Tensor", ["t", "t"], {}, ["n"]])
        self.run(DEFINE, ADD_, ["aten::add_.Tensor", ["t", "t"], {}, ["x"]])
        self.run(DEFINE, PICK, ["aten::index_select", ["t", "v", "t"], {}, ["n"]])

    def run(self, *stream: Any) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream)))

    def capture(self, number: int, stream: list[Any], exports: list[Any], places: Any = (CPU,)) -> None:
        self.run(DO, "graph_begin", [], DO, "graph_define", [number, stream, exports, list(places), {}])

    def __setitem__(self, slot: int, value: Any) -> None:
        self.executor.state.values.slots[slot] = torch.tensor(value, dtype=torch.float32)

    def __getitem__(self, slot: int) -> Any:
        value = self.executor.state.values.slots[slot]
        return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made[1], made[2] = [1, 1], [10, 10]
    return made


def test_a_replay_reads_what_was_there_when_it_was_captured(worker: Worker) -> None:
    worker.capture(7, [ADD, 1, 2, 3, ADD, 3, 3, 4, RELEASE, [3]], [[4, TWO]])
    worker.run(RELEASE, [2], REPLAY, 7)
    worker[2] = [50, 50]
    assert worker[4] == [22, 22]
    worker.run(ADD_, 1, 1, REPLAY, 7)
    assert worker[4] == [24, 24]
    assert 3 not in worker.executor.state.values.slots


def test_what_is_released_during_a_capture_is_kept_for_it(worker: Worker) -> None:
    worker.run(DO, "graph_begin", [])
    worker.run(RELEASE, [2])
    worker.run(DO, "graph_define", [7, [ADD, 1, 2, 3], [[3, TWO]], [CPU], {}], REPLAY, 7)
    assert worker[3] == [11, 11]
    assert worker.executor.state.values.deferred_releases is None
    assert 2 not in worker.executor.state.values.slots


def test_results_nobody_looks_at_are_exchanged_and_others_are_filled(worker: Worker) -> None:
    worker.capture(7, [ADD, 1, 2, 3], [[3, TWO]])
    worker.run(REPLAY, 7)
    first = worker.executor.state.values.slots[3].data_ptr()
    view = worker.executor.state.values.slots[3][:1]
    worker.run(ADD_, 1, 1, REPLAY, 7)
    assert worker.executor.state.values.slots[3].data_ptr() == first
    assert view.tolist() == [12]


def test_results_cannot_be_fetched_before_the_first_replay(worker: Worker) -> None:
    worker.capture(7, [ADD, 1, 2, 3], [[3, TWO]])
    worker.sent.clear()
    worker.run(FETCH, 1, 3, 0)
    assert isinstance(worker.sent[0], Failure)
    assert "replayed" in worker.sent[0].error["message"]
    worker.run(REPLAY, 7, FETCH, 2, 3, 0)
    assert isinstance(worker.sent[1], Reply)


def test_checks_are_made_until_they_succeed(worker: Worker) -> None:
    stream = [EXPECT, [encode_description(describe(torch.zeros(3)))], ADD, 1, 2, 3]
    worker.capture(7, stream, [[3, TWO]])
    for _ in range(2):
        worker.run(REPLAY, 7)
        assert isinstance(worker[3], Failed)
    good = [EXPECT, [TWO], ADD, 1, 2, 4]
    worker.capture(8, good, [[4, TWO]])
    worker.run(REPLAY, 8, REPLAY, 8)
    assert worker[4] == [11, 11]
    assert not any(step.checked for step in worker.executor.state.graphs._recordings[8].steps)


def test_a_failure_poisons_only_what_depends_on_it_and_names_the_graph(worker: Worker) -> None:
    worker.executor.state.values.slots[5] = torch.tensor([9])
    worker.capture(7, [PICK, 1, 0, 5, 3, ADD, 3, 3, 4, ADD, 1, 1, 6], [[4, TWO], [6, TWO]])
    worker.sent.clear()
    worker.run(REPLAY, 7)
    assert isinstance(worker[4], Failed)
    assert worker[6] == [2, 2]
    failure = worker.sent[0]
    assert isinstance(failure, Failure)
    assert (failure.error["graph"], failure.error["position"]) == (7, 0)
    worker.executor.state.values.slots[5].fill_(1)
    worker.run(REPLAY, 7)
    assert worker[4] == [2]


def test_a_forgotten_graph_leaves_its_values_and_feeds_others_to_the_end(worker: Worker) -> None:
    worker.capture(7, [ADD, 1, 2, 3], [[3, TWO]])
    worker.capture(8, [ADD, 3, 3, 4], [[4, TWO]])
    worker.run(REPLAY, 7, REPLAY, 8, DO, "graph_forget", [7], RELEASE, [3])
    worker[3] = [99, 99]
    worker.run(REPLAY, 8)
    assert worker[4] == [22, 22]
    with pytest.raises(ProtocolError, match="does not exist"):
        worker.run(REPLAY, 7)


def test_an_aborted_capture_poisons_what_it_would_have_made(worker: Worker) -> None:
    worker.run(DO, "graph_begin", [], DO, "graph_abort", [[3]])
    assert isinstance(worker[3], Failed)
    worker.run(ADD, 1, 2, 4)
    assert worker[4] == [11, 11]


@pytest.mark.parametrize(
    "stream",
    [
        [FETCH, 1, 1, 0],
        [REPLAY, 7],
        [DO, "synchronize", []],
        [DO, "view_storage", []],
        [ADD, 1],
        [999, 1],
        ["x"],
        [None],
        [EXPECT, [TWO]],
    ],
    ids=str,
)
def test_what_cannot_be_replayed_breaks_the_protocol(worker: Worker, stream: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        worker.capture(7, stream, [])


def test_captures_do_not_nest(worker: Worker) -> None:
    worker.run(DO, "graph_begin", [])
    with pytest.raises(ProtocolError, match="inside"):
        worker.run(DO, "graph_begin", [])
    other = Worker()
    with pytest.raises(ProtocolError, match="never began"):
        other.run(DO, "graph_abort", [[]])
