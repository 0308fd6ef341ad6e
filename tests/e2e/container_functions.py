"""What the tests of containers run in them; nothing here needs more than a worker has."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import skyproxy as sky


@sky.function
def total() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(sky.instance_info().node + 1)])
    dist.all_reduce(value)
    return value.item()


@sky.function
def reached() -> list[int]:
    found = []
    for peer in sky.instance_info().peers:
        with socket.create_connection((peer.address, 8765), timeout=30):
            found.append(peer.node)
    return found


@sky.function
def surroundings() -> dict[str, Any]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    try:
        Path("/written").touch()
        writes = True
    except OSError:
        writes = False
    Path("/tmp/written").touch()
    (Path.home() / "written").touch()
    limit = next(
        path.read_text().strip()
        for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
        if path.exists()
    )
    return {
        "capabilities": int(status["CapEff"], 16),
        "no new privileges": status["NoNewPrivs"],
        "user": os.getuid(),
        "writes": writes,
        "memory": limit,
        "secret": os.environ.get("SECRET"),
    }


@sky.function
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@sky.function
def imported(name: str) -> str:
    return str(__import__(name).__name__)


@sky.function
def given() -> list[str]:
    return sorted(name for name in os.environ if name.startswith("GIVEN_"))
