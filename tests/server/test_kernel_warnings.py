"""Warnings of kernels on the worker: who hears of them, and how often."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Warned
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server import kernel_warnings
from skyproxy_server.kernel_warnings import KernelWarning, collect
from tests.server.test_executor import Worker

VAR = torch.ops.aten.var.correction._op
DEFINE_VAR = ["aten::var.correction", ["t", "v"], {}, ["n"]]


@pytest.fixture(autouse=True)
def installed_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pytest gives each test filters of its own."""
    monkeypatch.setattr(kernel_warnings, "_installed", False)
    always = torch.is_warn_always_enabled()
    yield
    torch.set_warn_always(always)


@pytest.mark.filterwarnings("always")  # of this module; those of the worker's own are heard always
def test_what_a_kernel_warns_of_is_heard_each_time() -> None:
    for _ in range(2):
        found: list[KernelWarning] = []
        assert collect(lambda: VAR(torch.ones(1), [0]), found).isnan()
        assert [warning.category for warning in found] == ["UserWarning"]
        assert "degrees of freedom is <= 0" in found[0].message
    assert collect(lambda: 3, found) == 3


def test_an_error_passes_through_with_what_was_warned_of_before_it() -> None:
    found: list[KernelWarning] = []

    def fail() -> None:
        VAR(torch.ones(1), [0])
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        collect(fail, found)
    assert len(found) == 1


def test_warnings_of_another_thread_are_not_taken() -> None:
    found: list[KernelWarning] = []

    def run() -> None:
        thread = threading.Thread(target=lambda: VAR(torch.ones(1), [0]))
        thread.start()
        thread.join()

    collect(run, found)
    assert found == []


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made.values.update({1: torch.ones(1), 2: torch.ones(4)})
    return made


def test_the_client_is_told_where_the_command_stood(worker: Worker) -> None:
    number = len(worker.executor.state.ops.handlers)
    worker.run(commands.DEFINE, number, DEFINE_VAR, number, 1, [0], 5)
    (warned,) = [message for message in worker.sent if isinstance(message, Warned)]
    assert (warned.category, warned.place) == ("UserWarning", {"sequence": 2, "position": 3})
    assert worker.values[5].isnan()


def test_an_operation_without_warnings_is_listened_to_once(worker: Worker) -> None:
    number = len(worker.executor.state.ops.handlers)
    worker.run(commands.DEFINE, number, DEFINE_VAR, number, 2, [0], 5)
    assert worker.executor.state.ops.handlers[number] is worker.executor.state.ops.signatures[number].handler


def test_new_inputs_are_listened_to(worker: Worker) -> None:
    number = len(worker.executor.state.ops.handlers)
    look = encode_description(describe(torch.ones(())))
    read = encode_description(describe(torch.ones(1)))
    worker.run(commands.DEFINE, number, DEFINE_VAR, number, 2, [0], 5)
    worker.run(commands.EXPECT, [look, read], number, 1, [0], 5)
    (warned,) = [message for message in worker.sent if isinstance(message, Warned)]
    assert warned.place == {"sequence": 3, "position": 2}


def test_a_loop_that_warns_does_not_flood_its_client(worker: Worker) -> None:
    number = len(worker.executor.state.ops.handlers)
    worker.run(commands.DEFINE, number, DEFINE_VAR)
    for _ in range(200):
        worker.run(number, 1, [0], 5)
    assert sum(isinstance(message, Warned) for message in worker.sent) == 64
