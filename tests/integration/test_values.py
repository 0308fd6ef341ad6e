"""Values of a worker as Python sees them: flags, sizes that depend on them, large downloads, slices."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

MIB = 1 << 20


def same(remote: torch.Tensor, local: torch.Tensor) -> None:
    """Both are equal, and look the same."""
    assert remote.device.type == "sky"
    assert remote.dtype is local.dtype
    assert remote.shape == local.shape
    torch.testing.assert_close(remote.cpu(), local, rtol=0, atol=0, equal_nan=True)


def test_a_flag_that_turns_true_is_seen(sky: str) -> None:
    x = torch.zeros(4, device=sky)
    seen = []
    for step in range(6):
        seen.append(bool((x > 3.5).any()))
        x += 1
        assert len(seen) == step + 1
    assert seen == [False, False, False, False, True, True]


def test_a_nan_guard_fires(sky: str) -> None:
    loss = torch.ones((), device=sky)
    fired = []
    for step in range(5):
        loss = loss * (float("inf") if step == 2 else 1.0)
        loss = loss - loss if step == 3 else loss
        fired.append((bool(torch.isnan(loss)), math.isnan(loss.item()), not torch.isfinite(loss)))
    assert fired == [(False, False, False)] * 2 + [(False, False, True)] + [(True, True, True)] * 2


def test_a_loop_that_stops_on_a_value_stops_at_the_right_step(sky: str) -> None:
    def generate(device: str) -> list[int]:
        torch.manual_seed(3)
        table = torch.randint(0, 50, (50,)).to(device)
        token, out = torch.tensor(7, device=device), []
        finished = torch.tensor(False, device=device)
        while len(out) < 64 and not finished:
            out.append(int(token))
            token = table[token]
            finished = (token == 7) | finished
        return out

    assert generate(sky) == generate("cpu")


def test_every_way_to_a_python_value_gives_the_workers_value(sky: str) -> None:
    x = torch.tensor([1.5, -2.0, 0.0], device=sky)
    for factor in (1, 2, 3):
        y = x * factor
        assert y[0].item() == 1.5 * factor
        assert float(y[1]) == -2.0 * factor
        assert int(y[1]) == -2 * factor
        assert bool(y[2]) is False
        assert y.tolist() == [1.5 * factor, -2.0 * factor, 0.0]
        assert list(range(5))[torch.tensor(factor, device=sky)] == factor
        assert f"{y[0]:.2f}" == f"{1.5 * factor:.2f}"
        assert torch.equal(y, x * factor)
        assert not torch.equal(y, x * (factor + 1))
        assert torch.allclose(y, x * factor)
        assert not torch.allclose(y, x * (factor + 1))
        assert (y == x * factor).all()


@pytest.mark.parametrize("mebibytes", [15, 16, 17, 64])
def test_large_downloads_arrive_whole_and_later_calls_work(sky: str, mebibytes: int) -> None:
    count = mebibytes * MIB // 8
    x = torch.arange(count, device=sky)
    local = x.cpu()
    assert torch.equal(local, torch.arange(count))
    assert (x[-1] + 1).item() == count
    back = local.to(sky)
    assert torch.equal(back, x)


DATA_DEPENDENT: dict[str, Callable[[torch.Tensor], object]] = {
    "mask": lambda x: x[x > 2],
    "mask of rows": lambda x: x.view(2, 4)[torch.tensor([True, False], device=x.device)],
    "nonzero": lambda x: x.nonzero(),
    "nonzero tuple": lambda x: x.view(2, 4).nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 2),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique of a dim": lambda x: torch.unique(x.view(4, 2), dim=0),
    "unique consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "bincount weights": lambda x: torch.bincount(x.long(), weights=x * 0.5, minlength=12),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "repeat_interleave of another": lambda x: torch.repeat_interleave(x, x.long(), dim=0),
    "masked_select": lambda x: x.masked_select(x < 4),
    "argwhere": lambda x: torch.argwhere(x > 1),
    "count": lambda x: x.count_nonzero(),
    "to_sparse": lambda x: x.view(2, 4).to_sparse().to_dense(),
    "to_sparse indices": lambda x: x.view(2, 4).to_sparse().indices(),
    "to_sparse_csr": lambda x: x.view(2, 4).to_sparse_csr().crow_indices(),
    "histc": lambda x: torch.histc(x, bins=4),
    "one_hot": lambda x: nn.functional.one_hot(x.long()),
    "combinations": lambda x: torch.combinations(x[x > 3]),
    "pack": lambda x: nn.utils.rnn.pack_sequence([x[:3], x[:2]]).data,
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_sizes_that_depend_on_values(sky: str, sky1: str, name: str) -> None:
    local = torch.tensor([0.0, 3, 1, 4, 1, 5, 0, 2])
    expected = DATA_DEPENDENT[name](local)
    for device in (sky, sky1):
        result = DATA_DEPENDENT[name](local.to(device))
        pairs = zip(result, expected) if isinstance(expected, tuple) else [(result, expected)]
        for remote, wanted in pairs:
            same(remote, wanted)


def test_gradients_flow_through_a_mask(sky: str) -> None:
    local = torch.arange(6.0, requires_grad=True)
    remote = local.detach().to(sky).requires_grad_()
    for x in (local, remote):
        (x[x > 2] ** 2).sum().backward()
    assert torch.equal(remote.grad.cpu(), local.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_slices_travel_both_ways_as_they_are(sky: str, dtype: torch.dtype) -> None:
    local = (torch.arange(64 * 1000) % 5).reshape(64, 1000).to(dtype)
    remote = local.to(sky)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[3],
        lambda t: t[:, 5],
        lambda t: t[10:20, 100:900],
        lambda t: t[::3, ::7],
        lambda t: t.t()[2:5],
        lambda t: t[63, 999],
        lambda t: t[5:5],
        lambda t: t[1:2].expand(4, 1000),
    ]
    wide = torch.complex128 if dtype.is_complex else torch.float64  # not every dtype can be compared
    for view in views:
        expected = view(local)
        for result in (view(remote).cpu(), expected.to(sky).cpu()):
            assert result.dtype is dtype
            assert torch.equal(result.to(wide), expected.to(wide))


def test_a_slice_sends_its_own_bytes_only(sky: str) -> None:
    base = torch.zeros(8 * MIB, dtype=torch.bfloat16)
    before = torch.sky.stats()
    remote = base[:1000].to(sky)
    middle = torch.sky.stats()
    assert middle["bytes_sent"] - before["bytes_sent"] < 100_000
    large = base.to(sky)
    before = torch.sky.stats()
    large[500:1500].cpu()
    remote.cpu()
    assert torch.sky.stats()["bytes_received"] - before["bytes_received"] < 100_000
