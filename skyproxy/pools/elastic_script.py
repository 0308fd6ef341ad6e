"""A script under torchrun on a number of nodes that changes: one agent on each node, which come and go."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import Protocol, TypeVar

from skyproxy.errors import ConfigurationError, SessionLostError, WorkerStartError
from skyproxy.functions.scripts import Meeting, Script, run_script
from skyproxy.pools.call_options import CallOptions, Retry
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.pending import PendingCompute
from skyproxy.providers.base import Endpoint
from skyproxy.runtime.lifecycle import free_ports

logger = logging.getLogger("skyproxy")

T = TypeVar("T")

_LOOK_SECONDS = 0.2


class ScriptPool(Protocol):
    """The pool, as a script needs it."""

    def submit_call(self, call: PendingCompute[T]) -> PoolFuture[T]:
        """Make a call."""

    def script_endpoints(self) -> Sequence[Endpoint]:
        """The first process of each node that is there."""

    def want_nodes(self, count: int) -> None:
        """Have so many nodes, where the pool can grow, whatever its queue says."""


class ElasticScript:
    """A run of a script on as many nodes as there are, between two limits.

    The agents meet by TorchElastic's own rendezvous, whose store is on the first node. A lost node has the others form
    the group anew; a new one joins them. The loss of the first node ends the store: all agents are started again then,
    which counts as a restart as well.
    """

    def __init__(self, pool: ScriptPool, script: Script, timeout_seconds: float | None, start_seconds: float) -> None:
        """Prepare a run; `run` begins it.

        Args:
            pool: has the nodes.
            script: with `nodes`, the limits.
            timeout_seconds: for all of it; none by default.
            start_seconds: how long it may take until there are as many nodes as it needs.
        """
        assert script.nodes is not None
        self._pool = pool
        self._script = script
        self._least, self._most = script.nodes
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._start_seconds = start_seconds
        self._agents: dict[int, PoolFuture[None]] = {}
        """The calls that run the agents, by rank."""

    def run(self) -> None:
        """Run the script to its end.

        Raises:
            ScriptError: processes failed, more often than max_restarts says.
            SessionLostError: the node with the store was lost, more often than that.
            TimeoutError: the time is over.
            WorkerStartError: there are not as many nodes as it needs.
        """
        self._pool.want_nodes(self._most)
        try:
            for restarts in range(self._script.max_restarts + 1):
                try:
                    self._attempt(restarts)
                    return
                except _StoreLostError as error:
                    if restarts == self._script.max_restarts:
                        raise error.cause from None
                    logger.warning("skyproxy: %s lost its first node, and is started again", self._script.name)
        finally:
            self._pool.want_nodes(0)

    def _attempt(self, restarts: int) -> None:
        try:
            head = self._first_node()
            port = self._submit(free_ports, (1,), head.rank).wait()[0]
            meeting = Meeting(f"{head.address}:{port}", is_host=False, restarts=restarts)
            script = replace(self._script, meeting=meeting, run=secrets.token_hex(8))
            self._follow(script, head.rank)
        except SessionLostError as error:
            raise _StoreLostError(error) from None
        finally:
            self._stop()

    def _first_node(self) -> Endpoint:
        """The node for the store, once there are as many as the script needs."""
        end = time.monotonic() + self._start_seconds
        while True:
            there = self._pool.script_endpoints()
            if len(there) >= self._least:
                return min(there, key=lambda endpoint: endpoint.rank)
            if time.monotonic() > end:
                raise WorkerStartError(
                    f"{self._script.name} needs {self._least} nodes, and there were {len(there)} after "
                    f"{self._start_seconds:g} s. Give them more time: Compute(timeout=...)."
                )
            self._check_time()
            time.sleep(_LOOK_SECONDS)

    def _follow(self, script: Script, head: int) -> None:
        """Run an agent on each node until one has ended well, and all others as well."""
        is_ending = False
        while True:
            if not is_ending:
                self._start_agents(script, head)
            done, _ = wait(self._agents.values(), _LOOK_SECONDS, FIRST_COMPLETED)
            for rank in [rank for rank, agent in self._agents.items() if agent in done]:
                agent = self._agents.pop(rank)
                try:
                    agent.result(0)
                    is_ending = True
                except SessionLostError:
                    if rank == head and not is_ending:
                        raise
                    logger.warning("skyproxy: %s goes on without the node of rank %d", script.name, rank)
            if is_ending and not self._agents:
                return
            self._check_time()

    def _start_agents(self, script: Script, head: int) -> None:
        assert script.meeting is not None
        there = sorted(endpoint.rank for endpoint in self._pool.script_endpoints())
        for rank in sorted(there, key=lambda rank: rank != head):
            if rank not in self._agents and len(self._agents) < self._most:
                meeting = replace(script.meeting, is_host=rank == head)
                try:
                    self._agents[rank] = self._submit(run_script, (replace(script, meeting=meeting),), rank)
                except ConfigurationError:
                    if rank in {endpoint.rank for endpoint in self._pool.script_endpoints()}:
                        raise
                    continue  # lost just now

    def _submit(self, function: Callable[..., T], args: tuple[object, ...], rank: int) -> PoolFuture[T]:
        options = CallOptions(on=rank, retry=Retry(0), debug=False)
        return self._pool.submit_call(PendingCompute(function, args, {}, options, self._script.name))

    def _check_time(self) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise TimeoutError(f"{self._script.name} did not end in time.")

    def _stop(self) -> None:
        """End the agents that still run. What is to run there next waits for the real end of their calls."""
        agents, self._agents = list(self._agents.values()), {}
        for agent in agents:
            agent.cancel()


class _StoreLostError(Exception):
    """The first node is lost, where the agents met."""

    def __init__(self, cause: SessionLostError) -> None:
        super().__init__(str(cause))
        self.cause = cause
