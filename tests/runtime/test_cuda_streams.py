"""Threads that compute what another began, with a runtime that plays two GPUs: each thread has its own streams."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

from skyproxy.runtime.actor_loops import ActorLoop
from skyproxy.runtime.cuda_streams import carry_streams
from skyproxy_server.functions import output


class Stream:
    def __init__(self, device: int) -> None:
        self.device = device


class Runtime(threading.local):
    """The state of a thread, as CUDA and PyTorch have it: a device, and a stream for each."""

    def __init__(self) -> None:
        self.device = 0
        self.has_context = False
        self.streams = [DEFAULT[0], DEFAULT[1]]

    def set_device(self, index: int) -> None:
        self.device, self.has_context = index, True

    def set_stream(self, stream: Stream) -> None:
        self.streams[stream.device] = stream
        self.device = stream.device


DEFAULT = [Stream(0), Stream(1)]
OWN = [Stream(0), Stream(1)]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    played = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: played.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: played.streams[index])
    monkeypatch.setattr(torch.cuda, "set_stream", played.set_stream)
    monkeypatch.setattr(torch.cuda, "set_device", played.set_device)
    for stream in OWN:
        played.set_stream(stream)
    played.set_device(0)
    return played


def look(runtime: Runtime) -> tuple[list[Stream], int, bool]:
    return list(runtime.streams), runtime.device, runtime.has_context


def test_a_thread_takes_the_streams_and_the_device_of_another(runtime: Runtime) -> None:
    seen = []

    def work(use_streams: Callable[[], None]) -> None:
        seen.append(look(runtime))
        use_streams()
        seen.append(look(runtime))

    thread = threading.Thread(target=work, args=(carry_streams(),))
    thread.start()
    thread.join()
    assert seen == [(DEFAULT, 0, False), (OWN, 0, True)]


class Sink:
    def write(self, stream: str, text: str) -> None: ...

    def flush(self, stream: str) -> None: ...

    def has_begun_line(self, stream: str) -> bool:
        return False


@pytest.mark.parametrize(("is_functions", "streams"), [(True, OWN), (False, DEFAULT)])
def test_a_thread_that_a_function_starts_computes_on_its_streams(
    runtime: Runtime, is_functions: bool, streams: list[Stream]
) -> None:
    seen: list[list[Stream]] = []
    start = output._wrap_thread_start(threading.Thread.start)
    thread = threading.Thread(target=lambda: seen.append(list(runtime.streams)))
    with output.printing_to(Sink()) if is_functions else contextlib.nullcontext():
        start(thread)
    thread.join()
    assert seen == [streams]


def test_async_methods_of_an_actor_compute_on_the_streams_of_their_session(runtime: Runtime) -> None:
    loop = ActorLoop()

    async def method() -> tuple[list[Stream], int, bool]:
        return look(runtime)

    try:
        assert asyncio.run(loop.run(method())) == (OWN, 0, True)
    finally:
        loop.stop()


def test_a_process_that_uses_no_gpu_is_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "current_device")
    carry_streams()()
