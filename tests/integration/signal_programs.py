"""The programs that `signal_storms.py` strikes: each computes the same on any device, whatever was cut short before.

A program takes a device and returns what its results are compared by: lists, numbers, texts, tensors of the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def _numbers(*shape: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return (torch.arange(float(count)) % 17 / 16 - 0.4).reshape(shape)


def _filled(module: nn.Module, device: str) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(_numbers(*parameter.shape) * 0.3)
    return module.to(device)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, count: int = 3) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return losses


def _perceptron(device: str) -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), device)


@program
def training_with_sgd(device: str) -> Any:
    model = _perceptron(device)
    return _steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), _numbers(4, 6).to(device))


@program
def training_with_lists(device: str) -> Any:
    model = _perceptron(device)
    return _steps(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True), _numbers(4, 6).to(device))


@program
def fused_optimizer(device: str) -> Any:
    model = _perceptron(device)
    return _steps(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True), _numbers(4, 6).to(device))


@program
def convolutions(device: str) -> Any:
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    model = _filled(nn.Sequential(*layers), device)
    x = _numbers(2, 2, 8, 8).to(device)
    return _steps(model, torch.optim.SGD(model.parameters(), lr=0.05), x, 2)


@program
def recurrent(device: str) -> Any:
    cell = _filled(nn.GRU(4, 5, batch_first=True), device)
    output, hidden = cell(_numbers(2, 3, 4).to(device))
    (output.sum() + hidden.square().sum()).backward()
    return [round(p.grad.sum().item(), 3) for p in cell.parameters()]


@program
def attention(device: str) -> Any:
    layer = _filled(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), device)
    y = layer(_numbers(2, 5, 8).to(device))
    y.square().sum().backward()
    return [tuple(y.shape), *(round(p.grad.abs().sum().item(), 2) for p in layer.parameters())]


@program
def autocast_and_scaling(device: str) -> Any:
    model = _perceptron(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loss = model(_numbers(4, 6).to(device)).float().square().mean()
    (loss * 8).backward()
    return [tuple(p.grad.shape) for p in model.parameters()]


@program
def second_derivatives(device: str) -> Any:
    x = _numbers(5).to(device).requires_grad_()
    (first,) = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second.cpu()


@program
def transforms(device: str) -> Any:
    x = _numbers(3, 4).to(device)
    # Not `jvp`: a strike in PyTorch's own clean-up leaves its level behind, on the CPU as well.
    return torch.func.vmap(torch.func.jacrev(lambda row: row.exp() * row.sum()))(x).cpu()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + ctx.saved_tensors[0] * 0


@program
def own_functions_and_hooks(device: str) -> Any:
    x = _numbers(6).to(device).requires_grad_()
    seen: list[int] = []
    y = _Doubled.apply(x)
    y.register_hook(lambda gradient: seen.append(gradient.numel()) or gradient * 3)
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.numel()))
    (y.sum() + _Doubled.apply(y).sum()).backward()
    return [seen, x.grad.cpu()]


@program
def checkpointed(device: str) -> Any:
    model = _perceptron(device)
    x = _numbers(4, 6).to(device).requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    return x.grad.sum().cpu()


@program
def saved_tensors_elsewhere(device: str) -> Any:
    x = _numbers(4, 4).to(device).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = (x @ x).tanh() * x
    y.sum().backward()
    return x.grad.cpu()


@program
def loaders(device: str) -> Any:
    data = TensorDataset(_numbers(12, 3), torch.arange(12))
    total = torch.zeros(3, device=device)
    for x, _ in DataLoader(data, batch_size=4):
        total += x.to(device).sum(0)
    return total.cpu()


@program
def loaders_with_processes(device: str) -> Any:
    data = TensorDataset(_numbers(8, 3), torch.arange(8))
    total = torch.zeros(3, device=device)
    for x, _ in DataLoader(data, batch_size=4, num_workers=2):
        total += x.to(device).sum(0)
    return total.cpu()


@program
def threads(device: str) -> Any:
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.full((3,), float(number), device=device, requires_grad=True)
        (x * x).sum().backward()
        results[number] = x.grad.tolist()

    started = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in started:
        thread.start()
    work(3)
    for thread in started:
        thread.join()
    return sorted(results.items())


@program
def saving_and_loading(device: str) -> Any:
    model, file = _perceptron(device), io.BytesIO()
    torch.save({"model": model.state_dict(), "x": _numbers(3).to(device)}, file)
    file.seek(0)
    again = torch.load(file)
    return [value.cpu() for value in again["model"].values()] + [again["x"].cpu()]


@program
def copies(device: str) -> Any:
    x = _numbers(40, 50)
    y = x.to(device).t().contiguous().cpu()
    z = torch.empty(50, 40)
    z.copy_(y.to(device))
    return [y, z, copy.deepcopy(x.to(device)).cpu(), pickle.loads(pickle.dumps(x.to(device))).cpu()]


@program
def large_copies(device: str) -> Any:
    x = torch.arange(700_000, dtype=torch.float32)
    return torch.equal((x.to(device) + 1).cpu(), x + 1)


@program
def values(device: str) -> Any:
    x, found = _numbers(12).to(device), []
    for i in range(12):
        if x[i] > 0:
            found.append(round(x[i].item(), 4))
    return [found, x.tolist(), bool(x.any()), int(x.argmax())]


@program
def sizes_that_values_tell(device: str) -> Any:
    x = _numbers(5, 7).to(device)
    y = x.clone()
    y[y > 0.2] = 0
    return [x[x > 0].cpu(), x.nonzero().cpu(), torch.unique(x).cpu(), y.cpu(), torch.repeat_interleave(x[0], 2).cpu()]


@program
def changes_in_place(device: str) -> Any:
    x = _numbers(4, 6).to(device)
    x[1:3, ::2] += 1
    x.t()[2].mul_(3)
    x.view(-1)[3:9].copy_(torch.ones(6, device=device))
    x.transpose_(0, 1).unsqueeze_(0).clamp_(min=-0.1)
    return x.cpu()


@program
def lists(device: str) -> Any:
    items = [_numbers(i + 1).to(device) for i in range(6)]
    torch._foreach_mul_(items, 2.0)
    torch._foreach_add_(items, [x.clone() for x in items], alpha=0.5)
    parts = torch.cat(items).split(4)
    return [x.cpu() for x in [*items, *parts, *torch._foreach_norm(items)]]


@program
def given_results(device: str) -> Any:
    x, out, places = _numbers(3, 4).to(device), torch.empty(0, device=device), torch.empty(0, device=device).long()
    torch.add(x, 1, out=out)
    largest = torch.empty(0, device=device)
    torch.max(x, 1, out=(largest, places))
    return [out.cpu(), largest.cpu(), places.cpu()]


@program
def sparse(device: str) -> Any:
    x = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.ones(3), (2, 3)).to(device)
    return [(x + x).coalesce().to_dense().cpu(), (x @ _numbers(3, 2).to(device)).cpu()]


@program
def nested(device: str) -> Any:
    parts = [_numbers(2, 3).to(device), _numbers(4, 3).to(device)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return [part.cpu() for part in (x * 2).sin().unbind()]


@program
def random_numbers(device: str) -> Any:
    generator = torch.Generator(device=device).manual_seed(5)
    x = torch.rand(8, generator=generator, device=device)
    torch.manual_seed(3)
    return [x.cpu(), F.dropout(torch.ones(9, device=device), 0.5).cpu(), torch.randperm(6, device=device).cpu()]


@program
def printing(device: str) -> Any:
    x = _numbers(3, 4).to(device)
    return [str(x.cpu()) == str(x).replace(f", device='{device}'", ""), f"{x[0, 0]:.3f}", repr(x[:0].shape)]


@program
def matrices(device: str) -> Any:
    x = _numbers(4, 4).to(device) + 3 * torch.eye(4, device=device)
    return [torch.linalg.inv(x).cpu(), torch.linalg.det(x).cpu(), torch.einsum("ij,kj->ik", x, x).cpu()]


@program
def errors_of_workers(device: str) -> Any:
    with contextlib.suppress(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(3, 3, device=device)).tolist()
    with contextlib.suppress(IndexError):
        torch.ones(3, device=device)[5]
    return torch.ones(3, device=device).tolist()


@program
def streams_and_events(device: str) -> Any:
    module = torch.get_device_module(device)
    x = _numbers(5).to(device)
    with contextlib.ExitStack() as stack:
        if torch.device(device).type != "cpu":
            stack.enter_context(module.stream(module.Stream(device)))
            event = module.Event()
            event.record()
            event.synchronize()
        y = x * 2
    module.synchronize()
    return y.cpu()


@program
def event_loops(device: str) -> Any:
    async def one(number: float) -> float:
        await asyncio.sleep(0)
        return float((torch.ones(3, device=device) * number).sum())

    lost: list[BaseException | None] = []

    def end(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        lost.append(context.get("exception"))
        loop.stop()

    async def main() -> list[float]:
        asyncio.get_running_loop().set_exception_handler(end)  # else it goes on without the task that was struck
        return list(await asyncio.gather(*(one(float(i)) for i in range(4))))

    try:
        return asyncio.run(main())
    except RuntimeError:
        if lost and lost[0] is not None:
            raise lost[0] from None
        raise


@program
def decoding(device: str) -> Any:
    embedding, head = _filled(nn.Embedding(11, 6), device), _filled(nn.Linear(6, 11), device)
    tokens, cache = torch.tensor([[1]], device=device), torch.zeros(1, 0, 6, device=device)
    with torch.inference_mode():
        for _ in range(5):
            cache = torch.cat([cache, embedding(tokens[:, -1:])], 1)
            attended = F.scaled_dot_product_attention(cache[:, -1:], cache, cache)
            tokens = torch.cat([tokens, head(attended).argmax(-1)], 1)
    return tokens.tolist()


def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ weight) + 1).square().mean()


@program
def compiled(device: str) -> Any:
    weight = _numbers(6, 5).to(device).requires_grad_()
    run = _layer
    if torch.device(device).type != "cpu":
        torch._dynamo.reset()
        run = torch.compile(_layer, backend="sky")
    loss = run(_numbers(3, 6).to(device), weight)
    loss.backward()
    return [loss.detach().cpu(), weight.grad.cpu()]
