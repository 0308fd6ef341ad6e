"""The template, seen from the supervisor."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from typing import Any

import pytest

from skyproxy_server.control_channel import ControlChannel
from skyproxy_server.isolation.spawner import Template, TemplateSetup


class Process:
    """A template that is ready at once, and remembers which thread began it."""

    pid = 1

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        self.began_on = threading.current_thread()
        self._channel = ControlChannel(socket.socket(fileno=os.dup(pass_fds[0])))
        self._channel.send({"devices": [], "software": {}})

    def kill(self) -> None:
        self._channel.close()

    def wait(self) -> None: ...


def test_it_outlives_the_thread_that_had_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a process whose parent's thread ends, and one that serves a client ends with its connection."""
    monkeypatch.setattr(subprocess, "Popen", Process)
    template = Template(TemplateSetup())
    serving = threading.Thread(target=template.restart)
    serving.start()
    serving.join()
    process: Any = template._process
    assert process.began_on.is_alive()
    template.end()
