"""The part of a `Node` that runs jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from skyproxy.errors import ConfigurationError, UnknownJobError
from skyproxy.functions.runner import Runner
from skyproxy.protocol.messages import JOBS
from skyproxy.transport.base import Transport

if TYPE_CHECKING:
    from skyproxy.jobs.job import Job, JobStatus
    from skyproxy.jobs.submitting import JobWorker
    from skyproxy.session.opening import Opener


class NodeJobs:
    """Runs jobs on a worker."""

    _opener: Opener | None
    _runner: Runner
    _is_taken_away = False
    """True once its pool has ended its worker for good, with its jobs: nobody waits for it to come back."""

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
        **kwargs: object,
    ) -> Job:
        """Start a script or a function on the worker, where it runs on when this program has ended.

        The script, or the function's program, brings its own modules along, as functions do. The job finds a folder for
        checkpoints with `skyproxy.checkpoint_dir()`, and SKYPROXY_RESTART_COUNT in its environment.

        Args:
            target: the script's file, with `module` a module's name; or a function.
            args: of the script or of the function.
            name: by which the job is found again: letters, digits, dots, hyphens, underscores; made up by default.
            nproc_per_node: runs the script under torchrun with so many processes: a number, "gpu", "cpu" or "auto".
            max_restarts: how often it is started again when it dies; when its worker is taken away, it is in any case.
            grace_seconds: the time that it has after SIGTERM, to write a checkpoint; the worker's setting by default.
            env: further environment variables.
            module: whether `target` is started as `python -m` does.
            kwargs: of the function.

        Raises:
            ConfigurationError: the worker runs no jobs for this client, or this cannot be sent.
            LimitExceededError: there is a job of that name, or too many run.

        Example:
            ```python
            job = node.submit_job("train.py", "--epochs", 3, name="night-run", max_restarts=2)
            print(job.status().state)
            ```
        """
        from skyproxy.jobs.options import JobOptions  # late: most programs run no jobs
        from skyproxy.jobs.submitting import plain_function, script_of_target, submit_function, submit_script

        options = JobOptions(name, max_restarts, grace_seconds, env or {})
        place = self._job_place()
        if isinstance(target, str | os.PathLike):
            if kwargs:
                raise ConfigurationError(f"a script takes no {', '.join(kwargs)}=; arguments follow its name.")
            script = script_of_target(target, args, module=module, nproc_per_node=nproc_per_node, env=env)
            return submit_script(script, [place], options, torchrun=nproc_per_node is not None)
        if nproc_per_node is not None or module:
            raise ConfigurationError("nproc_per_node= and module= are for scripts, and this is a function.")
        return submit_function(plain_function(target), args, kwargs, place, options)

    def job(self, name: str) -> Job:
        """Find a job of this token's again by its name.

        Raises:
            UnknownJobError: there is none of that name.

        Example:
            ```python
            job = node.submit_job(pow, 2, 10, name="power")
            print(node.job("power").result())  # 1024
            ```
        """
        from skyproxy.jobs.job import Job

        place = self._job_place()
        job = Job(name, [place.open_connection], trusted=place.trusted)
        job.status()
        return job

    def jobs(self) -> list[JobStatus]:
        """List the jobs of this token, the newest first.

        Example:
            ```python
            for job in node.jobs():
                print(job.name, job.state)
            ```
        """
        from skyproxy.jobs.job import status_of
        from skyproxy.jobs.link import JobLink, job_rows

        with JobLink(self._open_jobs) as link:
            return [status_of(row) for row in job_rows(link)]

    def _job_place(self) -> JobWorker:
        """Return the worker as a place for jobs."""
        from skyproxy.jobs.submitting import JobWorker

        return JobWorker(self._open_jobs, self._runner.shares_files, self._runner.trusted)

    def _open_jobs(self, timeout_seconds: float | None = None) -> Transport:
        if self._is_taken_away:
            raise UnknownJobError("the job is gone with its worker, which its pool has taken away")
        if self._opener is None:
            raise ConfigurationError("this node was made without a way to ask its worker")
        return self._opener.open_apart(JOBS, timeout_seconds)
