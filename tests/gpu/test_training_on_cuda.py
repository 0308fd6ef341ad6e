"""Training on a CUDA worker beside the same on local CUDA: precisions, layouts, attention, optimizers, compile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from skyproxy.node import Node

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def losses(
    model: nn.Module, data: torch.Tensor, device: Any, *, autocast: torch.dtype | None = None, steps: int = 5
) -> torch.Tensor:
    """The losses of a few steps with AdamW; float16 goes through a GradScaler."""
    torch.manual_seed(1)
    model, data = copy.deepcopy(model).to(device), data.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device_type = torch.device(device).type
    scaler = torch.amp.GradScaler(device_type, enabled=autocast is torch.float16)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device_type, autocast, enabled=autocast is not None):
            loss = model(data).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return torch.stack(found).cpu()


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), torch.randn(16, 32)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), torch.randn(8, 3, 16, 16)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 32, 64)


def lstm() -> tuple[nn.Module, torch.Tensor]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 32, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    torch.manual_seed(0)
    return Last(), torch.randn(4, 10, 16)


MODELS = {make.__name__: make for make in (mlp, cnn, encoder, lstm)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
def test_a_model_trains_as_on_the_local_device(
    kind: str, gpu_node: Node, name: str, autocast: torch.dtype | None
) -> None:
    if kind == "cpu" and autocast is torch.float16:
        pytest.skip("float16 with a GradScaler is CUDA's")
    if (kind, name, autocast) == ("cpu", "lstm", torch.bfloat16) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("on this processor autocast's LSTM in bfloat16 raises, locally as on a worker")
    model, data = MODELS[name]()
    ours = losses(model, data, gpu_node.device(kind), autocast=autocast)
    theirs = losses(model, data, kind, autocast=autocast)
    tolerance = 1e-4 if autocast is None else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_channels_last_stays_channels_last_and_gives_the_same(kind: str, gpu_node: Node) -> None:
    model, data = cnn()
    model, data = model.to(memory_format=torch.channels_last), data.contiguous(memory_format=torch.channels_last)
    results = []
    for device in (gpu_node.device(kind), kind):
        placed, x = copy.deepcopy(model).to(device), data.to(device)
        hidden = placed[:4](x)
        assert hidden.is_contiguous(memory_format=torch.channels_last)
        hidden.square().mean().backward()
        results.append([hidden.detach().cpu(), placed[0].weight.grad.cpu()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


def test_dropout_draws_what_the_local_device_draws(kind: str, gpu_node: Node) -> None:
    drawn = []
    for device in (gpu_node.device(kind), torch.device(kind)):
        torch.manual_seed(11)
        x = torch.ones(1000, device=device)
        first = F.dropout(x, 0.3)
        drawn.append([first.cpu(), torch.randn(777, device=device).cpu(), torch.randperm(100, device=device).cpu()])
    for ours, theirs in zip(*drawn, strict=True):
        assert torch.equal(ours, theirs)


_BACKENDS = [None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@pytest.mark.parametrize("backend", _BACKENDS)
def test_attention_forward_and_backward(kind: str, gpu_node: Node, backend: SDPBackend | None) -> None:
    if kind == "cpu" and backend is SDPBackend.EFFICIENT_ATTENTION:
        pytest.skip("the CPU has no memory-efficient attention")
    torch.manual_seed(0)
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    inputs = [torch.randn(2, 4, 64, 32, dtype=dtype) for _ in range(3)]
    results = []
    for device in (gpu_node.device(kind), torch.device(kind)):
        placed = [x.to(device).requires_grad_() for x in inputs]
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            found = F.scaled_dot_product_attention(*placed, is_causal=True)
        found.float().square().sum().backward()
        results.append([found.detach().float().cpu(), *(x.grad.float().cpu() for x in placed)])
    torch.testing.assert_close(results[0], results[1], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("worker", ["eager", "auto"])
def test_a_compiled_model_trains_as_it_does_eagerly(kind: str, gpu_node: Node, worker: str) -> None:
    if kind == "cpu" and worker == "auto":
        pytest.skip("inductor on a CPU wants a compiler of C++")
    model, data = mlp()
    device = gpu_node.device(kind)
    want = losses(model, data, device)
    torch._dynamo.reset()
    placed = copy.deepcopy(model)
    placed.compile(backend="sky", options={"worker": worker})
    torch.testing.assert_close(losses(placed, data, device), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "form", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": True}], ids=str
)
def test_forms_of_adam(kind: str, gpu_node: Node, form: dict[str, bool]) -> None:
    if kind == "cpu" and "capturable" in form:
        pytest.skip("the CPU captures nothing")
    model, data = mlp()
    ended = []
    for device in (gpu_node.device(kind), torch.device(kind)):
        placed, x = copy.deepcopy(model).to(device), data.to(device)
        optimizer = torch.optim.Adam(placed.parameters(), lr=1e-2, **form)
        for _ in range(3):
            optimizer.zero_grad()
            placed(x).square().mean().backward()
            optimizer.step()
        ended.append([p.detach().cpu() for p in placed.parameters()])
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-4, atol=1e-5)
