"""The executor: order, failures, uploads, and what it does with clients that break the rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, CancelTransfer, Chunk, Failure, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server.executor import Executor
from skyproxy_server.transfers import Transfers

CPU = ["cpu", None]
RELU, ADD_, EMBED, SPLIT, EMPTY, T_, RESIZE_ = range(commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 7)
SIGNATURES = [
    [commands.DEFINE, RELU, ["aten::relu", ["t"], {}, ["n"]]],
    [commands.DEFINE, ADD_, ["aten::add_.Tensor", ["t", "t"], {}, ["x"]]],
    [commands.DEFINE, EMBED, ["aten::embedding", ["t", "t"], {}, ["n"]]],
    [commands.DEFINE, SPLIT, ["aten::split.Tensor", ["t", "v"], {}, ["N"]]],
    [commands.DEFINE, EMPTY, ["aten::empty.memory_format", ["v"], {"dtype": ["c", "dtype", "float32"]}, ["n"]]],
    [commands.DEFINE, T_, ["aten::t_", ["t"], {}, ["x"]]],
    [commands.DEFINE, RESIZE_, ["aten::resize_", ["t", "v"], {}, ["x"]]],
]


class Worker:
    """An executor, what it sent, and its bulk connection."""

    def __init__(self, **limits: int) -> None:
        self.sent: list[Message] = []
        self.transfers = Transfers(SETTINGS.chunk_bytes)
        self.executor = Executor(
            [{"type": "cpu", "index": 0, "name": "CPU"}],
            self.sent.append,
            self.transfers,
            dataclasses.replace(SETTINGS, **limits),
        )
        self._sequence = 0
        self.run(*[item for definition in SIGNATURES for item in definition])

    def run(self, *stream: Any, buffers: tuple[bytes, ...] = ()) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream), buffers))

    def ask(self, *command: Any) -> Message:
        """The answer of a request."""
        self.run(*command)
        return self.sent[-1]

    def fetch(self, slot: int) -> Any:
        answer = self.ask(commands.FETCH, 77, slot, 0)
        if isinstance(answer, Failure):
            return answer.error["type"]
        assert isinstance(answer, Reply)
        return bytes(answer.buffers[0])

    @property
    def values(self) -> dict[int, Any]:
        return self.executor.state.values.slots


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made.values.update({1: torch.tensor([-1.0, 2.0]), 2: torch.zeros(3, 2), 3: torch.tensor([9])})
    return made


def fields(tensor: torch.Tensor) -> list[Any]:
    return encode_description(describe(tensor))


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_poisons_what_depends_on_it_and_is_told_once(worker: Worker) -> None:
    worker.run(EMBED, 2, 3, 4, RELU, 1, 5, RELU, 4, 6)
    told = [message for message in worker.sent if isinstance(message, Failure)]
    assert len(told) == 1
    assert told[0].request == 0
    assert told[0].error["op"] == "aten::embedding"
    assert told[0].error["type"] == "IndexError"
    assert (told[0].error["sequence"], told[0].error["position"]) == (2, 0)
    assert "IndexError" in told[0].error["traceback"]
    assert worker.fetch(4) == worker.fetch(6) == "IndexError"
    assert worker.values[5].tolist() == [0, 2]


def test_a_target_comes_back_once_its_error_was_delivered(worker: Worker) -> None:
    worker.values[4] = worker.values[2][0]  # a view
    worker.run(EMBED, 2, 3, 5, ADD_, 4, 5, RELU, 2, 6)
    assert worker.fetch(2) == "IndexError"
    assert worker.fetch(2) == worker.values[2].numpy().tobytes()
    assert worker.fetch(6) == "IndexError"  # computed while it was in doubt
    worker.run(RELU, 2, 6)
    assert worker.values[6].tolist() == [[0, 0]] * 3


def test_a_tensor_that_was_to_be_reshaped_behind_a_failure_gets_its_new_shape(worker: Worker) -> None:
    worker.values[2] = torch.arange(6.0).view(3, 2)
    expected = [fields(torch.empty(3, 2).t())]
    worker.run(EMBED, 2, 3, 5, ADD_, 2, 5, commands.EXPECT, expected, T_, 2)
    assert worker.fetch(2) == "IndexError"
    assert worker.values[2].tolist() == [[0, 2, 4], [1, 3, 5]]
    worker.run(EMBED, 2, 3, 5, ADD_, 2, 5, commands.EXPECT, [fields(torch.empty(5, 5))], RESIZE_, 2, [5, 5])
    assert worker.fetch(2) == "IndexError"
    assert worker.values[2].shape == (5, 5)
    assert worker.values[2].flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tensor_that_cannot_get_its_new_shape_fails_for_good(worker: Worker) -> None:
    huge = [["float32", [1 << 20, 1 << 30], [1 << 30, 1], 0]]
    alias = worker.values[4] = worker.values[2]
    worker.run(commands.EXPECT, huge, RESIZE_, 2, [1 << 20, 1 << 30])
    assert [worker.fetch(2) for _ in range(3)] == ["RuntimeError"] * 3
    assert alias.shape == (0,)  # else it would reach beyond its memory


def test_a_target_that_looks_otherwise_than_was_inferred_fails_for_good(worker: Worker) -> None:
    worker.run(commands.EXPECT, [fields(torch.empty(9, 9))], T_, 2)
    assert [worker.fetch(2) for _ in range(3)] == ["InferenceMismatchError"] * 3


def test_synchronize_raises_each_unseen_failure_once(worker: Worker) -> None:
    worker.run(EMBED, 2, 3, 4, EMBED, 2, 3, 5)
    worker.fetch(4)
    call = (commands.CALL, 8, "synchronize", [])
    assert isinstance(worker.ask(*call), Failure)
    assert isinstance(worker.ask(*call), Reply)


def test_out_of_memory_is_a_failure_like_any_other(worker: Worker) -> None:
    worker.run(EMPTY, [1 << 50], 4, RELU, 4, 5, RELU, 1, 6)
    assert worker.fetch(5) == "RuntimeError"
    assert worker.values[6].tolist() == [0, 2]


def test_a_list_of_results_is_poisoned_as_a_whole(worker: Worker) -> None:
    worker.run(EMBED, 2, 3, 4, SPLIT, 4, 1, [5, 6])
    assert worker.fetch(5) == worker.fetch(6) == "IndexError"
    worker.run(SPLIT, 1, 1, [5, 6])
    assert worker.values[6].tolist() == [2]


def test_failures_are_remembered_up_to_a_bound(worker: Worker) -> None:
    worker.run(*[item for slot in range(10, 510) for item in (EMBED, 2, 3, slot)])
    assert len(worker.executor.state.reports.unreported) == 100


def test_an_output_that_nobody_wants_leaves_slot_0_empty(worker: Worker) -> None:
    worker.run(RELU, 1, 0)
    assert worker.values[0] is None
    worker.run(commands.RELEASE, [0])
    assert worker.values[0] is None


# --- uploads ---------------------------------------------------------------------------------------------------------


def test_an_upload_takes_the_next_buffer(worker: Worker) -> None:
    x, y = torch.arange(3.0), torch.arange(4)
    stream = [commands.UPLOAD, 4, fields(x), CPU, commands.UPLOAD, 5, fields(y), CPU]
    worker.run(*stream, buffers=(x.numpy().tobytes(), y.numpy().tobytes()))
    assert torch.equal(worker.values[4], x)
    assert torch.equal(worker.values[5], y)


def receive(worker: Worker, x: torch.Tensor, slot: int = 4, number: int = 1) -> None:
    worker.run(commands.RECEIVE, slot, fields(x), CPU, number)


def chunk(worker: Worker, data: bytes, offset: int, total: int, number: int = 1) -> None:
    head = Chunk(number, offset, total)
    target = worker.transfers.sink(head)
    if target is not None:
        target[: len(data)] = data
    worker.transfers.on_chunk(Chunk(number, offset, total, (data,)))


@pytest.mark.parametrize("announced", ["first", "between", "last"])
def test_a_transfer_may_come_before_and_after_its_announcement(worker: Worker, announced: str) -> None:
    x = torch.arange(4.0)
    data = x.numpy().tobytes()
    if announced == "first":
        receive(worker, x)
    chunk(worker, data[:6], 0, 16)
    if announced == "between":
        receive(worker, x)
    chunk(worker, data[6:], 6, 16)
    if announced == "last":
        receive(worker, x)
    worker.run(RELU, 4, 5)
    assert worker.values[5].tolist() == [0, 1, 2, 3]
    assert not worker.executor.state.values.gates
    assert worker.transfers._arrivals == {}


@pytest.mark.parametrize("order", ["announced, cancelled", "cancelled, announced", "begun, cancelled, announced"])
def test_a_transfer_that_was_given_up_poisons_its_value_and_nobody_waits(worker: Worker, order: str) -> None:
    x = torch.arange(4.0)
    cancel = CancelTransfer(1, "the upload was interrupted")
    if order.startswith("begun"):
        chunk(worker, x.numpy().tobytes()[:6], 0, 16)
    if order.startswith("announced"):
        receive(worker, x)
        worker.transfers.on_cancel(cancel)
    else:
        worker.transfers.on_cancel(cancel)
        receive(worker, x)
    worker.run(RELU, 1, 6)
    assert worker.values[6].tolist() == [0, 2]
    worker.run(RELU, 4, 5)
    for slot in (4, 5):
        answer = worker.ask(commands.FETCH, 9, slot, 0)
        assert isinstance(answer, Failure)
        assert "interrupted" in answer.error["message"]
    # The client knows it: nobody else is told.
    assert isinstance(worker.ask(commands.CALL, 8, "synchronize", []), Reply)
    assert not worker.executor.state.values.gates
    assert worker.transfers._arrivals == {}
    assert worker.transfers._cancelled == {}


def test_a_transfer_without_memory_fails_alone(worker: Worker) -> None:
    huge = 1 << 50
    chunk(worker, b"abc", 0, huge)
    worker.run(commands.RECEIVE, 4, ["uint8", [huge], [1], 0], CPU, 1)
    chunk(worker, b"abc", 3, huge)
    worker.run(RELU, 1, 5)
    assert worker.values[5].tolist() == [0, 2]
    assert worker.fetch(4) == "RuntimeError"
    worker.transfers.on_cancel(CancelTransfer(1, "no matter"))
    assert worker.transfers._arrivals == {}


def test_a_transfer_that_loses_its_connection_ends_its_waits(worker: Worker) -> None:
    receive(worker, torch.arange(4.0))
    worker.transfers.end()
    worker.run(RELU, 4, 5)
    assert worker.fetch(5) == "RuntimeError"


# --- clients that break the rules ------------------------------------------------------------------------------------

X = fields(torch.zeros(2))


@pytest.mark.parametrize(
    "stream",
    [
        [999, 1],
        [0],
        [17, 1, 2],
        [-1, 1, 2],
        [None, 1],
        ["aten::relu", 1],
        [RELU],
        [RELU, 1],
        [EMBED, 2, 3],
        [commands.EXPECT],
        [commands.EXPECT, []],
        [commands.EXPECT, [[1]], T_, 2],
        [commands.EXPECT, 7, T_, 2],
        [commands.EXPECT, [], commands.RELEASE, [1]],
        [commands.RELEASE],
        [commands.RELEASE, 7],
        [commands.DEFINE, RELU + 100, ["aten::relu", ["t"], {}, ["n"]]],
        [commands.DEFINE, RELU + 5, ["aten::relu"]],
        [commands.DEFINE, RELU + 5, None],
        [commands.DEFINE],
        [commands.UPLOAD, 4, X, CPU],
        [commands.UPLOAD, 4, ["float32", [2]], CPU],
        [commands.UPLOAD, 4, ["nothing", [2], [1], 0], CPU],
        [commands.RECEIVE, 4, X],
        [commands.FETCH, 1, 31337, 0],
        [commands.DESCRIBE, 1, [31337], []],
        [commands.CALL, 1, "no_such_control", []],
        [commands.CALL, 1, ["a", "list"], []],
        [commands.DO, "__class__", []],
    ],
    ids=str,
)
def test_malformed_batches_are_a_protocol_error(worker: Worker, stream: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        worker.run(*stream)


def test_an_op_on_a_slot_that_holds_nothing_fails_alone(worker: Worker) -> None:
    worker.run(RELU, 31337, 4, RELU, 1, 5)
    assert worker.values[5].tolist() == [0, 2]
    answer = worker.ask(commands.FETCH, 1, 4, 0)
    assert isinstance(answer, Failure)
    assert "does not hold" in answer.error["message"]


def test_a_transfer_of_another_size_is_a_protocol_error(worker: Worker) -> None:
    chunk(worker, b"abcd", 0, 8)
    with pytest.raises(ProtocolError, match="8 bytes"):
        receive(worker, torch.arange(4.0))
    with pytest.raises(ProtocolError, match="does not fit"):
        chunk(worker, b"abcd", 4, 9)


def test_there_is_a_bound_on_values_and_on_signatures() -> None:
    worker = Worker(max_handles=10)
    worker.values[1] = torch.ones(1)
    worker.run(*[item for slot in range(1, 11) for item in (RELU, 1, slot)])
    with pytest.raises(ProtocolError, match="10 values"):
        worker.run(RELU, 1, 11)
    worker = Worker(max_signatures=len(SIGNATURES))
    with pytest.raises(ProtocolError, match=f"{len(SIGNATURES)} signatures"):
        worker.run(commands.DEFINE, RESIZE_ + 1, ["aten::relu", ["t"], {}, ["n"]])


def test_a_table_of_signatures_can_be_started_anew(worker: Worker) -> None:
    worker.run(commands.DEFINE, RELU, ["aten::neg", ["t"], {}, ["n"]], RELU, 1, 4)
    assert worker.values[4].tolist() == [1, -2]
    with pytest.raises(ProtocolError, match="never defined"):
        worker.run(EMBED, 2, 3, 4)


def test_the_end_forgets_every_value(worker: Worker) -> None:
    receive(worker, torch.arange(4.0))
    worker.executor.end()
    assert worker.values == {}
    assert not worker.executor.state.values.gates


# --- the grammar -----------------------------------------------------------------------------------------------------

LOOKS = [fields(torch.zeros(2)), fields(torch.zeros(2))]
COMMANDS = [
    [RELU, 1, 10],
    [RELU, 99, 11],  # fails: the slot holds nothing
    [ADD_, 1, 2],  # fails: the shapes do not fit
    [EMBED, 2, 3, 12],  # fails: the index is out of range
    [EMPTY, [2], 13],
    [commands.EXPECT, LOOKS, RELU, 1, 14],
    [commands.EXPECT, [fields(torch.zeros(5))], RELU, 1, 15],  # fails: it has other sizes
    [commands.RELEASE, [10, 13]],
    [commands.FETCH, 7, 1, 0],
    [commands.DESCRIBE, 8, [1], [2]],
    [commands.CALL, 9, "item", [3]],
    [commands.DO, "synchronize", []],
    [commands.DO, "take_apart", [1, [2, 3, 4]]],
]
"""Commands of every kind but for those whose bytes come from elsewhere; some fail wherever they stand."""


@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(COMMANDS), max_size=25))
@example([COMMANDS[2], [commands.EXPECT, LOOKS, RELU, 1, 14], COMMANDS[8], COMMANDS[0]])  # watched from then on
def test_a_batch_is_run_in_the_steps_of_the_walk_whatever_fails(written: list[list[Any]]) -> None:
    worker = Worker()
    worker.values.update({1: torch.ones(2), 2: torch.zeros(3, 2), 3: torch.tensor([9])})
    stream = [item for command in written for item in command]
    expected = commands.walk(stream, worker.executor.state.ops.widths)
    behind_expect = {commands.op_at(stream, at) for at in expected if stream[at] == commands.EXPECT}
    ops, visited = worker.executor.state.ops, list[int]()
    ops.handlers = _NotingHandlers(ops.handlers, visited)
    gated = _gated_positions(worker)
    worker.run(*stream)
    assert sorted({*visited, *gated}) == [at for at in expected if at not in behind_expect]


class _NotingHandlers(list[Any]):
    """Handlers that note where they are called, also those that take the place of others during a batch."""

    def __init__(self, handlers: list[Any], positions: list[int]) -> None:
        super().__init__(handlers)
        self._positions = positions

    def __getitem__(self, number: Any) -> Any:
        handler = super().__getitem__(number)

        def noting(slots: dict[int, Any], stream: list[Any], position: int) -> int:
            self._positions.append(position)
            following: int = handler(slots, stream, position)
            return following

        return noting


def _gated_positions(worker: Worker) -> list[int]:
    """Note the positions that the executor looks at while a storage is not usable: such a command may not run."""
    positions: list[int] = []
    own = worker.executor._wait_for_gates

    def noting(stream: list[Any], position: int) -> Exception | None:
        positions.append(position)
        return own(stream, position)

    worker.executor._wait_for_gates = noting  # type: ignore[method-assign]
    return positions
