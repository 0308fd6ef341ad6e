"""Tenants who write whatever the API server takes: nobody else waits for that, and nothing of theirs stays for ever."""

from __future__ import annotations

import asyncio
import copy
import datetime
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from skyproxy_operator.cluster import ApiError
from skyproxy_operator.controller import Controller
from tests.operator.fake_cluster import FakeCluster
from tests.operator.makers import NOW, OPTIONS, make_compute
from tests.operator.virtual_time import run_virtually
from tests.operator.world import KEY, World, run

LIMITS = "limits: {maxLifetime: 1h}\nspec: {maxLifetime: 30m}\noverrides: [maxLifetime, image]"
# As the API server's own check of date-time lets them pass.
TIMES = ["0000-01-01T00:00:00Z", "2026-05-01t12:00:00z", "2026-05-01T12:00:00+99:99", "9999-12-31T23:59:59-23:59"]
TIMES += ["2026-05-01T12:00:00.123456789123Z", "0001-01-01T00:00:00+23:59", "2026-05-01T12:00:00x1Z"]
COUNTS = [-1, 1 << 31, (1 << 63) - 1, -(1 << 63)]
TEXTS = ["", "\x1b]52;c;x\x07", "x" * 5000, "0", "\u202e", "²", "1/9"]
STATUS: dict[str, list[Any]] = {
    **dict.fromkeys(("startTime", "readySince", "expiryTime", "lastActivityTime", "lastFailureTime"), TIMES),
    **dict.fromkeys(("restarts", "failuresInARow", "observedGeneration", "readyNodes"), COUNTS),
    **dict.fromkeys(("formed", "endedReason", "endedMessage", "lastFailure", "url", "externalUrl"), TEXTS),
    "phase": ["Pending", "Running", "Expired", "Terminating"],
    "inUse": [True, False],
    "worker": [{}, {"devices": [{"index": -1}], "summary": "\x1b[2J"}],
    "pullFailures": [{"": ""}, {"image": "x" * 10_000}],
    "nodes": [[], [{"rank": 1 << 40}]],
    "runtime": [{}, {"name": "other"}, {"name": "a100", "template": "]["}, {"outdated": True}],
    "conditions": [
        [],
        [{"type": "Ready", "status": "True", "reason": "x", "message": "", "lastTransitionTime": TIMES[0]}],
    ],
}
ANNOTATIONS = ["9" * 5000, "9" * 20, "-1", "", "²", "x"]
LABELS = ["9" * 60, "", "007", "x", "1"]


def spoil(world: World, draw: random.Random) -> None:
    """Change the status and the pods, as somebody may who has rights on these."""
    status = world.cluster.objects["Compute", *KEY].setdefault("status", {})
    for key in draw.sample(sorted(STATUS), draw.randint(1, len(STATUS))):
        status[key] = copy.deepcopy(draw.choice(STATUS[key]))
    for pod in world.cluster.all("Pod"):
        metadata = pod["metadata"]
        if draw.random() < 0.3:
            metadata["annotations"]["skyproxy.dev/attempt"] = draw.choice(ANNOTATIONS)
        if draw.random() < 0.3:
            metadata["labels"]["skyproxy.dev/node"] = draw.choice(LABELS)
        if draw.random() < 0.1:
            metadata["annotations"] = metadata["labels"]


def is_storable(value: Any) -> bool:
    """Tell whether the API server has room for every number."""
    if isinstance(value, dict | list):
        return all(map(is_storable, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 63


@pytest.mark.parametrize("seed", range(30))
def test_whatever_tenants_write_every_look_comes_to_its_end_and_so_do_the_pods(seed: int) -> None:
    world = World(maxLifetime="1h", idleTimeout="30m", nodes=1 + seed % 2, restartPolicy={"maxRestarts": 1000})

    async def scenario(world: World) -> None:
        draw = random.Random(seed)
        await world.settle(6)
        for _ in range(10):
            spoil(world, draw)
            for _ in range(3):
                await world.look()
                world.cluster.finish_deletions()
                world.cluster.make_ready()
                world.now += datetime.timedelta(seconds=20)
            assert is_storable({key: world.status.get(key) for key in ("restarts", "failuresInARow", "nodes")})
        for _ in range(3):
            world.now += datetime.timedelta(hours=2)
            for _ in range(6):
                await world.look()
                world.cluster.finish_deletions()
                world.cluster.make_ready()
        assert world.names("Pod") == []

    run(scenario, world)


class Unwritten(FakeCluster):
    """One that takes no status any more."""

    async def patch_status(self, compute: Any, patch: Any) -> None:
        raise ApiError("status of Compute dev", 422, "Invalid", "it has something that no status can have")


@pytest.mark.parametrize("how", [{"suspend": True}, {"maxLifetime": "1s"}], ids=str)
def test_a_status_that_cannot_be_written_keeps_no_pod_alive(how: dict[str, Any]) -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()
        world.edit(**how)
        world.cluster.__class__ = Unwritten
        with pytest.raises(ApiError, match="no status can have"):
            await world.look()
        world.cluster.finish_deletions()
        assert world.names("Pod") == []

    run(scenario, world)


WRONG = [
    {"idleTimeout": "soon"},
    {"podTemplate": {"spec": {"hostPID": True}}},
    {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 5}}},
    {"env": [{"name": "A", "value": "x" * 1_000_000}]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_a_spec_that_becomes_wrong_gives_pods_no_longer_life(wrong: dict[str, Any]) -> None:
    world = World(maxLifetime="1h")

    async def scenario(world: World) -> None:
        await world.settle()
        world.edit(**wrong)
        again = await world.look()
        assert world.status["conditions"][1]["reason"] == "InvalidSpec"
        assert world.names("Pod") == ["dev-0"]
        # A mistake ends no worker, and it is looked at again in time.
        assert again is not None
        assert again <= 3600
        world.now += datetime.timedelta(hours=1)
        await world.look()
        world.cluster.finish_deletions()
        assert world.names("Pod") == []
        assert "their lifetime of 1h is over" in world.status["conditions"][1]["message"]
        for _ in range(3):
            await world.look()
        assert world.names("Pod") == []
        # Whoever mends it has a worker again.
        world.edit(**dict.fromkeys(wrong))
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({"maxLifetime": "99h"}, 3600),
        ({"maxLifetime": "40m", "nodes": 0, "podTemplate": {"spec": {"hostPID": True}}}, 2400),
        ({"idleTimeout": "soon"}, 1800),
        ({"runtime": "no-such"}, 1800),
        ({"runtime": None}, 1800),
    ],
    ids=str,
)
def test_no_change_of_the_spec_gives_pods_more_than_the_limit_of_their_runtime(
    change: dict[str, Any], seconds: int
) -> None:
    world = World(replace(OPTIONS, require_runtime=True), runtime="a100")
    world.cluster.runtime_texts["a100"] = LIMITS

    async def scenario(world: World) -> None:
        await world.settle()
        started = datetime.datetime.fromisoformat(world.status["startTime"])
        world.edit(**change)
        world.now = started + datetime.timedelta(seconds=seconds - 1)
        await world.look()
        assert world.names("Pod") == ["dev-0"]
        world.now = started + datetime.timedelta(seconds=seconds)
        await world.look()
        world.cluster.finish_deletions()
        assert world.names("Pod") == []

    run(scenario, world)


def test_a_text_in_a_status_that_would_become_any_amount_of_it_is_refused() -> None:
    lines = ["a0: &a0 {image: x}"] + [
        f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}" for level in range(1, 40)
    ]
    world = World(runtime="a100", maxLifetime="1h")
    world.cluster.runtime_texts["a100"] = "overrides: ['*']"

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.objects["Compute", *KEY]["status"]["runtime"]["template"] = "\n".join([*lines, "spec: *a39"])
        await world.look()
        assert "an alias" in world.status["conditions"][1]["message"]
        world.now += datetime.timedelta(hours=1)
        await world.look()
        world.cluster.finish_deletions()
        assert world.names("Pod") == []

    run(scenario, world)


class Slow(FakeCluster):
    """One whose API server takes a tenth of a second to write a status."""

    async def patch_status(self, compute: Any, patch: Any) -> None:
        await asyncio.sleep(0.1)
        await super().patch_status(compute, patch)


@pytest.mark.parametrize("namespace", ["lab", "storm"])
def test_who_changes_specs_all_the_time_keeps_nobody_waiting_and_has_few_looks(namespace: str) -> None:
    world = World(maxLifetime="20s")
    world.cluster.__class__ = Slow
    stormy = [(namespace, f"storm-{number}") for number in range(12)]
    for where, name in stormy:
        made = make_compute(name, uid=name, suspend=True)
        made["metadata"]["namespace"] = where
        world.cluster.put(made)

    async def storm(controller: Controller) -> None:
        while True:
            for key in stormy:
                compute = world.cluster.objects["Compute", *key]
                compute["metadata"]["generation"] += 1
                controller.touch(key)
            await asyncio.sleep(0.05)

    async def scenario(world: World) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        world.controller = Controller(
            world.cluster,  # type: ignore[arg-type]
            world.cluster,
            world.prober,  # type: ignore[arg-type]
            OPTIONS,
            lambda: NOW + datetime.timedelta(seconds=loop.time() - begun),
        )
        works = [asyncio.create_task(world.controller.run()), asyncio.create_task(storm(world.controller))]

        async def wait_for(is_so: Callable[[], object], seconds: float) -> None:
            while not is_so():
                assert loop.time() - begun < seconds
                await asyncio.sleep(0.1)

        await wait_for(lambda: world.names("Pod"), 5)
        world.cluster.make_ready()
        world.controller.touch(KEY)
        await wait_for(lambda: "startTime" in world.status, 10)
        count = len([name for verb, kind, name in world.cluster.requests if kind == "Compute/status"])
        await wait_for(lambda: world.status["phase"] == "Expired", 40)
        writes = [name for verb, kind, name in world.cluster.requests if kind == "Compute/status"][count:]
        # Two looks a second each, whatever happens to it.
        assert max(map(writes.count, {name for _, name in stormy})) < 100
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    run_virtually(scenario(world))


def test_a_pod_of_somebody_else_under_the_name_of_a_node_is_named() -> None:
    world = World()
    world.cluster.put({"kind": "Pod", "metadata": {"name": "dev-0", "namespace": "lab", "labels": {}}, "spec": {}})

    async def scenario(world: World) -> None:
        await world.look()
        assert world.status["conditions"][1]["reason"] == "NameTaken"
        assert "Pod dev-0" in world.status["conditions"][1]["message"]

    run(scenario, world)


def test_a_compute_that_is_made_again_and_again_leaves_nothing_in_memory() -> None:
    world = World()

    async def scenario(world: World) -> None:
        for number in range(20):
            world.cluster.put(make_compute(uid=f"again-{number}"))
            world.cluster.collect_garbage()
            await world.look()
            await world.look()
            world.cluster.finish_deletions()
        children = world.controller._children
        assert set(children._known) | set(children._read) == {"again-19"}

    run(scenario, world)
