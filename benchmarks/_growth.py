"""How cost grows with the work: parameters, living tensors, depth of the graph, length of a sequence; and factories."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import psutil
import torch
from _figures import interleaved, microseconds_each, ratio_at_most, value_at_most
from _links import Bench


def _timed(run: Callable[[], object], bench: Bench) -> float:
    bench.synchronize()
    started = time.perf_counter()
    run()
    bench.synchronize()
    return (time.perf_counter() - started) * 1e3


def _chain(count: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(count)))


def _train(count: int, device: str, bench: Bench) -> tuple[float, float, float]:
    """Milliseconds of moving a model, of its first step with AdamW, and of the third."""
    gc.collect()  # as where a program begins: what the rounds before have left is not this one's
    model, x = _chain(count), torch.ones(2, 4, device=device)
    moved = _timed(lambda: model.to(device), bench)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    steps = [_timed(step, bench) for _ in range(3)]
    assert model[0].weight.isfinite().all().item()
    return moved, steps[0], steps[2]


def parameters(bench: Bench) -> None:
    """A chain of small layers: each operation of the optimizer is on a list of all parameters."""
    for count in (10,) if bench.scale.small_models else (100, 1000, 5000):
        rows: dict[str, list[tuple[float, float, float]]] = {"sky": [], "local": []}
        for number in range(max(2, bench.scale.slow_rounds)):
            sides = [("sky", bench.device), ("local", bench.local)]
            for side, device in sides if number % 2 == 0 else reversed(sides):
                # Another number of layers each time, so that nothing is known of the lists.
                rows[side].append(_train(count + number, device, bench))
        for at, (name, targets) in enumerate(
            (("first step", (ratio_at_most(5),)), ("later step", (ratio_at_most(3),))), start=1
        ):
            figures = {side: [row[at] for row in found] for side, found in rows.items()}
            bench.compare("growth", f"{count} layers, AdamW: {name}", "ms", figures, targets)


def modules(bench: Bench) -> None:
    """Moving a module, beside converting it here; and copying its state dict to the CPU, beside cloning it here."""
    for count in (10,) if bench.scale.small_models else (100, 1000, 5000):
        moved: dict[str, list[float]] = {"sky": [], "local": []}
        copied: dict[str, list[float]] = {"sky": [], "local": []}
        for number in range(max(2, bench.scale.slow_rounds)):
            for side in ("sky", "local") if number % 2 == 0 else ("local", "sky"):
                model = _chain(count)
                target = bench.device if side == "sky" else torch.float64
                each = 2 * count / 1e3
                moved[side].append(_timed(lambda model=model, target=target: model.to(target), bench) / each)
                copy = torch.Tensor.cpu if side == "sky" else torch.Tensor.clone
                copied[side].append(
                    _timed(lambda model=model, copy=copy: {k: copy(v) for k, v in model.state_dict().items()}, bench)
                    / each
                )
        bench.compare("growth", f"{2 * count} parameters: `.to`, each", "us", moved)
        bench.compare("growth", f"{2 * count} parameters: `v.cpu()` over a state dict, each", "us", copied)


_FACTORIES: dict[str, Callable[[str], object]] = {
    "torch.empty(4)": lambda device: torch.empty(4, device=device),
    "torch.zeros(4)": lambda device: torch.zeros(4, device=device),
    "torch.full((4,), 2.0)": lambda device: torch.full((4,), 2.0, device=device),
    "torch.arange(4)": lambda device: torch.arange(4, device=device),
    "torch.rand(4)": lambda device: torch.rand(4, device=device),
    "torch.zeros(())": lambda device: torch.zeros((), device=device),
    "torch.tensor([1.0, 2.0])": lambda device: torch.tensor([1.0, 2.0], device=device),
    "torch.tensor(1.0)": lambda device: torch.tensor(1.0, device=device),
}


def factories(bench: Bench) -> None:
    """What the program waits for a small tensor that is made of numbers."""
    count = bench.scale.calls // 5
    for name, make in _FACTORIES.items():
        sides = {
            side: lambda make=make, device=device: microseconds_each(lambda: make(device), count, bench.synchronize)
            for side, device in (("sky", bench.device), ("local", bench.local))
        }
        figures = interleaved(sides, bench.scale.rounds)
        bench.compare("growth", f"client time: {name}", "us", figures, (value_at_most(8),))


def living_tensors(bench: Bench) -> None:
    """Making small tensors while many live, and what each takes of this process's memory."""
    resident = psutil.Process().memory_info
    for living in (200,) if bench.scale.small_models else (200, 200_000):
        kept, taken = {}, {}
        for device in (bench.local, bench.device):
            before = resident().rss
            kept[device] = [torch.ones(4, device=device) for _ in range(living)]
            bench.synchronize()
            taken[device] = (resident().rss - before) / living

        def make(device: str) -> float:
            return microseconds_each(lambda: torch.zeros(4, device=device), bench.scale.calls // 10, bench.synchronize)

        sides = {"sky": lambda: make(bench.device), "local": lambda: make(bench.local)}
        figures = interleaved(sides, bench.scale.rounds)
        bench.compare("growth", f"torch.zeros(4) beside {living} living tensors", "us", figures, (value_at_most(8),))
        if living > 10_000:  # what fewer take is lost in what the process has at hand
            bytes_each = {"sky": [taken[bench.device]], "local": [taken[bench.local]]}
            name = f"memory of the client for each of {living} living tensors"
            bench.compare("growth", name, "bytes", bytes_each, (value_at_most(1024),))
        kept.clear()


def depth_and_length(bench: Bench) -> None:
    """Backward through deep graphs, and attention over longer and longer sequences."""

    def backward(depth: int, device: str) -> float:
        x = torch.ones(4, device=device, requires_grad=True)

        def run() -> None:
            y = x
            for _ in range(depth):
                y = y * 1.0
            y.sum().backward()

        return _timed(run, bench) / depth * 1e3

    def attend(length: int, device: str) -> float:
        x = torch.ones(1, length, 32, device=device)
        return _timed(lambda: [torch.softmax(x[:, :n] @ x[:, :n].mT, -1) for n in range(1, length)], bench) / length

    tiny = bench.scale.small_models
    for name, unit, measure, sizes in (
        ("forward and backward, an operation, depth", "us", backward, (20,) if tiny else (100, 2000)),
        ("attention over a growing sequence, a token, length", "ms", attend, (8,) if tiny else (32, 128)),
    ):
        for size in sizes:
            figures = interleaved(
                {
                    "sky": lambda measure=measure, size=size: measure(size, bench.device),
                    "local": lambda measure=measure, size=size: measure(size, bench.local),
                },
                bench.scale.slow_rounds,
            )
            bench.compare("growth", f"{name} {size}", unit, figures)


def growth(bench: Bench) -> None:
    """All of it."""
    factories(bench)
    parameters(bench)
    modules(bench)
    living_tensors(bench)
    depth_and_length(bench)


__all__ = ["growth"]
