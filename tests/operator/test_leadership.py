"""Of several operators one works. The Lease is in memory, and time is virtual."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from skyproxy_operator.cluster import ApiError
from skyproxy_operator.leadership import Leadership, LeaseLostError
from tests.operator.makers import OPTIONS
from tests.operator.virtual_time import run_virtually

TAKING_PART = replace(OPTIONS, lease_namespace="system", lease_seconds=15.0)


class Leases:
    """The Lease as the API server keeps it: who replaces it must have seen the last version.

    Attributes:
        unreachable: whether all requests fail.
        asked: the methods of all requests.
    """

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.unreachable = False
        self.asked: list[str] = []

    def _check(self) -> None:
        if self.unreachable:
            raise ApiError("Lease", 0, "Unreachable", "the API server cannot be reached")

    def _store(self, lease: dict[str, Any]) -> None:
        self.version += 1
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self.version)

    async def read(self, *_: str) -> dict[str, Any] | None:
        self.asked.append("GET")
        self._check()
        return copy.deepcopy(self.lease)

    async def create(self, lease: dict[str, Any]) -> bool:
        self._check()
        if self.lease is not None:
            return False
        self._store(lease)
        return True

    async def request(self, method: str, path: str, *, what: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(method)
        self._check()
        assert (method, path) == ("PUT", "/apis/coordination.k8s.io/v1/namespaces/system/leases/skyproxy-operator")
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(what, 409, "Conflict", "the object has been modified")
        self._store(body)
        return copy.deepcopy(self.lease)

    @property
    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"] if self.lease else ""


class Candidate:
    """An operator that takes part; `working` is set while it is at work."""

    def __init__(self, leases: Any, name: str, options: Any = TAKING_PART) -> None:
        self.working = asyncio.Event()
        self.ended = asyncio.Event()
        self.leadership = Leadership(leases, options, name)
        self.task = asyncio.create_task(self.leadership.run(self._work))

    async def _work(self) -> None:
        self.working.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.working.clear()
            self.ended.set()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def run(scenario: Callable[[Leases], Any]) -> None:
    run_virtually(scenario(Leases()))


def test_one_works_and_the_next_takes_over_at_once_when_it_leaves() -> None:
    async def scenario(leases: Leases) -> None:
        first = Candidate(leases, "first")
        await first.working.wait()
        second = Candidate(leases, "second")
        # Longer than the Lease lasts: it is renewed.
        await asyncio.sleep(30 * TAKING_PART.lease_seconds)
        assert (first.working.is_set(), second.working.is_set(), leases.holder) == (True, False, "first")
        await first.stop()
        assert (leases.holder, first.leadership.leading) == ("", False)
        await second.working.wait()
        assert leases.holder == "second"
        assert leases.lease is not None
        assert leases.lease["spec"]["leaseTransitions"] == 1
        await second.stop()

    run(scenario)


def test_of_two_that_begin_together_one_works() -> None:
    async def scenario(leases: Leases) -> None:
        candidates = [Candidate(leases, str(number)) for number in range(5)]
        await asyncio.wait(
            [asyncio.create_task(item.working.wait()) for item in candidates], return_when="FIRST_COMPLETED"
        )
        await asyncio.sleep(TAKING_PART.lease_seconds)
        assert sum(item.working.is_set() for item in candidates) == 1
        for item in candidates:
            await item.stop()

    run(scenario)


def test_the_lease_of_one_that_died_runs_out() -> None:
    async def scenario(leases: Leases) -> None:
        dead = Leadership(leases, TAKING_PART, "dead")  # type: ignore[arg-type]
        assert await dead._try()
        heir = Candidate(leases, "heir")
        await heir.working.wait()
        assert leases.holder == "heir"
        await heir.stop()

    run(scenario)


STRANGE: list[Any] = [
    {},
    {"metadata": {"name": "skyproxy-operator"}, "spec": "text"},
    {"metadata": {"name": "skyproxy-operator"}, "spec": {"holderIdentity": ["x"], "leaseDurationSeconds": "soon"}},
    {"metadata": {"name": "skyproxy-operator"}, "spec": {"leaseTransitions": {}}},
]


@pytest.mark.parametrize("strange", STRANGE)
def test_an_answer_that_is_no_lease_ends_no_candidate_and_no_leader_before_its_time(strange: Any) -> None:
    class Strange(Leases):
        answer: Any = None

        async def read(self, *_: str) -> dict[str, Any] | None:
            return await super().read() if self.answer is None else self.answer

        async def request(self, method: str, path: str, *, what: str, body: dict[str, Any]) -> dict[str, Any]:
            if self.answer is not None:
                return {}
            return await super().request(method, path, what=what, body=body)

    async def scenario(_: Leases) -> None:
        leases = Strange()
        leases.lease = {"metadata": {"resourceVersion": "0"}, "spec": {}}
        leases.answer = strange
        candidate = Candidate(leases, "candidate")
        await asyncio.sleep(10 * TAKING_PART.lease_seconds)
        assert not candidate.task.done()
        leases.answer = None
        await candidate.working.wait()
        # For a time that is shorter than a third of what may pass it does not matter.
        leases.answer = strange
        await asyncio.sleep(TAKING_PART.lease_seconds / 3)
        leases.answer = None
        await asyncio.sleep(10 * TAKING_PART.lease_seconds)
        assert candidate.working.is_set()
        await candidate.stop()

    run(scenario)


def test_who_cannot_renew_stops_before_another_may_begin() -> None:
    async def scenario(leases: Leases) -> None:
        leader = Candidate(leases, "leader")
        await leader.working.wait()
        renewed = asyncio.get_running_loop().time()
        leases.unreachable = True
        with pytest.raises(LeaseLostError):
            await leader.task
        assert leader.ended.is_set()
        assert asyncio.get_running_loop().time() - renewed < TAKING_PART.lease_seconds

    run(scenario)


def test_a_server_that_does_not_answer_is_as_bad_as_one_that_is_gone() -> None:
    async def scenario(leases: Leases) -> None:
        leader = Candidate(leases, "leader")
        await leader.working.wait()
        renewed = asyncio.get_running_loop().time()

        async def never(*_: str) -> None:
            await asyncio.sleep(10_000)

        leases.read = never  # type: ignore[assignment, method-assign]
        await leader.ended.wait()
        assert asyncio.get_running_loop().time() - renewed < TAKING_PART.lease_seconds
        with pytest.raises(LeaseLostError):
            await leader.task

    run(scenario)


def test_a_failure_of_the_work_is_passed_on_and_the_lease_given_up() -> None:
    async def scenario(leases: Leases) -> None:
        async def work() -> None:
            raise ValueError("a bug")

        with pytest.raises(ValueError, match="a bug"):
            await Leadership(leases, TAKING_PART, "one").run(work)  # type: ignore[arg-type]
        assert leases.holder == ""

    run(scenario)


def test_without_a_namespace_for_the_lease_everyone_works() -> None:
    async def scenario(leases: Leases) -> None:
        candidates = [Candidate(leases, str(number), OPTIONS) for number in range(2)]
        for item in candidates:
            await item.working.wait()
            await item.stop()
        assert leases.lease is None

    run(scenario)


def test_renewing_is_one_request_and_who_finds_another_version_reads_it_first() -> None:
    async def scenario(leases: Leases) -> None:
        candidate = Candidate(leases, "first")
        await candidate.working.wait()
        await asyncio.sleep(TAKING_PART.lease_seconds)
        leases.asked.clear()
        await asyncio.sleep(10 * TAKING_PART.lease_seconds)
        assert set(leases.asked) == {"PUT"}
        assert len(leases.asked) <= 10 * 4 + 1
        # Somebody wrote something else into it.
        assert leases.lease is not None
        leases._store({**leases.lease, "metadata": {**leases.lease["metadata"], "labels": {"a": "b"}}})
        leases.asked.clear()
        await asyncio.sleep(TAKING_PART.lease_seconds)
        assert leases.asked[:3] == ["PUT", "GET", "PUT"]
        assert (candidate.working.is_set(), leases.lease["metadata"]["labels"]) == (True, {"a": "b"})
        await candidate.stop()

    run(scenario)
