"""A Compute in every phase, and what may happen to it there: it is deleted, changed, or its namespace goes."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable

import pytest

from skyproxy_operator.cluster import ApiError
from tests.operator.world import KEY, World, run

Way = Callable[[World], Awaitable[None]]
KINDS = ("Pod", "Service", "Secret", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget")


async def be_refused(world: World) -> None:
    world.cluster.refuse["Pod"] = ApiError("Pod dev-0", 403, "Forbidden", "exceeded quota: share")
    await world.look()


async def be_made(world: World) -> None:
    await world.look()
    await world.look()


async def run_well(world: World) -> None:
    await world.settle()


async def back_off(world: World) -> None:
    await world.settle()
    world.cluster.fail("dev-1")
    await world.look()
    world.cluster.finish_deletions()
    await world.look()


async def be_restarted(world: World) -> None:
    """Pods of the start before are on their way out."""
    await world.settle()
    world.cluster.fail("dev-1")
    await world.look()


async def be_suspended(world: World) -> None:
    await world.settle()
    world.edit(suspend=True)
    await world.settle()


async def fail(world: World) -> None:
    world.edit(restartPolicy={"maxRestarts": 0})
    await world.settle()
    world.cluster.fail("dev-0")
    await world.settle()


async def expire(world: World) -> None:
    world.edit(maxLifetime="1h")
    await world.settle()
    world.now += datetime.timedelta(hours=2)
    await world.settle()


async def be_wrong(world: World) -> None:
    world.edit(idleTimeout="soon")
    await world.look()


WAYS: dict[tuple[str, str], Way] = {
    ("Pending", "QuotaExceeded"): be_refused,
    ("Pending", ""): be_made,
    ("Running", "Ready"): run_well,
    ("Pending", "BackOff"): back_off,
    ("Provisioning", "Restarting"): be_restarted,
    ("Suspended", "Suspended"): be_suspended,
    ("Failed", "WorkerExited"): fail,
    ("Expired", "MaxLifetime"): expire,
    ("Failed", "InvalidSpec"): be_wrong,
}
every_phase = pytest.mark.parametrize(("phase", "way"), WAYS.items(), ids=["-".join(key) for key in WAYS])


def worlds() -> World:
    return World(
        nodes=2,
        restartPolicy={"backoffSeconds": 60},
        volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache"}],
    )


async def bring(world: World, phase: tuple[str, str], way: Way) -> None:
    await way(world)
    found = world.status["phase"], world.status["conditions"][1]["reason"]
    assert found[0] == phase[0], found
    assert not phase[1] or found[1] == phase[1], found


@every_phase
def test_it_is_deleted_and_leaves_nothing(phase: tuple[str, str], way: Way) -> None:
    world = worlds()

    async def scenario(world: World) -> None:
        await bring(world, phase, way)
        made = dict(world.cluster.made)
        world.cluster.refuse.clear()
        world.cluster.objects["Compute", *KEY]["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
        for _ in range(3):
            world.start_operator()
            await world.look()
        assert world.status["phase"] == "Terminating"
        new = [place for place, count in world.cluster.made.items() if count > made.get(place, 0)]
        assert [place for place in new if place[0] != "Event"] == []
        del world.cluster.objects["Compute", *KEY]
        world.cluster.collect_garbage()
        world.cluster.finish_deletions()
        assert await world.look() is None
        assert [place for place in world.cluster.objects if place[0] != "Event"] == []

    run(scenario, world)


@every_phase
def test_it_is_changed_and_runs_as_it_is_now(phase: tuple[str, str], way: Way) -> None:
    world = worlds()

    async def scenario(world: World) -> None:
        await bring(world, phase, way)
        world.cluster.refuse.clear()
        world.edit(
            image="other", suspend=False, idleTimeout=None, maxLifetime=None, restartPolicy={"backoffSeconds": 1}
        )
        await world.settle(20)
        assert (world.status["phase"], world.status["readyNodes"]) == ("Running", 2)
        images = {pod["spec"]["containers"][0]["image"] for pod in world.cluster.all("Pod")}
        assert (world.names("Pod"), images) == (["dev-0", "dev-1"], {"other"})

    run(scenario, world)


@every_phase
def test_its_namespace_goes_and_nothing_is_made_there(phase: tuple[str, str], way: Way) -> None:
    world = worlds()
    message = "unable to create new content in namespace lab because it is being terminated"

    async def scenario(world: World) -> None:
        await bring(world, phase, way)
        # Its controller deletes one kind after the other, in any order.
        for kind in (*KINDS, "Event"):
            world.cluster.refuse[kind] = ApiError(f"{kind} x", 403, "Forbidden", message)
        for kind in KINDS:
            places = [place for place in world.cluster.objects if place[0] == kind]
            for place in places:
                del world.cluster.objects[place]
            world.controller.touch(KEY, children=True)
            await world.look()
            world.now += datetime.timedelta(minutes=2)
        assert [place for place in world.cluster.objects if place[0] in KINDS] == []
        count = len(world.cluster.requests)
        for _ in range(3):
            world.start_operator()
            await world.look()
        tried = {request[:2] for request in world.cluster.requests[count:] if request[0] not in ("get", "list")}
        if world.status["phase"] == "Terminating":
            assert tried == set()
        else:
            # Who wants nothing there learns of it from nobody, and asks for nothing.
            assert world.status["phase"] in ("Suspended", "Failed", "Expired")

    run(scenario, world)
