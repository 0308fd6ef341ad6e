"""The part of a pool that runs jobs: on one of its nodes, or under torchrun on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NoReturn

from skyproxy.errors import ConfigurationError, ConnectError, UnknownJobError
from skyproxy.runtime.lifecycle import free_ports

if TYPE_CHECKING:
    from skyproxy.jobs.job import Job
    from skyproxy.jobs.submitting import JobWorker
    from skyproxy.node import Node
    from skyproxy.pools.elastic_workers import ElasticWorkers
    from skyproxy.pools.growth import Nodes
    from skyproxy.pools.job_holds import JobHolds
    from skyproxy.pools.workers import Workers


class PoolJobs:
    """Runs jobs on the workers of a pool that runs."""

    _job_holds: JobHolds | None = None

    if TYPE_CHECKING:
        limits: Nodes | None

        @property
        def ranks(self) -> list[int]:
            """The ranks that are there."""

        @property
        def nodes(self) -> Sequence[Node]:
            """The connections to all processes, by rank."""

        def _members(self) -> Mapping[int, Node]:
            """The processes that are there, by rank."""

        def _running_workers(self) -> Workers | ElasticWorkers:
            """Return what the pool runs on."""

    def submit_job(
        self,
        target: str | os.PathLike[str] | Callable[..., object],
        /,
        *args: object,
        name: str | None = None,
        nproc_per_node: int | str | None = None,
        max_restarts: int = 0,
        grace_seconds: float | None = None,
        env: Mapping[str, object] | None = None,
        module: bool = False,
        rank: int | None = None,
        **kwargs: object,
    ) -> Job:
        """Start a script or a function that runs on when this program has ended; see `Node.submit_job`.

        A script with `nproc_per_node` runs under torchrun on all nodes of the pool; everything else on one rank. The
        workers must outlive the program, too: those of `Compute(keep=True)`, `Remote`, `skyproxy up`.

        Args:
            target, args, name, nproc_per_node, max_restarts, grace_seconds, env, module, kwargs: as of
                `Node.submit_job`.
            rank: where a function, or a script without `nproc_per_node`, runs; by default on the first that is there.
                An elastic pool keeps that process while the job runs, and for as long after as idle ones stay.

        Example:
            ```python
            job = pool.submit_job("train.py", nproc_per_node="gpu", max_restarts=3, name="night-run")
            print(job.wait().state)
            ```
        """
        if nproc_per_node is None or not isinstance(target, str | os.PathLike):
            chosen, place = self._place_for_job(rank)
            with self._hold([chosen]) as hold:
                return hold(
                    place.submit_job(
                        target,
                        *args,
                        name=name,
                        nproc_per_node=nproc_per_node,
                        max_restarts=max_restarts,
                        grace_seconds=grace_seconds,
                        env=env,
                        module=module,
                        **kwargs,
                    )
                )
        if kwargs:
            raise ConfigurationError(f"a script takes no {', '.join(kwargs)}=; arguments follow its name.")
        from skyproxy.jobs.options import JobOptions
        from skyproxy.jobs.submitting import script_of_target, submit_script

        script = script_of_target(target, args, module=module, nproc_per_node=nproc_per_node, env=env)
        options = JobOptions(name, max_restarts, grace_seconds, env or {})
        with self._hold(self.ranks) as hold:
            return hold(submit_script(script, job_places(self), options, torchrun=True))

    def _place_for_job(self, rank: int | None) -> tuple[int, Node]:
        places = self._members()
        chosen = min(places, default=0) if rank is None else rank
        if chosen not in places:
            known = ", ".join(map(str, places)) or "none"
            raise ConfigurationError(f"there is no rank {chosen} in this pool at this moment. There are: {known}.")
        return chosen, places[chosen]

    def _hold(self, ranks: Collection[int]) -> AbstractContextManager[Callable[[Job], Job]]:
        """Keep the processes of an elastic pool for the job that is handed to what this gives."""
        if self.limits is None:
            return nullcontext(lambda job: job)
        if self._job_holds is None:
            from skyproxy.pools.job_holds import JobHolds

            self._job_holds = JobHolds(self.limits.idle_seconds)
        return self._job_holds.submitting(ranks)

    def _has_jobs(self, rank: int) -> bool:
        return self._job_holds is not None and self._job_holds.has(rank)

    def job(self, name: str) -> Job:
        """Find a job of this token's again by its name, on whichever nodes it runs.

        Raises:
            UnknownJobError: there is none of that name.

        Example:
            ```python
            print(pool.job("night-run").status().state)
            ```
        """
        return _found_job(name, self.nodes)


def _found_job(name: str, nodes: Sequence[Node]) -> Job:
    """Put a job together from the parts of it that nodes have.

    A node that cannot be reached stands for a part that no other has; a part that is on no node is one that went with
    its worker, which whoever asks for it is told: a job without it would seem to have succeeded.
    """
    from skyproxy.jobs.job import Job
    from skyproxy.jobs.link import JobLink, OpenConnection, part_of

    parts: list[tuple[int, OpenConnection]] = []
    unreachable: list[OpenConnection] = []
    first_error: ConnectError | None = None
    count, is_trusted = 1, True
    for place in (node._job_place() for node in nodes):
        try:
            with JobLink(place.open_connection) as link:
                index, count = part_of(link.ask("status", name=name)[0])
        except UnknownJobError:
            continue
        except ConnectError as error:
            first_error = first_error or error
            unreachable.append(place.open_connection)
            continue
        parts.append((index, place.open_connection))
        is_trusted = is_trusted and place.trusted
    if not parts:
        raise first_error or UnknownJobError(f"there is no job {name!r} on the workers of this pool")
    elsewhere = iter(unreachable)
    for index in set(range(count)) - {index for index, _ in parts}:
        parts.append((index, next(elsewhere, partial(_open_nothing, name))))
    return Job(name, [opening for _, opening in sorted(parts, key=itemgetter(0))], trusted=is_trusted)


def _open_nothing(name: str, timeout_seconds: float | None = None) -> NoReturn:
    raise UnknownJobError(f"a part of the job {name} is gone with its worker")


def job_places(pool: PoolJobs) -> list[JobWorker]:
    """Return the first process of each node, with its place for torchrun and a port of this job's own."""
    members = pool._members()
    if not members:
        raise ConfigurationError(
            "this pool has no process at this moment, so there is no place for a script. Nodes(minimum, maximum) keeps "
            "a minimum in any case; else a call starts the first one."
        )
    infos = pool._running_workers().group.places(list(members))
    nodes = list(members.values())
    (port,) = nodes[0].submit(free_ports, 1, results="value").result()
    return [
        replace(node._job_place(), info=replace(info, head_port=port, job=""))
        for node, info in zip(nodes, infos, strict=True)
        if info.local_rank == 0
    ]
