"""Several workers on one machine that live and die together: one process each, on ports that follow one another."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyproxy.errors import ConfigurationError

logger = logging.getLogger("skyproxy.server")

_POOL_VARIABLE = "COMPUTE_POOL"
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 8.0
"""The time that those that are left may take to end; Kubernetes gives a pod of ours two seconds more."""


def run_processes(
    arguments: Sequence[str],
    count: int,
    port: int,
    stop: threading.Event,
    leave_seconds: float = 0.0,
    jobs: Path | None = None,
) -> int:
    """Runs workers until one of them ends, or `stop` is set; then the others are ended, too.

    Args:
        arguments: those of this process, from which each worker's follow. The token must be in a file.
        count: how many.
        port: of the first.
        stop: set when they are to end.
        leave_seconds: the time that their clients have for last snapshots.
        jobs: the folder for the jobs of all; each gets one of its own below it.

    Returns:
        The exit status: 0 where they were told to end and did so orderly, else that of the first which did not.
    """
    # The last argument counts, so each of them runs a single worker on a port of its own.
    own = [["--processes", "1", "--port", str(port + index)] for index in range(count)]
    if jobs is not None:
        for index, words in enumerate(own):
            words += ["--jobs", str(jobs / f"worker-{index}")]
    # The first listens when the others do, so that one question about readiness is one about all of them.
    own[0] += [word for index in range(1, count) for word in ("--after-port", str(port + index))]
    commands = [[sys.executable, "-m", "skyproxy_server", *arguments, *words] for words in own]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index, command in enumerate(commands):
            started.append(subprocess.Popen(command, env=environment(os.environ, index)))
        while not stop.wait(_LOOK_SECONDS):
            ended = next((process for process in started if process.poll() is not None), None)
            if ended is not None:
                number = started.index(ended)
                logger.error("worker %d ended with status %d; the others end, too", number, ended.returncode)
                _end(started, _GRACE_SECONDS)
                return ended.returncode if ended.returncode > 0 else 128 - ended.returncode
        _end(started, _GRACE_SECONDS + leave_seconds)
        return next((process.returncode for process in started if process.returncode > 0), 0)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_for_ports(host: str, ports: Sequence[int], stop: threading.Event) -> bool:
    """Waits until something listens on each of these ports of this machine; False when `stop` was set instead.

    Args:
        host: the address that we listen on ourselves, which may stand for all of them.
        ports: those to wait for.
        stop: ends the wait.
    """
    address = {"": "localhost", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    for port in ports:
        while not stop.is_set():
            try:
                socket.create_connection((address, port), 1.0).close()
                break
            except OSError:
                stop.wait(_LOOK_SECONDS)
    return not stop.is_set()


def environment(given: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The environment of the worker with that number on its machine: what it knows of its pool is about itself.

    Raises:
        ConfigurationError: COMPUTE_POOL is no JSON object.
    """
    result = dict(given)
    text = given.get(_POOL_VARIABLE)
    if text:
        try:
            pool = {**json.loads(text), "local_rank": local_rank}
        except (ValueError, TypeError):
            raise ConfigurationError(f"{_POOL_VARIABLE}={text!r} is not a JSON object.") from None
        # The rank follows from the node and the local rank.
        pool.pop("rank", None)
        result[_POOL_VARIABLE] = json.dumps(pool, separators=(",", ":"))
    return result


def _end(processes: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """Tells all to end, and sees to it that they do."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
