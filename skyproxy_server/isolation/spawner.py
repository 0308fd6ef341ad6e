"""The process that sessions are forked from, seen from the supervisor."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.isolation.session_user import SessionUser

logger = logging.getLogger("skyproxy.server")

_LOAD_SECONDS = 300.0
_RESTART_PAUSES_SECONDS = (0.0, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class TemplateSetup:
    """The modules and settings that the template loads.

    Attributes:
        device: the choice of devices, as `inventory` knows it.
        functions: whether clients may run functions.
        allow_ops: operators and namespaces that clients may call beside the usual ones.
        log_level: how much sessions log.
        snapshots: the folder of sessions' snapshots; empty for none. The template does not look at it.
    """

    device: str = "auto"
    functions: bool = True
    allow_ops: Sequence[str] = field(default_factory=tuple)
    log_level: str = "INFO"
    snapshots: str = ""


class Template:
    """The process that sessions are forked from; started again where it ends."""

    def __init__(self, setup: TemplateSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ControlChannel | None = None
        self._failures = 0
        # The kernel ends it with the thread that began it: not one of a connection, which may be gone at any moment.
        self._births = ThreadPoolExecutor(1, "skyproxy-template")

    @property
    def pid(self) -> int:
        """Its process id; 0 where it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self, stop: threading.Event | None = None, user: SessionUser | None = None) -> dict[str, Any]:
        """Start it, and wait until it has loaded what sessions need.

        Args:
            stop: ends the wait.
            user: one that sessions could have; it is tried.

        Returns:
            "devices" and "software" of this worker; with a user "user_obstacle", what keeps sessions from having it.

        Raises:
            ConfigurationError: it cannot do what was asked for.
            ChannelClosedError: it ended, or took too long.
        """
        self.end()
        channel, theirs = ControlChannel.pair()
        with theirs:
            self._births.submit(self._begin, theirs.fileno()).result()
        self._channel = channel
        setup = self._setup
        channel.send(
            {
                "device": setup.device,
                "functions": setup.functions,
                "allow_ops": list(setup.allow_ops),
                "log_level": setup.log_level,
                "user": user.to_plain() if user is not None else None,
            }
        )
        deadline = time.monotonic() + _LOAD_SECONDS
        while True:
            try:
                answer, _ = channel.receive(0.2)
                break
            except TimeoutError:
                if (stop is not None and stop.is_set()) or time.monotonic() > deadline:
                    self.end()
                    raise ChannelClosedError("the template did not get ready") from None
        if "refused" in answer:
            self.end()
            raise ConfigurationError(answer["refused"])
        return answer

    def _begin(self, descriptor: int) -> None:
        command = [sys.executable, "-P", "-m", "skyproxy_server.isolation.template", str(descriptor), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], env=_environment())

    def fork(self, order: dict[str, object], descriptors: Sequence[int]) -> None:
        """Have a session's process forked.

        Raises:
            ChannelClosedError: there is no template.
        """
        if self._channel is None:
            raise ChannelClosedError("there is no template")
        self._channel.send(order, descriptors, wait=False)

    def sweep(self, user: SessionUser) -> None:
        """Have all processes of a user ended; without a template nothing happens."""
        channel = self._channel
        if channel is not None:
            with suppress(ChannelClosedError):
                channel.send({"sweep": user.to_plain()}, wait=False)

    def restart(self) -> None:
        """Start it again after it failed; each time in a row with a longer pause before.

        Raises:
            ChannelClosedError, ConfigurationError: it does not come up.
        """
        pause = _RESTART_PAUSES_SECONDS[min(self._failures, len(_RESTART_PAUSES_SECONDS) - 1)]
        self._failures += 1
        logger.error("the process that sessions are made from does not answer; it is started again")
        time.sleep(pause)
        self.start()

    def note_success(self) -> None:
        """Take note that it did what it was asked for."""
        self._failures = 0

    def end(self) -> None:
        """End it; sessions go on without it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """The environment of all processes that run clients' operations: without the token."""
    return {name: value for name, value in os.environ.items() if name != "SKYPROXY_TOKEN"}
