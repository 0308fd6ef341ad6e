"""Pods in a queue of Kueue's, against a cluster in memory that does with them what Kueue does."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy_operator.queueing import (
    GROUP_LABEL,
    QUEUE_LABEL,
    TOTAL_ANNOTATION,
    gate_cause,
    is_gated,
    queue_labels,
    workload_query,
)
from tests.operator.makers import condition, make_compute, make_pod, spec_of
from tests.operator.world import World, run


def labels(compute: dict[str, Any], attempt: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    return queue_labels(compute, spec_of(compute), attempt)


def gated(*gates: str, queue: str | None = "research", **more: Any) -> dict[str, Any]:
    pod = make_pod(make_compute(), conditions=[condition("PodScheduled", "False", "SchedulingGated", "gates")], **more)
    pod["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
    pod["metadata"]["labels"] |= {QUEUE_LABEL: queue} if queue else {}
    return pod


def workload(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "w"}, "status": {"conditions": list(conditions), **status}}


# --- what pods tell Kueue -------------------------------------------------------------------------------------------


def test_without_a_queue_kueue_is_told_nothing() -> None:
    assert labels(make_compute(nodes=2)) == ({}, {})


def test_a_node_alone_is_no_group() -> None:
    assert labels(make_compute(queue="research")) == ({QUEUE_LABEL: "research"}, {})


def test_several_nodes_are_a_group_that_is_new_with_each_start_and_spec() -> None:
    pool = make_compute("p" * 50, nodes=2, queue="research")
    found, counts = labels(pool)
    assert (found[QUEUE_LABEL], counts[TOTAL_ANNOTATION]) == ("research", "2")
    assert len(found[GROUP_LABEL]) <= 63
    assert found == labels(pool)[0]
    others = [
        labels(pool, 1),
        labels(make_compute("p" * 50, nodes=3, queue="research")),
        labels(make_compute("p" * 50, uid="another", nodes=2, queue="research")),
    ]
    assert len({found[GROUP_LABEL], *(item[0][GROUP_LABEL] for item in others)}) == 4


def test_a_workload_is_found_by_its_group_or_its_pod() -> None:
    pod = make_pod(make_compute())
    assert workload_query(pod) == {"labelSelector": "kueue.x-k8s.io/job-uid=pod-0-0"}
    pod["metadata"]["labels"][GROUP_LABEL] = "dev-1234"
    assert workload_query(pod) == {"fieldSelector": "metadata.name=dev-1234"}


# --- what Kueue says ------------------------------------------------------------------------------------------------

GATE = "kueue.x-k8s.io/admission"
NO_ROOM = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 2 more needed"


@pytest.mark.parametrize(
    ("said", "text", "actionable"),
    [
        (None, "until Kueue admits it.", False),
        (workload(), "until Kueue admits it.", False),
        (workload(condition("QuotaReserved", "False", "Pending", NO_ROOM)), f"Kueue: {NO_ROOM}", False),
        (
            workload(condition("QuotaReserved", "False", "Inadmissible", "LocalQueue research doesn't exist")),
            "Kueue: LocalQueue research doesn't exist",
            True,
        ),
        (
            workload(
                condition("QuotaReserved", "True"),
                admissionChecks=[{"name": "a", "state": "Ready"}, {"name": "b", "state": "Pending", "message": "m"}],
            ),
            "Kueue: quota is reserved; admission checks are left: b (m)",
            False,
        ),
    ],
)
def test_the_cause_is_what_kueue_says(said: dict[str, Any] | None, text: str, actionable: bool) -> None:
    cause = gate_cause(gated(GATE), said)
    assert (cause.reason, cause.actionable) == ("Queued", actionable)
    assert cause.message.startswith("Pod dev-0 waits in the queue research until Kueue admits it.")
    assert cause.message.endswith(text)


def test_other_gates_are_named() -> None:
    for pod in (gated("site/check", queue=None), gated("site/check")):
        cause = gate_cause(pod)
        assert (cause.reason, "site/check" in cause.message) == ("SchedulingGated", True)


def test_what_has_ended_waits_for_no_gate() -> None:
    assert is_gated(gated(GATE))
    assert not is_gated(gated(GATE, phase="Failed"))
    assert not is_gated(make_pod(make_compute(), ready=True))


# --- stories --------------------------------------------------------------------------------------------------------


def queued_world(**spec: Any) -> World:
    world = World(queue="research", restartPolicy={"backoffSeconds": 0, "maxRestarts": 0}, **spec)
    world.cluster.kinds["Workload"] = "v1beta1"
    return world


def conditions(world: World) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["reason"]) for item in world.status["conditions"]}


@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_wait_their_turn_and_the_status_says_so(nodes: int) -> None:
    async def scenario(world: World) -> None:
        world.cluster.workload_object = workload(condition("QuotaReserved", "False", "Pending", NO_ROOM))
        await world.settle()
        assert world.status["phase"] == "Queued"
        assert conditions(world)["Scheduled"] == ("False", "Queued")
        assert conditions(world)["Degraded"][0] == "False"
        assert NO_ROOM in world.status["conditions"][0]["message"]
        asked = [verb for verb, kind, _ in world.cluster.requests if kind == "Workload"]
        assert asked == ["list"], "once, and then after a pause"
        world.cluster.admit()
        await world.settle()
        assert (world.status["phase"], world.status["readyNodes"]) == ("Running", nodes)
        assert conditions(world)["Degraded"] == ("False", "AsExpected")

    run(scenario, queued_world(nodes=nodes))


def test_making_room_for_others_is_no_failure_and_a_new_group_waits() -> None:
    async def scenario(world: World) -> None:
        seen = set()
        for _ in range(3):
            await world.settle()
            assert world.status["phase"] == "Queued"
            world.cluster.admit()
            await world.settle()
            assert world.status["phase"] == "Running"
            seen |= {pod["metadata"]["labels"][GROUP_LABEL] for pod in world.cluster.all("Pod")}
            world.cluster.preempt()
        await world.settle()
        assert world.status["phase"] == "Queued"
        assert (world.status["failuresInARow"], world.status["restarts"], len(seen)) == (0, 3, 3)
        assert world.status["lastFailure"].startswith("EvictedByQueue: Kueue took pod dev-0 back: Preempted")

    run(scenario, queued_world(nodes=2))


def test_a_member_that_is_deleted_in_the_queue_lets_all_start_again() -> None:
    """Kueue keeps what is left of a group, under the name that its replacement needs."""

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.all("Pod")[1]["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
        await world.settle()
        assert {pod["metadata"]["annotations"]["skyproxy.dev/attempt"] for pod in world.cluster.all("Pod")} == {"1"}
        assert world.status["phase"] == "Queued"
        world.cluster.admit()
        await world.settle()
        assert world.status["phase"] == "Running"

    world = queued_world(nodes=2)
    world.edit(restartPolicy={"backoffSeconds": 0, "maxRestarts": 1})
    run(scenario, world)


def test_a_changed_spec_queues_again() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.admit()
        await world.settle()
        world.edit(nodes=3)
        await world.settle()
        assert (world.status["phase"], len(world.names("Pod"))) == ("Queued", 3)

    run(scenario, queued_world(nodes=2))


def test_without_kueue_no_pod_is_made_and_the_cause_says_so() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.names("Pod") == []
        assert conditions(world)["Degraded"] == ("True", "QueueUnavailable")
        assert conditions(world)["Ready"] == ("False", "QueueUnavailable")

    run(scenario, World(queue="research"))


@pytest.mark.parametrize("ready", [True, False])
def test_pods_that_kueue_does_not_look_after_are_told_of(ready: bool) -> None:
    async def scenario(world: World) -> None:
        # Its webhook does not select the namespace.
        world.cluster.put = _without_kueue(world)  # type: ignore[method-assign]
        await world.look()
        await world.look()
        if ready:
            world.cluster.make_ready()
            await world.look()
        assert conditions(world)["Ready"][0] == str(ready)
        assert conditions(world)["Degraded"] == ("True", "QueueIgnored")

    run(scenario, queued_world())


def _without_kueue(world: World) -> Any:
    put = world.cluster.put

    def made(item: dict[str, Any]) -> dict[str, Any]:
        kept, world.cluster.kinds = world.cluster.kinds, {}
        try:
            return put(item)
        finally:
            world.cluster.kinds = kept

    return made
