"""When workers are asked what they do, and what their answers and their silence bring about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyproxy_operator.metrics import METRICS
from skyproxy_operator.reaping import Report
from tests.operator.makers import OPTIONS
from tests.operator.world import KEY, World, run


def reaped_for_idling() -> float:
    return METRICS.registry.get_sample_value("skyproxy_operator_reaped_total", {"reason": "IdleTimeout"}) or 0.0


def test_an_idle_worker_is_asked_in_time_and_goes() -> None:
    world = World(idleTimeout="10m", options=replace(OPTIONS, probe_seconds=0.0))

    async def scenario(world: World) -> None:
        await world.settle()
        world.prober.idle_seconds = 599.0
        world.controller._memories[KEY].probe_at = 0.0
        again = await world.look()
        assert again is not None
        assert again <= 1.0
        world.prober.idle_seconds = 601.0
        world.controller._memories[KEY].probe_at = 0.0
        before = reaped_for_idling()
        await world.look()
        assert world.status["phase"] == "Expired"
        assert reaped_for_idling() == before + 1
        world.cluster.finish_deletions()
        await world.settle()
        assert world.cluster.all("Pod") == []

    run(scenario, world)


def test_workers_are_not_asked_all_the_time() -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()

    run(scenario, world)
    assert len(world.prober.asked) == 1


def test_a_worker_that_tells_nothing_for_long_is_worth_a_word() -> None:
    world = World(idleTimeout="10m")

    async def scenario(world: World) -> None:
        await world.settle()
        reasons = []
        for idle in (None, None, None, None, 1.0):
            world.prober.idle_seconds = idle
            world.controller._memories[KEY].probe_at = 0.0
            await world.look()
            reasons.append(world.status["conditions"][3]["reason"])
            assert world.status["phase"] == "Running"
        assert reasons == ["AsExpected", "AsExpected", "ActivityUnknown", "ActivityUnknown", "AsExpected"]

    run(scenario, world)


@pytest.mark.parametrize("limits", [{}, {"idleTimeout": "10m"}])
@pytest.mark.parametrize(
    ("silence", "reason"),
    [
        (Report(problem="it answered HTTP 401", reason="TokenRefused"), "TokenRefused"),
        (Report(problem="its certificate is not accepted", reason="CertificateRefused"), "CertificateRefused"),
        (Report(problem="it cannot be asked"), "ActivityUnknown"),
    ],
)
def test_a_worker_that_cannot_be_asked_is_degraded_with_the_cause(
    limits: dict[str, str], silence: Report, reason: str
) -> None:
    world = World(**limits)

    async def scenario(world: World) -> None:
        await world.settle()
        world.prober.idle_seconds, world.prober.silence = None, silence
        for _ in range(4):
            world.controller._memories[KEY].probe_at = 0.0
            await world.look()
        degraded = world.status["conditions"][3]
        assert (degraded["status"], degraded["reason"]) == ("True", reason)
        assert silence.problem in degraded["message"]
        assert ("idleTimeout has no effect" in degraded["message"]) == bool(limits)
        # It goes on taking sessions: who is connected is not cut off.
        assert world.status["phase"] == "Running"
        world.prober.idle_seconds = 1.0
        world.controller._memories[KEY].probe_at = 0.0
        await world.look()
        assert world.status["conditions"][3]["status"] == "False"

    run(scenario, world)


def test_a_program_of_the_users_own_need_not_answer() -> None:
    world = World(command=["sleep", "inf"])

    async def scenario(world: World) -> None:
        world.prober.idle_seconds = None
        await world.settle()
        for _ in range(4):
            world.controller._memories[KEY].probe_at = 0.0
            await world.look()
        assert world.status["conditions"][3]["status"] == "False"

    run(scenario, world)


@pytest.mark.parametrize("how", ["marked", "gone", "replaced"])
@pytest.mark.parametrize("spec", [{"snapshots": {"storage": "1Gi"}}, {}])
def test_workers_whose_compute_is_deleted_are_told_once_where_they_keep_sessions(
    how: str, spec: dict[str, dict[str, str]]
) -> None:
    world = World(nodes=2, procsPerNode=2, **spec)

    async def scenario(world: World) -> None:
        await world.settle()
        ports = {port for addresses, _ in world.prober.asked for _, port in addresses}
        compute = world.cluster.objects["Compute", *KEY]
        assert world.prober.told == []
        if how == "marked":
            compute["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
        elif how == "gone":
            del world.cluster.objects["Compute", *KEY]
        else:
            compute["metadata"]["uid"] = "compute-2"
        await world.look()
        assert world.prober.told == ([[("10.0.0.1", port) for _ in range(2) for port in sorted(ports)]] if spec else [])
        world.cluster.objects.pop(("Compute", *KEY), None)
        await world.look()
        assert len(world.prober.told) == bool(spec)

    run(scenario, world)
