"""Programs whose results are compared with and without broken connections; run as a script, thousands of cuts.

python -m tests.integration.broken_connections --cuts 2000
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("SKYPROXY_RECONNECT", "1")

import torch

import skyproxy
from tests.integration.chaos_proxy import chaos_proxy
from tests.integration.programs import worker


def train(
    device: torch.device | str,
    steps: int = 60,
    seed: int = 0,
    before_step: Callable[[int], object] = lambda step: None,
) -> list[torch.Tensor]:
    """Train a small network, with values read, small and large uploads, and large downloads; the final weights."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 8))
    data = torch.randn(steps, 160, 64)  # 40 KB a step: inline
    wide = torch.randn(512, 300)  # 600 KB: on the bulk connection
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        before_step(step)
        x = data[step].to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            seen.append(loss.cpu())
        if step % 10 == 0:
            moved = (wide + step).to(device)
            moved.add_(model[0].bias)
            seen.append(moved.cpu())
            moved.mul_(0)  # in place, while the download may be on its way
    return [*seen, *(parameter.detach().cpu() for parameter in model.parameters())]


def check_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def count(device: torch.device | str, times: int) -> float:
    """Add one to a number on the worker, so many times: what is done twice, or not at all, is seen."""
    total = torch.zeros((), device=device)
    for number in range(times):
        total.add_(1)
        if number % 50 == 0:
            total.item()
    return float(total.item())


def move(device: torch.device | str, size_bytes: int, seed: int) -> None:
    """Upload and download as many bytes, and compare them."""
    values = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    there = values.to(device)
    values.zero_()  # what was uploaded is ours to change
    back = there.cpu()
    there.fill_(7)
    expected = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(back, expected)
    assert bool((there == 7).all())


def held(process: int | None = None) -> dict[str, int]:
    """What a process has: threads, descriptors, and memory in MB."""
    gc.collect()
    status = Path(f"/proc/{process or 'self'}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{process or 'self'}/fd")),
        "MB": int(fields["VmRSS"].split()[0]) // 1024,
    }


def main() -> None:
    """Break connections at random places until there were enough cuts; end with an error at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        worker(Path(folder)) as (url, token),
        chaos_proxy(int(url.rpartition(":")[2]), arguments.seed) as proxy,
        skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=token) as node,
    ):
        device = node.devices[0]
        expected = train(device)
        assert node.run(sum, [1, 2, 3]) == 6
        process = node.run(os.getpid)
        before = held(), held(process)
        rounds, began = 0, time.monotonic()
        while proxy.cuts < arguments.cuts:
            rounds += 1
            proxy.cut_after(1, 60_000 * rounds % 900_000 + 20_000, cuts=arguments.cuts)
            proxy.cut()
            check_same(expected, train(device))
            assert count(device, 2000) == 2000
            move(device, 3 << 20, rounds)
            assert node.run(sum, [1, 2, 3]) == 6
            print(
                f"{rounds} rounds, {proxy.cuts} cuts, {time.monotonic() - began:.0f} s: exact, {held()['MB']} MB",
                flush=True,
            )
        proxy.cut_after(1, 1, cuts=0)
        torch.sky.synchronize(device)
        for who, then, now in zip(("client", "worker"), before, (held(), held(process)), strict=True):
            print(f"{who}: " + ", ".join(f"{name} {then[name]} -> {now[name]}" for name in now))
        print("handles on the worker", node._session.call("stats")["handles"])


if __name__ == "__main__":
    main()
