"""Programs whose worker is killed while they run, compared with an undisturbed run; as a script, many kills.

python -m tests.integration.protected_programs --kills 50
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import skyproxy
from skyproxy.tensor.core.transfers import start_download
from tests.integration.programs import worker

Device = torch.device | str
Disturb = Callable[[int], object]
Program = Callable[[Device, int, Disturb], list[torch.Tensor]]


def _nothing(step: int) -> None:
    pass


def digits(device: Device, steps: int, disturb: Disturb = _nothing) -> list[torch.Tensor]:
    """Train a CNN with dropout and Adam; losses and weights."""
    torch.manual_seed(3)
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 10))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, losses = torch.Generator().manual_seed(9), []
    for step in range(steps):
        x = torch.randn(16, 1, 8, 8, generator=images).to(device)
        y = torch.randint(0, 10, (16,), generator=images).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        disturb(step)
        if step % 7 == 0:
            losses.append(losses[-1].cpu())  # the program waits for its worker now and then
    return [loss.cpu() for loss in losses] + [p.detach().cpu() for p in model.parameters()]


def transformer(device: Device, steps: int, disturb: Disturb = _nothing) -> list[torch.Tensor]:
    """Train a layer of a transformer with a schedule, on batches that are uploaded beside the operations."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    texts, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x = torch.randn(32, 20, 32, generator=texts).to(device)  # 80 KB
        disturb(step)
        loss = (layer(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return [loss.cpu() for loss in losses] + [p.detach().cpu() for p in layer.parameters()]


def captured(device: Device, steps: int, disturb: Disturb = _nothing) -> list[torch.Tensor]:
    """Replay a captured graph, with values written into its input and read from its output."""
    torch.manual_seed(5)
    weight, x = torch.randn(32, 32).to(device) / 6, torch.zeros(8, 32, device=device)
    (x @ weight).tanh()
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y = (x @ weight).tanh()
        weight.add_(y.mean(0).outer(x.mean(0)), alpha=0.01)
    inputs, seen = torch.Generator().manual_seed(2), []
    for step in range(steps):
        x.copy_(torch.randn(8, 32, generator=inputs))
        disturb(step)
        graph.replay()
        if step % 5 == 0:
            seen.append(y.cpu())
    return [*seen, weight.cpu()]


def transfers(device: Device, steps: int, disturb: Disturb = _nothing) -> list[torch.Tensor]:
    """Move tensors that travel beside the operations, in both directions, and change them in place meanwhile."""
    values, seen = torch.Generator().manual_seed(6), []
    total = torch.zeros(200_000, device=device)
    for step in range(steps):
        here = torch.randn(200_000, generator=values)
        there = here.to(device)
        here.zero_()  # what was uploaded is ours to change
        total.add_(there)
        disturb(step)
        finish, _ = start_download(total)
        total.mul_(0.5)  # in place, while the download may be on its way
        seen.append(finish())
    return [*seen, total.cpu()]


PROGRAMS: dict[str, Program] = {
    "digits": digits,
    "transformer": transformer,
    "captured": captured,
    "transfers": transfers,
}


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether two runs gave the same bits."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(each) for each in listed.split()]


class Served(NamedTuple):
    """A worker with a process for each session, which are quicker to replace than whole workers.

    Attributes:
        url, token: where it listens, and what it wants to hear.
        snapshots: its folder for snapshots.
        process: the worker's own process.
        others: what had been started when there was no session.
    """

    url: str
    token: str
    snapshots: Path
    process: int
    others: frozenset[int]

    def kill_session(self) -> None:
        """Kill the process of the one session that there is."""
        for each in set(children(self.process)) - self.others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Run such a worker, which keeps snapshots in this folder."""
    before, snapshots = set(children(os.getpid())), folder / "snapshots"
    with worker(folder, "--session-processes", "--snapshots", str(snapshots)) as (url, token):
        (process,) = set(children(os.getpid())) - before
        yield Served(url, token, snapshots, process, frozenset(children(process)))


def main() -> int:
    """Kill workers at random places of each program until it was done so often; fail at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice, recoveries, began = random.Random(arguments.seed), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as there:
        while recoveries < arguments.kills:
            for name, program in PROGRAMS.items():
                places = set(dice.sample(range(arguments.steps), 3))
                with skyproxy.connect(there.url, token=there.token) as node:
                    expected = program(node.devices[0], arguments.steps, _nothing)
                    protected = skyproxy.protect(every=dice.choice((0.02, 0.2, 5.0)), node=node)
                    seen = program(
                        node.devices[0], arguments.steps, lambda step, at=places: step in at and there.kill_session()
                    )
                    recoveries += protected.recoveries
                    if not same(expected, seen):
                        print(f"{name}: another result after kills at {sorted(places)}")
                        return 1
                print(f"{name}: same bits; {recoveries} recoveries, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
