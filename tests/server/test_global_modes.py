"""Sessions with different modes take turns; those with the same ones run side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Message, Sequence
from skyproxy.settings import SETTINGS
from skyproxy.torch_modes import USUAL, Record, put_in_force, values_in_force
from skyproxy_server import global_modes
from skyproxy_server.executor import Executor
from skyproxy_server.global_modes import SessionModes, note_function, wait_for_rest
from skyproxy_server.transfers import Transfers

DOUBLE: Record = (("default_dtype", "float64"),)
HALF: Record = (("default_dtype", "bfloat16"),)
FLUSHING: Record = (("flush_denormal", True),)


@pytest.fixture(autouse=True)
def values(_settable_flags: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """All modes of this process, which are the same after each test; no function of another test has run in it."""
    monkeypatch.setattr(global_modes._Process, "own", None)
    before = values_in_force()
    yield before
    after = values_in_force()
    put_in_force(before)
    assert after == before


def _modes(record: Record) -> SessionModes:
    modes = SessionModes()
    modes.switch(record)
    return modes


@pytest.mark.parametrize("record", [USUAL, DOUBLE], ids=["usual", "double"])
def test_batches_of_equal_modes_run_side_by_side(record: Record) -> None:
    both = threading.Barrier(2, timeout=10)

    def batch() -> None:
        with _modes(record):
            both.wait()

    threads = [threading.Thread(target=batch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not both.broken


def test_no_session_sees_the_modes_of_another() -> None:
    wrong: list[Any] = []

    def session(record: Record, other: Record, dtype: torch.dtype, other_dtype: torch.dtype) -> None:
        own = _modes(record)
        for _ in range(100):
            with own:
                for now, expected in ((record, dtype), (other, other_dtype), (record, dtype)):
                    own.switch(now)
                    wrong.extend(x.dtype for x in [torch.arange(3) / 2 for _ in range(3)] if x.dtype is not expected)

    threads = [
        threading.Thread(target=session, args=args)
        for args in (
            (USUAL, DOUBLE, torch.float32, torch.float64),
            (DOUBLE, DOUBLE, torch.float64, torch.float64),
            (USUAL, USUAL, torch.float32, torch.float32),
            (HALF, USUAL, torch.bfloat16, torch.float32),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def _flushed() -> float:
    """The share of denormal numbers that a parallel operation flushes to zero."""
    numbers = torch.full((torch.get_num_threads() << 16,), 1e-39)
    return float((numbers * 1.0 == 0).float().mean())


def test_only_batches_that_ask_for_it_flush_denormal_numbers() -> None:
    found: dict[str, list[float]] = {"flushing": [], "usual": []}

    def session(name: str, record: Record) -> None:
        own = _modes(record)
        for _ in range(20):
            with own:
                found[name].append(_flushed())
        own.switch(USUAL)
        with own:
            found["usual"].append(_flushed())

    threads = [
        threading.Thread(target=session, args=args)
        for args in (("flushing", FLUSHING), ("flushing", FLUSHING), ("usual", USUAL), ("usual", USUAL))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found["flushing"]) == {1.0}
    assert set(found["usual"]) == {0.0}


def test_a_switch_inside_a_batch_counts_from_there_on() -> None:
    own = SessionModes()
    with own:
        assert torch.get_default_dtype() is torch.float32
        own.switch(DOUBLE)
        assert torch.get_default_dtype() is torch.float64
        with own.use_for_block(HALF):
            assert torch.get_default_dtype() is torch.bfloat16
            own.switch(USUAL)
            assert torch.get_default_dtype() is torch.float32
        assert torch.get_default_dtype() is torch.float64
    assert torch.get_default_dtype() is torch.float32
    with own:
        assert torch.get_default_dtype() is torch.float64


def test_what_a_function_of_the_worker_had_set_is_back_after_a_batch() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with _modes((("float32_matmul_precision", "medium"), ("cudnn.enabled", False))):
            assert not torch.backends.cudnn.enabled
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.enabled
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    finally:
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_order_of_attention_that_the_hardware_has_is_back_after_each_batch_with_another() -> None:
    usual, by_hardware = torch._C._get_sdp_priority_order(), [3, 1, 2, 0, 4]
    own = _modes(HALF)
    try:
        with own:
            torch._C._set_sdp_priority_order(by_hardware)  # as the first attention of a process on Hopper does
            own.switch((("sdp.priority_order", (0, 1, 2, 3, 4)),))
            assert torch._C._get_sdp_priority_order() == [0, 1, 2, 3, 4]
            own.switch((("sdp.priority_order", (1, 2, 0, 3, 4)),))
            assert torch._C._get_sdp_priority_order() == [1, 2, 0, 3, 4]
            own.switch(DOUBLE)
            assert torch._C._get_sdp_priority_order() == by_hardware
        assert torch._C._get_sdp_priority_order() == by_hardware
    finally:
        torch._C._set_sdp_priority_order(usual)


def test_what_a_function_sets_during_a_batch_stays() -> None:
    own = _modes(HALF)
    with own:
        torch.set_default_dtype(torch.float64)  # as a function would, on a thread of its own
        torch.backends.cudnn.benchmark = True
        own.switch((("cudnn.enabled", False),))
        assert torch.get_default_dtype() is torch.float64
    try:
        assert torch.backends.cudnn.enabled
        assert torch.backends.cudnn.benchmark
        assert torch.get_default_dtype() is torch.float64
        with own:
            assert not torch.backends.cudnn.enabled
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.backends.cudnn.benchmark = False
        torch.set_default_dtype(torch.float32)


def _leave(dtype: torch.dtype) -> None:
    note_function(begins=True)
    torch.set_default_dtype(dtype)
    note_function(begins=False)


def test_what_a_function_has_left_is_there_for_the_next_function_and_for_no_batch() -> None:
    _leave(torch.float64)
    for modes, expected in ((_modes(USUAL), torch.float32), (_modes(HALF), torch.bfloat16)):
        with modes:
            assert torch.get_default_dtype() is expected
            modes.switch(FLUSHING)
            assert torch.get_default_dtype() is torch.float32
        assert torch.get_default_dtype() is torch.float64
    _leave(torch.float32)
    with _modes(USUAL):
        assert torch.get_default_dtype() is torch.float32
    assert global_modes._Process.at_rest == USUAL


def test_what_a_function_has_left_during_a_batch_is_found_by_no_later_one() -> None:
    with _modes(HALF):
        _leave(torch.float64)
    assert torch.get_default_dtype() is torch.float64
    with _modes(USUAL):
        assert torch.get_default_dtype() is torch.float32
    _leave(torch.float32)
    with _modes(USUAL):
        assert torch.get_default_dtype() is torch.float32
    assert global_modes._Process.at_rest == USUAL


def test_a_function_that_begins_during_a_batch_waits_until_the_modes_of_the_batch_are_put_back() -> None:
    found: list[torch.dtype] = []

    def function() -> None:
        wait_for_rest()
        found.append(torch.get_default_dtype())

    thread = threading.Thread(target=function)
    with _modes(DOUBLE):
        thread.start()
        while not global_modes._Process.is_changing:
            thread.join(0.001)
        assert thread.is_alive()
    thread.join(10)
    assert found == [torch.float32]


def test_a_function_does_not_wait_for_a_batch_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_modes, "_LONGEST_BATCH_SECONDS", 0.01)
    with _modes(DOUBLE):
        wait_for_rest()
        assert torch.get_default_dtype() is torch.float64


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch accepts every library")
def test_a_mode_that_this_machine_refuses_names_itself_and_leaves_the_session_as_it_was() -> None:
    own = _modes(DOUBLE)
    with own:
        with pytest.raises(ConfigurationError, match=r"preferred_blas_library cannot be 'Cublaslt' on this worker"):
            own.switch((("cuda.preferred_blas_library", "Cublaslt"),))
        assert torch.get_default_dtype() is torch.float64


class Worker:
    """An executor of one device of the CPU, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        row = {"type": "cpu", "index": 0, "name": "CPU"}
        self.executor = Executor([row], self.sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS)

    def run(self, *stream: Any) -> None:
        with self.executor.state.modes:
            self.executor.run(Batch(Sequence(1), list(stream)))


def test_a_mode_that_this_torch_does_not_have_is_a_failure_that_names_it() -> None:
    worker = Worker()
    worker.run(commands.DO, "set_modes", [{"speed": True}])
    assert isinstance(worker.sent[0], Failure)
    assert "has no mode 'speed'" in worker.sent[0].error["message"]


@pytest.mark.parametrize(
    "fields",
    [[], {"default_dtype": "int64"}, {"mkldnn.enabled": 1}, {"sdp.flash": "yes"}, {"deterministic_algorithms": 2}],
)
def test_a_malformed_record_ends_the_session(fields: Any) -> None:
    with pytest.raises(ProtocolError):
        Worker().run(commands.DO, "set_modes", [fields])


def test_modes_of_cuda_leave_a_worker_without_it_as_it_is() -> None:
    worker = Worker()
    worker.run(commands.DO, "set_modes", [{"cudnn.benchmark": True, "default_dtype": "float64"}])
    assert worker.executor.state.modes.record == DOUBLE
