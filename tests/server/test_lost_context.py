"""The loss of the CUDA context: which errors are one, who is told what, and that the process ends once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.errors import LimitExceededError, SessionLostError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import OPERATIONS, CancelTransfer, Failure, Hello, Message
from skyproxy.settings import SETTINGS
from skyproxy.transport.memory import memory_transport_pair
from skyproxy_server import lost_context
from skyproxy_server.activity import Activity
from skyproxy_server.controls import CONTROLS
from skyproxy_server.cuda_staging import Staging, own_streams
from skyproxy_server.failures import Failed
from skyproxy_server.lost_context import CONTEXT, FINAL_ERRORS, ContextLostError, CudaContext, break_off
from skyproxy_server.transfers import Transfers
from skyproxy_server.worker_host import WorkerHost
from skyproxy_server.worker_session import WorkerSession
from tests.server.test_executor import Worker

ASSERT = "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"


class Gpus:
    """Two GPUs, of which the program uses the second.

    Attributes:
        error: what it answers to whoever waits for it.
        asked: the GPUs that were waited for.
    """

    def __init__(self) -> None:
        self.error = ""
        self.asked: list[int] = []

    def synchronize(self, index: int) -> None:
        self.asked.append(index)
        if self.error:
            raise torch.AcceleratorError(self.error)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    made = Gpus()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: index)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    on_lost = CONTEXT.on_lost
    yield made
    CONTEXT.is_lost, CONTEXT.on_lost = False, on_lost


@pytest.mark.parametrize("words", FINAL_ERRORS.values())
def test_an_error_that_the_device_gives_again_is_the_loss_of_the_context(gpus: Gpus, words: str) -> None:
    gpus.error = f"CUDA error: {words}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    assert f"(CUDA error: {words}" in CONTEXT.explain(torch.AcceleratorError(gpus.error))
    assert gpus.asked == [1], "the other has no context, and would get one"


def test_what_a_library_calls_it_is_found_out_from_the_device(gpus: Gpus) -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
    assert CONTEXT.explain(error) == ""
    gpus.error = ASSERT
    assert "device-side assert triggered" in CONTEXT.explain(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ASSERT),  # the words of somebody's own exception
        torch.AcceleratorError("CUDA error: invalid device function"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
    ],
)
def test_a_device_that_works_has_lost_nothing(gpus: Gpus, error: Exception) -> None:
    assert CONTEXT.explain(error) == ""


def test_errors_of_other_things_ask_no_device(gpus: Gpus) -> None:
    gpus.error = ASSERT
    for error in (ValueError("sizes differ"), torch.OutOfMemoryError("CUDA out of memory"), KeyError()):
        assert CONTEXT.explain(error) == ""
    assert not gpus.asked


def test_a_process_that_never_used_cuda_has_no_context_to_lose(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.error = ASSERT
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert CONTEXT.explain(torch.AcceleratorError(ASSERT)) == ""
    assert not gpus.asked


def test_the_assertion_is_named_where_standard_error_is_a_file(
    gpus: Gpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpus.error = ASSERT
    saved = os.dup(2)
    try:
        with (tmp_path / "log").open("w+") as log:
            os.dup2(log.fileno(), 2)
            os.write(2, b"x.cu:9: block: [0,0,0], thread: [1,0,0] Assertion `t >= 0 && t < n_classes` failed.\n" * 40)
            assert "triggered; Assertion `t >= 0 && t < n_classes` failed)" in CONTEXT.explain(RuntimeError(ASSERT))
    finally:
        os.dup2(saved, 2)
        os.close(saved)


# --- operations and questions ----------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made.values.update({1: torch.tensor([-1.0, 2.0]), 2: torch.zeros(3, 2), 3: torch.tensor([9])})
    return made


def raise_assert(*arguments: Any) -> Any:
    raise torch.AcceleratorError(ASSERT)


def test_an_operation_that_loses_the_context_ends_the_session(gpus: Gpus, worker: Worker) -> None:
    gpus.error = ASSERT
    handlers = worker.executor.state.ops.handlers
    handlers[commands.FIRST_SIGNATURE] = raise_assert
    with pytest.raises(ContextLostError) as caught:
        worker.run(commands.FIRST_SIGNATURE, 1, 5)
    record = caught.value.failed.record
    assert (record["op"], record["type"], record["sequence"], record["position"]) == (
        "aten::relu",
        "AcceleratorError",
        2,
        0,
    )
    assert not [message for message in worker.sent if isinstance(message, Failure)]


def test_a_question_that_loses_it_does(gpus: Gpus, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.error = ASSERT
    monkeypatch.setattr(torch.Tensor, "cpu", raise_assert)
    with pytest.raises(ContextLostError) as caught:
        worker.run(commands.FETCH, 7, 1, 0)
    assert caught.value.failed.record["op"] == "fetch"


def test_an_upload_that_loses_it_does(gpus: Gpus, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.error = ASSERT
    monkeypatch.setattr("skyproxy_server.tensor_commands.TensorCommands._allocate", raise_assert)
    with pytest.raises(ContextLostError):
        worker.run(commands.RECEIVE, 8, ["float32", [2], [1], 0], ["cpu", None], 5)


def test_a_control_that_loses_it_does(gpus: Gpus, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.error = ASSERT
    monkeypatch.setitem(CONTROLS, "synchronize", raise_assert)
    for command in ([commands.CALL, 7, "synchronize", []], [commands.DO, "synchronize", []]):
        with pytest.raises(ContextLostError):
            worker.run(*command)


def test_a_download_that_loses_it_tells_whoever_ends_the_process() -> None:
    transfers, found, sent = Transfers(SETTINGS.chunk_bytes, Broken()), [], Sent()
    transfers.on_device_failure = found.append
    transfers.depart(3, torch.zeros(5))
    transfers._departures.put(None)
    transfers.send(sent)  # type: ignore[arg-type]
    assert [str(error) for error in found] == [ASSERT]
    assert isinstance(sent.messages[0], CancelTransfer)


class Broken(Staging):
    """A device that does not give its values."""

    def __init__(self) -> None:
        super().__init__(SETTINGS.chunk_bytes)

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        raise_assert()
        yield memoryview(b"")


class Sent:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def test_kernels_that_nobody_waits_for_are_waited_for_at_the_end_of_their_session(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    CONTEXT.on_lost = told.append
    for name, plain in {"current_device": 0, "Stream": 0, "set_device": None, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, plain=plain: plain)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with own_streams([{"type": "cuda", "index": 1}]):
        gpus.error = ASSERT
    assert len(told) == 1


def test_a_session_that_cannot_begin_says_so(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    client, link = memory_transport_pair()
    session = WorkerSession(link, [{"type": "cpu", "index": 0, "name": "CPU"}], SETTINGS, Activity())
    monkeypatch.setattr("skyproxy_server.worker_session.own_streams", raise_assert)
    session.run()
    with pytest.raises(SessionLostError, match="internal error on the worker"):
        client.recv(10)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_process_ends_once_however_many_threads_notice() -> None:
    context, ended, told = CudaContext(), threading.Event(), []
    others = [threading.Thread(target=context.lose, args=(f"again {number}",)) for number in range(3)]

    def end(words: str) -> None:
        told.append(words)
        for other in others:
            other.start()
        ended.wait(0)

    context.on_lost = end
    context.lose("first")
    for other in others:
        other.join()
    assert told == ["first"]


def test_an_error_of_a_function_ends_the_process_only_if_it_lost_the_context(gpus: Gpus) -> None:
    told: list[str] = []
    CONTEXT.on_lost = told.append
    CONTEXT.note(torch.AcceleratorError(ASSERT))
    assert not told
    gpus.error = ASSERT
    CONTEXT.note(torch.AcceleratorError(ASSERT))
    assert len(told) == 1


class Told:
    def __init__(self) -> None:
        self.reason = ""

    def break_off(self, reason: str) -> None:
        self.reason = reason


def test_every_session_is_told_and_whose_operation_it_was() -> None:
    own, other = Told(), Told()
    break_off([own], own, "it broke", 5)
    assert own.reason == "it broke"
    break_off([own, other], own, "it broke", 5)
    assert own.reason == "it broke. Another session shared that process, and may have caused this"
    shared = "of the same process found that it broke. Each that shared it may have caused this"
    assert other.reason == f"another session {shared}"
    break_off([own, other], None, "it broke", 5)
    assert own.reason == other.reason == f"a function {shared}"


def test_a_goodbye_has_room_for_the_reason(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_context, "_assertion", lambda: "Assertion `" + "x" * 150 + "` failed")
    gpus.error = "CUDA error: " + max(FINAL_ERRORS.values(), key=len)
    words, own, other = CONTEXT.explain(RuntimeError(gpus.error)), Told(), Told()
    break_off([own, other, *(Told() for _ in range(99))], own, words, 5)
    assert max(len(own.reason), len(other.reason)) <= 512


def test_the_error_has_the_command_and_the_words() -> None:
    failed = Failed(RuntimeError("x"), "aten::sum", 1, 2)
    error = ContextLostError(failed, "it broke")
    assert (error.failed, error.words, str(error)) == (failed, "it broke", "it broke")
    assert not isinstance(error, RuntimeError), "the worker drops commands with those"


def test_the_process_ends_also_where_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    host, ended = WorkerHost([{"type": "cpu", "index": 0, "name": "CPU"}]), []
    host.on_context_lost = lambda: ended.append(True)
    monkeypatch.setattr("skyproxy_server.worker_host.break_off", raise_assert)
    with pytest.raises(torch.AcceleratorError):
        host._break_off("it broke")
    assert ended == [True]


def test_a_thread_that_is_interrupted_does_not_keep_the_process() -> None:
    context, told = CudaContext(), []
    context.on_lost = lambda words: told.append(threading.current_thread())
    context.lose("it broke")
    assert told
    assert told != [threading.current_thread()]


def test_a_process_that_is_about_to_end_takes_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    host = WorkerHost([{"type": "cpu", "index": 0, "name": "CPU"}])
    monkeypatch.setattr(CONTEXT, "is_lost", True)
    with pytest.raises(LimitExceededError, match="its CUDA context is lost; try again"):
        host.open_session(Hello([0], OPERATIONS, "", {}), memory_transport_pair()[1])


def test_whichever_connection_is_read_first_says_the_same(gpus: Gpus) -> None:
    (operations, link), (bulk, bulk_link) = memory_transport_pair(), memory_transport_pair("bulk")
    session = WorkerSession(link, [{"type": "cpu", "index": 0, "name": "CPU"}], SETTINGS, Activity())
    assert session.take_bulk(bulk_link)
    CONTEXT.is_lost = True
    session.break_off("it broke")
    session.end()
    for client in (operations, bulk):
        with pytest.raises(SessionLostError):
            client.recv(10)
        goodbye = client.connection.goodbye
        assert goodbye is not None
        assert (goodbye.code_name, goodbye.reason) == ("crashed", "it broke")
