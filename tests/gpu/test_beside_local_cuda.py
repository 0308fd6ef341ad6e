"""A program that uses `sky` and the GPU of its own machine: backward and pinned memory there are what they were."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skyproxy.node import Node


def trained(device: torch.device | str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # the default one is shared by threads
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(32, 8, generator=generator).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model[0].weight.detach().cpu()


def test_both_train_in_one_program_by_turns_and_in_threads(kind: str, gpu_node: Node) -> None:
    expected = trained(kind)
    torch.testing.assert_close(trained(gpu_node.device(kind)), expected, rtol=1e-4, atol=1e-5)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(trained(kind))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    for weight in found:
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_on_the_cpu_goes_back_to_either(kind: str, gpu_node: Node) -> None:
    for device in (kind, gpu_node.device(kind)):
        weight = torch.ones(4, device=device, requires_grad=True)
        (weight * 2).sum().cpu().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
def test_a_graph_of_both_is_refused(gpu_node: Node) -> None:
    weight = torch.ones(4, device=gpu_node.device("cuda"), requires_grad=True)
    loss = ((weight * 2).to("cuda") * 3).sum()
    with pytest.raises(RuntimeError, match="Cut the graph where they meet"):
        loss.backward()
    assert trained("cuda").isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
def test_memory_is_pinned_for_the_local_gpu(gpu_node: Node) -> None:
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert not torch.arange(4.0).is_pinned()
    assert pinned.to("cuda", non_blocking=True).sum().item() == pinned.to(gpu_node.devices[0]).sum().item() == 6
    for (batch,) in DataLoader(TensorDataset(torch.arange(32.0)), 8, pin_memory=True, num_workers=1):
        assert batch.is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
def test_a_program_that_only_imports_skyproxy_trains_on_its_gpu() -> None:
    program = """
import torch, skyproxy
weight = torch.ones(3, device="cuda", requires_grad=True)
(weight * 2).sum().backward()
print(weight.grad.tolist(), torch.accelerator.current_accelerator(), torch.ones(2).pin_memory().is_pinned())
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "[2.0, 2.0, 2.0] cuda True"
