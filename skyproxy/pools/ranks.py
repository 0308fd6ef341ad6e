"""The ranks of a pool as one group: formed with the plugins' hooks, ended together when one of them fails.

A group has generations. Each has a job's name and ports of its own, so that what a failed one left behind is in
nobody's way; a rank that cannot be stopped gets a new process in between.
"""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import cloudpickle

from skyproxy.errors import RankErrors, SessionLostError
from skyproxy.pools.gathering import ANSWER_SECONDS, SETTLE_SECONDS, Gathering
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import Task, abort_calls, close_hooks, free_ports, open_hooks
from skyproxy.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from skyproxy.functions.call import Call
    from skyproxy.node import Node
    from skyproxy.runtime.plugin import Plugin

logger = logging.getLogger("skyproxy")

PURPOSES = ("torch", "jax", "coordination", "torchrun")
_FORM_ATTEMPTS = 3
_is_alive = operator.attrgetter("alive")


class RankGroup:
    """All ranks of a pool.

    Attributes:
        nodes: the connections to the ranks' processes, by rank; replaced where a process is.
        plugins: of the pool.
    """

    def __init__(
        self,
        pool: str,
        nodes: Sequence[Node],
        infos: Sequence[InstanceInfo],
        *,
        plugins: Sequence[Plugin] = (),
        replace_rank: Callable[[int], Node] | None = None,
        settings: Settings = SETTINGS,
    ) -> None:
        """Nothing is sent yet.

        Args:
            pool: the pool's name, unique among those that share workers.
            nodes: connected, by rank.
            infos: the topology as each rank sees it; job and head_port are filled in here.
            plugins: whose hooks are to be entered in every rank.
            replace_rank: ends a rank's process, starts another, and gives the connection to it.
            settings: limits.
        """
        self.nodes = list(nodes)
        self.plugins = tuple(plugins)
        self._pool = pool
        self._infos = list(infos)
        self._replace_rank = replace_rank
        self._settings = settings
        self._lock = threading.RLock()
        self._stops = threading.Condition()
        self._stopping = 0
        self._generation = 0
        self._formed = False
        self._broken: set[int] = set()
        self._ports: dict[str, int] = {}
        self._contexts: dict[int, dict[str, object]] = {}
        self._closed = False

    @property
    def job(self) -> str:
        """The name of this generation."""
        return f"{self._pool}/{self._generation}"

    @property
    def stop_timeout_seconds(self) -> float:
        """The seconds for which a rank may go on after another one failed."""
        return self._settings.rank_stop_timeout_seconds

    def context(self, rank: int) -> dict[str, object]:
        """Return what goes beside a call to a rank, for `instance_info()` and the plugins there."""
        contexts = self._contexts  # of one generation, which may end meanwhile
        context = contexts.get(rank)
        if context is None:
            info = self._infos[rank]
            info = replace(info, job=self.job, head_port=self._ports.get("torch", info.head_port))
            context = contexts[rank] = {"pool": asdict(info), "ports": dict(self._ports)}
        return context

    def places(self, ranks: Sequence[int]) -> list[InstanceInfo]:
        """Return the places of ranks, without what a formed group has of its own: its name and its ports."""
        return [self._infos[rank] for rank in ranks]

    @staticmethod
    def task(function: Callable[..., object]) -> Task:
        """The function as it goes to the ranks: called there as the plugins want it, and known to run."""
        return Task(function)

    @property
    def members(self) -> dict[int, Node]:
        """The connections to the ranks' processes, by rank."""
        return dict(enumerate(self.nodes))

    @property
    def addresses(self) -> dict[int, str]:
        """The addresses by which the ranks reach one another."""
        return {peer.rank: peer.address for peer in self._infos[0].peers}

    def node_of(self, rank: int) -> Node | None:
        """The connection to a rank's process; None where it is gone for good."""
        return self.nodes[rank]

    def wait_for_rank(self, timeout_seconds: float) -> int:
        """Return a rank that is there: all of them always are."""
        return 0

    def crew(self, ranks: Sequence[int]) -> RankGroup:
        """The whole group, formed: all of its ranks are always there."""
        self.ensure()
        return self

    # --- forming ------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of this generation."""
        return self._generation

    @property
    def broken(self) -> set[int]:
        """The ranks whose processes a failure left in a state that no hook can mend."""
        return set(self._broken)

    def ensure(self, generation: int | None = None) -> None:
        """Forms the group where it is not formed, or has lost a rank; cheap where there is nothing to do.

        Args:
            generation: the number of the next one at least; by default one more than the last one's.

        Raises:
            RankErrors: a plugin failed, or some ranks never came; one exception a rank.
            WorkerStartError: a lost rank cannot be replaced.
        """
        if self._formed and all(map(_is_alive, self.nodes)):
            return
        with self._lock:
            if self._formed and all(map(_is_alive, self.nodes)):
                return
            self._generation = max(self._generation, (generation or 0) - 1)
            for attempt in itertools.count(1):
                # What ends the generation before must not meet the next one.
                self.wait_until_stopped()
                self._revive()
                try:
                    self._form()
                    return
                except RankErrors as error:
                    # The port was free when the head looked, and is not any more.
                    if attempt < _FORM_ATTEMPTS and any("in use" in str(one) for one in error.exceptions):
                        continue
                    raise

    def _revive(self) -> None:
        """Starts anew the processes that are gone, or that a failure left in a state which no hook can mend."""
        stale = {rank for rank, node in enumerate(self.nodes) if not node.alive} | self._broken
        again = self._generation > 0 and any(getattr(plugin, "restarts_ranks", False) for plugin in self.plugins)
        wanted = set(range(len(self.nodes))) if again else stale
        if wanted and self._replace_rank is None:
            lost = ", ".join(map(str, sorted(wanted)))
            raise SessionLostError(f"rank {lost} of pool {self._pool} is gone, and it cannot be restarted.")
        if wanted:
            assert self._replace_rank is not None
            logger.info("skyproxy: pool %s restarts rank %s", self._pool, ", ".join(map(str, sorted(wanted))))
            with ThreadPoolExecutor(len(wanted), "skyproxy-rank") as threads:
                starting = {rank: threads.submit(self._replace_rank, rank) for rank in wanted}
            # All that came up are used, also where another one did not.
            self._broken -= {rank for rank, future in starting.items() if future.exception() is None}
            for rank, future in starting.items():
                if future.exception() is None:
                    self.nodes[rank] = future.result()
            for future in starting.values():
                future.result()

    def _form(self) -> None:
        self._generation += 1
        self._contexts = {}
        ports = self._call(0, free_ports, len(PURPOSES)).result(self._settings.rank_start_timeout_seconds)
        self._ports = dict(zip(PURPOSES, ports))
        self._contexts = {}
        if self.plugins:
            # By value where a class is not importable there, once for all ranks.
            plugins = cloudpickle.dumps(self.plugins)
            calls = {rank: self._call(rank, open_hooks, plugins) for rank in range(len(self.nodes))}
            self.gather(calls, self._settings.rank_start_timeout_seconds, "the plugins' hooks").result()
        self._formed = True

    def _call(self, rank: int, function: Callable[..., object], *args: object) -> Call:
        return self.nodes[rank].submit(function, *args, results="value", context=self.context(rank))

    # --- running ------------------------------------------------------------------------------------------------------

    def gather(
        self, calls: Mapping[int, Call], timeout_seconds: float | None = None, what: str = "the task"
    ) -> Future[list[object]]:
        """The results of a call to each rank, in the order of ranks.

        The first failure ends the others: their calls are cancelled and their process groups aborted, so that a rank
        that waits for a failed one raises at once. A rank that does not stop gets a new process before the next task.

        Args:
            calls: by rank.
            timeout_seconds: for all; none by default.
            what: names it in errors.

        Returns:
            A future; its exception is `RankErrors`. Cancelling it cancels the calls.
        """
        return Gathering(self, self._infos, dict(calls), timeout_seconds, what).future

    def stop(self, calls: Mapping[int, Call]) -> set[int]:
        """Ends calls that wait for a failed rank; the group is formed anew before the next task.

        First what they wait for, so that they raise where they stand; then those that go on are cancelled.

        Returns:
            The ranks that did not stop in time; their processes are replaced, as far as plugins hold something there.
        """
        self.expect_stop()
        try:
            # One time for both rounds: whoever waits for the error waits for us.
            end = time.monotonic() + SETTLE_SECONDS + self._settings.rank_stop_timeout_seconds
            going_on = self._abort(calls, SETTLE_SECONDS)
            for rank in going_on:
                calls[rank].cancel()
            left = max(SETTLE_SECONDS, end - time.monotonic())
            stuck = self._abort({rank: calls[rank] for rank in going_on}, left)
            self._broken |= {rank for rank, holds in stuck.items() if holds}
            return set(stuck)
        finally:
            self.stop_ended()

    def expect_stop(self) -> None:
        """End this generation; the next one is not formed before `stop_ended` was called as often."""
        with self._stops:
            self._stopping += 1
            self._formed = False

    def stop_ended(self) -> None:
        """See `expect_stop`."""
        with self._stops:
            self._stopping -= 1
            self._stops.notify_all()

    def wait_until_stopped(self) -> None:
        """Wait until what ends calls of this group has done so; bounded in time."""
        with self._stops:
            self._stops.wait_for(lambda: not self._stopping)

    def _abort(self, calls: Mapping[int, Call], timeout_seconds: float) -> dict[int, bool]:
        """Aborts the process groups of ranks; those whose call still runs after so long, and whether they hold any."""
        replies: dict[int, Call] = {}
        for rank, call in calls.items():
            if self.nodes[rank].alive:
                try:
                    replies[rank] = self._call(rank, abort_calls, [call.id], timeout_seconds)
                except Exception as error:  # lost between the question and the call
                    logger.debug("rank %d cannot be told to stop: %s", rank, error)
        going_on: dict[int, bool] = {}
        end = time.monotonic() + timeout_seconds + ANSWER_SECONDS
        for rank, reply in replies.items():
            try:
                answer = reply.result(max(0.1, end - time.monotonic()))
            except Exception:
                answer = {"idle": not self.nodes[rank].alive, "holds": True}
            if not answer["idle"]:
                going_on[rank] = bool(answer["holds"])
        return going_on

    def close(self) -> None:
        """Leaves the plugins' hooks on all ranks; bounded in time. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._formed = False
            if self._generation:
                self.leave_hooks()

    def leave_hooks(self) -> None:
        """Leaves the plugins' hooks on all ranks that are there; bounded in time."""
        calls = {}
        for rank, node in enumerate(self.nodes):
            if node.alive:
                try:
                    calls[rank] = self._call(rank, close_hooks, self._pool)
                except Exception as error:  # lost meanwhile: nothing is left to close there
                    logger.debug("rank %d: %s", rank, error)
        end = time.monotonic() + self._settings.rank_close_timeout_seconds
        for rank, call in calls.items():
            try:
                call.result(max(0.0, end - time.monotonic()))
            except Exception as error:
                logger.warning("skyproxy: rank %d did not leave its plugins' hooks: %s", rank, error)
