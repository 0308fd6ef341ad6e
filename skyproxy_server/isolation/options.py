"""Options of the command line for how far sessions are kept apart, beyond a process for each."""

from __future__ import annotations

import argparse
import logging

from skyproxy.errors import ConfigurationError
from skyproxy_server.isolation.cgroups import Cgroups, CgroupsUnavailableError, own_cgroup

logger = logging.getLogger("skyproxy.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that the functions below read."""
    parser.add_argument(
        "--session-cpus",
        type=_processor_count,
        default=0.0,
        metavar="N",
        help="how many processors a session may keep busy, 0.5 for half of one; 0: no bound; needs cgroups",
    )
    parser.add_argument(
        "--session-cgroups",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="give each session with a process a cgroup of its own; the default where this worker may make them",
    )


def asks_for_processes(arguments: argparse.Namespace) -> bool:
    """Return whether something was asked for that only a session with a process of its own can have."""
    return bool(
        arguments.session_memory
        or arguments.session_gpu_fraction
        or arguments.session_cpus
        or arguments.session_cgroups
    )


def _processor_count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 4096.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processors; use one from 0 to 4096")
    return value


def session_cgroups(arguments: argparse.Namespace) -> Cgroups | None:
    """Make the place of sessions' cgroups; None where they have none.

    Raises:
        ConfigurationError: they were asked for, and there can be none.
    """
    wanted: bool | None = arguments.session_cgroups
    if wanted is False:
        if arguments.session_cpus:
            raise ConfigurationError("--session-cpus needs cgroups: leave out --no-session-cgroups.")
        return None
    try:
        made = Cgroups(own_cgroup())
    except CgroupsUnavailableError as why:
        if wanted or arguments.session_cpus:
            raise ConfigurationError(
                f"Sessions can have no cgroups here: {why}. Start the worker in a cgroup that it may divide, "
                "as a unit of systemd with Delegate=yes has; or leave out --session-cpus and --session-cgroups."
            ) from why
        logger.info("sessions: no cgroups, so the kernel divides the processors among all threads: %s", why)
        return None
    most = (
        f"at most {arguments.session_cpus:g} processors" if arguments.session_cpus else "equal parts of the processors"
    )
    logger.info("sessions: a cgroup each, with %s", most)
    return made
