"""The process of one function: whatever goes wrong in it before, after or beside the function is told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from skyproxy.errors import SessionLostError
from skyproxy_server.control_channel import ControlChannel
from skyproxy_server.functions import nursery as nursery_module
from skyproxy_server.functions.events import OutgoingEvent
from skyproxy_server.functions.isolated_process import IsolatedFunction, wait_for_gpus
from skyproxy_server.functions.nursery import Nursery
from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("processes of functions need Linux", allow_module_level=True)

SESSION = "s" * 32


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery(1)
    yield made
    made.session_ended(SESSION)


def test_what_is_raised_before_the_function_begins_is_printed_where_its_caller_reads(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery_module, "_END_SECONDS", 60.0)  # on a busy machine, it would be killed before it prints
    process = nursery.take(SESSION)
    try:
        process.channel.send({"head": 1, "files": 0})  # and no file
        ending = process.ending()
        said = os.read(process.err, 1 << 16).decode()
    finally:
        nursery.give_back(process)
    assert ending.description == "exited with status 1"
    assert "Traceback" in said
    assert "IndexError" in said


def test_an_event_that_cannot_be_told_says_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(event: OutgoingEvent) -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    ours, theirs = ControlChannel.pair()
    start = {"lent": ([], []), "identity": "i" * 32, "session": SESSION, "devices": []}
    function = IsolatedFunction(ours, start, [])
    monkeypatch.setattr(function, "_send_values", fail)
    with theirs, pytest.raises(SessionLostError):
        function.send_event("i", OutgoingEvent(1, "result", {}, None, []))
    ours.close()
    assert "RuntimeError: CUDA error: invalid resource handle" in capfd.readouterr().err
    assert not torch.cuda.is_initialized()


def test_all_gpus_that_the_function_has_used_are_waited_for_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index != 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    wait_for_gpus()
    assert waited == [0, 2]
