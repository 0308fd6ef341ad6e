"""Streams and events belong to the device that was asked for; each thread has a current device of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def first_device(sky: str) -> Iterator[None]:
    yield
    torch.sky.set_stream(torch.sky.default_stream(1))
    torch.sky.set_device(sky)


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function gives in a thread that is new."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


MAKERS: dict[str, Callable[[], torch.Stream]] = {
    "torch.Stream(device)": lambda: torch.Stream(device="sky:1"),
    "torch.Stream(torch.device)": lambda: torch.Stream(torch.device("sky:1")),
    "torch.Stream(number)": lambda: torch.Stream(1),
    "torch.Stream of parts": lambda: torch.Stream(stream_id=7, device_index=1, device_type=20),
    "torch.sky.Stream": lambda: torch.sky.Stream("sky:1"),
    "torch.sky.Stream of parts": lambda: torch.sky.Stream(stream_id=7, device_index=1, device_type=20),
    "torch.sky.current_stream": lambda: torch.sky.current_stream("sky:1"),
    "torch.accelerator.current_stream": lambda: torch.accelerator.current_stream(1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_stream_is_on_the_device_that_was_asked_for(name: str, sky1: str) -> None:
    stream = MAKERS[name]()
    assert isinstance(stream, torch.Stream)
    assert (stream.device, stream.device_index) == (torch.device(sky1), 1)
    stream.synchronize()
    assert stream.query()


def test_streams_without_a_device_are_on_the_current_one(sky1: str) -> None:
    with torch.sky.device(1):
        assert torch.Stream().device == torch.Event().device == torch.device(sky1)


def test_every_new_stream_and_event_has_a_number_of_its_own(sky: str) -> None:
    streams = [torch.Stream(device=sky), torch.sky.Stream(), torch.Stream(0)]
    assert len({stream.stream_id for stream in streams}) == len(set(streams)) == 3
    assert torch.sky.current_stream() == torch.sky.default_stream()
    assert torch.sky.default_stream() not in streams
    assert len({torch.Event(device=sky).event_id, torch.sky.Event().event_id, torch.Event(device=sky).event_id}) == 3


@pytest.mark.parametrize(
    "make", [lambda **kw: torch.Event(**kw), lambda **kw: torch.sky.Event(**kw)], ids=["torch", "torch.sky"]
)
def test_events_measure_the_time_between_them(make: Any, sky1: str) -> None:
    first, last = make(device=sky1, enable_timing=True), make(device=sky1, enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        first.elapsed_time(last)
    first.record()
    x = torch.ones(64, 64, device=sky1)
    _ = x @ x
    last.record(torch.sky.current_stream(sky1))
    last.synchronize()
    assert last.query()
    assert first.elapsed_time(last) > 0
    assert first.device == last.device == torch.device(sky1)
    assert isinstance(first, torch.Event)


def test_streams_of_other_devices_are_made_by_pytorch() -> None:
    with pytest.raises(
        RuntimeError, match=r"cuda|create a new Stream"
    ):  # a build for CUDA without a GPU says the latter
        torch.Stream(device="cuda")

    assert isinstance(torch.Stream(device="sky"), torch.Stream)
    assert not isinstance(1, torch.Stream)


@pytest.mark.parametrize("name", ["Stream", "Event"])
@pytest.mark.parametrize("given", [{"device": "sky:1"}, {"device": 1}, {}])
def test_a_class_derived_from_pytorchs_own_is_not_of_sky(given: dict[str, Any], name: str, sky1: str) -> None:
    kind = getattr(torch, name)
    own = type("Own", (kind,), {})
    assert issubclass(own, kind)
    assert own(device="cpu").device.type == "cpu"
    with pytest.raises(TypeError, match=f"Own derives from torch.{name} and cannot be of sky. Use torch.sky.{name}"):
        own(**given)
    derived = type("Own", (getattr(torch.sky, name),), {})(device="sky:1")
    assert isinstance(derived, kind)
    assert derived.device == torch.device(sky1)


@pytest.mark.parametrize("given", [{"prioriti": 1}, {"device_type": 1, "device_index": 0, "stream_id": 0}])
def test_a_stream_takes_no_arguments_that_mean_nothing_to_it(given: dict[str, Any], sky: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"prioriti|have the device type 20, not 1"):
        torch.sky.Stream(**given)


def test_a_chosen_stream_is_the_current_one_of_its_block_and_thread(sky: str, sky1: str) -> None:
    stream = torch.sky.Stream(sky1)
    for block in (stream, torch.sky.stream(stream)):
        with block:
            assert torch.sky.current_device() == 1
            assert torch.sky.current_stream() == torch.accelerator.current_stream(1) == stream
            assert in_thread(lambda: torch.sky.current_stream(1)) == torch.sky.default_stream(1)
        assert torch.sky.current_device() == 0
        assert torch.sky.current_stream(1) == torch.sky.default_stream(1)
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream


def test_each_thread_leaves_a_shared_stream_for_what_was_current_there(sky1: str) -> None:
    shared = torch.sky.Stream("sky:0")
    entered, left = threading.Event(), threading.Event()

    def enter_later() -> int:
        torch.sky.set_device(1)
        entered.wait(60)
        with shared:
            left.set()
        return torch.sky.current_device()

    def enter_first() -> int:
        with shared:
            entered.set()
            left.wait(60)
        return torch.sky.current_device()

    with ThreadPoolExecutor(2) as threads:
        first, later = threads.submit(enter_first), threads.submit(enter_later)
        assert (first.result(60), later.result(60)) == (0, 1)


def test_blocks_of_streams_that_generators_hold_end_in_any_order(sky1: str) -> None:
    def hold(stream: torch.Stream) -> Iterator[None]:
        with stream:
            yield

    streams = [torch.sky.Stream("sky:0"), torch.sky.Stream(sky1)]
    first, last = (hold(stream) for stream in streams)
    next(first)
    next(last)
    del first  # which leaves the block of the stream that was entered before
    assert torch.sky.current_stream(0) == torch.sky.default_stream(0)
    assert torch.sky.current_stream(1) == streams[1]
    del last
    assert torch.sky.current_stream(1) == torch.sky.default_stream(1)


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.sky.set_device(1),
        lambda: torch.accelerator.set_device_index(1),
        lambda: torch.sky.device(1).__enter__(),
        lambda: torch.sky.set_stream(torch.Stream(device="sky:1")),
    ],
)
def test_the_current_device_is_one_of_each_thread(choose: Callable[[], object], sky: str, sky1: str) -> None:
    choose()
    assert torch.ones(1, device="sky").device == torch.device(sky1)
    assert in_thread(torch.sky.current_device) == 0
    assert in_thread(torch.accelerator.current_device_index) == 0
    assert in_thread(lambda: torch.ones(1, device="sky").device) == torch.device(sky)

    def choose_another() -> int:
        torch.sky.set_device(0)
        return torch.sky.current_device()

    assert in_thread(choose_another) == 0
    assert torch.sky.current_device() == 1


def test_backward_leaves_the_current_device_of_its_thread(sky1: str) -> None:
    seen = []
    x = torch.ones(2, device=sky1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch.sky.current_device()))
    with torch.sky.device(1):
        y.sum().backward()
    assert seen == [1]
    assert x.grad is not None
    assert x.grad.device == torch.device(sky1)


def test_threads_of_a_data_loader_begin_with_the_first_device(sky: str, sky1: str) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    with torch.sky.device(1):
        batches = [batch.to(sky1) for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)]
        assert torch.sky.current_device() == 1
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]


def test_an_event_is_made_with_the_arguments_that_cuda_takes(sky: str) -> None:
    for event in (torch.sky.Event(True, False, False, True), torch.sky.Event(enable_timing=True, external=True)):
        event.record()
        assert event.elapsed_time(event) == 0
