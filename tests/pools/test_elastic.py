"""Pools that grow with their queue, shrink when they have nothing to do, and survive the loss of a node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import skyproxy as sky
from skyproxy.errors import ConfigurationError, SessionLostError, WorkerStartError
from skyproxy.pools.pool import Compute
from skyproxy.providers.base import Launched, Progress, Report, WorkerSpec
from tests.integration import programs

pytestmark = pytest.mark.timeout(300)

LOCAL = sky.Local(device="cpu")
wait_for = partial(programs.wait_for, timeout=100.0)


class Events(list[tuple[str, int | None]]):
    """What a pool told `on_event`."""

    def __call__(self, progress: Progress) -> None:
        self.append((progress.phase, progress.node))

    def of(self, *phases: str) -> list[tuple[str, int | None]]:
        return [event for event in self if event[0] in phases]


class Workers:
    """Local workers; `before` is called for each node before it is launched."""

    name = "wrapped"

    def __init__(self, before: Callable[[int], Any]) -> None:
        self.before = before
        self.launches = 0

    async def launch(self, spec: WorkerSpec, report: Report) -> Launched:
        self.launches += 1
        waiting = self.before(int(spec.name.rpartition("-")[2]))
        if waiting is not None:
            await waiting
        return await LOCAL.launch(spec, report)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


def pid() -> int:
    return os.getpid()


def place() -> tuple[int, int, int]:
    info = sky.instance_info()
    return info.rank, info.world_size, os.getpid()


def wait_for_file(path: str, number: int = 0) -> int:
    Path(f"{path}.{os.getpid()}").touch()
    while not Path(path).exists():
        time.sleep(0.02)
    return number


def begun(folder: Path) -> int:
    return len(list(folder.glob("end.*")))


def test_forty_calls_make_the_pool_grow_and_their_end_makes_it_shrink(tmp_path: Path) -> None:
    events = Events()
    end = tmp_path / "end"
    with Compute(provider=LOCAL, nodes=sky.Nodes(1, 3, idle="1s"), on_event=events) as pool:
        assert (pool.ranks, pool.world_size, len(pool.nodes)) == ([0], 1, 1)
        results = pool.map(wait_for_file, [str(end)] * 40, range(40))
        wait_for(lambda: begun(tmp_path) == 3, "all three nodes run a call")
        assert pool.ranks == [0, 1, 2]
        end.touch()
        assert list(results) == list(range(40))
        wait_for(lambda: pool.world_size == 1, "the pool has shrunk")
        assert pool.run(pow, 2, 3) == 8
    assert sorted(events.of("growing")) == [("growing", 1), ("growing", 2)]
    assert len(events.of("shrinking")) == 2
    assert events.of("lost", "failed") == []


def test_a_node_that_is_killed_under_load_loses_no_call(tmp_path: Path) -> None:
    events = Events()
    end = tmp_path / "end"
    with Compute(provider=LOCAL, nodes=sky.Nodes(2, 2), retry=3, on_event=events) as pool:
        first, second = pool.broadcast(pid)
        results = pool.map(wait_for_file, [str(end)] * 12, range(12))
        wait_for(lambda: begun(tmp_path) == 2, "both nodes run a call")
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: events.of("lost") != [], "the loss is noticed")
        end.touch()
        assert list(results) == list(range(12))
        wait_for(lambda: pool.ranks == [0, 1], "another node has taken its place")
        assert [row[:2] for row in pool.broadcast(place)] == [(0, 2), (1, 2)]
        assert pool.broadcast(pid)[0] == first  # the other one was not touched
    assert events.of("lost") == [("lost", 1)]


@pytest.mark.slow
def test_a_call_without_retry_fails_with_its_node_and_no_other_does(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with Compute(provider=LOCAL, nodes=sky.Nodes(1, 1)) as pool:
        victim = pool.run(pid)
        running = pool.submit(wait_for_file, str(end))
        wait_for(lambda: begun(tmp_path) == 1, "the call runs")
        waiting = pool.submit(pow, 2, 5)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(SessionLostError):
            running.result(100)
        assert waiting.result(100) == 32


class Counter(sky.Actor):
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


@sky.function
def three() -> torch.Tensor:
    return torch.tensor([3.0])


def test_an_empty_pool_starts_with_its_first_call_and_keeps_what_is_in_use() -> None:
    with Compute(provider=LOCAL, nodes=sky.Nodes(0, 1, idle=0.2)) as pool:
        assert (pool.ranks, pool.world_size, pool.nodes) == ([], 0, [])
        with pytest.raises(ConfigurationError, match="none at this moment"):
            three().on(0) >> pool
        assert (three().on("head") >> pool).item() == 3
        wait_for(lambda: pool.ranks == [], "the node has gone")

        actor = Counter.on(pool)()
        home = pool.nodes[0]
        assert actor.add() == 1
        kept = three().remote() >> pool
        assert kept.item() == 3  # and nothing is under way any more
        held = pool._workers.membership._holds  # type: ignore[union-attr]
        (node,) = pool._workers.membership.nodes.values()  # type: ignore[union-attr]
        assert held(node)
        del actor
        wait_for(lambda: not any(calls.is_open for calls in list(pool._actors)), "the actor is let go")
        assert held(node)  # for the tensor
        assert pool.nodes == [home]
        del kept
        wait_for(lambda: pool.ranks == [], "nothing is held, and the node has gone")
        with pytest.raises(ConfigurationError, match="is not a node of this pool"):
            pool.rank_of(home)


def test_a_broadcast_goes_to_those_that_are_there(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with Compute(provider=LOCAL, nodes=sky.Nodes(1, 2, idle="100s")) as pool:
        running = pool.submit(pool_place_after, str(end))
        everywhere = sky.function(wait_for_file)(str(end), 7).submit_to_all(pool)
        waiting = pool.submit(place)
        wait_for(lambda: pool.ranks == [0, 1], "the pool has grown")
        assert waiting.result(100)[:2] == (1, 2)  # on the new node, while the broadcast runs on the other
        end.touch()
        assert everywhere.result(100) == [7]
        first = running.result(100)
        assert [row[:2] for row in pool.broadcast(place)] == [(0, 2), (1, 2)]
        # The ranks of those that live are stable; in a broadcast they count without gaps.
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: pool.ranks in ([1], [0, 1]), "the loss is noticed")
        (there, *_) = [(sky.function(place)().on(1) >> pool)]
        assert there[2] == waiting.result()[2]


def pool_place_after(path: str) -> int:
    wait_for_file(path)
    return os.getpid()


class Marked(sky.plugins.Plugin):
    """Sets a variable in every process, and takes it away."""

    @contextlib.contextmanager
    def around_process(self, info: sky.InstanceInfo) -> Iterator[None]:
        os.environ["MARKED"] = str(info.world_size)
        yield
        del os.environ["MARKED"]


@pytest.mark.slow
def test_plugins_are_set_up_in_each_node_that_comes() -> None:
    with Compute(provider=LOCAL, nodes=sky.Nodes(0, 1), plugins=[Marked()]) as pool:
        assert pool.run(os.getenv, "MARKED") == "1"
        assert pool.broadcast(os.getenv, "MARKED") == ["1"]


def never(number: int) -> None:
    raise WorkerStartError(f"no room for node {number}")


@pytest.mark.slow
def test_a_pool_goes_on_with_what_it_has_and_says_so_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    events = Events()
    end = tmp_path / "end"
    provider = Workers(lambda number: never(number) if number else None)
    with (
        caplog.at_level(logging.WARNING, "skyproxy"),
        Compute(provider=provider, nodes=sky.Nodes(1, 3), on_event=events) as pool,
    ):
        results = pool.map(wait_for_file, [str(end)] * 5, range(5))
        wait_for(lambda: len(events.of("failed")) >= 4, "two attempts for two nodes have failed")
        end.touch()
        assert list(results) == list(range(5))
        assert pool.ranks == [0]
    told = [record.getMessage() for record in caplog.records if "could not be started" in record.getMessage()]
    assert len(told) == 1
    assert "goes on with 1 nodes: node" in told[0]
    assert "no room for node" in told[0]


def wrong(number: int) -> None:
    raise ConfigurationError(f"there is no node {number}")


def test_calls_do_not_wait_for_a_node_that_cannot_be() -> None:
    provider = Workers(wrong)
    with Compute(provider=provider, nodes=sky.Nodes(0, 2)) as pool:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="there is no node"):
                pool.submit(pow, 2, 2).result(100)
        with pytest.raises(ConfigurationError, match="there is no node"):
            sky.function(pow)(2, 2).submit_to_all(pool).result(100)
    assert provider.launches >= 3


def test_calls_are_given_up_after_some_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyproxy.pools.growth._FIRST_PAUSE_SECONDS", 0.01)
    provider = Workers(never)
    with Compute(provider=provider, nodes=sky.Nodes(0, 1)) as pool:
        with pytest.raises(WorkerStartError, match="no room for node 0"):
            pool.submit(pow, 2, 2).result(100)
    assert provider.launches == 5


def test_the_first_nodes_come_up_together_or_not_at_all() -> None:
    before = children()
    provider = Workers(lambda number: never(number) if number else None)
    with pytest.raises(WorkerStartError, match="no room for node 1"):
        Compute(provider=provider, nodes=sky.Nodes(2, 3)).start()
    wait_for(lambda: children() <= before, "what had begun is gone")


def test_a_pool_that_is_closed_while_nodes_start_leaves_none_behind(tmp_path: Path) -> None:
    before = children()
    asked = threading.Event()

    async def late() -> None:
        asked.set()
        await asyncio.sleep(1000)

    provider = Workers(lambda number: late() if number == 2 else None)
    with Compute(provider=provider, nodes=sky.Nodes(0, 3)) as pool:
        futures = [pool.submit(wait_for_file, str(tmp_path / "end")) for _ in range(9)]
        assert asked.wait(100)
        wait_for(lambda: children() > before, "a worker is being started")
    assert all(future.cancelled() for future in futures)
    wait_for(lambda: children() <= before, "all workers are gone")


PROGRAM = """
import sys, threading, time
import skyproxy as sky

def told(progress):
    if progress.phase == "growing":
        print("growing", flush=True)

if __name__ == "__main__":
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=sky.Nodes(0, 2), on_event=told) as pool:
        pool.run(time.sleep, 1000)
"""


def test_an_interrupt_while_the_pool_grows_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-X", "faulthandler", str(script)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "growing\n"
        process = psutil.Process(program.pid)
        wait_for(lambda: process.children(), "a worker is being started")
        workers = process.children(recursive=True)
        program.send_signal(signal.SIGINT)
        try:
            _, errors = program.communicate(timeout=80)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGABRT)  # it says where its threads are, unless it is past its last statement
            pytest.fail(f"it did not end: {program.communicate()[1]}")
        assert "KeyboardInterrupt" in errors
        assert program.returncode != 0
        _, alive = psutil.wait_procs(workers, 100)
        assert not alive
    finally:
        program.kill()


class Whole(sky.plugins.Plugin):
    restarts_ranks = True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"provider": sky.Remote(["ws://127.0.0.1:1"], token="x")}, "Remote"),
        ({"provider": LOCAL, "plugins": [Whole()]}, "Whole"),
        ({"provider": LOCAL, "name": "stays", "keep": True}, "keep"),
    ],
)
def test_what_cannot_be_elastic_says_so(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Compute(nodes=sky.Nodes(1, 2), **options).start()


@pytest.mark.slow
def test_an_actor_whose_node_is_lost_is_made_again_on_another() -> None:
    @sky.actor(max_restarts=1)
    class Holder:
        def pid(self) -> int:
            return os.getpid()

    with Compute(provider=LOCAL, nodes=sky.Nodes(1, 1)) as pool, ThreadPoolExecutor(1) as threads:
        holder: Any = Holder.on(pool)()  # type: ignore[attr-defined]
        first = holder.pid()
        os.kill(first, signal.SIGKILL)

        def second() -> int:
            while True:
                try:
                    return int(holder.pid())
                except SessionLostError:  # the call that found it dead
                    continue

        assert threads.submit(second).result(100) != first
