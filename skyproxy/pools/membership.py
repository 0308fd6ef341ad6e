"""The nodes of an elastic pool: started, connected, watched and taken away, as the rule of its growth says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from skyproxy.errors import ConfigurationError, SkyproxyError, WorkerStartError
from skyproxy.pools.elastic_group import ElasticGroup, Member
from skyproxy.pools.growth import Growth, Load, Nodes
from skyproxy.pools.loop_thread import loop_thread
from skyproxy.pools.slots import Demand
from skyproxy.pools.workers import check_software, close_nodes, connect_worker, really
from skyproxy.providers.all_or_none import run_all_or_none
from skyproxy.providers.base import Launched, Progress, Report, WorkerSpec
from skyproxy.providers.single_nodes import NodeSource

logger = logging.getLogger("skyproxy")

_LOOK_SECONDS = 1.0
"""The longest time between two looks at whether all nodes are alive."""


class CallQueue(Protocol):
    """The scheduler, as the membership needs it."""

    def add_ranks(self, ranks: Collection[int]) -> None:
        """Processes have come."""

    def remove_ranks(self, ranks: Collection[int], is_held: Callable[[int], bool]) -> bool:
        """Take idle processes out of use."""

    def lose_ranks(self, ranks: Collection[int]) -> None:
        """Processes are gone."""

    def fail_waiting(self, error: Exception) -> None:
        """End the calls that wait."""

    def demand(self) -> Demand:
        """Return what waits."""


@dataclass
class PoolNode:
    """A node that is there.

    Attributes:
        number: its own, from 0, for as long as it is there.
        launched: what the provider gave.
        members: its processes.
        tensors: what its sessions held when it came, for comparison.
    """

    number: int
    launched: Launched
    members: list[Member]
    tensors: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks of its processes."""
        return [member.endpoint.rank for member in self.members]

    @property
    def is_alive(self) -> bool:
        """True if all of its processes are there."""
        return all(member.node.alive for member in self.members)

    @property
    def is_in_use(self) -> bool:
        """True if the program holds tensors there, or runs something beside the pool's queue."""
        sessions = (member.node._session for member in self.members)
        if any(session.recorder.live_slots > before for session, before in zip(sessions, self.tensors)):
            return True
        return any(member.node._runner.is_busy for member in self.members)


class Membership:
    """Keeps as many nodes as its rule wants. Runs on the loop of all pools, as one task.

    Attributes:
        nodes: those that are there, by number.
        wanted: nodes that somebody wants in any case, whatever the queue says.
        is_held: tells whether something beside the queue keeps a rank, such as an actor.
    """

    def __init__(
        self,
        source: NodeSource,
        spec: WorkerSpec,
        limits: Nodes,
        group: ElasticGroup,
        slots_per_node: int,
        report: Report,
    ) -> None:
        """Make the membership of one pool; `begin` starts its nodes.

        Args:
            source: of the nodes.
            spec: of the whole pool.
            limits: of its size.
            group: what comes is added to.
            slots_per_node: single calls that a node runs at a time.
            report: told of every change.
        """
        self.nodes: dict[int, PoolNode] = {}
        self.wanted = 0
        self.is_held: Callable[[int], bool] = lambda rank: False
        self._source = source
        self._spec = spec
        self._limits = limits
        self._group = group
        self._growth = Growth(limits, slots_per_node)
        self._report = report
        self._queue: CallQueue | None = None
        self._on_join: Callable[[PoolNode], object] = lambda node: None
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_woken = False
        self._closed = False

    # --- from other threads -------------------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Have it look at the queue, soon; cheap where that is on its way already. Any thread."""
        if not self._is_woken:
            self._is_woken = True
            loop_thread().post(self._wake.set)

    def want(self, count: int) -> None:
        """Have so many nodes, whatever the queue says. Any thread."""
        self.wanted = count
        self.look_soon()

    def condemn(self, ranks: Sequence[int]) -> None:
        """Replace the nodes of these ranks, whatever runs there. Any thread; they are out of use when this returns."""
        numbers = {rank // self._spec.procs_per_node for rank in ranks}
        for number in numbers:
            node = self.nodes.get(number)
            if node is not None:
                self._take_out(node)
        loop_thread().post(lambda: self._end_all(numbers, "did not stop, and is replaced"))

    # --- its life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first nodes, as many as there must be, or none of them."""
        await run_all_or_none(self._add(number) for number in range(self._limits.minimum))

    def begin(self, queue: CallQueue, on_join: Callable[[PoolNode], object]) -> None:
        """Follow the queue from now on."""
        self._queue, self._on_join = queue, on_join
        for node in self.nodes.values():
            on_join(node)
        loop_thread().post(self._begin)

    def _begin(self) -> None:
        if not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End all nodes, also those that are starting; idempotent."""
        self._closed = True
        tasks = [task for task in (self._task, *self._starting.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)
        try:
            await asyncio.to_thread(self._group.close)
        finally:
            nodes, self.nodes = list(self.nodes.values()), {}
            outcomes = await asyncio.gather(*(self._end(node) for node in nodes), return_exceptions=True)
            await self._source.close()
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _run(self) -> None:
        while True:
            try:
                look_at = self._look()
            except Exception:
                logger.exception("skyproxy: the size of pool %s could not be looked at", self._spec.name)
                look_at = None
            pause = _LOOK_SECONDS if look_at is None else min(_LOOK_SECONDS, max(0.0, look_at - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause + 0.01):
                    await self._wake.wait()
            self._is_woken = False  # before it is cleared: whoever comes in between sets it once more
            self._wake.clear()

    # --- growing and shrinking ----------------------------------------------------------------------------------------

    def _look(self) -> float | None:
        """Act on what is there and what is wanted; return when to look again."""
        assert self._queue is not None
        lost = {number for number, node in self.nodes.items() if not node.is_alive}
        self._end_all(lost, "is lost")
        now = time.monotonic()
        demand = self._queue.demand()
        decision = self._growth.decide(self._load(demand, now), now)
        for _ in range(decision.start):
            self._start_one()
        for number in decision.stop:
            self._shrink(number)
        return decision.look_at

    def _load(self, demand: Demand, now: float) -> Load:
        idle: dict[int, float | None] = {}
        for number, node in self.nodes.items():
            since = [demand.idle_since.get(rank) for rank in node.ranks]
            known = [moment for moment in since if moment is not None]
            idle[number] = max(known) if known and len(known) == len(since) and not self._holds(node) else None
        # A broadcast goes to those that are there: one is enough.
        wanted = max(self.wanted, int(demand.broadcasts or self._group.needs_member))
        return Load(idle, len(self._starting), demand.free_slots, demand.waiting, wanted)

    def _holds(self, node: PoolNode) -> bool:
        return node.is_in_use or any(self.is_held(rank) for rank in node.ranks)

    def _start_one(self) -> None:
        number = next(n for n in range(self._limits.maximum) if n not in self.nodes and n not in self._starting)
        self._report(Progress("growing", number, f"starting node {number} of {self._limits.maximum} at most"))
        task = asyncio.get_running_loop().create_task(self._try_to_add(number))
        self._starting[number] = task

    async def _try_to_add(self, number: int) -> None:
        try:
            await self._add(number)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._starting.pop(number, None)
            self._note_failure(number, error)
        else:
            self._starting.pop(number, None)
            self._growth.succeeded()
            node = self.nodes[number]
            self._on_join(node)
            assert self._queue is not None
            self._queue.add_ranks(node.ranks)
            self._report(Progress("running", number, f"node {number} has joined the pool"))
        self.look_soon()

    def _note_failure(self, number: int, error: Exception) -> None:
        assert self._queue is not None
        before = self._growth.failures
        pause = self._growth.failed(time.monotonic())
        message = f"node {number} could not be started: {error}"
        self._report(Progress("failed", number, message))
        if not before:
            logger.warning(
                "skyproxy: pool %s goes on with %d nodes: %s. The next attempt is in %.0f s; further failures are "
                "reported to on_event alone.",
                *(self._spec.name, len(self.nodes), message.rstrip("."), pause),
            )
        is_final = isinstance(error, ConfigurationError) or self._growth.has_given_up
        if is_final and not self.nodes and not self._starting:
            self._queue.fail_waiting(error if isinstance(error, SkyproxyError) else WorkerStartError(message))
            self._growth.reset()

    def _shrink(self, number: int) -> None:
        assert self._queue is not None
        node = self.nodes[number]
        if not self._queue.remove_ranks(node.ranks, lambda _: self._holds(node)):
            return
        del self.nodes[number]
        self._group.remove(node.ranks)
        self._report(Progress("shrinking", number, f"node {number} had nothing to do, and is taken away"))
        self._start_task(self._leave_and_end(node))

    async def _leave_and_end(self, node: PoolNode) -> None:
        await asyncio.to_thread(self._group.leave, node.members)
        await self._end(node)

    def _end_all(self, numbers: Collection[int], why: str) -> None:
        for number in numbers:
            node = self.nodes.pop(number, None)
            if node is None:
                continue
            self._take_out(node)
            reasons = [str(member.node._session.lost) for member in node.members if member.node._session.lost]
            self._report(Progress("lost", number, ": ".join([f"node {number} {why}", *reasons[:1]])))
            self._start_task(self._end(node))

    def _take_out(self, node: PoolNode) -> None:
        assert self._queue is not None
        self._queue.lose_ranks(node.ranks)
        self._group.remove(node.ranks)

    def _start_task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._log_failure(work))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _log_failure(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except Exception as error:
            logger.warning("skyproxy: a node of pool %s could not be ended: %s", self._spec.name, error)

    async def _end(self, node: PoolNode) -> None:
        for member in node.members:
            member.node._is_taken_away = True
        try:
            await close_nodes([member.node for member in node.members])
        finally:
            await self._source.remove_node(node.launched)

    async def _add(self, number: int) -> None:
        """Start a node and connect to its processes; takes back what was begun where that fails or is cancelled."""
        timeout = self._spec.timeout_seconds
        try:
            async with asyncio.timeout(timeout) as limit:
                launched = await self._source.add_node(number, self._report_for(number))
                try:
                    self.nodes[number] = await self._connect(number, launched)
                except BaseException:
                    await really(self._source.remove_node(launched))
                    raise
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WorkerStartError(
                f"node {number} of {self._spec.name} did not start within {timeout:g} s. Give it more time: "
                "Compute(timeout=...)."
            ) from error

    async def _connect(self, number: int, launched: Launched) -> PoolNode:
        procs = self._spec.procs_per_node
        endpoints = [replace(e, node=number, rank=number * procs + e.local_rank) for e in launched.endpoints]
        connections = await run_all_or_none(connect_worker(self._spec, endpoint) for endpoint in endpoints)
        try:
            await check_software(launched, connections)
            members = [Member(endpoint, node) for endpoint, node in zip(endpoints, connections)]
            tensors = tuple(member.node._session.recorder.live_slots for member in members)
            await asyncio.to_thread(self._group.add, members)
        except BaseException:
            await really(close_nodes(connections))
            raise
        return PoolNode(number, launched, members, tensors)

    def _report_for(self, number: int) -> Report:
        def report(progress: Progress) -> None:
            # A step of one node, whatever its pool of one reports.
            self._report(replace(progress, node=number))

        return report
