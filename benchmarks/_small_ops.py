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


Prepared = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]
"""What is timed, and what then reads a value of its result and checks it."""


def _elementwise(device: str, count: int) -> Prepared:
    base = torch.arange(4096.0, device=device)
    inputs = []
    for shape in itertools.islice(_new_shapes, count):
        stride = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        inputs.append(base.as_strided(shape, stride))
    assert len(inputs) == count, "every shape was used; make more of them in _shapes()"

    def run() -> torch.Tensor:
        result = base
        for x in inputs:
            result = x + x
        return result

    def check(result: torch.Tensor) -> None:
        assert result.flatten()[-1].item() == 2 * (result.numel() - 1)

    return run, check


def _growing_cache(device: str, count: int) -> Prepared:
    token = torch.ones(1, 2, 1, next(_new_numbers), device=device)

    def run() -> torch.Tensor:
        cache = token
        for _ in range(count):
            cache = torch.cat((cache, token), 2)
        return cache

    def check(cache: torch.Tensor) -> None:
        assert cache.sum().item() == token.numel() * (count + 1)

    return run, check


def _scalars(device: str, count: int) -> Prepared:
    x = torch.ones(16, 16, device=device)
    numbers = [next(_new_numbers) / 64 for _ in range(count)]

    def run() -> torch.Tensor:
        y = x
        for number in numbers:
            y = x * number
        return y

    def check(y: torch.Tensor) -> None:
        assert y[0, 0].item() == torch.tensor(numbers[-1]).item()

    return run, check


def _indices(device: str, count: int) -> Prepared:
    x = torch.arange(float(count), device=device)

    def run() -> torch.Tensor:
        y = x
        for index in range(count):
            y = x[index]
        return y

    def check(y: torch.Tensor) -> None:
        assert y.item() == count - 1

    return run, check


def _slices(device: str, count: int) -> Prepared:
    start = next(_new_numbers) % 16
    x = torch.arange(float(start + 2 * count), device=device)

    def run() -> torch.Tensor:
        y = x
        for index in range(count):
            y = x[start + index : start + 2 * index + 1]
        return y

    def check(y: torch.Tensor) -> None:
        assert y[0].item() == start + count - 1

    return run, check


def never_seen(bench: Bench) -> None:
    """Operations whose shapes or scalars never came before: caches of any kind do not help, here or on the worker."""
    count = bench.scale.new_shapes

    def measure(prepare: Callable[[str, int], Prepared], device: str, whole: list[float]) -> float:
        run, check = prepare(device, count)
        bench.synchronize()
        started = time.perf_counter()
        result = run()
        recorded = time.perf_counter()
        check(result)
        whole.append((time.perf_counter() - started) / count * 1e6)
        return (recorded - started) / count * 1e6

    for name, prepare in (
        ("x + x, never-seen shape", _elementwise),
        ("cat of a growing cache", _growing_cache),
        ("x * k, changing scalar", _scalars),
        ("x[i], changing index", _indices),
        ("x[i:j], changing slice", _slices),
    ):
        whole: dict[str, list[float]] = {"sky": [], "local": []}
        for side, device in (("sky", bench.device), ("local", bench.local)):
            measure(prepare, device, whole[side])
            whole[side].clear()  # the first one also loads and makes what a process needs once
        figures = interleaved(
            {
                side: lambda prepare=prepare, device=device, kept=whole[side]: measure(prepare, device, kept)
                for side, device in (("sky", bench.device), ("local", bench.local))
            },
            bench.scale.rounds,
        )
        bench.compare("small operations", f"client time: {name}", "us/op", figures, NEVER_SEEN)
        bench.compare("small operations", f"end to end: {name}", "us/op", whole)


def _assert_equal(sky: torch.Tensor, local: torch.Tensor) -> None:
    sky, local = sky.detach().cpu(), local.detach().cpu()
    assert torch.equal(sky, local), f"the remote result differs: {sky} against {local}"


__all__ = ["cases", "end_to_end", "enqueue", "never_seen"]
