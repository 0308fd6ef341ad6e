"""The decision whether a worker runs jobs, and where it keeps them."""

from __future__ import annotations

import logging
from pathlib import Path

from skyproxy.settings import SETTINGS
from skyproxy_server.jobs.store import Jobs

logger = logging.getLogger("skyproxy.server")


def choose_jobs(root: Path | None, *, functions: bool, bounds_sessions: bool) -> Jobs | str:
    """Return a worker's jobs, those of its predecessor taken up; a text says why there are none.

    Args:
        root: where they are kept; None: only as long as the worker runs.
        functions: whether clients may run code of theirs at all.
        bounds_sessions: whether sessions have bounds, or users of their own, that a job would not have.

    Raises:
        ConfigurationError: the folder cannot be used.
    """
    if not functions:
        return "this worker runs no jobs: it was started with --no-functions"
    if bounds_sessions:
        return (
            "this worker runs no jobs: it bounds what sessions use, or gives each a user of its own, and jobs would "
            "have neither"
        )
    jobs = Jobs(root, SETTINGS)
    if root is not None:
        logger.info("keeps jobs in %s", root)
    return jobs
