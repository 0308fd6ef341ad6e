"""The part of a pool that runs jobs: on one of its nodes, or under torchrun on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from skyproxy.errors import ConfigurationError, UnknownJobError
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import free_ports

if TYPE_CHECKING:
    from skyproxy.jobs.job import Job
    from skyproxy.jobs.submitting import JobWorker
    from skyproxy.node import Node
    from skyproxy.pools.growth import Nodes
    from skyproxy.pools.job_holds import JobHolds


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

        def rank_info(self, rank: int) -> InstanceInfo:
            """The place of a rank."""

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
        places = dict(zip(self.ranks, self.nodes, strict=False))
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
        from skyproxy.jobs.job import Job

        found = []
        for node in self.nodes:
            try:
                node.job(name)
            except UnknownJobError:
                continue
            found.append(node)
        if not found:
            raise UnknownJobError(f"there is no job {name!r} on the workers of this pool")
        place = found[0]._job_place()
        return Job(name, [node._job_place().open_connection for node in found], trusted=place.trusted)


def job_places(pool: PoolJobs) -> list[JobWorker]:
    """Return the first process of each node, with its place for torchrun and a port of this job's own."""
    infos = [pool.rank_info(rank) for rank in pool.ranks]
    (port,) = pool.nodes[0].submit(free_ports, 1, results="value").result()
    return [
        replace(node._job_place(), info=replace(info, head_port=port, job=""))
        for node, info in zip(pool.nodes, infos, strict=True)
        if info.local_rank == 0
    ]
