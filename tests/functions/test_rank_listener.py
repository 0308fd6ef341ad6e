"""Processes as torchrun starts them, without it: where they wait for a debugger, and the worker's end of that."""

from __future__ import annotations

import os
import queue
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyproxy.functions.rank_listener import RankListener, listening
from skyproxy.runtime import breakpoints
from skyproxy.runtime.debug_rooms import Line
from tests.runtime.prompts import until_prompt

if sys.platform == "win32":
    pytest.skip("sockets that are files", allow_module_level=True)

WAIT_SECONDS = 60

COUNT = """
def count():
    total = 1
    breakpoint()
    print("total is", total)

count()
"""
FAIL = """
secret = 41
raise ValueError(f"not {secret + 1}")
"""


class Rank:
    """A process of a script, and the listener of its worker."""

    def __init__(self, folder: Path, script: str, seconds: float = WAIT_SECONDS, path: str = "") -> None:
        self.places: queue.Queue[breakpoints.Place] = queue.Queue()
        self.listener = RankListener(folder, seconds, self.places.put, "dev/1")
        (folder / "script.py").write_text(script)
        place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}
        place |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        root = str(Path(__file__).resolve().parents[2])
        found = self.listener.variables(os.pathsep.join(part for part in (path, root) if part))
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(folder / "script.py")],
            env={**os.environ, **place, **found},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def next_place(self) -> breakpoints.Place:
        return self.places.get(timeout=WAIT_SECONDS)

    def end(self) -> tuple[int, str]:
        printed, _ = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, printed


@pytest.fixture
def begin() -> Iterator[Callable[..., Rank]]:
    """Starts ranks, and ends what is left of them."""
    begun: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="sky") as folder:  # a short name: a socket's path has 107 bytes

        def start(script: str, **options: Any) -> Rank:
            begun.append(Rank(Path(folder), script, **options))
            return begun[-1]

        yield start
        for rank in begun:
            rank.listener.close()
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait(WAIT_SECONDS)


def test_a_breakpoint_of_a_script_waits_and_says_which_rank_it_is(begin: Callable[..., Rank]) -> None:
    rank = begin(COUNT)
    place = rank.next_place()
    assert (place["kind"], place["function"], place["line"]) == ("breakpoint", "count", 4)
    assert (place["rank"], place["world_size"], place["pool"]) == (3, 4, "dev/1")
    said = breakpoints.attach(place["debugger"])
    assert "count()" in until_prompt(said)
    breakpoints.tell(place["debugger"], "!total = 40")
    until_prompt(said)
    breakpoints.tell(place["debugger"], "c")
    assert rank.end() == (0, "total is 40\n")
    assert [kind for kind, _ in said if kind != "alive"] == ["end"]
    assert rank.next_place() == {**place, "kind": "gone"}
    with pytest.raises(LookupError):
        breakpoints.tell(place["debugger"], "c")


def test_an_exception_that_ends_a_script_waits_to_be_looked_at(begin: Callable[..., Rank]) -> None:
    rank = begin(FAIL)
    place = rank.next_place()
    assert (place["kind"], place["line"]) == ("exception", 3)
    said = breakpoints.attach(place["debugger"])
    assert "ValueError: not 42" in until_prompt(said)
    breakpoints.tell(place["debugger"], "p secret")
    assert "41" in until_prompt(said)
    breakpoints.tell(place["debugger"], "q")
    status, printed = rank.end()
    assert status == 1
    assert printed.count("ValueError: not 42") == 1


def test_where_nobody_comes_the_script_ends_and_says_why(begin: Callable[..., Rank]) -> None:
    rank = begin(COUNT, seconds=0.1)
    status, printed = rank.end()
    assert status == 1
    assert "nobody attached to the breakpoint in" in printed


def test_a_worker_that_is_gone_leaves_no_process_waiting(begin: Callable[..., Rank]) -> None:
    rank = begin(COUNT)
    rank.next_place()
    rank.listener.close()
    status, printed = rank.end()
    assert status == 1
    assert "the worker is gone" in printed


def test_the_module_of_that_name_that_is_there_already_is_imported_too(
    begin: Callable[..., Rank], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    rank = begin("print('the script')", path=str(tmp_path))
    assert rank.end() == (0, "the other one\nthe script\n")


def test_only_the_workers_user_can_open_the_socket(begin: Callable[..., Rank]) -> None:
    rank = begin("")
    path = Path(rank.listener.variables("")["SKYPROXY_SCRIPT_DEBUG"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    rank.end()


@contextmanager
def stranger(rank: Rank) -> Iterator[Line]:
    """A process that says what no rank says."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_SECONDS)
    sock.connect(rank.listener.variables("")["SKYPROXY_SCRIPT_DEBUG"])
    line = Line(sock)
    yield line
    line.close()


@pytest.mark.parametrize(
    "words",
    [
        {"waits": {}},
        {"waits": {"kind": "gone", "file": "", "function": "", "pool": "", "line": 0, "rank": 0, "world_size": 1}},
        {"waits": {"kind": "exception", "file": 7, "function": "", "pool": "", "line": 0, "rank": 0, "world_size": 1}},
        {"said": [1, "text"]},
        {"said": [1, "command", ""]},
        {"said": [1, "text", "x" * 100_000]},
        {},
    ],
)
def test_who_says_what_no_debugger_says_is_hung_up_on(begin: Callable[..., Rank], words: dict[str, object]) -> None:
    rank = begin("")
    with stranger(rank) as line:
        line.send(words)
        with pytest.raises(OSError, match="the other end has left"):
            line.receive()
    assert rank.places.empty()
    rank.end()


@pytest.mark.parametrize("options", [{"seconds": None}, {"announce": None}])
def test_who_does_not_debug_opens_no_socket(tmp_path: Path, options: dict[str, None]) -> None:
    asked: dict[str, Any] = {"seconds": 1.0, "announce": print, "pool": "", **options}
    with listening(tmp_path, **asked) as listener:
        assert listener is None
    assert list(tmp_path.iterdir()) == []


def test_where_no_socket_can_be_made_the_script_runs_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(tmp_path / ("x" * 200), 1.0, print, "") as listener:
        assert listener is None
    assert "breakpoints of this script cannot wait" in capsys.readouterr().err
