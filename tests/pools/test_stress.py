"""Many tasks at once over four nodes, some of which fail: every caller gets its own result."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyproxy as sky
from skyproxy.errors import RankErrors

pytestmark = pytest.mark.timeout(300)

NODES = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=NODES) as opened:
        yield opened


class Unlucky(Exception):
    """A task's own failure."""


@sky.compute
def work(number: int, fails: bool) -> tuple[int, bytes]:
    import random as remote_random
    import time

    time.sleep(remote_random.random() / 100)  # so that tasks overtake one another
    if fails:
        raise Unlucky(number)
    return number, bytes([number % 256]) * (number * 37)


@sky.compute
def everywhere(number: int) -> tuple[int, int]:
    return number, sky.instance_info().rank


@sky.compute
def fails_somewhere(number: int) -> int:
    if sky.instance_info().rank == number % NODES:
        raise Unlucky(number)
    return number


def test_two_hundred_tasks_with_failures_each_get_their_own_result(pool: Any) -> None:
    chosen = random.Random(7)
    fails = [chosen.random() < 0.2 for _ in range(200)]
    futures = [work(number, fails[number]) > pool for number in range(200)]
    for number, future in enumerate(futures):
        if fails[number]:
            with pytest.raises(Unlucky) as caught:
                future.result(200)
            assert caught.value.args == (number,)
        else:
            assert future.result(200) == (number, bytes([number % 256]) * (number * 37))
    assert sum(fails) > 20


@sky.compute
def dies_once(number: int, folder: str) -> int:
    import os
    import signal
    from pathlib import Path

    died = Path(folder, str(number))
    if number % 40 == 7 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_two_hundred_tasks_outlive_the_processes_that_they_kill(pool: Any, tmp_path: Path) -> None:
    before = pool.launched.process_ids()
    futures = [dies_once(number, str(tmp_path)).with_retry(4) > pool for number in range(200)]
    assert [future.result(200) for future in futures] == [number * number for number in range(200)]
    assert len(list(tmp_path.iterdir())) == 5
    after = pool.broadcast(os.getpid)
    assert after == pool.launched.process_ids()
    assert 1 <= len(set(after) - set(before)) <= NODES  # some of them more than once
    assert not any(psutil.pid_exists(number) for number in set(before) - set(after))


def test_broadcasts_beside_single_tasks_never_cross(pool: Any) -> None:
    stop = threading.Event()

    def singles(start: int) -> int:
        done = 0
        while not stop.is_set():
            number = start + done
            assert work(number % 250, False).run(pool)[0] == number % 250
            done += 1
        return done

    def broadcasts(start: int) -> None:
        for number in range(start, start + 15):
            assert everywhere(number) @ pool == [(number, rank) for rank in range(NODES)]

    with ThreadPoolExecutor(6) as threads:
        beside = [threads.submit(singles, 1000 * index) for index in range(3)]
        try:
            for one in [threads.submit(broadcasts, 1000 * index) for index in range(3)]:
                one.result(200)
        finally:
            stop.set()
        assert all(one.result(200) > 0 for one in beside)


def test_a_broadcast_that_fails_harms_nobody_else(pool: Any) -> None:
    futures = [work(number, False) > pool for number in range(40)]
    for number in range(6):
        with pytest.raises(RankErrors) as caught:
            fails_somewhere(number) @ pool
        assert caught.value.by_rank[number % NODES].args == (number,)
    assert [future.result(200)[0] for future in futures] == list(range(40))
