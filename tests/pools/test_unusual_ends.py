"""What a caller is told where a function did not simply return or raise."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyproxy as sky
from skyproxy.errors import ActorDiedError, ConfigurationError, RankErrors, RemoteFunctionError, SessionLostError
from skyproxy.pools import Compute, pool_task


@pytest.fixture(scope="module")
def pool() -> Iterator[Compute]:
    with Compute(name="ends", provider=sky.Local(device="cpu")) as pool:
        yield pool


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
def same(x: Any) -> Any:
    return x


def exit_at_once() -> None:
    os.write(2, b"the last words\n")
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.write(2, b"the last words\n")
    os.abort()


def kill() -> None:
    os.write(2, b"the last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS = [
    (exit_at_once, ["exited with code 3", "the last words"]),
    (crash, ["SIGSEGV", "Segmentation fault", "in crash"]),
    (abort, ["SIGABRT", "the last words"]),
    (kill, ["SIGKILL", "the last words"]),
]


@pytest.mark.parametrize(("function", "said"), DEATHS, ids=[function.__name__ for function, _ in DEATHS])
def test_a_death_names_its_cause_and_the_end_of_the_log(
    pool: Compute, function: Callable[[], None], said: list[str]
) -> None:
    with pytest.raises(SessionLostError) as caught:
        pool.run(function)
    for words in said:
        assert words in str(caught.value)
    assert "may still run" not in str(caught.value)
    assert "The pool puts another process in its place" in str(caught.value)
    assert "skyproxy.connect" not in str(caught.value)
    assert caught.value.process_ended
    assert pool.run(abs, -1) == 1, "another process took its place"


def one_item(path: str) -> Iterator[int]:
    yield 1
    while not os.path.exists(path):
        time.sleep(0.01)
    exit_at_once()


class Dying(sky.Actor):
    def items(self, path: str) -> Iterator[int]:
        yield from one_item(path)


def test_a_death_in_the_midst_of_a_stream_says_where_and_whose(pool: Compute, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    items = pool.run(one_item, str(first))
    assert next(items) == 1
    first.touch()
    with pytest.raises(SessionLostError, match="exited with code 3") as caught:
        next(items)
    assert caught.value.__notes__ == ["one_item was running on rank 0 of 1."]
    assert pool.run(abs, -1) == 1
    items = Dying.on(pool.nodes[0])().items(str(second))  # the process in its place is one of the pool's nodes, too
    assert next(items) == 1
    second.touch()
    with pytest.raises(ActorDiedError, match=r"actor Dying on rank 0 died while Dying.items ran: .*code 3"):
        next(items)
    assert pool.run(abs, -1) == 1


@pytest.mark.parametrize("function", [lambda: sys.exit(3), lambda: sys.exit("no data")])
def test_sys_exit_says_so_and_ends_nobody_else(pool: Compute, function: Callable[[], None]) -> None:
    with pytest.raises(RemoteFunctionError, match=r"called sys.exit\((3|'no data')\) on the worker"):
        pool.run(function)
    assert pool.run(abs, -1) == 1


def read_all() -> str:
    return sys.stdin.read()


def stop_here() -> None:
    breakpoint()


@pytest.mark.parametrize(
    ("function", "asked"),
    [(input, "input"), (read_all, "input"), (stop_here, "breakpoint")],
    ids=["input", "read", "stop"],
)
def test_who_asks_for_a_terminal_is_told_at_once(pool: Compute, function: Callable[[], Any], asked: str) -> None:
    with pytest.raises(RuntimeError, match=rf"no standard input: nobody can answer {asked}\(\).*f\.local"):
        pool.run(function)


def test_what_a_function_starts_reads_an_end_of_input(pool: Compute) -> None:
    assert pool.run(subprocess.check_output, ["cat"]) == b""


def test_a_wait_for_processes_whose_streams_nobody_reads_is_told_of(
    pool: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_task, "_PATIENCE_SECONDS", 0.05)
    told = threading.Event()
    seen: list[str] = []

    def warn(text: str, *args: object) -> None:
        seen.append(text % args)
        told.set()

    monkeypatch.setattr(pool_task.logger, "warning", warn)
    streams = pool.map(count, [3, 3])
    held = [next(streams)]  # of the only process
    waiting = threading.Thread(target=lambda: held.append(next(streams)))
    waiting.start()
    assert told.wait(30), "the second call waits, and nobody says why"
    assert "count waits for a process, and all of them are held by streams" in seen[0]
    assert list(held[0]) == [0, 1, 2]  # which sets its process free
    waiting.join(30)
    assert list(held[-1]) == [0, 1, 2]


def test_a_wait_in_the_midst_of_a_stream_that_holds_all_processes_is_refused(pool: Compute) -> None:
    with pytest.raises(ConfigurationError, match=r"same would wait forever.*list\(.*concurrency=2"):
        for item in count(3).stream(pool):
            same(item) >> pool
    with pytest.raises(ConfigurationError, match="forever"):
        for item in count(3) >> pool:
            (same(item) & same(item)) >> pool

    async def read() -> None:
        for item in count(3).stream(pool):
            await (same(item) > pool)

    with pytest.raises(ConfigurationError, match="forever"):
        asyncio.run(read())
    assert [future.result() for future in [same(item) > pool for item in count(3).stream(pool)]] == [0, 1, 2]
    assert same(4) >> pool == 4


def test_a_full_disk_is_named(pool: Compute) -> None:
    def fill() -> None:
        with open("/dev/full", "w", encoding="utf-8") as file:
            file.write("x")

    with pytest.raises(OSError, match="No space left") as caught:
        pool.run(fill)
    assert any("disk of the worker is full" in note for note in caught.value.__notes__)


def daemon(path: str) -> None:
    subprocess.Popen([sys.executable, "-c", _DAEMON, path], start_new_session=True)
    while not Path(path).exists():
        time.sleep(0.01)


_DAEMON = """
import os, pathlib, sys, time
if os.fork():
    os._exit(0)
os.setsid()
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(600)
"""


def test_daemons_end_with_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "process"
    with Compute(provider=sky.Local(device="cpu")) as pool:
        pool.run(daemon, str(path))
        process = psutil.Process(int(path.read_text()))
        assert process.is_running()
    _, alive = psutil.wait_procs([process], timeout=60)
    assert not alive


def test_equal_errors_of_ranks_are_shown_once_with_a_count() -> None:
    errors: dict[int, Exception] = {rank: ValueError("no data") for rank in range(3)}
    errors[3] = KeyError("x")
    for rank, error in errors.items():
        error.add_note(f"On rank {rank}.")
    group = RankErrors.of("it failed", errors, 1)
    assert group.exceptions == (errors[1], errors[3])
    assert group.by_rank == errors
    text = "".join(traceback.format_exception(group))
    assert text.count("no data") == 1
    assert "The same on 3 ranks: 0, 1, 2." in text
    part = group.subgroup(ValueError)
    assert part is not None
    assert sorted(part.by_rank) == [0, 1, 2]
