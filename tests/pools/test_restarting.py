"""Calls on all ranks that begin again, on all of them, where one has failed."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, RankErrors, SessionLostError, WorkerStartError
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.restarting import Restarting
from skyproxy.settings import SETTINGS
from tests.integration.programs import wait_for

pytestmark = pytest.mark.timeout(180)
PATIENCE_SECONDS = 60
Made = tuple[int, int, str]


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2) as pool:
        yield pool


@sky.compute
def train(dies: bool) -> Made:
    """Counts to three, and saves each step; rank 1 fails at the second one, the first time."""
    rank, folder = sky.instance_info().rank, sky.checkpoint_dir()
    place = folder / f"rank-{rank}"
    step = int(place.read_text()) if place.exists() else 0
    while step < 3:
        step += 1
        place.write_text(str(step))
        if (rank, step, sky.restart_count()) == (1, 2, 0):
            if dies:
                os._exit(3)
            raise OSError("the disk is gone")
    return step, sky.restart_count(), str(folder)


@pytest.mark.parametrize("dies", [True, False])
def test_all_ranks_begin_again_where_one_fails_and_find_their_checkpoints(pool: sky.Compute, dies: bool) -> None:
    results = train(dies).with_restarts(2) @ pool
    assert [result[:2] for result in results] == [(3, 1), (3, 1)]
    (folder,) = {result[2] for result in results}
    wait_for(lambda: not Path(folder).exists(), "the folder for checkpoints is removed")


@sky.compute(max_restarts=1)
def fail(told: str) -> None:
    with Path(told).open("a") as file:
        file.write(f"{sky.instance_info().rank}{sky.restart_count()} ")
    raise LookupError("never")


def test_they_begin_again_so_often_and_no_more(pool: sky.Compute, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankErrors, match="never") as caught:
        fail(str(told)) @ pool
    assert "It was begun 2 times." in caught.value.__notes__
    tried = told.read_text().split()  # a rank that another one's failure ended sooner may not have begun
    assert {attempt[1] for attempt in tried} == {"0", "1"}
    assert len(tried) == len(set(tried)) <= 4
    assert pool.broadcast(max, 1, 2) == [2, 2]


def test_what_makes_no_sense_is_refused(pool: sky.Compute) -> None:
    with pytest.raises(ConfigurationError, match="max_restarts=-1: use 0 or more"):
        train(True).with_restarts(-1)
    with pytest.raises(ConfigurationError, match="with_retry"):
        train(True).with_restarts(1) >> pool
    with pytest.raises(ConfigurationError, match="tensors that stay on the workers"):
        train(True).remote().with_restarts(1) @ pool
    with pytest.raises(ConfigurationError, match="no folder for checkpoints"):
        sky.checkpoint_dir()


# --- with stand-ins for attempts ---


class Attempts:
    """What `begin` gives, in turn; and what it was told."""

    def __init__(self, *outcomes: list[object] | Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.told: list[Mapping[str, object]] = []
        self.last: Future[list[object]] = Future()
        self.begun = threading.Event()
        self.over: list[str] = []
        self.is_over = threading.Event()

    def begin(self, beside: Mapping[str, object]) -> Future[list[object]]:
        self.told.append(beside)
        outcome = self.outcomes.pop(0)
        self.last = Future()
        if isinstance(outcome, Exception):
            self.last.set_exception(outcome)
        elif outcome is not None:
            self.last.set_result(outcome)
        self.begun.set()
        return self.last

    def end(self, checkpoints: str) -> None:
        self.over.append(checkpoints)
        self.is_over.set()

    def run(self, max_restarts: int, pause_seconds: float = 0.0) -> PoolFuture[list[object]]:
        future: PoolFuture[list[object]] = PoolFuture("f")
        settings = dataclasses.replace(SETTINGS, job_restart_seconds=pause_seconds)
        Restarting(self.begin, future, max_restarts, self.end, settings).start()
        return future


def rank_errors(error: Exception) -> RankErrors:
    return RankErrors.of("f failed on rank 0", {0: error}, 0)


def test_each_attempt_is_told_its_number_and_the_same_folder() -> None:
    attempts = Attempts(rank_errors(OSError()), SessionLostError("gone"), [1, 2])
    assert attempts.run(5).result(PATIENCE_SECONDS) == [1, 2]
    assert attempts.is_over.wait(PATIENCE_SECONDS)
    assert [beside["restart_count"] for beside in attempts.told] == [0, 1, 2]
    assert {beside["checkpoint_dir"] for beside in attempts.told} == set(attempts.over)


@pytest.mark.parametrize(
    "error", [rank_errors(TimeoutError("late")), WorkerStartError("no more machines"), ConfigurationError("closed")]
)
def test_no_attempt_follows_a_timeout_or_where_no_process_can_be_had(error: Exception) -> None:
    attempts = Attempts(error, [1])
    with pytest.raises(type(error)):
        attempts.run(5).result(PATIENCE_SECONDS)
    assert attempts.is_over.wait(PATIENCE_SECONDS)
    assert len(attempts.told) == 1


def while_it_pauses(attempts: Attempts) -> PoolFuture[list[object]]:
    attempts.outcomes.append(rank_errors(OSError()))
    return attempts.run(5, pause_seconds=10_000)


def while_it_runs(attempts: Attempts) -> PoolFuture[list[object]]:
    attempts.outcomes.append(None)
    return attempts.run(5)


@pytest.mark.parametrize("begin", [while_it_pauses, while_it_runs])
def test_cancelling_ends_it_at_once(begin: Callable[[Attempts], PoolFuture[list[object]]]) -> None:
    attempts = Attempts()
    future = begin(attempts)
    assert attempts.begun.wait(PATIENCE_SECONDS)
    assert future.cancel()
    assert attempts.is_over.wait(PATIENCE_SECONDS)
    with pytest.raises(CancelledError):
        future.result(0)
    assert attempts.last.done()
    assert len(attempts.told) == 1
