"""The threads that a pool takes in the program: as many for sixteen processes as for one."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import Counter

import pytest
import torch

import skyproxy as sky
from skyproxy.errors import RankErrors, SessionLostError
from skyproxy.transport.shared_threads import shared_threads
from tests.integration.programs import wait_for

pytestmark = [
    pytest.mark.skipif(not hasattr(select, "epoll"), reason="threads are shared where the system can wait like that"),
    pytest.mark.timeout(240),
]
MOST_MORE = 8
"""Threads that unpickle results are made as they are needed, up to eight for a pool of any size."""


@sky.compute
def speak(x: int) -> int:
    print("rank", sky.instance_info().rank)
    return x + 1


@sky.compute
def process() -> int:
    return os.getpid()


def own_threads() -> Counter[str]:
    """The names of the threads that are skyproxy's, without those of asyncio."""
    return Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("skyproxy"))


def threads_of(nodes: int) -> Counter[str]:
    """The threads that there are while a pool has run all kinds of calls, beyond those that there were."""
    before = own_threads()
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=nodes) as pool:
        assert speak(1) @ pool == [2] * nodes
        assert list(pool.map(speak, range(2 * nodes))) == list(range(1, 2 * nodes + 1))
        assert speak(torch.ones(3).sum().item()) >> pool == 4
        wait_for(lambda: not own_threads()["skyproxy-worker-port"], "the readers of ports have ended")
        return own_threads() - before


def test_a_pool_of_sixteen_takes_hardly_more_threads_than_a_pool_of_one() -> None:
    threads_of(1)  # those that last as long as the process are there from now on
    one, sixteen = threads_of(1), threads_of(16)
    helpers = "skyproxy-helper"  # more than there are at rest are for moments in which all of them wait
    assert sixteen.total() - sixteen[helpers] <= one.total() - one[helpers] + MOST_MORE, (one, sixteen)
    assert sixteen[helpers] <= 64
    shared = shared_threads()
    assert shared is not None
    wait_for(lambda: len(shared._helpers) <= 4, "helpers that are not needed end")


def test_a_process_that_dies_is_replaced_and_its_connections_leave_nothing() -> None:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2) as pool:
        first, second = process() @ pool
        os.kill(second, signal.SIGKILL)

        def processes() -> list[int] | None:
            try:
                return process() @ pool
            except (RankErrors, SessionLostError):  # until it is known
                return None

        again = wait_for(processes, "a new process has taken its place")
        assert again[0] == first
        assert again[1] != second
        wait_for(lambda: not own_threads()["skyproxy-broken"], "nobody tries to reach the old one")


def test_tensors_and_large_results_take_the_shared_thread() -> None:
    with sky.Compute(provider=sky.Local(device="cpu")) as pool:
        node = pool.nodes[0]
        sent = torch.randn(1 << 20)
        there = sent.to(node.devices[0])
        assert torch.equal(there.cpu(), sent)
        assert (there * 2).sum().item() == (sent * 2).sum().item()
        assert torch.equal(pool.run(torch.neg, sent), -sent)
        assert own_threads()["skyproxy-uploads"] >= 1
