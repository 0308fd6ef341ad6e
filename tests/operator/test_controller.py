"""The controller against a cluster in memory: what it brings about, and that no interruption changes that."""

from __future__ import annotations

import asyncio
import base64
import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from skyproxy_operator.cluster import ApiError
from skyproxy_operator.controller import Controller
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.options import Options
from skyproxy_operator.reaping import Report
from tests.operator.fake_cluster import FakeCluster, FakeProber, Interrupted
from tests.operator.makers import NOW, OPTIONS, make_compute
from tests.operator.virtual_time import run_virtually

KEY = ("lab", "dev")
EVERYTHING = {
    "nodes": 2,
    "idleTimeout": "10m",
    "volumes": [
        {"name": "cache", "storage": "1Gi", "path": "/cache"},
        {"name": "data", "storage": "1Gi", "path": "/data", "reclaimPolicy": "Retain"},
    ],
    "gateway": {"enabled": True, "hostname": "dev.example", "parentRef": {"name": "g", "namespace": "infra"}},
}


class World:
    """A cluster with one Compute, and an operator that can be replaced at any time."""

    def __init__(self, options: Options = OPTIONS, **spec: Any) -> None:
        self.options = options
        self.cluster = FakeCluster()
        self.cluster.kinds = {"HTTPRoute": "v1", "BackendTLSPolicy": "v1"}
        self.prober = FakeProber()
        self.now = NOW
        self.compute = self.cluster.put(make_compute(uid="compute-1", **spec))
        self.start_operator()

    def start_operator(self) -> None:
        """A new process: nothing is remembered."""
        self.controller = Controller(self.cluster, self.prober, self.options, lambda: self.now)  # type: ignore[arg-type]

    async def look(self) -> float | None:
        return await self.controller.reconcile(KEY)

    async def settle(self, looks: int = 12) -> None:
        """The world goes on until nothing changes any more."""
        for _ in range(looks):
            await self.look()
            self.cluster.finish_deletions()
            self.cluster.collect_garbage()
            self.cluster.make_ready()
            self.now += datetime.timedelta(seconds=1)
        if self.cluster.stop_after is None:
            count = len(self.cluster.requests)
            await self.look()
            changes = [request for request in self.cluster.requests[count:] if request[0] not in ("get", "list")]
            assert changes == [], "it does not come to rest"

    def edit(self, **spec: Any) -> None:
        compute = self.cluster.objects["Compute", *KEY]
        compute["spec"].update(spec)
        compute["metadata"]["generation"] += 1

    @property
    def status(self) -> dict[str, Any]:
        return self.cluster.objects["Compute", *KEY].get("status", {})

    def names(self, kind: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.cluster.all(kind)]


def run(scenario: Callable[[World], Any], world: World) -> None:
    asyncio.run(scenario(world))


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


def test_a_name_that_is_used_again_gets_new_secrets() -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()
        first = world.cluster.objects["Secret", "lab", "dev-token"]["data"]["token"]
        del world.cluster.objects["Compute", *KEY]
        world.cluster.put(make_compute(uid="compute-2"))
        # Garbage collection has not come yet: nothing may be built on what belongs to the earlier one.
        await world.look()
        assert len(world.cluster.all("Pod")) == 1
        assert world.status["conditions"][1]["reason"] in ("CleaningUp", "ReplacingPods")
        await world.settle()
        assert world.status["phase"] == "Running"
        assert world.cluster.objects["Secret", "lab", "dev-token"]["data"]["token"] != first

    run(scenario, world)


def test_a_token_that_somebody_made_before_is_used() -> None:
    world = World()
    token = base64.b64encode(b"mine").decode()
    world.cluster.put(
        {"kind": "Secret", "metadata": {"name": "dev-token", "namespace": "lab"}, "data": {"token": token}}
    )

    async def scenario(world: World) -> None:
        await world.settle()

    run(scenario, world)
    assert world.cluster.objects["Secret", "lab", "dev-token"]["data"]["token"] == token
    assert world.prober.asked[0][1].token == "mine"


def test_what_is_not_ours_is_left_alone() -> None:
    world = World()
    theirs = {"kind": "Service", "metadata": {"name": "dev", "namespace": "lab", "labels": {}}, "spec": {"x": 1}}
    world.cluster.put(theirs)

    async def scenario(world: World) -> None:
        for _ in range(3):
            await world.look()

    run(scenario, world)
    assert world.cluster.objects["Service", "lab", "dev"]["spec"] == {"x": 1}
    assert world.cluster.all("Pod") == []
    assert world.status["conditions"][1]["reason"] == "NameTaken"


def test_a_full_quota_is_told_and_overcome() -> None:
    world = World()

    async def scenario(world: World) -> None:
        message = 'pods "dev-0" is forbidden: exceeded quota: gpus'
        world.cluster.refuse["Pod"] = ApiError("Pod dev-0", 403, "Forbidden", message)
        await world.look()
        assert world.status["conditions"][1]["reason"] == "QuotaExceeded"
        world.cluster.refuse.clear()
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


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
        before = METRICS.reaped.value(reason="IdleTimeout")
        await world.look()
        assert world.status["phase"] == "Expired"
        assert METRICS.reaped.value(reason="IdleTimeout") == before + 1
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


def test_a_look_at_what_is_as_it_should_be_costs_two_requests() -> None:
    world = World(**EVERYTHING)

    async def scenario(world: World) -> None:
        await world.settle()
        count = len(world.cluster.requests)
        await world.look()
        assert [request[:2] for request in world.cluster.requests[count:]] == [("get", "Compute"), ("list", "Pod")]
        # Something happened to a child: all of them are looked at again.
        del world.cluster.objects["Service", "lab", "dev"]
        world.controller.touch(KEY, children=True)
        await world.look()
        assert "dev" in world.names("Service")

    run(scenario, world)


def test_no_token_and_no_key_is_anywhere_but_in_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    world = World(**EVERYTHING)

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.fail("dev-0")
        await world.settle()

    run(scenario, world)
    secrets = [
        base64.b64decode(value).decode() for item in world.cluster.all("Secret") for value in item["data"].values()
    ]
    private = [text for text in secrets if "CERTIFICATE" not in text]
    assert len(private) == 2
    elsewhere = repr([item for item in world.cluster.objects.values() if item["kind"] != "Secret"]) + caplog.text
    for text in private:
        assert text not in elsewhere
        assert base64.b64encode(text.encode()).decode() not in elsewhere
    assert "accessmode" not in repr(world.prober.asked[0][1]).lower()
    assert private[0] not in repr(world.prober.asked[0][1])


def test_a_bad_spec_is_told_and_mended() -> None:
    world = World(idleTimeout="soon")

    async def scenario(world: World) -> None:
        await world.look()
        assert world.status["conditions"][1] | {"lastTransitionTime": ""} == {
            "type": "Ready",
            "status": "False",
            "reason": "InvalidSpec",
            "message": "spec.idleTimeout: 'soon' is no duration; write it like 30m, 1h30m or 2d",
            "observedGeneration": 1,
            "lastTransitionTime": "",
        }
        assert world.cluster.all("Pod") == world.cluster.all("Secret") == []
        world.edit(idleTimeout="1h")
        await world.settle()
        assert world.status["phase"] == "Running"

    run(scenario, world)


@pytest.mark.parametrize("kinds", [{}, {"HTTPRoute": "v1"}, {"HTTPRoute": "v1", "BackendTLSPolicy": "v1alpha2"}])
def test_a_gateway_that_the_cluster_does_not_know_is_told_and_keeps_nothing_from_running(kinds: dict[str, str]) -> None:
    world = World(gateway={"enabled": True, "hostname": "a.example", "parentRef": {"name": "g"}})
    world.cluster.kinds = kinds

    async def scenario(world: World) -> None:
        for _ in range(3):
            await world.look()
            world.cluster.make_ready()

    run(scenario, world)
    assert world.status["phase"] == "Running"
    assert world.status["conditions"][3]["reason"] == "GatewayUnavailable"


def test_a_way_in_that_is_not_wanted_any_more_goes() -> None:
    world = World(gateway={"enabled": True, "hostname": "a.example", "parentRef": {"name": "g"}})

    async def scenario(world: World) -> None:
        await world.settle()
        assert world.names("HTTPRoute") == ["dev"]
        world.edit(gateway={"enabled": False})
        await world.settle()
        assert world.names("HTTPRoute") == []
        assert "externalUrl" not in world.status
        # One that somebody else made stays.
        theirs = {"kind": "HTTPRoute", "metadata": {"name": "dev", "namespace": "lab", "labels": {}}}
        world.cluster.put(theirs)
        world.controller.touch(KEY, children=True)
        await world.look()
        assert world.names("HTTPRoute") == ["dev"]

    run(scenario, world)


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


def test_secrets_that_somebody_replaced_are_read_again_when_a_worker_refuses_what_was_known() -> None:
    world = World()

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    async def scenario(world: World) -> None:
        await world.settle()
        before = world.prober.asked[-1][1]
        secret = world.cluster.objects["Secret", "lab", "dev-token"]
        secret["data"] = {"token": encoded("the-new-token"), "former": encoded(before.token)}
        world.prober.idle_seconds = None
        world.prober.silence = Report(problem="it answered HTTP 401", reason="TokenRefused")
        for _ in range(2):
            world.controller._memories[KEY].probe_at = 0.0
            await world.look()
        after = world.prober.asked[-1][1]
        assert (after.token, after.former) == ("the-new-token", before.token)

    run(scenario, world)


def test_a_certificate_that_is_made_anew_leaves_the_former_authority_trusted() -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()
        first = world.prober.asked[-1][1].authority
        world.now += datetime.timedelta(days=1700)
        for _ in range(2):
            # Without the memory of a process: it is looked at after a while in any case.
            world.start_operator()
            await world.look()
            trusted = world.prober.asked[-1][1].authority
            assert trusted.count("BEGIN CERTIFICATE") == 2
            assert first.strip() in trusted
            assert trusted != first

    run(scenario, world)


def test_a_template_that_does_not_fit_is_told() -> None:
    world = World(podTemplate={"spec": {"containers": [{"image": "x"}]}})

    async def scenario(world: World) -> None:
        await world.look()

    run(scenario, world)
    assert world.status["conditions"][1]["reason"] == "InvalidSpec"
    assert "has no name" in world.status["conditions"][1]["message"]


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
        assert {verb for verb, _, _ in world.cluster.requests[count:]} == {"get", "list"}

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
