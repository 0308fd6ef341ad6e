"""Questions that take long: nobody waits for them, and their answers are not lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyproxy_operator.controller import Controller
from skyproxy_operator.probing import ProbeCredentials
from skyproxy_operator.questions import Questions
from skyproxy_operator.reaping import Report
from tests.operator.fake_cluster import FakeCluster
from tests.operator.makers import NOW, OPTIONS, make_compute
from tests.operator.virtual_time import run_virtually

ACCESS = ProbeCredentials("token", "authority", "dev.lab.svc")
HERE = [("10.0.0.1", 8765)]


class SlowProber:
    """Workers that take as long to answer as their namespace says."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[tuple[float, str]] = []
        self.cancelled = 0

    async def ask(self, addresses: Any, access: ProbeCredentials, path: str = "/activity") -> list[Report]:
        self.asked.append((asyncio.get_running_loop().time(), access.namespace))
        try:
            await asyncio.sleep(self.seconds.get(access.namespace, 0.0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [Report(1.0, {"devices": [], "software": {}}) for _ in addresses]


def test_a_quick_answer_is_given_at_once_and_a_slow_one_is_told_of() -> None:
    async def main() -> None:
        prober = SlowProber(slow=5.0)
        questions = Questions(prober)  # type: ignore[arg-type]
        told: list[float] = []
        loop = asyncio.get_running_loop()

        async def ask(namespace: str) -> Any:
            access = ProbeCredentials("token", "authority", "dev.lab.svc", namespace=namespace)
            return await questions.ask(namespace, HERE, access, lambda: told.append(loop.time()))

        assert await ask("quick") == [Report(1.0, {"devices": [], "software": {}})]
        assert (loop.time(), told) == (0.0, [])
        assert await ask("slow") is None
        assert loop.time() == pytest.approx(0.25)
        # A second look waits for nothing, and asks nothing else.
        assert await ask("slow") is None
        assert loop.time() == pytest.approx(0.25)
        await asyncio.sleep(6)
        assert told == [5.0]
        assert len(await ask("slow")) == 1
        assert len(prober.asked) == 2

    run_virtually(main())


@pytest.mark.parametrize(
    "other", [([("10.0.0.2", 8765)], ACCESS), (HERE, ProbeCredentials("another", "authority", "dev.lab.svc"))]
)
def test_an_answer_of_others_is_none_of_those_that_are_asked_now(other: tuple[Any, ProbeCredentials]) -> None:
    async def main() -> None:
        prober = SlowProber()
        prober.seconds = {"": 5.0}
        questions = Questions(prober)  # type: ignore[arg-type]
        assert await questions.ask("uid", HERE, ACCESS, lambda: None) is None
        assert await questions.ask("uid", *other, lambda: None) is None
        await asyncio.sleep(0)
        assert (len(prober.asked), prober.cancelled) == (2, 1)
        questions.forget("uid")
        await questions.ask("uid", HERE, ACCESS, lambda: None)
        await questions.close()
        assert prober.cancelled == 3

    run_virtually(main())


def test_many_slow_workers_of_one_namespace_delay_no_look_at_another() -> None:
    async def main() -> None:
        cluster, prober = FakeCluster(), SlowProber(crowd=5.0)
        controller = Controller(cluster, cluster, prober, OPTIONS, lambda: NOW)  # type: ignore[arg-type]

        def put(namespace: str, name: str) -> tuple[str, str]:
            compute = make_compute(name, uid=f"{namespace}-{name}")
            compute["metadata"]["namespace"] = namespace
            cluster.put(compute)
            return namespace, name

        crowd = [put("crowd", f"c{number}") for number in range(40)]
        for key in crowd:
            await controller.reconcile(key)
        cluster.make_ready()
        running = asyncio.ensure_future(controller.run())
        await asyncio.sleep(0.1)
        assert len(prober.asked) == OPTIONS.concurrency
        # Every place where looks are made asks a slow worker now.
        loop = asyncio.get_running_loop()
        begun = loop.time()
        new = put("field", "new")
        controller.touch(new)
        while "phase" not in (cluster.objects["Compute", *new].get("status") or {}):
            await asyncio.sleep(0.01)
        assert loop.time() - begun <= 0.3
        # And the slow ones are heard in the end.
        await asyncio.sleep(20)
        heard = [item for item in cluster.all("Compute") if "worker" in (item.get("status") or {})]
        assert len(heard) == len(crowd)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtually(main())


def test_an_operator_that_ends_leaves_no_question_behind() -> None:
    async def main() -> None:
        cluster, prober = FakeCluster(), SlowProber(lab=5.0)
        controller = Controller(cluster, cluster, prober, OPTIONS, lambda: NOW)  # type: ignore[arg-type]
        cluster.put(make_compute())
        await controller.reconcile(("lab", "dev"))
        cluster.make_ready()
        running = asyncio.ensure_future(controller.run())
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (len(prober.asked), prober.cancelled) == (1, 1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())
