"""Tensors that the collector finalizes together with what still uses them keep their values."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyproxy.tensor.core.late_release import LateRelease


@pytest.fixture(autouse=True)
def _without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class _Circle:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self, *held: Any) -> None:
        self.held, self.me = held, self


class _Keeper(_Circle):
    """Gives what it holds to a list when it dies."""

    def __init__(self, saved: list[torch.Tensor], *held: Any) -> None:
        super().__init__(*held)
        self._saved = saved

    def __del__(self) -> None:
        self._saved.extend(self.held)


def _others(sky: str) -> list[torch.Tensor]:
    """Tensors that take all slots which were given back."""
    return [torch.full((4,), 100.0 + number, device=sky) for number in range(8)]


@pytest.mark.parametrize("size", [4, 1 << 18], ids=["small", "large"])
def test_a_tensor_that_a_destructor_saves_from_a_circle_keeps_its_values(size: int, sky: str) -> None:
    saved: list[torch.Tensor] = []
    _Keeper(saved, torch.full((size,), 7.0, device=sky))
    gc.collect()
    others = _others(sky)
    (x,) = saved
    assert (x + 1).unique().tolist() == [8.0]
    assert [int(other[0]) for other in others] == list(range(100, 108))


def test_a_tensor_is_saved_from_a_second_circle_too(sky: str) -> None:
    saved: list[torch.Tensor] = []
    _Keeper(saved, torch.full((4,), 7.0, device=sky))
    gc.collect()
    _Keeper(saved, saved.pop())
    gc.collect()
    others = _others(sky)
    assert saved[0].tolist() == [7.0] * 4
    assert len(others) == 8


def test_a_view_that_a_destructor_saves_keeps_the_memory_of_its_base(sky: str) -> None:
    saved: list[torch.Tensor] = []
    _Keeper(saved, torch.arange(4.0, device=sky)[1:])
    gc.collect()
    others = _others(sky)
    assert saved[0].mul_(2).tolist() == [2.0, 4.0, 6.0]
    assert len(others) == 8


def test_the_finally_of_a_generator_in_a_circle_computes_with_its_tensors(sky: str) -> None:
    found: list[float] = []

    def stream(x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            yield x
        finally:
            others = _others(sky)
            found.append((x * 2).sum().item())
            others.clear()

    batches = stream(torch.full((4,), 3.0, device=sky))
    next(batches)
    _Circle(batches)
    del batches
    gc.collect()
    assert found == [24.0]


def test_a_tensor_of_a_circle_that_nobody_saves_gives_its_slot_back(sky: str) -> None:
    recorder = torch.zeros(1, device=sky)._sky.device.recorder  # type: ignore[attr-defined]
    gc.collect()
    before = sum(recorder.held)
    for _ in range(5):
        _Circle(torch.ones(4, device=sky), torch.ones(1 << 18, device=sky))
    assert sum(recorder.held) == before + 10
    gc.collect()
    assert sum(recorder.held) == before


def test_a_tensor_that_was_saved_gives_its_slot_back_with_its_last_reference(sky: str) -> None:
    recorder = torch.zeros(1, device=sky)._sky.device.recorder  # type: ignore[attr-defined]
    before = sum(recorder.held)
    saved: list[torch.Tensor] = []
    _Keeper(saved, torch.ones(4, device=sky))
    gc.collect()
    assert sum(recorder.held) == before + 1
    saved.clear()
    assert sum(recorder.held) == before


def test_a_tensor_of_a_capture_that_a_destructor_saves_is_filled_by_replays(sky: str) -> None:
    saved: list[torch.Tensor] = []
    x = torch.ones(4, device=sky)
    x + 1
    graph = torch.sky.SkyGraph()  # type: ignore[attr-defined]
    with torch.sky.graph(graph):  # type: ignore[attr-defined]
        _Keeper(saved, x + 1)
        gc.collect()
        kept = [x * number for number in range(4)]
    graph.replay()
    assert saved[0].tolist() == [2.0] * 4
    assert kept[3].tolist() == [3.0] * 4


def test_what_is_given_back_late_is_given_back_once_and_out_of_the_collectors_sight() -> None:
    given: list[int] = []
    late = LateRelease(given.append, 3)
    assert not gc.is_tracked(late)
    circle = _Circle(late)
    del late
    gc.collect(0)
    del circle
    assert given == []
    gc.collect()
    assert given == [3]
