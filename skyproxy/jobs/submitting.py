"""Submitting jobs: from what a user names to what a worker is sent."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyproxy.errors import ConfigurationError, SkyproxyError
from skyproxy.functions.scripts import Script, describe_script, pack_for
from skyproxy.jobs.documents import function_document, new_name, script_document
from skyproxy.jobs.job import Job
from skyproxy.jobs.link import JobLink, OpenConnection, send_job
from skyproxy.jobs.options import JobOptions
from skyproxy.runtime.instance import InstanceInfo, Peer

logger = logging.getLogger("skyproxy")

_ALONE = InstanceInfo(peers=(Peer(0, 0, "127.0.0.1"),))


@dataclass(frozen=True)
class JobWorker:
    """A worker for jobs.

    Attributes:
        open_connection: makes a connection for jobs.
        shares_files: whether it sees this program's folders under the same paths.
        trusted: whether results may be any object.
        info: its place among others, for torchrun.
    """

    open_connection: OpenConnection
    shares_files: bool = False
    trusted: bool = False
    info: InstanceInfo = _ALONE


def submit_script(script: Script, places: Sequence[JobWorker], options: JobOptions, *, torchrun: bool) -> Job:
    """Start a script as a job on each of some workers, all of them or none.

    Args:
        script: of `describe_script`.
        places: the workers, by node.
        options: of the job.
        torchrun: whether the script runs under torchrun.
    """
    shares_files = all(place.shares_files for place in places)
    # Agents on several nodes start all ranks again together; a single one is started again itself.
    restarts = options.max_restarts if torchrun and len(places) > 1 else 0
    packed = replace(pack_for(script, shares_files=shares_files), max_restarts=restarts)
    kind = "torchrun" if torchrun else "script"
    asked = options.request(script.name, kind)
    asked["name"] = options.name or new_name(Path(script.name).stem)
    begun: list[JobWorker] = []
    try:
        for index, place in enumerate(places):
            info = place.info if torchrun else None
            begun.append(place)
            with JobLink(place.open_connection) as link:
                send_job(link, {**asked, "part": [index, len(places)]}, script_document(packed, info))
    except BaseException:
        _take_back(str(asked["name"]), begun[:-1])
        raise
    return Job(str(asked["name"]), [place.open_connection for place in places])


def _take_back(name: str, places: Sequence[JobWorker]) -> None:
    try:
        Job(name, [place.open_connection for place in places]).cancel(wait=False)
    except SkyproxyError as error:  # why it did not begin everywhere is what its caller has to know
        logger.warning("skyproxy: the job %s may run on a part of its nodes: %s", name, error)


def submit_function(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    place: JobWorker,
    options: JobOptions,
) -> Job:
    """Start a call as a job."""
    title = str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]
    document = function_document(function, args, kwargs, plain=not place.trusted, shares_files=place.shares_files)
    asked = options.request(title.strip("<>"), "function")
    with JobLink(place.open_connection) as link:
        send_job(link, asked, document)
    return Job(str(asked["name"]), [place.open_connection], trusted=place.trusted)


def script_of_target(
    target: str | os.PathLike[str],
    args: Sequence[object],
    *,
    module: bool,
    nproc_per_node: int | str | None,
    env: Mapping[str, object] | None,
) -> Script:
    """Return the script that a user means."""
    return describe_script(
        target,
        args,
        is_module=module,
        procs_per_node=1 if nproc_per_node is None else nproc_per_node,
        env=env,
    )


def plain_function(target: object) -> Callable[..., object]:
    """Return the function to call, undecorated.

    Raises:
        ConfigurationError: it is none.
    """
    function = getattr(target, "__wrapped__", target) if hasattr(target, "__skyproxy_rewrap__") else target
    if not callable(function):
        raise ConfigurationError(f"{target!r:.80} is neither a script nor a function.")
    return function
