"""Memory of freed tensors is used again, and given back when somebody asks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import psutil
import pytest
import torch

import skyproxy

_MIB = 1 << 20

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the C library of GNU is told anything")

_PROGRAM = f"""
import json, resource, sys
from skyproxy_server.allocator import give_back_memory, keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
import psutil, torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    large = torch.ones(16 * {_MIB}, dtype=torch.uint8)
    return large, torch.ones(48 * {_MIB}, dtype=torch.uint8)

for _ in range(3):
    step()
before = faults()
for _ in range(20):
    step()
pages = faults() - before
full = psutil.Process().memory_info().rss
give_back_memory()
print(json.dumps({{"pages": pages, "given_back": full - psutil.Process().memory_info().rss}}))
"""


def run(mode: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


def test_memory_that_was_freed_costs_no_page_faults_and_can_be_given_back() -> None:
    kept, plain = run("keep"), run("plain")
    assert kept["pages"] * 4 < plain["pages"]
    assert kept["given_back"] >= 60 * _MIB


def test_a_worker_gives_its_memory_back_when_asked() -> None:
    node = skyproxy.launch_local("cpu")
    try:
        (device,) = node.devices
        worker = psutil.Process(node.run(os.getpid))
        held = torch.ones(64 * _MIB, dtype=torch.uint8, device=device)
        torch.sky.synchronize(device)
        full = worker.memory_info().rss
        del held
        torch.sky.synchronize(device)
        torch.sky.empty_cache()
        torch.sky.synchronize(device)
        assert full - worker.memory_info().rss >= 60 * _MIB
    finally:
        node.close()
