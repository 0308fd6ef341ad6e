"""What was delivered is kept by nobody: not by the client, whose collector need not run, nor by the worker."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

import skyproxy

SIZE = 32 << 20
ROUNDS = 12


def as_tensor(seed: int) -> Any:
    import torch

    return torch.full((SIZE // 4,), float(seed))


def as_bytes(seed: int) -> Any:
    return bytes([seed]) * SIZE


def as_array(seed: int) -> Any:
    import numpy

    return numpy.full(SIZE // 4, seed, numpy.float32)


def as_error(seed: int) -> Any:
    error = ValueError("with a lot of data")
    error.data = bytes([seed]) * SIZE  # type: ignore[attr-defined]
    raise error


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def settled(node: skyproxy.Node, process: psutil.Process) -> int:
    """The resident bytes of a process once the worker has dropped what it may, and has given back what is free."""
    node.run(abs, 1)
    node.synchronize()
    torch.sky.empty_cache()
    node.synchronize()
    lowest, pause = process.memory_info().rss, threading.Event()
    for _ in range(20):
        pause.wait(0.02)
        lowest = min(lowest, process.memory_info().rss)
    return int(lowest)


def taken(node: skyproxy.Node, function: Callable[[int], Any], seed: int) -> None:
    try:
        node.submit(function, seed).result()
    except ValueError:
        pass


def dropped(node: skyproxy.Node, function: Callable[[int], Any], seed: int) -> None:
    call = node.submit(function, seed)
    ended = threading.Event()
    call.add_done_callback(lambda call: ended.set())
    assert ended.wait(60)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("use", [taken, dropped])
@pytest.mark.parametrize("function", [as_tensor, as_bytes, as_array, as_error])
def test_delivered_results_are_freed_at_once(
    node: skyproxy.Node, function: Callable[[int], Any], use: Callable[..., None]
) -> None:
    assert node.process_id is not None
    processes = {"client": psutil.Process(), "worker": psutil.Process(node.process_id)}
    for seed in range(2):
        use(node, function, seed)
    before = {name: settled(node, process) for name, process in processes.items()}
    for seed in range(ROUNDS):
        use(node, function, seed)
    for name, process in processes.items():
        grown = settled(node, process) - before[name]
        assert grown < 3 * SIZE, f"the {name} keeps {grown >> 20} MiB"
