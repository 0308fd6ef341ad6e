"""Parts of PyTorch on a remote device: random numbers, events, autocast, files, checkpoints, recurrent networks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20


def same(remote: torch.Tensor, local: torch.Tensor) -> None:
    """Both are equal, and look the same."""
    assert remote.device.type == "sky"
    assert remote.dtype is local.dtype
    assert remote.shape == local.shape
    torch.testing.assert_close(remote.cpu(), local, rtol=0, atol=0, equal_nan=True)


def round_trips(action: Callable[[], object]) -> int:
    before = torch.sky.stats()["round_trips"]
    action()
    return int(torch.sky.stats()["round_trips"] - before)


def test_a_failing_op_leaves_its_batch_mates_and_says_where_it_was(sky: str) -> None:
    before = [torch.full((3,), float(i), device=sky) for i in range(10)]
    bad = torch.zeros(3, device=sky)[torch.full((1,), 5, device=sky)]
    after = [b * 2 for b in before]
    assert [a.tolist() for a in after] == [[2.0 * i] * 3 for i in range(10)]
    with pytest.raises(IndexError, match=r"aten::index[^\n]*\n[^\n]*test_parts_of_pytorch\.py:\d+"):
        bad.cpu()
    assert after[-1].tolist() == [18, 18, 18]


def test_manual_seed_makes_the_same_numbers_as_locally(sky: str) -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(42)
        drop = nn.Dropout(0.5)
        return [
            torch.rand(5, device=device),
            torch.randn(2, 3, device=device),
            torch.randint(0, 100, (7,), device=device),
            torch.randperm(10, device=device),
            drop(torch.ones(20, device=device)),
            torch.bernoulli(torch.full((9,), 0.3, device=device)),
            torch.multinomial(torch.ones(5, device=device), 3),
            torch.empty(4, device=device).normal_(2.0, 3.0),
            torch.normal(torch.zeros(3, device=device), torch.ones(3, device=device)),
        ]

    for remote, local, again in zip(draw(sky), draw("cpu"), draw(sky), strict=True):
        same(remote, local)
        same(again, local)


def test_generators_are_accepted(sky: str) -> None:
    local, remote = torch.Generator().manual_seed(5), torch.Generator(sky).manual_seed(5)
    same(torch.rand(4, generator=remote, device=sky), torch.rand(4, generator=local))
    same(torch.randperm(9, generator=remote, device=sky), torch.randperm(9, generator=local))
    state = remote.get_state()
    first = torch.randn(3, generator=remote, device=sky)
    remote.set_state(state)
    assert torch.equal(torch.randn(3, generator=remote, device=sky), first)


def test_random_state_is_saved_and_restored(sky: str) -> None:
    state = torch.sky.get_rng_state(sky)
    first = torch.rand(5, device=sky)
    torch.sky.set_rng_state(state, sky)
    assert torch.equal(torch.rand(5, device=sky), first)
    with torch.random.fork_rng(devices=[torch.device(sky).index], device_type="sky"):
        torch.rand(5, device=sky)
        inner = torch.sky.get_rng_state(sky)
    assert not torch.equal(inner, torch.sky.get_rng_state(sky))


def test_synchronize_really_waits_and_events_measure(sky: str) -> None:
    x = torch.full((512, 512), 1 / 512, device=sky)
    x.cpu()
    start, end = torch.sky.Event(enable_timing=True), torch.sky.Event(enable_timing=True)
    start.record()
    y = x
    for _ in range(100):
        y = y @ x
    end.record()
    torch.sky.synchronize(sky)
    assert round_trips(lambda: None) == 0
    # All of it is done: to ask for the value costs no more than the way there and back.
    milliseconds = start.elapsed_time(end)
    assert milliseconds > 1
    import time

    begun = time.monotonic()
    y[0, 0].item()
    assert time.monotonic() - begun < max(0.2, milliseconds / 2000)
    assert end.query()
    end.synchronize()
    torch.sky.current_stream().synchronize()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(torch.sky.Event(enable_timing=True))


def test_autocast_computes_as_locally(sky: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    twin = copy.deepcopy(model).to(sky)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        local = model(x)
    with torch.autocast("sky", dtype=torch.bfloat16):
        remote = twin(x.to(sky))
    assert remote.dtype is local.dtype is torch.bfloat16
    torch.testing.assert_close(remote.cpu(), local)
    remote.float().sum().backward()
    local.float().sum().backward()
    torch.testing.assert_close(twin[0].weight.grad.cpu(), model[0].weight.grad, rtol=1e-2, atol=1e-2)


def test_saving_and_loading(sky: str, sky1: str) -> None:
    model = nn.Linear(3, 2).to(sky)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3}, file)
    for where in ("cpu", sky, sky1):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        assert loaded["model"]["weight"].device == torch.device(where)
        assert torch.equal(loaded["model"]["weight"].cpu(), model.weight.detach().cpu())
    file.seek(0)
    assert torch.load(file, weights_only=True)["model"]["bias"].device == torch.device(sky)
    model.load_state_dict(loaded["model"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(sky: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    twin = copy.deepcopy(block).to(sky)
    gradients = []
    for module, device in ((block, "cpu"), (twin, sky)):
        torch.manual_seed(1)
        x = torch.ones(3, 4, device=device, requires_grad=True)
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        gradients.append((x.grad.cpu(), module[0].weight.grad.cpu()))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(sky: str, dtype: torch.dtype) -> None:
    local = torch.linspace(-3, 3, 50)
    remote = local.to(sky).to(dtype)
    assert remote.dtype is dtype
    assert torch.equal(remote.cpu().float(), local.to(dtype).float())
    assert torch.equal(local.to(dtype).to(sky).float().cpu(), local.to(dtype).float())


def test_memory_questions_have_answers(sky: str) -> None:
    free, total = torch.sky.mem_get_info(sky)
    assert 0 < free <= total
    before = torch.sky.memory_allocated(sky)
    kept = torch.zeros(MIB, device=sky)
    assert torch.sky.memory_allocated(sky) - before >= 4 * MIB
    del kept
    torch.sky.synchronize(sky)
    assert torch.sky.memory_allocated(sky) - before < 4 * MIB
    assert torch.sky.get_device_properties(sky).total_memory > 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(sky: str, kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = kind(4, 6, num_layers=2, batch_first=True, bidirectional=True)
    twin = copy.deepcopy(model).to(sky)
    x = torch.randn(3, 5, 4)
    outputs = []
    for module, inputs in ((model, x), (twin, x.to(sky))):
        out, _ = module(inputs)
        out.square().sum().backward()
        outputs.append([out.detach().cpu(), *(p.grad.cpu() for p in module.parameters())])
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
