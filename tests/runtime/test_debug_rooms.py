"""The folder of sockets: whose it must be, what is found there, and what is no message."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.runtime import debug_rooms
from skyproxy.runtime.debug_rooms import Line

if sys.platform == "win32":
    pytest.skip("sockets that are files", allow_module_level=True)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sky") as folder:  # a short name: a socket's path has 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_the_folder_is_its_users_alone(runtime: Path) -> None:
    place = debug_rooms.folder()
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o755)
    with pytest.raises(ConfigurationError, match="not a folder of this user alone"):
        debug_rooms.folder()


def test_a_link_in_place_of_the_folder_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "skyproxy-debug").symlink_to(runtime / "elsewhere")
    with pytest.raises(ConfigurationError, match="not a folder of this user alone"):
        debug_rooms.folder()


def test_programs_that_listen_are_found_and_what_has_ended_is_removed(runtime: Path) -> None:
    ended = debug_rooms.folder() / "1.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(ended))
    listener, path = debug_rooms.listen()
    with listener:
        assert path.stat().st_mode & 0o777 == 0o600
        [line] = debug_rooms.programs()
        line.close()
    assert sorted(os.listdir(debug_rooms.folder())) == [path.name]


@pytest.mark.parametrize("said", [b"", b"no json\n", b"[1]\n", b'{"waiting": []}', b"\xff\n"])
def test_a_program_that_says_no_message_has_nothing_that_waits(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    line = Line(ours)
    assert debug_rooms.waiting(line) == []
    line.close()
    theirs.close()
