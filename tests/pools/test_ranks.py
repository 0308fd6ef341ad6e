"""The group of ranks, over ranks that are threads of this process: who is asked what, who is ended, who is replaced."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from skyproxy.errors import PluginError, RankErrors, SessionLostError, WorkerStartError
from skyproxy.pools.ranks import RankGroup
from skyproxy.runtime import CallContext, InstanceInfo, Peer, entered_call, instance_info
from skyproxy.runtime.lifecycle import LIFECYCLE, abort_calls
from skyproxy.runtime.plugin import Plugin
from skyproxy.settings import Settings

FAST = Settings(rank_start_timeout_seconds=20.0, rank_stop_timeout_seconds=0.5, rank_close_timeout_seconds=5.0)
_ids = itertools.count()


class ThreadCall:
    """A call that runs on a thread, and that can be left but not interrupted."""

    def __init__(self, future: Future[Any]) -> None:
        self.id = f"call-{next(_ids)}"
        self._future: Future[Any] = Future()
        future.add_done_callback(self._copy)

    def _copy(self, future: Future[Any]) -> None:
        if self._future.done():
            return
        error = future.exception()
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(future.result())

    def cancel(self) -> bool:
        if not self._future.done():
            self._future.set_exception(RuntimeError("cancelled"))
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


class ThreadRank:
    """A rank in this process."""

    def __init__(self) -> None:
        self.alive = True
        self.asked: list[str] = []
        self._threads = ThreadPoolExecutor(8)

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> ThreadCall:
        self.asked.append(function.__name__)
        made: list[ThreadCall] = []
        ready = threading.Event()

        def run() -> Any:
            ready.wait(30)
            with entered_call(CallContext(made[0].id, values=options["context"])):
                return function(*args)

        made.append(ThreadCall(self._threads.submit(run)))
        ready.set()
        return made[0]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    LIFECYCLE.close()


def group(count: int, **options: Any) -> RankGroup:
    peers = tuple(Peer(rank, rank, f"10.0.0.{rank}") for rank in range(count))
    infos = [
        InstanceInfo(node=rank, total_nodes=count, rank=rank, world_size=count, peers=peers) for rank in range(count)
    ]
    return RankGroup("pool", [ThreadRank() for _ in range(count)], infos, settings=FAST, **options)


def on_all(made: RankGroup, function: Callable[[], Any]) -> Future[list[Any]]:
    made.ensure()
    task = made.task(function)
    calls = {rank: node.submit(task, context=made.context(rank)) for rank, node in enumerate(made.nodes)}
    return made.gather(calls)


def test_results_come_in_the_order_of_ranks() -> None:
    made = group(3)
    assert on_all(made, lambda: instance_info().rank).result(30) == [0, 1, 2]


def test_all_ranks_share_a_port_and_a_job_and_each_generation_has_its_own() -> None:
    made = group(2)
    first = on_all(made, lambda: (instance_info().head_port, instance_info().job)).result(30)
    assert first[0] == first[1]
    with pytest.raises(RankErrors):
        on_all(made, lambda: 1 / 0).result(30)
    second = on_all(made, lambda: (instance_info().head_port, instance_info().job)).result(30)
    assert second[0] == second[1]
    assert {first[0][1], second[0][1]} == {"pool/1", "pool/2"}
    assert first[0][0] != second[0][0]


def test_forming_costs_nothing_once_formed() -> None:
    made = group(2)
    made.ensure()
    asked = [list(node.asked) for node in made.nodes]
    made.ensure()
    assert [node.asked for node in made.nodes] == asked == [["free_ports"], []]


def test_the_first_failure_ends_the_others_and_every_rank_is_reported() -> None:
    made = group(3)
    release = threading.Event()

    def work() -> None:
        if instance_info().rank == 1:
            raise ValueError("no data")
        release.wait(30)

    with pytest.raises(RankErrors) as caught:
        on_all(made, work).result(30)
    release.set()
    error = caught.value
    assert error.first == 1
    assert sorted(error.by_rank) == [0, 1, 2]
    assert isinstance(error.by_rank[1], ValueError)
    assert "On rank 1 of 3, node 1 (10.0.0.1)." in error.by_rank[1].__notes__
    assert "Rank 2 was stopped because rank 1 had failed." in error.by_rank[2].__notes__
    assert "failed on rank 1: ValueError: no data; rank 0, 2 stopped because of it" in str(error)


def test_several_failures_are_told_from_those_that_were_stopped() -> None:
    made = group(3)

    def work() -> None:
        if instance_info().rank != 2:
            raise ValueError(f"rank {instance_info().rank}")

    with pytest.raises(RankErrors) as caught:
        on_all(made, work).result(30)
    assert sorted(caught.value.by_rank) == [0, 1]
    parts: list[Any] = []
    try:
        raise caught.value
    except* ValueError as part:
        parts.append(part)
    assert sorted(parts[0].by_rank) == [0, 1]


def test_a_rank_that_died_is_the_cause_though_others_noticed_first() -> None:
    made = group(2)

    def work() -> None:
        if instance_info().rank == 1:
            made.nodes[1].alive = False
            raise SessionLostError("the worker is gone")
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankErrors) as caught:
        on_all(made, work).result(30)
    assert caught.value.first == 1


def test_a_dead_rank_is_started_again_before_the_next_task() -> None:
    replaced: list[int] = []

    def start_again(rank: int) -> ThreadRank:
        replaced.append(rank)
        return ThreadRank()

    made = group(3, replace_rank=start_again)
    made.ensure()
    made.nodes[2].alive = False
    assert on_all(made, lambda: instance_info().rank).result(30) == [0, 1, 2]
    assert replaced == [2]


def test_a_dead_rank_that_nobody_can_start_is_an_error() -> None:
    made = group(2)
    made.nodes[1].alive = False
    with pytest.raises(SessionLostError, match="rank 1 of pool pool"):
        made.ensure()


def test_ranks_that_came_up_again_are_used_though_another_did_not() -> None:
    tried: list[int] = []

    def start_again(rank: int) -> ThreadRank:
        tried.append(rank)
        if rank == 2 and tried.count(2) == 1:
            raise WorkerStartError("no room")
        return ThreadRank()

    made = group(3, replace_rank=start_again)
    made.nodes[1].alive = made.nodes[2].alive = False
    with pytest.raises(WorkerStartError):
        made.ensure()
    assert on_all(made, lambda: instance_info().rank).result(30) == [0, 1, 2]
    assert sorted(tried) == [1, 2, 2]


class Holding(Plugin):
    """Holds something in the rank, and does not let go of a task when told to."""

    def around_app(self, info: InstanceInfo) -> Any:
        return contextlib.nullcontext()


class RestartsRanks(Holding):
    restarts_ranks = True


STUCK = threading.Event()


def get_stuck() -> None:
    if instance_info().rank == 0:
        raise ValueError("first")
    STUCK.wait(60)


@pytest.mark.parametrize(("plugins", "expected"), [((), []), ((Holding(),), [1]), ((RestartsRanks(),), [0, 1])])
def test_a_rank_that_cannot_be_stopped_gets_a_new_process_where_plugins_hold_something(
    plugins: tuple[Plugin, ...], expected: list[int]
) -> None:
    replaced: list[int] = []

    def start_again(rank: int) -> ThreadRank:
        replaced.append(rank)
        return ThreadRank()

    STUCK.clear()
    made = group(2, plugins=plugins, replace_rank=start_again)
    try:
        with pytest.raises(RankErrors) as caught:
            on_all(made, get_stuck).result(30)
        assert "did not stop within 0.5 s" in "".join(caught.value.by_rank[1].__notes__)
        made.ensure()
        assert sorted(replaced) == expected
    finally:
        STUCK.set()


class DeafRank(ThreadRank):
    """Its process runs code that lets nothing else run: it answers nobody."""

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> ThreadCall:
        return ThreadCall(Future()) if function is abort_calls else super().submit(function, *args, **options)


def test_a_failure_is_reported_within_five_seconds_though_a_rank_answers_nothing() -> None:
    STUCK.clear()
    made = group(2)
    made._settings = replace(FAST, rank_stop_timeout_seconds=Settings().rank_stop_timeout_seconds)
    made.nodes[1] = DeafRank()
    failed: list[float] = []

    def work() -> None:
        if instance_info().rank == 0:
            failed.append(time.monotonic())
        get_stuck()

    try:
        with pytest.raises(RankErrors) as caught:
            on_all(made, work).result(30)
        assert time.monotonic() - failed[0] < 5
        assert caught.value.first == 0
        assert "did not stop within 2 s" in "".join(caught.value.by_rank[1].__notes__)
    finally:
        STUCK.set()


class Failing(Plugin):
    def around_app(self, info: InstanceInfo) -> Any:
        raise OSError("[Errno 98] Address already in use")


def test_forming_tries_other_ports_and_then_says_why_not() -> None:
    made = group(2, plugins=[Failing()])
    with pytest.raises(RankErrors) as caught:
        made.ensure()
    assert made.nodes[0].asked.count("free_ports") == 3
    assert isinstance(caught.value.by_rank[caught.value.first], PluginError)
    assert "plugin 'Failing', around_app" in str(caught.value)


NEVER = threading.Event()


class Hanging(Plugin):
    def around_app(self, info: InstanceInfo) -> Any:
        NEVER.wait(60)
        return contextlib.nullcontext()


def test_ranks_that_never_come_are_named_with_their_addresses() -> None:
    NEVER.clear()
    made = group(2, plugins=[Hanging()])
    made._settings = replace(FAST, rank_start_timeout_seconds=0.5)
    try:
        with pytest.raises(RankErrors, match=r"the plugins' hooks did not end on rank 0 \(node 0, 10\.0\.0\.0\), 1"):
            made.ensure()
    finally:
        NEVER.set()


def test_a_cancelled_gathering_ends_its_calls() -> None:
    made = group(2)
    release = threading.Event()
    future = on_all(made, lambda: release.wait(30))
    assert future.cancel()
    release.set()
    # The next generation forms, so nothing of the one before holds it up.
    assert on_all(made, lambda: instance_info().rank).result(30) == [0, 1]


ABORTED: list[str] = []


class NotesAborts(Holding):
    def abort(self, info: InstanceInfo) -> None:
        ABORTED.append(info.job)


def test_what_ends_a_cancelled_task_does_not_meet_the_next_generation() -> None:
    ABORTED.clear()
    made = group(2, plugins=[NotesAborts()])
    release = threading.Event()
    future = on_all(made, lambda: release.wait(30))
    assert future.cancel()
    release.set()
    assert on_all(made, lambda: instance_info().job).result(30) == ["pool/2"] * 2
    assert set(ABORTED) == {"pool/1"}


def test_closing_leaves_the_hooks_of_every_rank_that_is_there() -> None:
    made = group(2, plugins=[Holding()])
    made.ensure()
    made.nodes[1].alive = False
    made.close()
    made.close()
    assert [node.asked.count("close_hooks") for node in made.nodes] == [1, 0]


def test_a_rank_that_had_finished_before_it_died_is_not_to_blame() -> None:
    made = group(2)

    def work() -> None:
        if instance_info().rank == 0:
            raise ValueError("on rank 0")

    made.ensure()
    task = made.task(work)
    calls = {rank: node.submit(task, context=made.context(rank)) for rank, node in enumerate(made.nodes)}
    calls[1].result(30)
    made.nodes[1].alive = False
    with pytest.raises(RankErrors) as caught:
        made.gather(calls).result(30)
    assert (caught.value.first, list(caught.value.by_rank)) == (0, [0])
