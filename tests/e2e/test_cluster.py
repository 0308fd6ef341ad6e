"""The Python interface on a cluster: two Computes at once, a decorated function, a pool with a process group."""

from __future__ import annotations

from tests.e2e.cluster import Cluster
from tests.e2e.computes import User, collection, wait_nothing_left

PAIR = """
import asyncio, copy, os, socket, sys
import torch
from skyproxy import Cluster, Compute, Image
from skyproxy.providers import Kubernetes

where = Kubernetes(sys.argv[1])
steps = []


def look(there):
    with open("/cache/written", "a") as file:
        file.write("x")
    return socket.gethostname(), os.environ["HF_HOME"], os.environ["OF_IMAGE"], there.device.type, there.sum().item()


async def main():
    left = Compute(
        name="left",
        provider=where,
        resources={"cpu": "1", "memory": "4Gi"},
        volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache"}],
        env={"HF_HOME": "/cache"},
        image=Image(pip=["torch"], env={"OF_IMAGE": "yes"}),
    )
    right = Compute(
        name="right", provider=where, resources={"cpu": "1", "memory": "4Gi"}, on_event=lambda s: steps.append(s.phase)
    )
    async with Cluster(left, right) as (a, b):
        print(*await a.execute(look, torch.arange(4.0, device=a.device("cpu"))))
        print(await b.execute(socket.gethostname), steps[0], steps[-1])
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        policy = copy.deepcopy(model).to(a.device("cpu"))
        reference = copy.deepcopy(policy).to(b.device("cpu"))
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        policy(torch.ones(3, 4, device=a.device("cpu"))).sum().backward()
        optimizer.step()
        before = [bool((p.cpu() == r.cpu()).all()) for p, r in zip(policy.parameters(), reference.parameters())]
        for r, p in zip(reference.parameters(), policy.parameters()):
            r.data.copy_(p.data)
        after = [bool((p.cpu() == r.cpu()).all()) for p, r in zip(policy.parameters(), reference.parameters())]
        print(any(before), all(after))


asyncio.run(main())
"""

HALF = """
import asyncio, sys
from skyproxy import Cluster, Compute
from skyproxy.errors import WorkerStartError
from skyproxy.providers import Kubernetes

where = Kubernetes(sys.argv[1])


async def main():
    good = Compute(name="good", provider=where, resources={"memory": "4Gi"})
    bad = Compute(name="bad", provider=where, resources={"nvidia.com/gpu": "999"}, timeout=5)
    try:
        async with Cluster(good, bad):
            print("both came up")
    except WorkerStartError as error:
        print("failed:", error)


asyncio.run(main())
"""

DECORATED = """
import asyncio, os
import torch
from skyproxy import compute
from skyproxy.providers import Kubernetes

where = Kubernetes(os.environ["WHERE"])


@compute(name="decorated", provider=where, resources={"cpu": "1", "memory": "4Gi"})
async def train(node, epochs, lr=0.5):
    device = node.device("cpu")
    weight = torch.zeros(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=lr)
    for _ in range(epochs):
        loss = (weight - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


print(asyncio.run(train(epochs=3)))
"""

POOL = """
import sys
import skyproxy as sky
from skyproxy.providers import Kubernetes


@sky.function
def total():
    import torch
    import torch.distributed as dist

    info = sky.instance_info()
    value = torch.tensor([float(info.node + 1)])
    dist.all_reduce(value)
    print("hello from", info.node)
    return info.node, info.total_nodes, info.head_addr, value.item()


where = Kubernetes(sys.argv[1])
with sky.Compute(
    name="pool", provider=where, nodes=2, resources={"memory": "4Gi"}, plugins=[sky.plugins.torch(backend="gloo")]
) as pool:
    for row in total() @ pool:
        print(*row)
"""


def test_two_computes_in_a_cluster_work_together_and_leave_together(cluster: Cluster, user: User) -> None:
    lines = user.python(PAIR, user.namespace).splitlines()
    assert lines == ["left-0 /cache yes cpu 6.0", "right-0 provisioning running", "False True"]
    wait_nothing_left(cluster, user.namespace)


def test_a_cluster_of_which_one_fails_leaves_nothing(cluster: Cluster, user: User) -> None:
    output = user.python(HALF, user.namespace)
    assert output.startswith("failed:")
    assert "nvidia.com/gpu" in output
    wait_nothing_left(cluster, user.namespace)


def test_a_decorated_function_gets_a_node_for_its_time(cluster: Cluster, user: User) -> None:
    value = float(user.python(DECORATED, WHERE=user.namespace))
    # The mean over 3 elements: each step moves by lr * 2/3 of what is left, and the last loss is before its step.
    assert abs(value - (2 / 3) ** 4) < 1e-6
    assert cluster.items(collection(user.namespace)) == []
    wait_nothing_left(cluster, user.namespace)


def test_a_pool_over_two_pods_has_a_process_group(cluster: Cluster, user: User) -> None:
    output = user.python(POOL, user.namespace)
    head = f"pool-0.pool-nodes.{user.namespace}.svc"
    assert f"0 2 {head} 3.0" in output
    assert f"1 2 {head} 3.0" in output
    assert "hello from 0" in output
    wait_nothing_left(cluster, user.namespace)
