"""Packed sequences are padded as on the CPU, to the last bit, and steps of other lengths wait for nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from skyproxy.tensor.dispatch import inference


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.stride() == theirs.stride()
    ours, theirs = ours.detach().cpu(), theirs.detach()
    assert ours.dtype is theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs) or (ours.isnan() == theirs.isnan()).all()
    if theirs.is_floating_point():
        assert torch.equal(ours.signbit(), theirs.signbit())


LENGTHS = {
    "other lengths": [5, 2, 4, 1],
    "the same twice": [3, 5, 3, 5],
    "one length": [5, 5, 5, 5],
    "one step": [1, 1, 1, 1],
    "one sequence": [5],
}
FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "batch first": {"batch_first": True},
    "a padding": {"padding_value": -2.5},
    "not a number": {"padding_value": float("nan"), "batch_first": True},
    "a total length": {"total_length": 9},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sequences_are_padded_as_on_the_cpu(lengths: str, form: str, sky: str) -> None:
    counts = torch.tensor(LENGTHS[lengths])
    values = torch.randn(5, len(counts), 3)
    # A gradient of zero without a sign has none on the CPU either, where it is added to zeros.
    weights = torch.where(torch.rand(9, len(counts), 3) < 0.3, -0.0, torch.randn(9, len(counts), 3))

    def run(place: str) -> list[torch.Tensor]:
        x = values.to(place).requires_grad_()
        packed = rnn.pack_padded_sequence(x * 1, counts, enforce_sorted=False)
        packed.data.retain_grad()
        padded, sizes = rnn.pad_packed_sequence(packed, **FORMS[form])
        by_time = padded.transpose(0, 1) if FORMS[form].get("batch_first") else padded
        by_time.backward(weights[: len(by_time)].to(place))
        assert packed.data.grad is not None
        assert x.grad is not None
        assert torch.equal(sizes, counts)
        return [packed.data, padded, packed.data.grad, x.grad, padded.sum().reshape(1)]

    for ours, theirs in zip(run(sky), run("cpu"), strict=True):
        _same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.complex64])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sequences_of_any_dtype_are_padded(mode: Any, dtype: torch.dtype, sky: str) -> None:
    parts = [torch.ones(n, 2, 2).to(dtype) for n in (3, 1, 2)]
    with mode():
        theirs = rnn.pad_packed_sequence(rnn.pack_sequence(parts, enforce_sorted=False))[0]
        ours = rnn.pad_packed_sequence(rnn.pack_sequence([p.to(sky) for p in parts], enforce_sorted=False))[0]
    assert torch.equal(ours.cpu(), theirs)


def test_a_total_that_is_too_short_is_refused_as_locally(sky: str) -> None:
    packed = rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 1]))
    with pytest.raises(ValueError) as expected:
        rnn.pad_packed_sequence(packed, total_length=2)
    with pytest.raises(ValueError) as found:
        rnn.pad_packed_sequence(packed.to(sky), total_length=2)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(("kind", "most"), [(nn.LSTM, 45), (nn.GRU, 45), (nn.RNN, 45)])
def test_steps_of_other_lengths_wait_for_nothing(
    kind: Any, most: int, ways: int, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    theirs = kind(5, 6, bidirectional=ways == 2)
    ours, drawn = copy.deepcopy(theirs).to(sky), random.Random(1)
    asked: list[str] = []
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: asked.append(call.info.name))
    waits, misses = [], []
    for _ in range(7):
        counts = torch.tensor([drawn.randint(2, 24) for _ in range(6)])
        x = torch.randn(int(counts.max()), 6, 5)
        there = x.to(sky)
        before = torch.sky.stats()
        results = []
        for network, values in ((ours, there), (theirs, x)):
            network.zero_grad()
            packed = rnn.pack_padded_sequence(values, counts, enforce_sorted=False)
            output, _ = rnn.pad_packed_sequence(network(packed)[0])
            output.square().mean().backward()
            results.append(output)
        after = torch.sky.stats()
        waits.append(after["round_trips"] - before["round_trips"])
        misses.append(after["cache_misses"] - before["cache_misses"])
        _same(*results)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            _same(p.grad, q.grad)
    assert asked == []
    assert waits == [0] * 7
    assert max(misses[2:]) <= most, misses


def test_gradients_of_gradients_of_packed_networks_are_those_of_the_cpu(sky: str) -> None:
    torch.manual_seed(0)
    network = nn.GRU(3, 4).double()

    def run(place: str) -> list[torch.Tensor]:
        module = copy.deepcopy(network).to(place)
        x = torch.linspace(-1, 1, 4 * 3 * 3, dtype=torch.float64).view(4, 3, 3).to(place).requires_grad_()
        packed = rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
        output, _ = rnn.pad_packed_sequence(module(packed)[0])
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in module.parameters())]

    for ours, theirs in zip(run(sky), run("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)


def test_what_was_written_into_an_order_is_inverted_as_it_is_now(sky: str) -> None:
    order = torch.tensor([2, 0, 1]).to(sky)
    assert rnn.invert_permutation(order).tolist() == [1, 2, 0]
    order.copy_(torch.tensor([1, 0, 2]))
    assert rnn.invert_permutation(order).tolist() == [1, 0, 2]
    order[1:].copy_(torch.tensor([2, 0]))
    assert rnn.invert_permutation(order).tolist() == [2, 0, 1]
    order.data.copy_(torch.arange(3))
    assert rnn.invert_permutation(order).tolist() == [0, 1, 2]
    assert rnn.invert_permutation(None) is None


def test_scripts_compile_pytorchs_own_inversion() -> None:
    invert = torch.jit.script(rnn.invert_permutation)
    assert invert(torch.tensor([2, 0, 1])).tolist() == [1, 2, 0]
