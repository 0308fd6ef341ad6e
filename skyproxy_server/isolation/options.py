"""Options of the command line for how far sessions are kept apart, beyond a process for each."""

from __future__ import annotations

import argparse
import logging
import os

from skyproxy.errors import ConfigurationError
from skyproxy_server.isolation.cgroups import Cgroups, CgroupsUnavailableError, own_cgroup
from skyproxy_server.isolation.priorities import CgroupMeans, Priorities, ProcessMeans
from skyproxy_server.isolation.session_users import SessionUsers, SessionUsersUnavailableError

logger = logging.getLogger("skyproxy.server")

AUTO, OFF = "auto", "off"
_UNUSED_NUMBERS = range(60706, 61184)
"""Numbers that nobody else gives to users: between those of systemd's home folders and its dynamic users. They are also
mapped in containers whose users are mapped, which have the numbers below 65536."""
_MOST_USERS = (1 << 31) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that the functions below read."""
    parser.add_argument(
        "--session-cpus",
        type=_processor_count,
        default=0.0,
        metavar="N",
        help="how many processors a session may keep busy, 0.5 for half of one; 0: no limit; needs cgroups",
    )
    parser.add_argument(
        "--session-cgroups",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="give each session with a process a cgroup of its own; the default where this worker may make them",
    )

    parser.add_argument(
        "--session-priorities",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let sessions that have computed much give way to those that mostly wait; they also give way to other "
        "programs of this machine then",
    )
    parser.add_argument(
        "--session-users",
        type=_session_users,
        default=AUTO,
        metavar="FIRST:COUNT",
        help="the users (by number) that sessions with a process have for themselves, where this worker runs as root; "
        "auto: unused ones where sessions can have them; off: the worker's own user for all",
    )


def asks_for_processes(arguments: argparse.Namespace) -> bool:
    """Return whether something was asked for that only a session with a process of its own can have."""
    return bool(
        arguments.session_memory
        or arguments.session_gpu_fraction
        or arguments.session_cpus
        or arguments.session_cgroups
        or isinstance(arguments.session_users, range)
    )


def _processor_count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 4096.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processors; use one from 0 to 4096")
    return value


def _session_users(text: str) -> str | range:
    if text in (AUTO, OFF):
        return text
    first, _, count = text.partition(":")
    if not (first.isdecimal() and count.isdecimal() and len(text) <= 20):
        raise argparse.ArgumentTypeError(f"{text!r} is neither FIRST:COUNT, as 60706:478, nor auto nor off")
    numbers = range(int(first), int(first) + int(count))
    if not numbers or not 0 < numbers[0] <= numbers[-1] < _MOST_USERS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: users have numbers from 1 to {_MOST_USERS - 1}, and COUNT is not 0"
        )
    return numbers


def session_users(arguments: argparse.Namespace) -> SessionUsers | None:
    """Make what gives sessions their users; None where all have the worker's.

    Raises:
        ConfigurationError: they were asked for, and there can be none.
    """
    wanted: str | range = arguments.session_users
    is_required = isinstance(wanted, range)
    # The only client of an embedded worker has started it, and means its own user.
    if wanted == OFF or (not is_required and (arguments.embedded or os.geteuid() != 0)):
        return None
    numbers = wanted if isinstance(wanted, range) else _UNUSED_NUMBERS
    try:
        return SessionUsers(numbers[0], len(numbers), is_required=is_required)
    except SessionUsersUnavailableError as why:
        if is_required:
            raise ConfigurationError(f"Sessions cannot have users of their own: {why}.") from why
        logger.warning("sessions: the worker's own user, root, for all: %s", why)
        return None


def session_priorities(arguments: argparse.Namespace, cgroups: Cgroups | None) -> Priorities | None:
    """Make what gives sessions their priorities; None where the kernel shall treat them alike."""
    if not arguments.session_priorities:
        return None
    return Priorities(CgroupMeans(cgroups) if cgroups is not None else ProcessMeans())


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
