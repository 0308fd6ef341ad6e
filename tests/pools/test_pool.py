"""A pool of two real worker processes: calls, results, errors, output, by rank."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed, wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import skyproxy as sky
from skyproxy.errors import ConfigurationError, LimitExceededError, RankErrors, SessionLostError
from skyproxy.functions import Payload
from skyproxy.pools import Compute, PoolFuture
from skyproxy.pools.scheduler import Scheduler
from skyproxy.pools.slots import ProcessSlots
from tests.integration import programs


@pytest.fixture(scope="module")
def pool() -> Iterator[Compute]:
    with Compute(name="tests", provider=sky.Local(device="cpu"), nodes=2, env={"COLOUR": "blue"}) as pool:
        yield pool


@sky.compute
def double(x: Any) -> Any:
    return x + x


@sky.compute
def where() -> tuple[int, int, int, bool, int, str, int]:
    info = sky.instance_info()
    return (info.rank, info.node, info.world_size, info.is_head, len(info.peers), info.job, os.getpid())


@sky.compute
def wait_for(path: str, value: Any) -> Any:
    while not os.path.exists(path):
        time.sleep(0.01)
    return value


@sky.compute
def touch_and_wait(begun: str, path: str, value: Any) -> Any:
    Path(begun).touch()
    while not os.path.exists(path):
        time.sleep(0.01)
    return value


@sky.compute
def speak(text: str) -> None:
    print(text)


@sky.compute
def fail(on: int = -1) -> int:
    rank = sky.instance_info().rank
    if on in (-1, rank):
        raise KeyError(f"rank {rank}")
    return rank


@sky.compute
def count(to: int) -> Iterator[int]:
    yield from range(to)


def test_one_process_runs_a_call(pool: Compute) -> None:
    assert double(21) >> pool == 42
    assert (double(21) > pool).result(60) == 42
    assert pool.run(double, "ab") == "abab"
    assert pool.submit(divmod, 7, 2).result(60) == (3, 1)


def test_all_processes_run_a_broadcast_in_the_order_of_ranks(pool: Compute) -> None:
    results = where() @ pool
    assert [result[:5] for result in results] == [(0, 0, 2, True, 2), (1, 1, 2, False, 2)]
    assert len({result[6] for result in results}) == 2
    (job,) = {result[5] for result in results}
    assert re.fullmatch(r"tests-[0-9a-f]{6}/\d+", job)  # the second number grows when a process is replaced
    assert pool.broadcast(os.getenv, "COLOUR") == ["blue", "blue"]


def test_processes_that_a_call_starts_know_the_topology_too(pool: Compute) -> None:
    script = "import skyproxy as sky; i = sky.instance_info(); print(i.rank, i.world_size)"

    def ask() -> str:
        import subprocess
        import sys

        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert pool.broadcast(ask) == ["0 2\n", "1 2\n"]


def test_a_call_runs_where_it_was_pinned(pool: Compute) -> None:
    assert [(where().on(rank) >> pool)[0] for rank in (1, "head", 0, 1)] == [1, 0, 0, 1]
    with pytest.raises(ConfigurationError, match="0 to 1"):
        where().on(2) >> pool


def test_a_call_follows_the_one_before_to_its_process_unless_that_failed(pool: Compute) -> None:
    first = (where() >> pool)[0]
    assert [(where() >> pool)[0] for _ in range(3)] == [first] * 3
    with pytest.raises(KeyError, match=f"rank {first}"):
        fail() >> pool
    assert (where() >> pool)[0] == 1 - first


def test_a_preferred_process_is_taken_only_where_it_has_nothing_to_do() -> None:
    slots = ProcessSlots([0, 1, 2], concurrency=2)
    idle, busy, gone = (slots.get(rank) for rank in range(3))
    assert idle is not None
    assert busy is not None
    assert gone is not None
    slots.prefer(busy)
    assert slots.next_free() is busy
    slots.prefer(busy)
    busy.busy = 1
    assert slots.next_free() is gone  # whose turn it is
    slots.prefer(gone)
    slots.remove([2])
    idle.busy = 1
    assert slots.next_free() in (idle, busy)
    slots.prefer(gone)
    assert slots.next_free() in (idle, busy)


def test_calls_of_a_group_run_at_the_same_time(pool: Compute, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert (touch_and_wait(a, b, 1) & touch_and_wait(b, a, 2)) >> pool == (1, 2)


def test_map_keeps_the_order_and_takes_endless_items(pool: Compute) -> None:
    def numbers() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    doubled = pool.map(double, numbers())
    assert [next(doubled) for _ in range(12)] == [2 * number for number in range(12)]
    doubled.close()  # type: ignore[attr-defined]
    assert list(pool.map(pow, [2, 3], [3, 2])) == [8, 9]


def test_a_map_of_many_short_calls_gives_each_result_and_each_line_once(
    pool: Compute, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(number: int) -> tuple[int, int]:
        print("number", number, end="" if number % 50 == 0 else "\n")
        return number, sky.instance_info().rank

    results = list(pool.map(work, range(400)))
    assert [number for number, _ in results] == list(range(400))
    assert {rank for _, rank in results} == {0, 1}
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[{rank}] number {number}" for number, rank in results)


def test_items_of_a_generator_come_one_by_one(pool: Compute) -> None:
    assert list(count(3) >> pool) == [0, 1, 2]


def test_an_exception_comes_back_as_itself_with_the_worker_s_traceback(pool: Compute) -> None:
    with pytest.raises(KeyError, match="rank") as caught:
        fail() >> pool
    assert "in fail" in str(caught.value.__cause__)


def test_a_broadcast_tells_of_every_rank(pool: Compute) -> None:
    with pytest.raises(RankErrors) as caught:
        fail() @ pool
    assert {type(error) for error in caught.value.exceptions} == {KeyError}
    with pytest.raises(RankErrors, match="rank 1"):
        fail(on=1) @ pool
    assert double(1) @ pool == [2, 2]


def test_output_appears_here_with_its_rank(pool: Compute, capsys: pytest.CaptureFixture[str]) -> None:
    speak("hello") @ pool
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]


def test_a_task_is_muted_for_itself_alone(pool: Compute, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    @sky.compute
    @sky.stdout(only="head")
    def head() -> None:
        print("head")

    head() @ pool
    assert capsys.readouterr().out == "[0] head\n"

    @sky.silent
    @sky.compute
    def quiet(begun: str, path: str) -> None:
        print("before")
        Path(begun).touch()
        while not os.path.exists(path):
            time.sleep(0.01)
        print("after")

    begun, path = tmp_path / "begun", tmp_path / "path"
    # A broadcast runs beside single calls: two tasks in one process, and only one of them is muted.
    running = quiet(str(begun), str(path)).on(0) > pool
    programs.wait_for(begun.exists, "it begins")
    speak("loud") @ pool
    path.touch()
    running.result(60)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] loud", "[1] loud"]


def test_a_call_that_takes_too_long_is_ended(pool: Compute, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        wait_for(str(tmp_path / "never"), 1).with_timeout(0.2) >> pool
    with pytest.raises(RankErrors, match="did not end on rank"):
        wait_for(str(tmp_path / "never"), 1).with_timeout(0.2) @ pool
    assert double(1) @ pool == [2, 2]


def test_a_cancelled_call_ends_on_its_worker(pool: Compute, tmp_path: Path) -> None:
    begun, path = tmp_path / "begun", tmp_path / "never"
    running = touch_and_wait(str(begun), str(path), 1).on(1) > pool
    waiting = where().on(1) > pool
    programs.wait_for(begun.exists, "it begins")
    assert not waiting.done()
    assert running.cancel()
    with pytest.raises(CancelledError):
        running.result(60)
    assert waiting.result(60)[0] == 1


def test_a_call_that_waits_can_be_cancelled(pool: Compute, tmp_path: Path) -> None:
    path = tmp_path / "path"
    running = [wait_for(str(path), rank).on(rank) > pool for rank in (0, 1)]
    waiting = double(1) > pool
    assert waiting.cancel()
    path.touch()
    assert [future.result(60) for future in running] == [0, 1]
    assert double(2) >> pool == 4


def test_futures_are_those_of_the_standard_library(pool: Compute) -> None:
    futures = [double(number) > pool for number in range(5)]
    assert wait(futures, 60).not_done == set()
    assert sorted(future.result() for future in as_completed(futures)) == [0, 2, 4, 6, 8]


def test_many_callers_get_their_own_results(pool: Compute) -> None:
    async def call(number: int) -> Any:
        try:
            return await (fail() > pool) if number % 7 == 0 else await (double(number) > pool)
        except KeyError:
            return "failed"

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*(call(number) for number in range(40))))

    assert asyncio.run(all_of_them()) == ["failed" if n % 7 == 0 else 2 * n for n in range(40)]


def test_broadcasts_beside_single_calls_never_cross(pool: Compute) -> None:
    outcomes: dict[str, list[Any]] = {"one": [], "all": []}

    def single() -> None:
        outcomes["one"] = [double(("one", number)) >> pool for number in range(10)]

    def broadcast() -> None:
        outcomes["all"] = [double(("all", number)) @ pool for number in range(10)]

    threads = [threading.Thread(target=target) for target in (single, broadcast)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert outcomes["one"] == [("one", n, "one", n) for n in range(10)]
    assert outcomes["all"] == [[("all", n, "all", n)] * 2 for n in range(10)]


def test_a_broadcast_is_pickled_once(pool: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    of = Payload.of.__func__  # type: ignore[attr-defined]

    def counting(cls: Any, *args: Any) -> Any:
        payload = of(cls, *args)
        made.append(payload.name)
        return payload

    monkeypatch.setattr(Payload, "of", classmethod(counting))

    class Counts:
        pickled = 0

        def __reduce__(self) -> Any:
            Counts.pickled += 1
            return (bytes, (1 << 20,))

    assert pool.broadcast(len, Counts()) == [1 << 20] * 2
    assert len(made) == 1
    assert Counts.pickled == 1


def test_tensors_come_back_as_values(pool: Compute) -> None:
    result = double(torch.ones(2)) >> pool
    assert type(result) is torch.Tensor
    assert result.device.type == "cpu"
    assert result.tolist() == [2.0, 2.0]


def test_tensors_stay_where_they_are_and_go_by_reference(pool: Compute) -> None:
    far = double(torch.ones(2)).on(1).remote() >> pool
    assert isinstance(far, sky.RemoteTensor)
    assert far.device == pool.nodes[1].device("cpu")

    @sky.compute
    def add_(x: torch.Tensor) -> int:
        x += 1
        return sky.instance_info().rank

    # It runs where the tensor lives, and on that very tensor.
    assert [add_(far) >> pool for _ in range(3)] == [1, 1, 1]
    assert far.tolist() == [5.0, 5.0]
    with pytest.raises(ConfigurationError, match="rank 1"):
        add_(far).on(0) >> pool
    with pytest.raises(ConfigurationError, match="live on one process"):
        add_(far) @ pool
    with pytest.raises(ConfigurationError, match="two workers"):
        double((far, torch.ones(1, device=pool.nodes[0].device("cpu")))) >> pool


def test_a_call_on_a_node_of_the_pool(pool: Compute) -> None:
    assert [(where() >> node)[0] for node in pool.nodes] == [0, 1]
    with pytest.raises(ConfigurationError, match="@ pool"):
        where() @ pool.nodes[0]


def test_coroutine_functions_run_too(pool: Compute) -> None:
    @sky.compute
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    assert later(1) >> pool == 2


def test_errors_of_a_function_are_not_taken_for_those_of_the_wait(pool: Compute) -> None:
    def fail(kind: type[Exception]) -> None:
        raise kind("mine")

    async def use() -> None:
        await (sky.compute(fail)(TimeoutError) > pool)

    with pytest.raises(TimeoutError, match="mine") as caught:
        asyncio.run(use())
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(CancelledError, match="mine"):
        pool.run(fail, CancelledError)


def test_arguments_have_any_name_and_partial_calls_are_calls(pool: Compute) -> None:
    assert pool.run(lambda self, function: (self, function), self=1, function=2) == (1, 2)
    assert pool.run(functools.partial(sky.compute(pow), 2), 3) == 8


def test_what_cannot_be_pickled_is_said_at_the_call(pool: Compute) -> None:
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        double(threading.Lock()).submit(pool)
    assert double(1) >> pool == 2


def test_pools_nodes_and_futures_stay_here_and_say_what_to_pass(pool: Compute) -> None:
    future = double(1) > pool
    node = pool.nodes[0]
    for given, told in (
        (pool, "a pool of its own"),
        (node, "connection of this program"),
        (future, r"the future of double .* future\.result\(\)"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            double([given]).submit(pool)
        with pytest.raises(ConfigurationError, match=told):
            pool.submit(lambda given=given: given)
    assert future.result(60) == 2
    assert double(1) >> pool == 2


def test_the_queue_has_a_bound(pool: Compute, tmp_path: Path) -> None:
    path = tmp_path / "path"
    scheduler = Scheduler(pool._running_workers().group, concurrency=1, retry=None, max_queued_calls=2)
    futures = [scheduler.submit(wait_for(str(path), number)) for number in range(4)]
    with pytest.raises(LimitExceededError, match="SKYPROXY_MAX_QUEUED_CALLS"):
        scheduler.submit(double(1))
    path.touch()
    assert [future.result(60) for future in futures] == [0, 1, 2, 3]
    scheduler.close()
    with pytest.raises(ConfigurationError, match="is not running"):
        scheduler.submit(double(1))


def test_a_pool_runs_once_at_a_time(pool: Compute) -> None:
    with pytest.raises(ConfigurationError, match="already"):
        pool.start()


@sky.compute
def die_once(path: str) -> int:
    """Ends its process at the first call, as the kernel's killer would."""
    if not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getpid(), 9)
    return os.getpid()


def test_a_lost_worker_is_an_error_and_is_replaced(pool: Compute, tmp_path: Path) -> None:
    before = pool.broadcast(os.getpid)
    with pytest.raises(SessionLostError) as caught:
        die_once(str(tmp_path / "one")).on(1) >> pool
    assert any("rank 1" in note for note in caught.value.__notes__)
    after = pool.broadcast(os.getpid)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert not psutil.pid_exists(before[1])


def test_a_call_that_may_run_twice_survives_its_worker(pool: Compute, tmp_path: Path) -> None:
    assert die_once(str(tmp_path / "one")).with_retry(1) >> pool in pool.broadcast(os.getpid)


def test_a_call_is_tried_again_for_the_exceptions_that_it_names(pool: Compute, tmp_path: Path) -> None:
    @sky.compute(retry=sky.Retry(2, (OSError,), backoff_seconds=0.01))
    def third_time(path: str, error: type[Exception]) -> int:
        with open(path, "a") as file:
            file.write("x")
        if (size := os.path.getsize(path)) < 3:
            raise error(size)
        return size

    assert third_time(str(tmp_path / "a"), OSError) >> pool == 3
    with pytest.raises(ValueError, match="1"):
        third_time(str(tmp_path / "b"), ValueError) >> pool


def test_a_stream_that_nobody_wants_frees_its_process(pool: Compute, tmp_path: Path) -> None:
    items = count(1_000_000_000).stream(pool)
    assert [next(items), next(items)] == [0, 1]
    items.close()  # type: ignore[attr-defined]
    # Neither a closed nor a dropped stream keeps a process, not even until the next collection.
    gc.disable()
    try:
        iter(count(1_000_000_000) >> pool)
        a, b = str(tmp_path / "a"), str(tmp_path / "b")
        assert (touch_and_wait(a, b, 1) & touch_and_wait(b, a, 2)) >> pool == (1, 2)
    finally:
        gc.enable()


def test_what_runs_at_the_end_is_cancelled(tmp_path: Path) -> None:
    with Compute(provider=sky.Local(device="cpu")) as pool:
        running: PoolFuture[int] = wait_for(str(tmp_path / "never"), 1) > pool
        waiting = double(1) > pool
        process = pool.launched.process_ids()[0]  # type: ignore[attr-defined]
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(60)
    assert not psutil.pid_exists(process)
    with pytest.raises(ConfigurationError, match="is not running"):
        double(1) >> pool
    assert "not running" in repr(pool)


@pytest.mark.slow
def test_100_mib_for_four_nodes_are_pickled_once() -> None:
    pickled = []

    class Counts:
        def __reduce__(self) -> tuple[Any, ...]:
            pickled.append(os.getpid())
            return (bytes, (b"x" * (100 << 20),))

    with Compute(provider=sky.Local(device="cpu"), nodes=4) as four:
        assert four.broadcast(len, Counts()) == [100 << 20] * 4
    assert pickled == [os.getpid()]
