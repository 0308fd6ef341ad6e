"""The actors of a pool: where each of them lives."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from skyproxy.pools.actor_calls import ActorCalls, ActorOptions
from skyproxy.pools.actor_place import new_place

if TYPE_CHECKING:
    from skyproxy.pools.elastic_workers import ElasticWorkers
    from skyproxy.pools.scheduler import Scheduler
    from skyproxy.pools.workers import Workers
    from skyproxy.providers.base import WorkerSpec


class PoolActors:
    """Actors of a `Compute`, whose workers and scheduler these are."""

    if TYPE_CHECKING:
        _actors: weakref.WeakSet[ActorCalls]

        @property
        def spec(self) -> WorkerSpec: ...
        def _running_workers(self) -> Workers | ElasticWorkers: ...
        def _running_scheduler(self) -> Scheduler: ...

    def add_actor(
        self,
        kind: type,
        options: ActorOptions,
        rank: int | None,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> ActorCalls:
        """Return the queue of a new actor, whose first call makes it: the first step of `kind.on(pool)(*args,
        **kwargs)`.
        """
        group, scheduler = self._running_workers().group, self._running_scheduler()
        while True:
            if not group.members:
                group.wait_for_rank(self.spec.timeout_seconds)
            loads = dict.fromkeys(group.members, 0)
            for calls in list(self._actors):
                if calls.is_open and calls.place.rank in loads:
                    loads[calls.place.rank] += 1
            if not loads:
                continue
            place = new_place(group, kind, rank, loads, (args, kwargs), options.max_restarts)
            calls = ActorCalls(place, options)
            with scheduler.locked():  # from here on, the actor keeps its process from being taken away
                if place.rank in group.members or rank is not None:
                    self._actors.add(calls)
                    return calls

    def _has_actors(self, rank: int) -> bool:
        return any(calls.place.rank == rank and calls.is_open for calls in list(self._actors))
