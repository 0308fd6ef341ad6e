"""What else a CUDA worker does: memory and its end, events, several sessions, functions, profiles, recovery."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.node import Node

MIB = 1 << 20
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")


@needs_cuda
def test_memory_that_is_not_there_is_refused_and_the_session_goes_on(gpu_node: Node) -> None:
    device = gpu_node.device("cuda")
    kept = torch.arange(1000, device=device)
    _, total = torch.sky.mem_get_info(device)
    with pytest.raises(torch.OutOfMemoryError, match="memory"):
        torch.empty(2 * total, dtype=torch.uint8, device=device).fill_(1).sum().item()
    assert kept.sum().item() == 499_500
    assert torch.ones(3, device=device).sum().item() == 3


@needs_cuda
def test_memory_is_counted_and_given_back(gpu_node: Node) -> None:
    device = gpu_node.device("cuda")
    torch.sky.synchronize(device)
    before = torch.sky.memory_allocated(device)
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
    assert torch.sky.memory_allocated(device) - before >= 64 * MIB
    assert torch.sky.max_memory_allocated(device) >= before + 64 * MIB
    del held
    assert torch.sky.memory_allocated(device) - before < MIB
    torch.sky.empty_cache()
    assert torch.sky.memory_reserved(device) >= torch.sky.memory_allocated(device)


def test_events_measure_what_the_device_does(kind: str, gpu_node: Node) -> None:
    device = gpu_node.device(kind)
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    x = torch.randn(1024, 1024, device=device)
    start.record()
    for _ in range(20):
        x = x @ x * 1e-3
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_two_workers_on_one_gpu_do_not_disturb_each_other(kind: str, gpu_node: Node) -> None:
    mine = gpu_node.device(kind)
    with skyproxy.launch_local(kind) as other_node:
        other = other_node.device(kind)
        drawn = []
        for disturbed in (False, True):
            torch.manual_seed(3)
            first = torch.randn(100, device=mine)
            if disturbed:
                torch.randn(100_000, device=other).sum().item()
            drawn.append((first.cpu(), torch.randn(100, device=mine).cpu()))
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][1], drawn[1][1])
    assert torch.ones(2, device=mine).sum().item() == 2


def test_a_function_sees_what_was_computed_and_its_results_go_on(kind: str, gpu_node: Node) -> None:
    device = gpu_node.device(kind)
    x = torch.randn(512, 512, device=device)
    y = x
    for _ in range(10):
        y = y @ x * 0.01

    def doubled(value: torch.Tensor) -> tuple[str, torch.Tensor]:
        return value.device.type, value * 2

    place, twice = gpu_node.run(doubled, y)
    assert place == kind
    torch.testing.assert_close((twice + 0).cpu(), y.cpu() * 2)


@needs_cuda
def test_a_profile_has_the_kernels(gpu_node: Node) -> None:
    device = gpu_node.device("cuda")
    x = torch.randn(256, 256, device=device)
    with skyproxy.profile() as profile:
        (x @ x).relu().sum().item()
    assert "gemm" in profile.summary().lower() or "relu" in profile.summary().lower()


def test_training_goes_on_where_the_worker_was_killed(kind: str) -> None:
    """On CUDA sums may be taken in another order, so within a tolerance there; on a CPU to the bit."""

    def train(device: torch.device, disturb: int | None, node: Node) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        found = []
        for step in range(12):
            if step == disturb:
                assert node.process_id is not None
                os.kill(node.process_id, signal.SIGKILL)
            x = torch.full((8, 16), 0.1 * step).to(device)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found).cpu()

    with skyproxy.launch_local(kind) as node:
        device = node.device(kind)
        expected = train(device, None, node)
        protected = skyproxy.protect(steps=4, node=node)
        found = train(device, 6, node)
        assert protected.recoveries == 1
    if kind == "cpu":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def read_in_a_thread(tensor: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(tensor.clone).result()


def test_threads_of_functions_read_what_is_computed(kind: str, gpu_node: Node) -> None:
    device = gpu_node.device(kind)
    size, steps = (2048, 60) if kind == "cuda" else (64, 3)
    factor = torch.randn(size, size, device=device) / 64
    for _ in range(5):
        product = factor
        for _ in range(steps):
            product = (product @ factor).clamp(-1, 1)
        made = torch.zeros(1 << 20, device=device).add_(product.sum() * 0 + 1)
        assert gpu_node.run(read_in_a_thread, made).sum().item() == 1 << 20
