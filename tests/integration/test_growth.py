"""Memory and caches stay bounded, and changing numbers do not miss the cache."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES

MIB = 1 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_the_client_does_not_grow_with_the_number_of_operations(sky: str) -> None:
    x = torch.ones(8, device=sky)

    def operations(count: int) -> None:
        y = x
        for _ in range(count // 4):
            y = (y * 0.5 + x).clamp(max=2).neg()
        y.cpu()

    operations(20_000)
    gc.collect()  # what earlier tests left in cycles holds values, too
    handles = torch.sky.stats()["handles"]
    growth = []
    for _ in range(3):
        before = resident_bytes()
        operations(40_000)
        growth.append(resident_bytes() - before)
    # A leak grows every time; allocators and other threads take what they take once.
    assert min(growth) < MIB, growth
    assert torch.sky.stats()["handles"] == handles


def test_the_shape_cache_is_bounded(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyproxy.tensor.core import devices

    class Small:
        max_cached_shapes = 64

    monkeypatch.setattr(devices, "SETTINGS", Small)
    chosen = DEVICES.of(sky)
    entries = dict(chosen.cache)
    chosen.cache.clear()
    for n in range(200):
        result = torch.ones(n + 2, device=sky) + 1
        assert len(chosen.cache) <= 64
    assert result.shape == (201,)
    assert result.sum().item() == 402
    chosen.cache.update(entries)
    assert SETTINGS.max_cached_shapes >= 4096


def misses(action: Callable[[], object]) -> int:
    before = torch.sky.stats()["cache_misses"]
    action()
    return int(torch.sky.stats()["cache_misses"] - before)


def test_changing_numbers_hit_the_cache(sky: str) -> None:
    x = torch.ones(4, device=sky)

    def use(number: int) -> None:
        y = x * (0.1 * number) + number
        y.add_(x, alpha=1e-3 / (number + 1))
        y.clamp_(-number, number)
        y.mul_(1.0 / (number + 1))
        (y**2.0).lerp_(x, 0.01 * number)
        y.addcdiv_(x, x, value=float(number))
        y.masked_fill_(y > number, float(number))
        torch.full_like(y, number * 1.5)

    use(1)
    use(2)
    assert misses(lambda: [use(n) for n in range(3, 60)]) == 0


def test_a_learning_rate_schedule_hits_the_cache(sky: str) -> None:
    model = nn.Linear(4, 4).to(sky)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    data = torch.ones(2, 4, device=sky)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    for _ in range(3):
        step()
    assert misses(lambda: [step() for _ in range(20)]) == 0


def test_a_growing_position_needs_no_inference_by_fake_tensors(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position in a buffer is a new number each time, and each shape is new: our own rules are fast there."""
    from skyproxy.tensor.dispatch import inference

    cache = torch.zeros(1, 200, 4, device=sky)
    query = torch.ones(1, 1, 4, device=sky)

    def write(position: int) -> None:
        cache[:, position : position + 1] = query
        cache[0, position] *= 3.0
        cache[0, position].add_(query[0, 0], alpha=-2)
        seen = torch.cat([cache[:, :position], query], 1)
        weights = torch.softmax(query @ seen.transpose(1, 2) * 0.5, -1)
        ((weights @ seen)[:, 0] + cache[0, position] * 2).relu()

    for position in (1, 2, 3):
        write(position)
    calls: list[str] = []
    original = inference._infer_by_fake
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: calls.append(call.info.name) or original(call))
    for position in range(4, 60):
        write(position)
    assert set(calls) <= {"aten::view"}  # of a transposed batch, once a step
    assert len(calls) <= 56
    assert cache[0, :62].sum(1).tolist() == [0.0] + [4.0] * 59 + [0.0, 0.0]


def test_outputs_and_uploads_take_their_memory_once_on_the_worker(sky: str) -> None:
    size = 256 * MIB
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        torch.ones(MIB, device=device).cpu()
        process = psutil.Process(node.process_id)
        base = peak(process)
        data = torch.ones(size // 4)
        remote = data.to(device)
        torch.sky.synchronize(device)
        assert peak(process) - base < 1.3 * size
        result = remote * 2
        torch.sky.synchronize(device)
        assert peak(process) - base < 2.3 * size
        assert result[-1].item() == 2


def peak(process: psutil.Process) -> int:
    """The most memory that a process ever had, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10
