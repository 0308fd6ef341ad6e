"""What `kubernetes_asyncio.leaderelection` does where a Lease matters: the reasons for an election of our own.

Each test holds a defect of the library. One that fails says that a new version has mended it: take the row out of
docs/topics/operator.md, and use the library's election when none is left. The Lease is in memory, and time is virtual.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("kubernetes_asyncio")

from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.leaderelection import leaderelection
from kubernetes_asyncio.leaderelection.electionconfig import Config
from kubernetes_asyncio.leaderelection.leaderelection import LeaderElection
from kubernetes_asyncio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes_asyncio.leaderelection.resourcelock.baselock import BaseLock

from tests.operator.virtual_time import run_virtually

LEASE_SECONDS, DEADLINE_SECONDS, RETRY_SECONDS = 15.0, 10.0, 2.0


class Shared:
    """The Lease as the API server keeps it."""

    record: LeaderElectionRecord | None = None

    @property
    def holder(self) -> str | None:
        return None if self.record is None else self.record.holder_identity


class Lock(BaseLock):
    """One candidate's way to the Lease.

    Attributes:
        trouble: what happens to each request before it is answered; None for nothing.
        asked: how many requests there were.
    """

    def __init__(self, shared: Shared, identity: str) -> None:
        super().__init__("skyproxy-operator", "system", identity)
        self.shared = shared
        self.trouble: Callable[[], Awaitable[object]] | None = None
        self.asked = 0

    async def _reach(self) -> None:
        self.asked += 1
        if self.trouble is not None:
            await self.trouble()

    async def get(self, name: str, namespace: str) -> tuple[bool, LeaderElectionRecord | Exception]:
        await self._reach()
        if self.shared.record is None:
            missing = ApiException(404, "Not Found")
            missing.body = json.dumps({"code": 404})
            return False, missing
        return True, copy.copy(self.shared.record)

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        return await self.update(name, namespace, election_record)

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        await self._reach()
        self.shared.record = copy.copy(updated_record)
        return True


class Candidate:
    """An operator whose work lasts until it is cancelled."""

    def __init__(self, shared: Shared, identity: str, work: Callable[[], Awaitable[None]] | None = None) -> None:
        self.lock = Lock(shared, identity)
        self.is_working = False
        self._own_work = work
        config = Config(self.lock, LEASE_SECONDS, DEADLINE_SECONDS, RETRY_SECONDS, self._work, None)
        self.election = asyncio.ensure_future(LeaderElection(config).run())

    async def _work(self) -> None:
        self.is_working = True
        try:
            if self._own_work is not None:
                await self._own_work()
            await asyncio.Event().wait()
        finally:
            self.is_working = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The wall clock that the library reads: virtual time, and by how much somebody has set it."""
    found = SimpleNamespace(set_by_seconds=0.0)
    found.time = lambda: 1_000_000 + asyncio.get_running_loop().time() + found.set_by_seconds
    monkeypatch.setattr(leaderelection, "time", found)
    return found


@pytest.fixture(autouse=True)
def _on_virtual_time(clock: SimpleNamespace) -> None:
    """Every test here."""


async def until_two_work(first: Candidate, shared: Shared) -> None:
    """Let another candidate come while the first has trouble; both are at work in the end."""
    second = Candidate(shared, "second")
    await asyncio.sleep(4 * LEASE_SECONDS)
    assert shared.holder == "second"
    assert second.is_working
    assert first.is_working


async def _leader(shared: Shared) -> Candidate:
    first = Candidate(shared, "first")
    await asyncio.sleep(LEASE_SECONDS)
    assert shared.holder == "first"
    assert first.is_working
    return first


def test_work_goes_on_without_a_lease_where_connections_are_refused() -> None:
    async def refuse() -> None:
        raise OSError("connection refused")

    async def main() -> None:
        shared = Shared()
        first = await _leader(shared)
        first.lock.trouble = refuse
        await until_two_work(first, shared)
        assert isinstance(first.election.exception(), OSError)

    run_virtually(main())


def test_work_goes_on_without_a_lease_where_a_request_hangs() -> None:
    async def main() -> None:
        shared = Shared()
        first = await _leader(shared)
        first.lock.trouble = asyncio.Event().wait
        await until_two_work(first, shared)
        assert not first.election.done()

    run_virtually(main())


def test_work_goes_on_without_a_lease_where_the_election_is_cancelled() -> None:
    async def main() -> None:
        shared = Shared()
        first = await _leader(shared)
        first.election.cancel()
        await until_two_work(first, shared)
        assert first.election.cancelled()

    run_virtually(main())


def test_a_lease_is_renewed_for_ever_where_the_work_has_failed() -> None:
    async def fail() -> None:
        raise ValueError("a defect")

    async def main() -> None:
        shared = Shared()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # which is all that one hears
        first = Candidate(shared, "first", fail)
        await asyncio.sleep(LEASE_SECONDS)
        asked = first.lock.asked
        await asyncio.sleep(100 * LEASE_SECONDS)
        assert not first.is_working
        assert shared.holder == "first"
        assert first.lock.asked > asked + 100
        assert not first.election.done()

    run_virtually(main())


def test_two_work_where_a_clock_is_set_while_a_request_is_slow(clock: SimpleNamespace) -> None:
    """With `try_acquire_or_renew` alone, too: a candidate measures the Lease's age by the clock on the wall."""

    async def main() -> None:
        shared = Shared()
        first = await _leader(shared)
        first.lock.trouble = lambda: asyncio.sleep(DEADLINE_SECONDS / 2)
        await asyncio.sleep(RETRY_SECONDS)
        second = Candidate(shared, "second")
        await asyncio.sleep(RETRY_SECONDS / 2)  # it has seen the Lease, which is young
        assert not second.is_working
        clock.set_by_seconds = 3600.0
        await asyncio.sleep(RETRY_SECONDS)
        assert shared.holder == "second"
        assert second.is_working
        assert first.is_working

    run_virtually(main())
