"""Values that are asked for without a wait."""

from __future__ import annotations

import asyncio

import pytest
import torch

import skyproxy


def test_a_value_is_that_of_the_moment_it_was_asked_for(sky1: str) -> None:
    x = torch.ones(3, device=sky1)
    (pending,) = skyproxy.prefetch(x)
    total = x.sum().item_async()
    x.add_(1)
    assert pending.result().tolist() == [1, 1, 1]
    assert total.result() == 3.0
    assert x.tolist() == [2, 2, 2]


def test_large_values_come_whole(sky: str) -> None:
    expected = torch.randn(300, 1000)
    remote = expected.to(sky)
    pending, transposed = skyproxy.prefetch(remote, remote.t())
    assert torch.equal(pending.result(), expected)
    assert torch.equal(transposed.result(), expected.t())
    assert pending.done()


def test_logging_every_step_waits_once(sky: str) -> None:
    w = torch.zeros((), device=sky)
    torch.sky.synchronize()
    before = torch.sky.stats()["round_trips"]
    logged = []
    for _ in range(50):
        w += 1
        logged.append(w.item_async())
    assert torch.sky.stats()["round_trips"] == before
    assert [value.result() for value in logged] == list(range(1, 51))
    assert f"{logged[2]:.1f}" == "3.0"
    assert float(logged[3]) == 4.0


def test_awaiting(sky: str) -> None:
    async def main() -> list[float]:
        values = [torch.full((), float(i), device=sky).item_async() for i in range(5)]
        return [await value for value in values]

    assert asyncio.run(main()) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_error_comes_with_the_result(sky: str) -> None:
    table = torch.zeros(3, 2, device=sky)
    bad = torch.nn.functional.embedding(torch.full((1,), 7, device=sky), table).sum().item_async()
    with pytest.raises(IndexError):
        bad.result()


def test_more_than_one_element_is_refused_here_and_now(sky: str) -> None:
    with pytest.raises(RuntimeError, match="2 elements"):
        torch.ones(2, device=sky).item_async()


def test_local_tensors_are_simply_there() -> None:
    x = torch.ones(2)
    (pending,) = skyproxy.prefetch(x)
    x.add_(1)
    assert pending.done()
    assert pending.result().tolist() == [1, 1]


def test_what_is_no_tensor_is_refused_before_anything_is_asked_for(sky: str) -> None:
    with pytest.raises(TypeError, match=r"prefetch\(\) takes tensors, not int"):
        skyproxy.prefetch(torch.ones(2, device=sky), 3)  # type: ignore[arg-type]
