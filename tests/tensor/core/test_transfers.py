"""Copies within a device, between devices, and of numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import skyproxy

NUMBERS = [1.5, 7, True, -2.7, float("inf"), 1 + 2j, 1 << 40]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_number_is_copied_into_a_tensor(sky1: str, dtype: torch.dtype) -> None:
    for number in NUMBERS:
        if number == float("inf") and not (dtype.is_floating_point or dtype.is_complex):
            continue  # undefined in C++
        local, remote = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype, device=sky1)
        assert remote.copy_(number) is remote  # type: ignore[arg-type]
        remote[1].copy_(number)  # type: ignore[arg-type]
        assert torch.equal(remote.cpu(), local.copy_(number))  # type: ignore[arg-type]


def test_a_copied_number_takes_part_in_autograd_and_costs_no_wait(sky1: str) -> None:
    x = torch.ones(3, device=sky1, requires_grad=True)
    y = x * 2
    y[0].copy_(4.0)  # type: ignore[arg-type]
    before = torch.sky.stats()["round_trips"]
    torch.zeros(3, device=sky1).copy_(1.0)  # type: ignore[arg-type]
    assert torch.sky.stats()["round_trips"] == before
    (y * y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 8.0, 8.0]


def test_what_is_no_number_is_refused(sky1: str) -> None:
    source: Any = "a"
    with pytest.raises(TypeError, match="must be Tensor"):
        torch.zeros(2, device=sky1).copy_(source)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_a_gradient_scaler_skips_a_step_with_infinities(sky1: str) -> None:
    def train(device: str) -> Any:
        x = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer, scaler = torch.optim.SGD([x], lr=0.1), torch.amp.GradScaler(device[:3], init_scale=8.0)
        seen = []
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((x * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((x.tolist(), scaler.get_scale()))
        scaler.update(4.0)
        scaler.update(torch.tensor(2.0, device=device))
        return seen, scaler.get_scale()

    assert train(sky1) == train("cpu")


@pytest.mark.parametrize("count", [1, 1 << 18])
def test_a_tensor_of_more_than_64_dimensions_keeps_its_session(sky1: str, count: int) -> None:
    kept, x = torch.ones(2, device=sky1), torch.rand(*[1] * 69, count)
    there = x.to(sky1)
    assert torch.equal(there.cpu(), x)
    assert torch.equal(torch.empty_like(there).copy_(x).cpu(), x)
    assert there.shape == x.shape
    assert kept.sum().item() == 2


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "copied": lambda x, values, places: x.copy_(values),
    "set item": lambda x, values, places: x.__setitem__(slice(1, 3), values[1:]),
    "set by places": lambda x, values, places: x.__setitem__(places, 9.0),
    "chosen": lambda x, values, places: x.copy_(x[places].sum()),
    "data": lambda x, values, places: x.data.copy_(values),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_values_of_a_class_with_its_own_dispatch_are_those_of_its_parts(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], sky1: str
) -> None:
    """A wrapper has no memory at its address: reading that ended the process."""
    found = []
    for place in ("cpu", sky1):
        values, places = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0, 2])
        x = torch.arange(3.0).to(place)
        write(x, TwoTensor(values, values), TwoTensor(places, places))
        found.append(x.tolist())
    assert found[0] == found[1]


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda c: c[:, ::2].t().conj(),
    "negative": lambda c: c.conj().imag.t(),
    "both": lambda c: torch._neg_view(c.conj())[:, ::2].t(),
    "rows": lambda c: c.conj()[::2, 1:],
    "expanded": lambda c: c[:1].expand(3, 6).conj().t(),
    "dense": lambda c: c.t().conj(),
}


async def _fetched(x: torch.Tensor) -> torch.Tensor:
    return await skyproxy.fetch_async(x)


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cpu": lambda x: x.cpu(),
    "copy_": lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x),
    "fetch_async": lambda x: asyncio.run(_fetched(x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lazy_bits_come_back_from_views_with_gaps_in_the_right_order(
    mode: Callable[[], AbstractContextManager[None]], kind: str, way: str, sky1: str
) -> None:
    with mode():
        c = torch.complex(torch.arange(24.0).view(4, 6), torch.arange(1.0, 25.0).view(4, 6))
        theirs, ours = LAZY[kind](c), WAYS[way](LAZY[kind](c.to(sky1)))
        assert torch.equal(ours.resolve_conj().resolve_neg(), theirs.resolve_conj().resolve_neg())


@pytest.mark.parametrize("number", [0.5, 3, True, 1j])
@pytest.mark.parametrize("dtype", [None, torch.complex64])
def test_a_number_that_stands_for_a_tensor_is_moved(number: complex, dtype: torch.dtype | None, sky1: str) -> None:
    """C++ hands the tensor that it has made of a number over as the number, as TorchScript does with a constant."""
    ours, theirs = (torch.ops.aten._to_copy(number, dtype=dtype, device=torch.device(d)) for d in (sky1, "cpu"))
    assert (ours.device, ours.dtype) == (torch.device(sky1), theirs.dtype)
    assert torch.equal(ours.cpu(), theirs)
