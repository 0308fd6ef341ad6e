"""One large tensor there and back: how fast, how much memory it takes besides, and what else is possible meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from _figures import latencies, percentile, ratio_at_least, value_at_least, value_at_most
from _links import Bench
from _memory_watch import MemoryWatch

AGAINST = "raw socket, fresh memory"
_MEBIBYTE = 1 << 20


def _payload(mebibytes: int) -> torch.Tensor:
    return torch.randn(mebibytes << 18, generator=torch.Generator().manual_seed(0))


def _wait_for_all_of(remote: torch.Tensor) -> None:
    """Waits until the last byte is there: the worker may well do other things while a transfer goes on."""
    remote[-1].item()


def bandwidth(bench: Bench) -> None:
    """Upload and download, bit-exact, against a raw socket that fills memory nobody touched before."""
    scale = bench.scale
    capped = bench.link.conditions is not None and bench.link.conditions.mbit_up is not None
    mebibytes = scale.mebibytes if bench.direct else 4 if capped else scale.mebibytes_through_proxy
    mebibytes = min(mebibytes, scale.mebibytes)
    tensor = _payload(mebibytes)
    data = memoryview(tensor.numpy()).cast("B")
    figures: dict[str, list[float]] = {"up": [], "down": [], "raw up": [], "raw down": []}

    def ours() -> None:
        bench.synchronize()
        started = time.perf_counter()
        remote = tensor.to(bench.device)
        _wait_for_all_of(remote)
        figures["up"].append(mebibytes / (time.perf_counter() - started))
        started = time.perf_counter()
        back = remote.cpu()
        figures["down"].append(mebibytes / (time.perf_counter() - started))
        assert torch.equal(back, tensor), "the tensor changed on its way"

    def raw() -> None:
        up, down = bench.yardsticks.raw_transfer(data)
        figures["raw up"].append(mebibytes / up)
        figures["raw down"].append(mebibytes / down)

    ours()
    raw()
    for row in figures.values():
        row.clear()  # the first one of each only warmed up
    for number in range(scale.rounds if bench.direct else scale.slow_rounds):
        for run in (ours, raw) if number % 2 == 0 else (raw, ours):
            run()
    targets = (ratio_at_least(0.7),)
    bench.add("bulk", f"upload {mebibytes} MiB", "MiB/s", figures["up"], figures["raw up"], AGAINST, targets)
    bench.add("bulk", f"download {mebibytes} MiB", "MiB/s", figures["down"], figures["raw down"], AGAINST, targets)


def memory(bench: Bench) -> None:
    """Resident memory at most, beyond what was there and the new tensor itself."""
    mebibytes = bench.scale.mebibytes
    tensor = _payload(mebibytes)
    target = (value_at_most(64),)
    extra: dict[str, list[float]] = {}
    watch = MemoryWatch(bench.process_ids)
    try:
        torch.equal(tensor.to(bench.device).cpu(), tensor)  # whatever is allocated once for all
        for _ in range(bench.scale.slow_rounds):
            bench.synchronize()
            watch.start()
            remote = tensor.to(bench.device)
            _wait_for_all_of(remote)
            own, worker = watch.stop()
            extra.setdefault("upload, client", []).append((own.most - own.before) / _MEBIBYTE)
            extra.setdefault("upload, worker", []).append((worker.most - worker.before) / _MEBIBYTE - mebibytes)
            watch.start()
            back = remote.cpu()
            own, worker = watch.stop()
            extra.setdefault("download, client", []).append((own.most - own.before) / _MEBIBYTE - mebibytes)
            extra.setdefault("download, worker", []).append((worker.most - worker.before) / _MEBIBYTE)
            assert torch.equal(back, tensor), "the tensor changed on its way"
            del remote, back
    finally:
        watch.close()
    for name, samples in extra.items():
        # A little below zero where memory of before was used again.
        bench.add("bulk", f"extra memory: {name}", "MiB", [max(0.0, s) for s in samples], targets=target)


class _Mover:
    """A second thread that moves a large tensor again and again."""

    def __init__(self, move: Callable[[], object]) -> None:
        self._move = move
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.moved = 0
        self._thread = threading.Thread(target=self._run, name="mover")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._move()
                self.moved += 1
        except BaseException as error:
            self._error = error

    def __enter__(self) -> _Mover:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def while_it_moves(bench: Bench) -> None:
    """Values and small operations of the main thread while another one moves a large tensor."""
    scale = bench.scale
    tensor = _payload(scale.mebibytes)
    remote = tensor.to(bench.device)
    one = torch.ones((), device=bench.device)
    x = torch.ones(16, 16, device=bench.device)

    def ask() -> list[float]:
        until, found = time.perf_counter() + scale.busy_seconds, []
        while time.perf_counter() < until:
            found += latencies(one.item, 10)
        return sorted(found)

    def operate() -> float:
        started, count = time.perf_counter(), 0
        while time.perf_counter() < started + scale.busy_seconds:
            y = torch.zeros(16, 16, device=bench.device)
            for _ in range(500):
                y = y + x
            count += 500
            assert y[0, 0].item() == 500
        return count / (time.perf_counter() - started) / 1e3

    def upload() -> None:
        moved = tensor.to(bench.device)
        assert moved[-1].item() == tensor[-1].item()

    def download() -> None:
        assert remote.cpu()[-1].item() == tensor[-1].item()

    for name, move in (("upload", upload), ("download", download)):
        figures: dict[str, list[float]] = {
            "p50": [],
            "p99": [],
            "alone p50": [],
            "alone p99": [],
            "rate": [],
            "alone": [],
        }
        for _ in range(scale.slow_rounds):
            with _Mover(move):
                ordered = ask()
            figures["p50"].append(percentile(ordered, 50) / 1e3)
            figures["p99"].append(percentile(ordered, 99) / 1e3)
            with _Mover(move):
                figures["rate"].append(operate())
            ordered = ask()
            figures["alone p50"].append(percentile(ordered, 50) / 1e3)
            figures["alone p99"].append(percentile(ordered, 99) / 1e3)
            figures["alone"].append(operate())
        against = "sky:0, nothing moving"
        add, group, suffix = bench.add, "bulk", f" during {name}"
        add(group, f".item() p50{suffix}", "ms", figures["p50"], figures["alone p50"], against)
        add(group, f".item() p99{suffix}", "ms", figures["p99"], figures["alone p99"], against, (value_at_most(10),))
        add(group, f"small ops{suffix}", "kops/s", figures["rate"], figures["alone"], against, (value_at_least(30),))


__all__ = ["bandwidth", "memory", "while_it_moves"]
