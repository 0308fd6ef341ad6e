"""Several Computes at once, all of them or none."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.pools.loop_thread import loop_thread
from skyproxy.pools.pool import Compute
from skyproxy.providers.all_or_none import run_all_or_none


class Cluster:
    """Computes that are provisioned at the same time and live equally long.

    `async with Cluster(Compute(...), Compute(...)) as (a, b)` gives what each of them gives by itself, in order: its
    node, or the pool where it has several workers. `with` gives the pools. If one does not come up, the others are
    taken back, and its error is raised.

    Example:
        ```python
        from skyproxy import Cluster, Compute, Local

        with Cluster(Compute(provider=Local()), Compute(provider=Local())) as (actors, learner):
            print(actors.world_size, learner.world_size)
        ```
    """

    def __init__(self, *computes: Compute) -> None:
        for position, compute in enumerate(computes):
            if not isinstance(compute, Compute):
                raise ConfigurationError(f"Cluster(): argument {position + 1} is {compute!r}, not a Compute(...).")
        if len(set(map(id, computes))) != len(computes):
            raise ConfigurationError("Cluster(): the same Compute appears twice. Make one for each place.")
        self.computes = computes

    async def __aenter__(self) -> tuple[Any, ...]:
        await self._provision()
        try:
            for compute in self.computes:
                compute.enter_client_hooks()
        except BaseException:
            await self._close_all()
            raise
        return tuple(compute.node_or_pool for compute in self.computes)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._close_all()

    def __enter__(self) -> tuple[Compute, ...]:
        loop_thread().run(self._provision())
        try:
            for compute in self.computes:
                compute.enter_client_hooks()
        except BaseException:
            loop_thread().finish(self._close_all())
            raise
        return self.computes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        loop_thread().finish(self._close_all())

    async def _provision(self) -> None:
        try:
            await run_all_or_none(compute.provision() for compute in self.computes)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._close_all()))
            raise

    async def _close_all(self) -> None:
        outcomes = await asyncio.gather(*(compute.close_async() for compute in self.computes), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
