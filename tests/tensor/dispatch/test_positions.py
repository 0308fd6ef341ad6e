"""Positions that are out of bounds are refused at the line of the operation, where their values are known here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import skyproxy

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""An operation on a (5, 5) tensor and positions."""


def fill(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x[:, index] = 1.0
    return x


CALLS: dict[str, Call] = {
    "index": lambda x, index: x[index],
    "index of the second dimension": lambda x, index: x[:, index],
    "index behind a mask": lambda x, index: x[torch.eye(3, 5, device=x.device).sum(0) > 0, index],
    "indices": lambda x, index: x[index.clamp(0, 4), index],
    "embedding": lambda x, index: F.embedding(index, x),
    "embedding_bag": lambda x, index: F.embedding_bag(index.unsqueeze(0), x),
    "gather": lambda x, index: x.gather(1, index.expand(5, -1)),
    "index_select": lambda x, index: x.index_select(-1, index),
    "take": lambda x, index: x.take(index),
    "put": lambda x, index: x.put(index, torch.ones(len(index), device=x.device)),
    "scatter": lambda x, index: x.scatter(1, index.unsqueeze(0), 1.0),
    "scatter_": lambda x, index: x.scatter_(1, index.unsqueeze(0), 1.0),
    "scatter_add": lambda x, index: x.scatter_add(1, index.unsqueeze(0), torch.ones(1, len(index), device=x.device)),
    "scatter_reduce": lambda x, index: x.scatter_reduce(0, index.unsqueeze(1), x[: len(index)].clone(), "sum"),
    "index_add": lambda x, index: x.index_add(0, index, torch.ones(len(index), 5, device=x.device)),
    "index_copy": lambda x, index: x.index_copy(0, index, torch.ones(len(index), 5, device=x.device)),
    "index_fill": lambda x, index: x.index_fill(0, index, 1.0),
    "index_put": lambda x, index: x.index_put((index,), torch.ones((), device=x.device)),
    "setitem": fill,
    "cross_entropy": lambda x, index: F.cross_entropy(x[: len(index)], index),
    "cross_entropy of pixels": lambda x, index: F.cross_entropy(x[None, :, :1, None], index[None, :1, None]),
    "one_hot": lambda x, index: F.one_hot(index, 5),
}
BEYOND = {"take": [0, -26, 1], "put": [0, 25, 1], "cross_entropy of pixels": [5, 0]}


def words(call: Callable[[], object]) -> str:
    with pytest.raises((IndexError, RuntimeError)) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_position_that_is_out_of_bounds_is_refused_at_its_line(name: str, sky1: str) -> None:
    call, x = CALLS[name], torch.randn(5, 5)
    good, beyond = torch.tensor([0, 4, 1]), torch.tensor(BEYOND.get(name, [0, 4, 5]))
    assert torch.equal(call(x.to(sky1), good.to(sky1)).cpu(), call(x.clone(), good))
    there, where = x.to(sky1), beyond.to(sky1)
    text = words(lambda: call(x.clone(), beyond))
    for _ in range(2):  # the second time, its shape is known
        assert text.split(".")[0].split("(")[0] in words(lambda: call(there, where))


@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_is_not_asked_for_an_assertion_would_end_it(
    name: str, sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, x = CALLS[name], torch.randn(5, 5).to(sky1)
    good, beyond = torch.tensor([0, 4, 1]), torch.tensor(BEYOND.get(name, [0, 4, 5]))
    there, where, negative = good.to(sky1), beyond.to(sky1), torch.tensor([0, 4, -30]).to(sky1)
    call(x, there)
    value = beyond[(beyond < -25) | (beyond > 4)][0].item()
    batches = x._sky.device.session.recorder.batches
    monkeypatch.setattr(x._sky.device, "place", ["cuda", 0])
    tried = [(where, value)]
    if name != "cross_entropy of pixels":  # which takes the first
        tried.append((negative, -30))
    for position, shown in tried if name != "indices" else ():  # which computes with them
        with pytest.raises(IndexError, match=f"^{shown} is out of bounds: aten::") as raised:
            call(x, position)
        assert isinstance(raised.value, skyproxy.errors.RemoteError)
    monkeypatch.undo()
    assert x._sky.device.session.recorder.batches <= batches + 2, "nothing but what comes before it"
    assert x.sum().isfinite().item()


def test_what_is_in_bounds_waits_for_nothing(sky1: str) -> None:
    x = torch.randn(5, 5).to(sky1)
    labels = torch.tensor([0, -100, 4, 9]).to(sky1)
    negative = torch.tensor([-5, 4]).to(sky1)
    large = torch.arange(1500).remainder(5).to(sky1)

    def run() -> None:
        F.cross_entropy(x[:3], labels[:3])
        x[negative], x.index_fill(0, negative, 1.0), x[large], x[:, large]

    run()
    torch.sky.synchronize()
    before = torch.sky.stats()["round_trips"]
    run()
    assert torch.sky.stats()["round_trips"] == before


def test_positions_that_were_changed_are_looked_at_anew(sky1: str) -> None:
    x, index = torch.randn(5, 5).to(sky1), torch.tensor([0, 7]).to(sky1)
    words(lambda: x[index])
    index.clamp_(max=4)
    assert x[index].shape == (2, 5)
    index.copy_(torch.tensor([1, 8]))
    words(lambda: x[index].cpu())


def test_a_captured_operation_is_recorded_whatever_its_positions_are_now(sky1: str) -> None:
    values = torch.randn(5, 5)
    x, index = values.to(sky1), torch.tensor([0, 7]).to(sky1)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        rows = x[index]
    index.copy_(torch.tensor([1, 2]))
    graph.replay()
    assert torch.equal(rows.cpu(), values[1:3])
