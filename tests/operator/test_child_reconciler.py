"""Secrets, Services, claims and ways in: made, mended and left alone, against a cluster in memory."""

from __future__ import annotations

import asyncio
import base64
import datetime
from dataclasses import replace
from typing import Any

import pytest

from skyproxy_operator import children
from skyproxy_operator.certificates import is_pair, issue
from skyproxy_operator.cluster import ApiError
from skyproxy_operator.reaping import Report
from tests.operator.fake_cluster import FakeCluster
from tests.operator.makers import NOW, OPTIONS, make_compute
from tests.operator.virtual_time import run_virtually
from tests.operator.world import EVERYTHING, KEY, World, run


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


def foreign(name: str, data: dict[str, str], **metadata: Any) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {"kind": "Secret", "metadata": {"name": name, "namespace": "lab", **metadata}, "data": encoded}


FOREIGN = [("dev-token", {"token": "of a robot"}), ("dev-tls", {"tls.crt": "c", "tls.key": "of a shop", "ca.crt": "a"})]


@pytest.mark.parametrize(("name", "data"), FOREIGN)
def test_a_secret_is_not_given_to_a_compute_for_its_name(name: str, data: dict[str, str]) -> None:
    world = World(replace(OPTIONS, secrets="shared-*"))
    world.cluster.put(foreign(name, data, annotations={"cert-manager.io/certificate-name": "dev"}))

    async def scenario(world: World) -> None:
        await world.settle()

    run(scenario, world)
    assert world.names("Pod") == []
    conditions = {row["type"]: row for row in world.status["conditions"]}
    assert conditions["Degraded"]["reason"] == "SecretTaken"
    assert name in conditions["Degraded"]["message"]
    assert world.cluster.objects["Secret", "lab", name]["data"] == foreign(name, data)["data"]


def test_whoever_may_change_a_secret_gives_it_to_a_compute_by_a_label() -> None:
    world = World(replace(OPTIONS, secrets=""))
    world.cluster.put(foreign("dev-token", {"token": "mine"}, labels={"skyproxy.dev/compute": "dev"}))

    async def scenario(world: World) -> None:
        await world.settle()

    run(scenario, world)
    assert world.status["phase"] == "Running"
    assert world.prober.asked[0][1].token == "mine"


class SlowCluster(FakeCluster):
    """One whose API server takes a second for each request.

    Attributes:
        under_way: requests that have not been answered.
    """

    under_way = 0

    async def _wait(self) -> None:
        self.under_way += 1
        try:
            await asyncio.sleep(1)
        finally:
            self.under_way -= 1

    async def read(self, *what: Any) -> Any:
        await self._wait()
        return await super().read(*what)

    async def create(self, wanted: Any) -> bool:
        await self._wait()
        return await super().create(wanted)

    async def apply(self, wanted: Any) -> Any:
        await self._wait()
        return await super().apply(wanted)


def slow_world() -> World:
    world = World()
    world.cluster = SlowCluster()
    world.cluster.put(make_compute(uid="compute-1"))
    world.start_operator()
    return world


def test_what_a_new_compute_needs_is_made_side_by_side() -> None:
    world = slow_world()

    async def scenario() -> None:
        begun = asyncio.get_running_loop().time()
        await world.look()
        children = [
            request for request in world.cluster.requests if request[1] in ("Secret", "Service", "NetworkPolicy")
        ]
        assert len(children) == 6
        # The longest of these is two: a Service is looked for, and applied. Then come a Pod and an event.
        assert asyncio.get_running_loop().time() - begun == pytest.approx(4, abs=0.1)

    run_virtually(scenario())


def test_a_child_that_fails_leaves_no_request_of_another_under_way() -> None:
    world = slow_world()
    cluster = world.cluster
    assert isinstance(cluster, SlowCluster)
    cluster.refuse["Secret"] = ApiError("Secret dev-token", 503, "", "etcd is gone")

    async def scenario() -> None:
        with pytest.raises(ApiError, match="Secret dev-token: etcd is gone"):
            await world.look()
        assert cluster.under_way == 0
        assert world.names("Service") == ["dev"]
        cluster.refuse.clear()
        await world.look()
        assert world.names("Pod") == ["dev-0"]

    run_virtually(scenario())


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


@pytest.mark.parametrize(
    ("limits", "phase"), [({}, "Running"), ({"egress": "namespace"}, "Pending"), ({"ingress": "namespace"}, "Pending")]
)
@pytest.mark.parametrize("how", ["taken", "refused"])
def test_where_networks_are_limited_no_worker_runs_without_its_policy(
    limits: dict[str, str], phase: str, how: str
) -> None:
    world = World(replace(OPTIONS, **limits))  # type: ignore[arg-type]
    if how == "taken":
        theirs = {"kind": "NetworkPolicy", "metadata": {"name": "dev", "namespace": "lab"}, "spec": {"podSelector": {}}}
        world.cluster.put(theirs)
    else:
        world.cluster.refuse["NetworkPolicy"] = ApiError("NetworkPolicy dev", 403, "Forbidden", "no")

    async def scenario(world: World) -> None:
        for _ in range(4):
            await world.look()
            world.cluster.make_ready()

    run(scenario, world)
    assert world.status["phase"] == phase
    assert world.names("Pod") == (["dev-0"] if phase == "Running" else [])
    degraded = next(row for row in world.status["conditions"] if row["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NameTaken" if how == "taken" else "Forbidden")


def test_a_claim_of_somebody_else_is_not_mounted_for_its_name() -> None:
    world = World(volumes=[{"name": "postgres-0", "storage": "1Gi", "path": "/cache"}])
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    theirs = {"name": "dev-postgres-0", "namespace": "lab", "labels": {"app": "postgres"}}
    world.cluster.put({"kind": "PersistentVolumeClaim", "metadata": theirs, "spec": spec})

    async def scenario(world: World) -> None:
        for _ in range(3):
            await world.look()
        assert world.names("Pod") == []
        assert world.status["conditions"][1]["reason"] == "NameTaken"
        # One that a Compute of that name left, or that somebody gives it, is its own.
        claim = world.cluster.objects["PersistentVolumeClaim", "lab", "dev-postgres-0"]
        claim["metadata"]["labels"]["skyproxy.dev/compute"] = "dev"
        await world.settle()
        assert world.status["phase"] == "Running"

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


@pytest.mark.parametrize("part", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("content", [None, b"", b"garbage", "another's"])
def test_what_somebody_spoilt_in_a_certificate_of_ours_is_made_anew_for_the_next_start(
    part: str, content: bytes | str | None
) -> None:
    world = World(restartPolicy={"backoffSeconds": 1})

    def data() -> dict[str, str]:
        found: dict[str, str] = world.cluster.objects["Secret", "lab", "dev-tls"]["data"]
        return found

    async def scenario(world: World) -> None:
        await world.settle()
        count = len(world.cluster.requests)
        other = children.certificate_secret(make_compute(), issue("dev", "lab", NOW))["data"]
        if content is None:
            del data()[part]
        else:
            data()[part] = other[part] if isinstance(content, str) else base64.b64encode(content).decode()
        await world.settle()
        # As long as the worker runs it goes on with what it has read.
        assert [request for request in world.cluster.requests[count:] if request[1] == "Secret"] == []
        world.cluster.fail("dev-0")
        await world.settle()
        assert (world.status["phase"], world.status["restarts"]) == ("Running", 1)
        made = {key: base64.b64decode(value).decode() for key, value in data().items()}
        assert is_pair(made["tls.crt"], made["tls.key"], made["ca.crt"])

    run(scenario, world)


@pytest.mark.parametrize("name", ["dev-token", "dev-tls"])
def test_a_secret_that_somebody_deleted_is_there_for_the_next_start(name: str) -> None:
    world = World(restartPolicy={"backoffSeconds": 1})

    async def scenario(world: World) -> None:
        await world.settle()
        del world.cluster.objects["Secret", "lab", name]
        world.cluster.fail("dev-0")
        await world.settle()
        assert (world.status["phase"], world.names("Secret")) == ("Running", ["dev-tls", "dev-token"])

    run(scenario, world)


def test_a_certificate_of_somebody_elses_is_left_as_it_is() -> None:
    world = World(restartPolicy={"backoffSeconds": 1})

    async def scenario(world: World) -> None:
        await world.settle()
        secret = world.cluster.objects["Secret", "lab", "dev-tls"]
        del secret["metadata"]["ownerReferences"]
        secret["data"]["tls.key"] = base64.b64encode(b"theirs").decode()
        world.cluster.fail("dev-0")
        await world.settle()
        assert world.cluster.objects["Secret", "lab", "dev-tls"]["data"] == secret["data"]

    run(scenario, world)


def reads(world: World) -> list[tuple[str, str]]:
    return [(kind, name) for verb, kind, name in world.cluster.requests if verb == "get"]


def writes(world: World) -> list[tuple[str, str]]:
    return [(verb, kind) for verb, kind, _ in world.cluster.requests if verb not in ("get", "list")]


def test_the_secrets_of_a_new_compute_are_made_without_being_looked_for() -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()
        # Somebody may have objects of these names that do not bear our label, which a watch does not see.
        assert reads(world) == [("Service", "dev"), ("NetworkPolicy", "dev")]
        world.cluster.requests.clear()
        world.start_operator()
        await world.look()
        assert reads(world) == [("Secret", "dev-token"), ("Secret", "dev-tls"), ("HTTPRoute", "dev")]
        assert writes(world) == []
        world.cluster.requests.clear()
        world.controller.touch(KEY, children=True)
        await world.look()
        assert world.cluster.requests == []

    run(scenario, world)


def test_a_child_that_somebody_changed_is_applied_again() -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.requests.clear()
        world.cluster.objects["Service", "lab", "dev"]["spec"]["ports"][0]["port"] = 1
        world.controller.touch(KEY, children=True)
        await world.look()
        assert writes(world) == [("patch", "Service")]
        assert world.cluster.objects["Service", "lab", "dev"]["spec"]["ports"][0]["port"] == 8765

    run(scenario, world)


def test_what_an_installation_says_no_more_is_taken_back() -> None:
    world = World(options=replace(OPTIONS, egress="namespace"))

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.requests.clear()
        # The policy of before has all that the one of now has, and more.
        world.options = OPTIONS
        world.start_operator()
        await world.look()
        assert writes(world) == [("patch", "NetworkPolicy")]

    run(scenario, world)


def test_no_private_key_stays_in_the_operators_memory() -> None:
    world = World()

    async def scenario(world: World) -> None:
        await world.settle()
        world.start_operator()
        await world.look()
        key = world.cluster.objects["Secret", "lab", "dev-tls"]["data"]["tls.key"]
        kept = [item for read in world.controller._children._read.values() for item in read.found.values()]
        assert {item["metadata"]["name"] for item in kept} == {"dev-token", "dev-tls"}
        assert key not in repr([item["data"] for item in kept])

    run(scenario, world)
