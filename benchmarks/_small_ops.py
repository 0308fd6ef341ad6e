"""Small operations: what the program waits for each, what the worker gets done, what new shapes and scalars cost."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import torch
from _figures import Target, interleaved, microseconds_each, ratio_at_most, value_at_least, value_at_most
from _links import Bench

Call = Callable[[], torch.Tensor]

ENQUEUE = (ratio_at_most(5), value_at_most(8))
NEVER_SEEN = (value_at_most(30),)
END_TO_END = (value_at_least(150),)


def cases(device: str) -> dict[str, tuple[Call, tuple[Target, ...]]]:
    """Operations on 16x16 float32, and what each should reach."""
    x = torch.ones(16, 16, device=device)
    y = torch.ones(16, 16, device=device)
    total = torch.zeros(16, 16, device=device)
    g = torch.ones(16, 16, device=device, requires_grad=True)
    return {
        "y = x + y": (lambda: x + y, ENQUEUE),
        "x.add_(y), in place": (lambda: total.add_(y), ENQUEUE),
        "x + y with gradient": (lambda: g + y, ENQUEUE),
        "x * 2.0": (lambda: x * 2.0, ()),
        "x @ y": (lambda: x @ y, ()),
        "x.view(256)": (lambda: x.view(256), ()),
        "x[3]": (lambda: x[3], ()),
        "x.sum(1)": (lambda: x.sum(1), ()),
    }


def enqueue(bench: Bench) -> None:
    """Client time of an operation: what the program itself waits, while the worker computes beside it."""
    count = bench.scale.calls
    sky, local = cases(bench.device), cases(bench.local)
    for name, (call, targets) in sky.items():
        twin = local[name][0]
        for warm in (call, twin):
            microseconds_each(warm, max(1, count // 5))
        figures = interleaved(
            {
                "sky": lambda call=call: microseconds_each(call, count, bench.synchronize),
                "local": lambda twin=twin: microseconds_each(twin, count, bench.synchronize),
            },
            bench.scale.rounds,
        )
        _assert_equal(call(), twin())
        bench.compare("small operations", f"client time: {name}", "us/op", figures, targets)


def end_to_end(bench: Bench) -> None:
    """Thousands of operations a second, done on the worker and their result read."""
    count = bench.scale.chain_ops

    def rate(chain: Callable[[str], float], device: str) -> float:
        bench.synchronize()
        started = time.perf_counter()
        done = chain(device)
        return done / (time.perf_counter() - started) / 1e3

    def out_of_place(device: str) -> float:
        x, y = torch.ones(16, 16, device=device), torch.zeros(16, 16, device=device)
        for _ in range(count):
            y = y + x
        assert y[0, 0].item() == count
        return count

    def in_place(device: str) -> float:
        x, y = torch.ones(16, 16, device=device), torch.zeros(16, 16, device=device)
        for _ in range(count):
            y.add_(x)
        assert y[0, 0].item() == count
        return count

    def with_gradient(device: str) -> float:
        depth = 50
        chains = max(1, count // (2 * depth))
        factor = torch.full((16, 16), -1.0, device=device)
        leaf = torch.ones(16, 16, device=device, requires_grad=True)
        upstream = torch.ones(16, 16, device=device)
        for _ in range(chains):
            y = leaf
            for _ in range(depth):
                y = y * factor
            y.backward(upstream)
        assert leaf.grad is not None
        assert leaf.grad[0, 0].item() == chains
        return 2 * depth * chains

    for name, chain, targets in (
        ("y = y + x", out_of_place, END_TO_END),
        ("y.add_(x), in place", in_place, END_TO_END),
        ("y = y * x, forward and backward", with_gradient, ()),
    ):
        for device in (bench.device, bench.local):
            rate(chain, device)
        figures = interleaved(
            {
                "sky": lambda chain=chain: rate(chain, bench.device),
                "local": lambda chain=chain: rate(chain, bench.local),
            },
            bench.scale.rounds,
        )
        bench.compare("small operations", f"end to end: {name}", "kops/s", figures, targets)


def _shapes() -> Iterator[tuple[int, ...]]:
    """Shapes of up to 4,096 elements, none twice in this process, large and small ones mixed."""
    sides = range(1, 25)
    every = [s for s in itertools.product(sides, repeat=4) if s[0] * s[1] * s[2] * s[3] <= 4096]
    random.Random(0).shuffle(every)
    return iter(every)


_new_shapes = _shapes()
_new_numbers = itertools.count(1)


def never_seen(bench: Bench) -> None:
    """Operations whose shapes or scalars never came before: caches of any kind do not help."""
    count = bench.scale.new_shapes

    def elementwise(device: str) -> float:
        base = torch.arange(4096.0, device=device)
        inputs = []
        for shape in itertools.islice(_new_shapes, count):
            stride = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
            inputs.append(base.as_strided(shape, stride))
        assert len(inputs) == count, "every shape was used; make more of them in _shapes()"
        result = base
        bench.synchronize()
        started = time.perf_counter()
        for x in inputs:
            result = x + x
        took = time.perf_counter() - started
        assert result.flatten()[-1].item() == 2 * (result.numel() - 1)
        return took / count * 1e6

    def growing_cache(device: str) -> float:
        token = torch.ones(1, 2, 1, next(_new_numbers), device=device)
        cache = token
        bench.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            cache = torch.cat((cache, token), 2)
        took = time.perf_counter() - started
        assert cache.sum().item() == token.numel() * (count + 1)
        return took / count * 1e6

    def scalars(device: str) -> float:
        x = torch.ones(16, 16, device=device)
        numbers = [next(_new_numbers) / 64 for _ in range(count)]
        y = x
        bench.synchronize()
        started = time.perf_counter()
        for number in numbers:
            y = x * number
        took = time.perf_counter() - started
        assert y[0, 0].item() == torch.tensor(numbers[-1]).item()
        return took / count * 1e6

    def indices(device: str) -> float:
        x = torch.arange(float(count), device=device)
        y = x
        bench.synchronize()
        started = time.perf_counter()
        for index in range(count):
            y = x[index]
        took = time.perf_counter() - started
        assert y.item() == count - 1
        return took / count * 1e6

    def slices(device: str) -> float:
        x = torch.arange(float(4 * count), device=device)
        start = next(_new_numbers) % 16
        y = x
        bench.synchronize()
        started = time.perf_counter()
        for index in range(count):
            y = x[start + index : start + 2 * index + 1]
        took = time.perf_counter() - started
        assert y[0].item() == start + count - 1
        return took / count * 1e6

    for name, run, targets in (
        ("x + x, never-seen shape", elementwise, NEVER_SEEN),
        ("cat of a growing cache", growing_cache, NEVER_SEEN),
        ("x * k, changing scalar", scalars, NEVER_SEEN),
        ("x[i], changing index", indices, NEVER_SEEN),
        ("x[i:j], changing slice", slices, NEVER_SEEN),
    ):
        for device in (bench.device, bench.local):
            run(device)  # what is loaded or made once in a process
        figures = interleaved(
            {"sky": lambda run=run: run(bench.device), "local": lambda run=run: run(bench.local)}, bench.scale.rounds
        )
        bench.compare("small operations", f"client time: {name}", "us/op", figures, targets)


def _assert_equal(sky: torch.Tensor, local: torch.Tensor) -> None:
    sky, local = sky.detach().cpu(), local.detach().cpu()
    assert torch.equal(sky, local), f"the remote result differs: {sky} against {local}"


__all__ = ["cases", "end_to_end", "enqueue", "never_seen"]
