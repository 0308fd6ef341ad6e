"""What keeps a cluster from ending workers that somebody uses, and lets it end the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyproxy_operator.disruption import annotations_to_change, are_in_use, is_protected
from skyproxy_operator.reaping import Report
from tests.operator.makers import OPTIONS, make_compute, make_pod, spec_of
from tests.operator.world import World, run

SAFE = "cluster-autoscaler.kubernetes.io/safe-to-evict"
KEEP = "karpenter.sh/do-not-disrupt"
COMPUTE = make_compute()


def said(**answer: Any) -> Report:
    return Report(1.0, answer)


@pytest.mark.parametrize(
    ("reports", "used"),
    [
        ([], None),
        ([Report(problem="silent")], None),
        ([said(sessions=0)], False),
        ([said(sessions=0), Report(problem="silent")], None),
        ([said(sessions=1), Report(problem="silent")], True),
        *(
            [[said(**{key: 1}), said()], True]
            for key in ("sessions", "detached", "named", "jobs_running", "calls_running")
        ),
    ],
)
def test_in_use_is_who_would_lose_something(reports: list[Report], used: bool | None) -> None:
    assert are_in_use(reports) is used


def changes(status: dict[str, Any], annotations: Any = None, **spec: Any) -> dict[str, str | None]:
    pod = make_pod(COMPUTE)
    pod["metadata"]["annotations"] |= annotations or {}
    return annotations_to_change(pod, spec_of(make_compute(**spec)), status, OPTIONS)


def test_autoscalers_are_told_and_only_what_is_new() -> None:
    assert changes({}) == {}
    assert changes({"inUse": True}) == {SAFE: "false", KEEP: "true"}
    assert changes({"inUse": True}, {SAFE: "false", KEEP: "true"}) == {}
    assert changes({"inUse": False}, {SAFE: "false", KEEP: "true"}) == {SAFE: "true", KEEP: None}
    assert changes({"inUse": False}, {SAFE: "true"}) == {}


def test_what_the_template_says_stays() -> None:
    template = {"metadata": {"annotations": {SAFE: "true"}}}
    assert changes({"inUse": True}, {SAFE: "true"}, podTemplate=template) == {KEEP: "true"}


def test_an_installation_can_do_without() -> None:
    off = replace(OPTIONS, protect_sessions=False)
    assert not is_protected({"inUse": True}, off)
    assert annotations_to_change(make_pod(COMPUTE), spec_of(COMPUTE), {"inUse": True}, off) == {}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_drains_and_autoscalers_wait_for_sessions_and_for_nothing_else(version: str) -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert (world.names("PodDisruptionBudget"), world.status["inUse"]) == ([], False)
        await _reports(world, sessions=1)
        (budget,) = world.cluster.all("PodDisruptionBudget")
        assert budget["apiVersion"] == f"policy/{version}"
        assert budget["spec"]["minAvailable"] == 2
        assert budget["metadata"]["ownerReferences"][0]["kind"] == "Compute"
        for pod in world.cluster.all("Pod"):
            assert pod["metadata"]["labels"].items() >= budget["spec"]["selector"]["matchLabels"].items()
            assert pod["metadata"]["annotations"].items() >= {SAFE: "false", KEEP: "true"}.items()
        await _reports(world, sessions=0)
        (budget,) = world.cluster.all("PodDisruptionBudget")
        assert budget["spec"]["minAvailable"] == 0
        for pod in world.cluster.all("Pod"):
            assert (pod["metadata"]["annotations"][SAFE], pod["metadata"]["annotations"].get(KEEP)) == ("true", None)

    world = World(nodes=2)
    world.cluster.kinds["PodDisruptionBudget"] = version
    run(scenario, world)


def test_a_worker_that_starts_again_is_not_in_use() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        await _reports(world, sessions=1)
        world.cluster.fail("dev-0")
        await world.look()
        await world.look()
        assert world.status["inUse"] is False
        assert world.cluster.all("PodDisruptionBudget")[0]["spec"]["minAvailable"] == 0

    world = World(restartPolicy={"backoffSeconds": 60})
    world.cluster.kinds["PodDisruptionBudget"] = "v1"
    run(scenario, world)


async def _reports(world: World, sessions: int) -> None:
    """The workers are asked, and then nothing happens any more."""
    world.prober.sessions = sessions
    for memory in world.controller._memories.values():
        memory.probe_at = 0.0
    await world.settle()
