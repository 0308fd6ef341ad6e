"""Cancelled commands: what is dropped, what is run all the same, and what a client can break with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Failure, Reply
from tests.server.test_executor import ADD_, COMMANDS, CPU, RELU, RESIZE_, T_, Worker, fields

CANCELLED = "CancelledOperationError"


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made.values.update({1: torch.tensor([-1.0, 2.0]), 2: torch.zeros(3, 2), 3: torch.tensor([9])})
    return made


def cancel(worker: Worker, number: int = 1) -> None:
    worker.executor.state.cancellation.ask(number)


def end(worker: Worker, number: int = 1) -> Any:
    answer = worker.ask(commands.CALL, 900 + number, "end_cancellation", [number])
    assert isinstance(answer, Reply)
    return answer.value


def test_results_are_poisoned_and_told_with_their_place(worker: Worker) -> None:
    cancel(worker)
    worker.run(RELU, 1, 4, RELU, 4, 5)
    assert worker.sent == []  # nobody is told of each of them
    assert end(worker) == {"dropped": 2, "places": [[2, 0], [2, 3]]}
    for slot, position in ((4, 0), (5, 3)):
        answer = worker.ask(commands.FETCH, 7, slot, 0)
        assert isinstance(answer, Failure)
        assert answer.error["type"] == CANCELLED
        assert (answer.error["sequence"], answer.error["position"]) == (2, position)
    worker.run(RELU, 1, 6)
    assert worker.fetch(6) == bytes(torch.tensor([0.0, 2.0]).numpy())


def test_it_begins_behind_the_command_that_runs_and_ends_at_its_mark(worker: Worker) -> None:
    handlers = worker.executor.state.ops.handlers
    own = handlers[RELU]
    assert own is not None

    def interrupted(slots: dict[int, Any], stream: list[Any], position: int) -> int:
        cancel(worker)  # as the other thread does
        return own(slots, stream, position)

    handlers[RELU] = interrupted
    mark = (commands.CALL, 9, "end_cancellation", [1])
    worker.run(RELU, 1, 4, ADD_, 1, 1, *mark, ADD_, 2, 2)
    assert worker.values[4].tolist() == [0, 2]
    assert worker.values[1].tolist() == [-1, 2]
    assert worker.executor.state.values.gates  # the mark on what was not changed
    assert worker.fetch(1) == CANCELLED
    assert worker.fetch(1) == bytes(torch.tensor([-1.0, 2.0]).numpy())  # it is told once
    assert not worker.executor.state.values.gates


def test_all_that_is_not_changed_is_told_of_once(worker: Worker) -> None:
    cancel(worker)
    worker.run(ADD_, 1, 1, ADD_, 2, 2)
    end(worker)
    assert worker.fetch(2) == CANCELLED
    assert worker.fetch(1) != CANCELLED


def test_marks_do_not_keep_memory_that_nobody_holds(worker: Worker) -> None:
    cancel(worker)
    worker.run(ADD_, 1, 1, commands.RELEASE, [1])
    end(worker)
    assert not worker.executor.state.values.gates


def test_what_both_sides_rely_on_is_run(worker: Worker) -> None:
    definition = ["aten::neg", ["t"], {}, ["n"]]
    number = len(worker.executor.state.ops.handlers)
    data = torch.tensor([3.0])
    cancel(worker)
    worker.run(
        *(commands.DEFINE, number, definition),
        *(commands.UPLOAD, 4, fields(data), CPU),
        *(commands.RELEASE, [3]),
        *(T_, 2),
        *(RESIZE_, 1, [1]),
        *(commands.DO, "manual_seed", [CPU, 5]),
        *(number, 4, 5),
        buffers=(bytes(data.numpy()),),
    )
    end(worker)
    assert 3 not in worker.values
    assert worker.values[2].shape == (2, 3)
    assert worker.values[1].shape == (1,)
    assert worker.fetch(5) == CANCELLED
    worker.run(number, 4, 5)
    assert worker.fetch(5) == bytes((-data).numpy())


def test_questions_are_refused_and_others_answered(worker: Worker) -> None:
    cancel(worker)
    for command in (
        (commands.FETCH, 7, 1, 0),
        (commands.DESCRIBE, 7, [1], []),
        (commands.CALL, 7, "item", [3]),
        (commands.CALL, 7, "synchronize", []),
    ):
        answer = worker.ask(*command)
        assert isinstance(answer, Failure)
        assert (answer.request, answer.error["type"]) == (7, CANCELLED)
    assert isinstance(worker.ask(commands.CALL, 7, "stats", []), Reply)
    end(worker)
    assert isinstance(worker.ask(commands.CALL, 7, "synchronize", []), Reply)


def test_a_failure_from_before_stays_the_cause(worker: Worker) -> None:
    worker.run(ADD_, 1, 2, RELU, 99, 4)
    cancel(worker)
    worker.run(RELU, 4, 5)
    end(worker)
    assert worker.fetch(5) == "ProtocolError"


def test_a_message_that_comes_after_its_end_means_nothing(worker: Worker) -> None:
    assert end(worker) == {"dropped": 0, "places": []}
    cancel(worker)
    assert not worker.executor.state.values.gates
    worker.run(RELU, 1, 4)
    assert worker.values[4].tolist() == [0, 2]


def test_the_later_of_two_counts(worker: Worker) -> None:
    cancel(worker, 2)
    worker.run(RELU, 1, 4)
    assert end(worker, 1)["dropped"] == 1
    worker.run(RELU, 1, 4)
    assert end(worker, 2)["dropped"] == 1
    worker.run(RELU, 1, 4)
    assert worker.values[4].tolist() == [0, 2]


def test_what_may_have_been_resized_is_not_used(worker: Worker) -> None:
    number = len(worker.executor.state.ops.handlers)
    worker.run(commands.DEFINE, number, ["aten::add.out", ["t", "t"], {"out": "t"}, ["x"]])
    worker.values[4] = torch.empty(0)
    cancel(worker)
    worker.run(number, 1, 1, 4)
    end(worker)
    assert worker.fetch(4) == CANCELLED
    assert worker.fetch(4) == CANCELLED


def test_a_control_that_meets_poison_does_not_leave_an_old_value(worker: Worker) -> None:
    """Slots are given out again without a release: what fills one must fill it whatever happens."""
    worker.run(RELU, 99, 4, commands.DO, "copy_to_device", [1, 4, CPU])
    assert worker.fetch(1) == "ProtocolError"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(COMMANDS), max_size=25), st.integers(0, 40))
def test_a_dropped_stream_is_walked_like_any_other(written: list[list[Any]], cut: int) -> None:
    """Whole streams end as they should; those that were cut anywhere are refused, and nothing else."""
    worker = Worker()
    worker.values.update({1: torch.ones(2), 2: torch.zeros(3, 2), 3: torch.tensor([9])})
    stream = [item for command in written for item in command]
    cancel(worker)
    worker.run(*stream)
    assert worker.executor.state.values.gates
    try:
        worker.run(*stream[: len(stream) - cut])
    except ProtocolError:
        assert cut
    assert end(worker)["dropped"] >= 0
