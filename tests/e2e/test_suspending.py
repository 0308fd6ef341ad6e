"""Sessions whose Pod ends: suspended and back, protected and gone on; the losses of an undisturbed run, to the bit."""

from __future__ import annotations

import json
import subprocess

from tests.e2e.cluster import Cluster
from tests.e2e.computes import User, kill_worker, killable, make, path_of, pods_of, wait_nothing_left, wait_phase

STEPS = """
import sys
import torch
import skyproxy

if "protect" in sys.argv:
    skyproxy.protect(every="1h")


def steps(device):
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    while True:
        loss = model(torch.randn(32, 8, generator=data).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


going = steps("sky:0")
print(next(going).hex(), flush=True)
for line in sys.stdin:
    print(next(going).hex(), flush=True)
"""


def step(program: subprocess.Popen[str]) -> str:
    """The loss of a program's next step."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    found = program.stdout.readline()
    assert found, program.communicate()[1]
    return found


def begun(program: subprocess.Popen[str]) -> str:
    """The loss of a program's first step."""
    assert program.stdout is not None
    found = program.stdout.readline()
    assert found, program.communicate()[1]
    return found


def undisturbed(user: User, count: int) -> list[str]:
    """The losses of a run on the same worker that nobody disturbs."""
    with user.started(STEPS) as alone:
        return [begun(alone), *(step(alone) for _ in range(count - 1))]


def test_a_suspended_worker_frees_its_pod_and_comes_back_with_the_next_operation(cluster: Cluster, user: User) -> None:
    user.sky("up", "dev", "--memory", "4Gi", "--suspend-after", "1h", "--snapshots", "1Gi")
    path, claim = (
        path_of(user.namespace, "dev"),
        f"/api/v1/namespaces/{user.namespace}/persistentvolumeclaims/dev-snapshots",
    )
    with user.started(STEPS) as program:
        losses = [begun(program), step(program)]
        assert user.sky("suspend", "dev").startswith("dev is suspended")
        assert cluster.get(path)["status"]["phase"] == "Suspended"
        assert pods_of(cluster, user.namespace, "dev") == []
        assert cluster.get(claim)["status"]["phase"] == "Bound"
        (shown,) = json.loads(user.sky("list", "--json"))
        assert (shown["phase"], shown["ready"]) == ("Suspended", False)
        losses += [step(program), step(program)]
        wait_phase(cluster, path, "Running")
        # By itself, when nobody asks for anything.
        cluster.patch(path, {"spec": {"suspendAfter": "2s"}})
        wait_phase(cluster, path, "Suspended")
        cluster.patch(path, {"spec": {"suspendAfter": "1h"}})
        assert user.sky("resume", "dev") == "dev is ready\n"
        losses.append(step(program))
    assert losses == undisturbed(user, len(losses))
    user.sky("down", "dev")
    wait_nothing_left(cluster, user.namespace, "dev")


def test_a_protected_program_goes_on_where_its_pod_is_deleted_or_killed(cluster: Cluster, user: User) -> None:
    spec = {"resources": {"memory": "4Gi"}, "restartPolicy": {"backoffSeconds": 0}, "snapshots": {"storage": "1Gi"}}
    path = make(cluster, user.namespace, "dev", **killable(spec))
    wait_phase(cluster, path, "Running")
    user.sky("connect", "dev")
    with user.started(STEPS, "protect") as program:
        losses = [begun(program), step(program)]
        (before,) = pods_of(cluster, user.namespace, "dev")
        place = f"/api/v1/namespaces/{user.namespace}/pods/dev-0"
        cluster.delete(place)
        losses.append(step(program))  # on either: a worker that is told to end still works for a moment
        cluster.wait(place, lambda pod: pod and pod["metadata"]["uid"] != before["metadata"]["uid"], "another Pod", 120)
        losses += [step(program), step(program)]
        (pod,) = pods_of(cluster, user.namespace, "dev")
        kill_worker(cluster, pod)
        losses += [step(program), step(program)]
    assert losses == undisturbed(user, len(losses))
