"""`Compute` and `Cluster` on a cluster, as a program uses them."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.computes import User, pods_of, wait_nothing_left

TWO = """
import asyncio, copy, os, sys, torch
from skyproxy import Cluster, Compute, Image
from skyproxy.providers import Kubernetes

async def main():
    where = Kubernetes(sys.argv[1])
    first = Compute(name="first", provider=where, image=Image(pip=["torch"], env={"A": "image"}), env={"B": "worker"})
    steps = []
    second = Compute(name="second", provider=where, on_event=lambda step: steps.append(step.phase))
    async with Cluster(first, second) as (a, b):
        x = torch.arange(4.0, device=a.device("cpu"))
        assert str(x.device) != str(b.device("cpu"))
        y = copy.deepcopy(x).to(b.device("cpu"))
        assert (y * 2).sum().item() == 12.0

        def seen(t):
            return os.environ["A"], os.environ["B"], t.device.type, float(t.sum())

        print(await a.execute(seen, x))
        assert steps[-1] == "running"

asyncio.run(main())
"""

ONE_FAILS = """
import asyncio, sys
from skyproxy import Cluster, Compute
from skyproxy.providers import Kubernetes

async def main():
    where = Kubernetes(sys.argv[1])
    huge = Compute(name="huge", provider=where, resources={"nvidia.com/gpu": 999}, timeout=10)
    async with Cluster(Compute(name="small", provider=where), huge):
        print("both came up")

try:
    asyncio.run(main())
except Exception as error:
    print(type(error).__name__, error)
"""

POOL = """
import sys, skyproxy as sky
from skyproxy.providers import Kubernetes

@sky.compute
def rank(x):
    info = sky.instance_info()
    return info.node, info.total_nodes, x

if __name__ == "__main__":
    with sky.Compute(name="pool", provider=Kubernetes(sys.argv[1]), nodes=2) as pool:
        print(rank(7) @ pool)
"""


def test_two_computes_in_a_cluster_and_nothing_left(cluster: Cluster, user: User) -> None:
    assert user.python(TWO, user.namespace).splitlines()[-1] == "('image', 'worker', 'cpu', 6.0)"
    wait_nothing_left(cluster, user.namespace)


def test_if_one_does_not_come_up_the_other_is_taken_back(cluster: Cluster, user: User) -> None:
    told = user.python(ONE_FAILS, user.namespace)
    assert "both came up" not in told
    assert "nvidia.com/gpu" in told
    assert pods_of(cluster, user.namespace, "small") == []
    wait_nothing_left(cluster, user.namespace)


@pytest.mark.timeout(400)
def test_a_pool_of_two_nodes(cluster: Cluster, user: User) -> None:
    assert user.python(POOL, user.namespace).splitlines()[-1] == "[(0, 2, 7), (1, 2, 7)]"
    wait_nothing_left(cluster, user.namespace)
