"""The exit status of every command, one meaning each."""

from __future__ import annotations

from enum import IntEnum

from skyproxy.errors import (
    ClusterError,
    ConfigurationError,
    ConnectError,
    SkyproxyError,
    UnknownJobError,
    WorkerStartError,
)


class ExitCode(IntEnum):
    """Exit statuses of the command line; docs/reference/cli.md has the same table."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_STARTED = 4
    UNREACHABLE = 5
    CLUSTER = 6
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "it worked",
    ExitCode.FAILED: "it failed; or `doctor` found something broken, or `status` a worker that is not ready",
    ExitCode.USAGE: "the arguments or the configuration are invalid",
    ExitCode.NOT_FOUND: "there is no worker, context or job of that name",
    ExitCode.NOT_STARTED: "the worker did not start, or not in time",
    ExitCode.UNREACHABLE: "the worker could not be reached",
    ExitCode.CLUSTER: "the Kubernetes cluster refused, or could not be asked",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
}

_BY_ERROR: list[tuple[type[BaseException], ExitCode]] = [
    (ConfigurationError, ExitCode.USAGE),
    (WorkerStartError, ExitCode.NOT_STARTED),
    (ConnectError, ExitCode.UNREACHABLE),
    (ClusterError, ExitCode.CLUSTER),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
]


class NotFoundError(SkyproxyError):
    """There is no worker or context of that name."""


def code_of(error: BaseException) -> ExitCode:
    """The status that an error ends a command with."""
    if isinstance(error, NotFoundError | UnknownJobError):
        return ExitCode.NOT_FOUND
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)
