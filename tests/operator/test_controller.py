"""The controller against a cluster in memory: what it brings about, and that no interruption changes that."""

from __future__ import annotations

import asyncio
import datetime
import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from skyproxy_operator import controller as controller_module
from skyproxy_operator.cluster import ApiError
from tests.operator.fake_cluster import Interrupted
from tests.operator.makers import make_compute
from tests.operator.virtual_time import run_virtually
from tests.operator.world import EVERYTHING, KEY, World, run


def test_everything_that_a_compute_needs_is_made() -> None:
    world = World(**EVERYTHING)

    async def scenario(world: World) -> None:
        await world.settle()

    run(scenario, world)
    assert world.names("Pod") == ["dev-0", "dev-1"]
    assert world.names("Service") == ["dev", "dev-nodes"]
    assert world.names("Secret") == ["dev-tls", "dev-token"]
    assert world.names("PersistentVolumeClaim") == ["dev-cache", "dev-data"]
    assert world.names("NetworkPolicy") == ["dev"]
    assert (world.names("HTTPRoute"), world.names("BackendTLSPolicy"), world.names("ConfigMap")) == (
        ["dev"],
        ["dev"],
        ["dev-ca"],
    )
    assert (world.status["phase"], world.status["readyNodes"]) == ("Running", 2)
    assert world.status["externalUrl"] == "wss://dev.example"
    assert max(world.cluster.made.values()) == 1


def test_everything_goes_with_the_compute_but_what_is_to_be_kept() -> None:
    world = World(**EVERYTHING)

    async def scenario(world: World) -> None:
        await world.settle()
        del world.cluster.objects["Compute", *KEY]
        world.cluster.collect_garbage()
        assert await world.look() is None

    run(scenario, world)
    left = [(kind, name) for kind, _, name in world.cluster.objects if kind != "Event"]
    assert left == [("PersistentVolumeClaim", "dev-data")]


def test_at_whatever_request_it_is_interrupted_the_next_one_goes_on() -> None:
    """Creating, a crash, a change of the spec, idling: interrupted at every request, the end is the same."""

    async def story(world: World) -> None:
        await world.settle()
        world.cluster.fail("dev-1")
        await world.settle()
        world.edit(image="other")
        await world.settle()

    def final(world: World) -> Any:
        status = {key: world.status.get(key) for key in ("phase", "restarts", "failuresInARow", "readyNodes")}
        made = {place: count for place, count in world.cluster.made.items() if place[0] not in ("Event", "Pod")}
        return status, sorted(place for place in world.cluster.objects if place[0] != "Event"), made

    undisturbed = World(**EVERYTHING, restartPolicy={"backoffSeconds": 1})
    asyncio.run(story(undisturbed))
    expected = final(undisturbed)
    assert expected[0] == {"phase": "Running", "restarts": 1, "failuresInARow": 1, "readyNodes": 2}

    def interrupted_story(first: int, every: int) -> World:
        world = World(**EVERYTHING, restartPolicy={"backoffSeconds": 1})

        async def look() -> float | None:
            if world.cluster.stop_after is None:
                world.cluster.stop_after = first
            while True:
                try:
                    return await world.controller.reconcile(KEY)
                except Interrupted:
                    world.start_operator()
                    # Enough for a whole look, so that it gets on at all.
                    world.cluster.stop_after = every

        world.look = look  # type: ignore[method-assign]
        asyncio.run(story(world))
        return world

    for first in range(60):
        world = interrupted_story(first, every=40 + first)
        assert final(world) == expected, f"interrupted at request {first}"


def test_two_starts_never_meet() -> None:
    world = World(nodes=3, restartPolicy={"backoffSeconds": 1})

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.fail("dev-2")
        for _ in range(8):
            await world.look()
            attempts = {pod["metadata"]["annotations"]["skyproxy.dev/attempt"] for pod in world.cluster.all("Pod")}
            assert len(attempts) <= 1
            # One pod at a time takes its leave.
            leaving = [pod for pod in world.cluster.all("Pod") if "deletionTimestamp" in pod["metadata"]]
            for pod in leaving[:1]:
                del world.cluster.objects["Pod", "lab", pod["metadata"]["name"]]
            world.now += datetime.timedelta(seconds=1)
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


def test_a_full_quota_is_told_once_and_overcome() -> None:
    world = World(nodes=3)

    async def scenario(world: World) -> None:
        message = 'pods "dev-0" is forbidden: exceeded quota: gpus, requested: pods=1, used: pods=2, limited: pods=2'
        world.cluster.refuse["Pod"] = ApiError("Pod dev-0", 403, "Forbidden", message)
        for _ in range(5):
            await world.look()
        conditions = {item["type"]: item for item in world.status["conditions"]}
        assert (conditions["Ready"]["reason"], conditions["Degraded"]["status"]) == ("QuotaExceeded", "True")
        assert "gpus of its namespace: pods: 1 asked for, 2 of 2 in use" in conditions["Ready"]["message"]
        # One Pod of three, once: what was refused is refused again, until something ends.
        assert [kind for verb, kind, _ in world.cluster.requests if verb == "create"].count("Pod") == 1
        assert [event["reason"] for event in world.cluster.all("Event")].count("QuotaExceeded") == 1
        world.cluster.refuse.clear()
        for memory in world.controller._memories.values():
            memory.refused_until = 0.0
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


def test_a_changed_spec_is_tried_at_once_after_a_refusal() -> None:
    world = World(resources={"cpu": "9"})

    async def scenario(world: World) -> None:
        world.cluster.refuse["Pod"] = ApiError("Pod dev-0", 403, "Forbidden", "exceeded quota: cpus")
        await world.look()
        world.cluster.refuse.clear()
        world.edit(resources={"cpu": "1"})
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


def test_a_look_at_what_is_as_it_should_be_costs_no_request() -> None:
    world = World(**EVERYTHING)

    async def scenario(world: World) -> None:
        await world.settle()
        count = len(world.cluster.requests)
        await world.look()
        assert world.cluster.requests[count:] == []
        # Something happened to a child: all of them are looked at again.
        del world.cluster.objects["Service", "lab", "dev"]
        world.controller.touch(KEY, children=True)
        await world.look()
        assert "dev" in world.names("Service")

    run(scenario, world)


def test_a_bad_spec_is_told_and_mended() -> None:
    world = World(idleTimeout="soon")

    async def scenario(world: World) -> None:
        await world.look()
        assert world.status["conditions"][1] | {"lastTransitionTime": ""} == {
            "type": "Ready",
            "status": "False",
            "reason": "InvalidSpec",
            "message": "spec.idleTimeout: 'soon' is not a duration. Examples: 90s, 30m, 1h30m, 2d",
            "observedGeneration": 1,
            "lastTransitionTime": "",
        }
        assert world.cluster.all("Pod") == world.cluster.all("Secret") == []
        world.edit(idleTimeout="1h")
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


def test_a_template_that_does_not_fit_is_told() -> None:
    world = World(podTemplate={"spec": {"containers": [{"image": "x"}]}})

    async def scenario(world: World) -> None:
        await world.look()

    run(scenario, world)
    assert world.status["conditions"][1]["reason"] == "InvalidSpec"
    assert "has no name" in world.status["conditions"][1]["message"]


def test_a_spec_that_is_too_deep_to_be_looked_at_is_told(request: pytest.FixtureRequest) -> None:
    # Libraries that other tests load may have raised it.
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"nodeAffinity": deep}
    world = World()
    whole = world.cluster.compute

    def compute(namespace: str, name: str) -> Any:
        found = whole(namespace, name)
        assert found is not None
        return {**found, "spec": {**found["spec"], "affinity": deep}}

    async def scenario(world: World) -> None:
        # Not in the cluster in memory, which copies everything.
        world.cluster.compute = compute  # type: ignore[method-assign]
        await world.look()

    run(scenario, world)
    ready = world.status["conditions"][1]
    assert (ready["reason"], ready["message"]) == ("InvalidSpec", "spec: something in it is nested too deeply")
    assert world.names("Pod") == []


def test_nothing_is_made_again_in_a_namespace_that_is_being_deleted(caplog: pytest.LogCaptureFixture) -> None:
    world = World(**EVERYTHING)
    message = "unable to create new content in namespace lab because it is being terminated"

    async def scenario(world: World) -> None:
        await world.settle()
        gone = ("Pod", "Service", "Secret", "NetworkPolicy", "ConfigMap")
        world.cluster.objects = {place: item for place, item in world.cluster.objects.items() if place[0] not in gone}
        for kind in (*gone, "PersistentVolumeClaim", "Event", "HTTPRoute", "BackendTLSPolicy"):
            world.cluster.refuse[kind] = ApiError(f"{kind} x", 403, "Forbidden", message)
        world.controller.touch(KEY, children=True)
        caplog.clear()
        await world.look()
        assert world.status["phase"] == "Terminating"
        count = len(world.cluster.requests)
        # Neither this operator nor the next one tries again, whatever goes meanwhile.
        for _ in range(2):
            world.controller.touch(KEY, children=True)
            await world.look()
            world.start_operator()
        assert world.cluster.requests[count:] == []

    run(scenario, world)
    ready = world.status["conditions"][1]
    assert (ready["type"], ready["reason"]) == ("Ready", "NamespaceTerminating")
    assert world.status["conditions"][3]["status"] == "False"  # nobody has to do anything
    assert caplog.records == []


def test_the_first_cause_of_a_failed_pull_stays_in_the_status() -> None:
    world = World(image="registry.example/worker:typo")
    image = "registry.example/worker:typo"

    def waits(reason: str, message: str) -> None:
        (pod,) = world.cluster.all("Pod")
        pod["spec"]["nodeName"] = "machine"
        state = {"waiting": {"reason": reason, "message": message}}
        pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "worker", "image": image, "state": state}]}

    def told() -> str:
        return str(world.status["conditions"][3]["message"])

    async def scenario(world: World) -> None:
        await world.look()
        waits("ErrImagePull", "rpc error: code = NotFound: manifest unknown")
        await world.look()
        assert "manifest unknown" in told()
        waits("ImagePullBackOff", f'Back-off pulling image "{image}"')
        world.start_operator()
        await world.look()
        assert world.status["conditions"][3]["reason"] == "ImagePullFailed"
        assert "manifest unknown" in told()
        # Another cause is news.
        waits("ErrImagePull", "dial tcp: lookup registry.example: no such host")
        await world.look()
        assert "no such host" in told()
        assert "manifest unknown" not in told()
        world.cluster.make_ready()
        (pod,) = world.cluster.all("Pod")
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        await world.look()
        assert world.status["phase"] == "Running"
        assert "pullFailures" not in world.status

    run(scenario, world)


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_a_look_that_failed_is_made_again() -> None:
    world = World()
    failures = iter([ApiError("x", 500, "", "etcd is gone"), RuntimeError("a bug")])

    async def scenario(world: World) -> None:
        done = asyncio.Event()
        reconcile = world.controller.reconcile

        async def failing(key: tuple[str, str]) -> float | None:
            for error in failures:
                raise error
            result = await reconcile(key)
            done.set()
            return result

        world.controller.reconcile = failing  # type: ignore[method-assign]
        work = asyncio.create_task(world.controller.run())
        world.controller.touch(KEY)
        await done.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert world.names("Pod") == ["dev-0"]

    run_virtually(scenario(world))


def test_fifty_computes_are_made_side_by_side() -> None:
    world = World()
    world.cluster.objects.clear()
    for number in range(50):
        world.cluster.put(make_compute(f"many-{number}", uid=f"many-{number}"))

    async def scenario(world: World) -> None:
        work = asyncio.create_task(world.controller.run())
        for number in range(50):
            for _ in range(3):
                world.controller.touch(("lab", f"many-{number}"))
        for _ in range(10_000):
            if len(world.cluster.all("Pod")) == 50 and not len(world.controller.queue):
                break
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    run(scenario, world)
    assert len(world.cluster.all("Pod")) == 50
    assert max(world.cluster.made.values()) == 1


def test_before_it_leads_nothing_is_queued_and_then_everything_is_looked_at() -> None:
    world = World()
    world.cluster.put(make_compute("other", uid="other"))

    async def scenario(world: World) -> None:
        world.controller.touch(KEY)
        assert len(world.controller.queue) == 0
        work = asyncio.create_task(world.controller.run())
        while len(world.cluster.all("Pod")) < 2:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        world.controller.touch(KEY)
        assert len(world.controller.queue) == 0

    run_virtually(scenario(world))


def test_a_new_leader_looks_at_new_ones_at_once_and_at_others_when_it_knows_what_was_done() -> None:
    world = World()
    for name in ("old", "behind"):
        world.cluster.put(make_compute(name, uid=name))
    world.cluster.objects["Compute", "lab", "old"]["status"] = {"phase": "Pending", "observedGeneration": 0}
    # The watch has not brought yet that somebody has looked at this one.
    behind = world.cluster.compute("lab", "behind")
    world.cluster.objects["Compute", "lab", "behind"]["status"] = {"phase": "Running"}
    compute = world.cluster.compute
    world.cluster.compute = lambda *key: behind if key == ("lab", "behind") else compute(*key)  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        caught_up = asyncio.Event()
        work = asyncio.create_task(world.controller.run(caught_up.wait))  # type: ignore[arg-type]
        for name in ("old", "behind", "dev"):
            world.controller.touch(("lab", name))
        await asyncio.sleep(5)
        assert world.names("Pod") == ["dev-0"]
        assert world.status["phase"] == "Pending"
        late = world.cluster.put(make_compute("late", uid="late"))
        world.controller.touch(("lab", late["metadata"]["name"]))
        await asyncio.sleep(5)
        assert world.names("Pod") == ["dev-0", "late-0"]
        world.cluster.compute = compute  # type: ignore[method-assign]
        caught_up.set()
        await asyncio.sleep(5)
        assert sorted(world.names("Pod")) == ["behind-0", "dev-0", "late-0", "old-0"]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    run_virtually(scenario(world))


def test_a_new_compute_goes_before_those_that_wait_already() -> None:
    world = World()
    judged = {"observedGeneration": 1}
    for number in range(20):
        world.cluster.put(make_compute(f"old-{number}", uid=f"old-{number}", status=judged))

    async def scenario(world: World) -> None:
        world.controller._running = True
        for number in range(20):
            world.controller.touch(("lab", f"old-{number}"), routine=number % 2 == 0)
        world.controller.touch(KEY, routine=True)
        order = [await world.controller.queue.get() for _ in range(21)]
        assert order[0] == KEY
        # Then those to which something happened, and in every fourth turn one whose time has come.
        assert order[1:6] == [("lab", f"old-{number}") for number in (1, 3, 0, 5, 7)]
        assert order[14:] == [("lab", f"old-{number}") for number in (6, 8, 10, 12, 14, 16, 18)]
        # Another spec is new again.
        world.controller.queue.add(("lab", "old-4"))
        world.edit()
        world.cluster.objects["Compute", *KEY]["status"] = judged
        world.controller.queue.done(KEY)
        world.controller.touch(KEY)
        assert await world.controller.queue.get() == KEY

    run(scenario, world)


def test_nothing_is_done_by_what_is_no_longer_true() -> None:
    world = World()

    def lost(patience_seconds: float) -> None:
        raise ApiError(
            "watch of Pod", 0, "Stale", f"nothing has been heard about them for {patience_seconds + 1:.0f} s"
        )

    async def scenario(world: World) -> None:
        world.cluster.check_current = lost  # type: ignore[method-assign]
        with pytest.raises(ApiError, match="nothing has been heard"):
            await world.look()
        assert world.cluster.requests == []

    run(scenario, world)


def test_events_are_read_once_a_pod_has_waited_and_then_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    now = [1000.0]
    monkeypatch.setattr(controller_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scenario(world: World) -> None:
        await world.look()
        (pod,) = world.cluster.all("Pod")
        pod["spec"]["nodeName"] = "machine"
        asked = []
        for _ in range(240):
            world.cluster.requests.clear()
            await world.look()
            if ("list", "Event", "dev-0") in world.cluster.requests:
                asked.append(now[0] - 1000.0)
            now[0] += 5.0
        assert asked == [10.0, 25.0, 55.0, 115.0, 235.0, 475.0, 775.0, 1075.0]

    run(scenario, world)
