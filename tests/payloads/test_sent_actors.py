"""Handles of actors that were sent to tasks, to other actors and back, on a pool of two real worker processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy as sky
from skyproxy.errors import ActorDiedError, ConfigurationError
from skyproxy.payloads.sent_actors import SENT_HANDLES, SentActor
from tests.integration.programs import wait_for

pytestmark = pytest.mark.timeout(300)
PATIENCE_SECONDS = 100


class OwnError(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(what)
        self.number = number


class Store(sky.Actor):
    def __init__(self, other: Any = None) -> None:
        self.items: list[Any] = []
        self.other = other

    def put(self, item: Any) -> int:
        self.items.append(item)
        return len(self.items)

    def all(self) -> list[Any]:
        return self.items

    def put_elsewhere(self, item: Any) -> int:
        return int(self.other.put(item))

    async def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def take(self, other: Any) -> None:
        self.other = other

    def ask_other(self, method: str) -> Any:
        return getattr(self.other, method)()

    def go_round(self, times: int) -> int:
        return 1 + self.other.go_round(times - 1) if times else 0

    async def go_round_later(self, times: int) -> int:
        return 1 + await self.other.go_round_later(times - 1) if times else 0

    def rank(self) -> int:
        return sky.instance_info().rank

    def fail(self) -> None:
        raise OwnError("in a method", 7)

    def unreadable(self) -> object:
        return threading.Lock()

    def each(self) -> Iterator[object]:
        yield from self.items

    def wait_for(self, path: str, begun: str) -> None:
        Path(begun).touch()
        while not os.path.exists(path):
            time.sleep(0.01)

    def die(self) -> None:
        os._exit(5)

    def __call__(self, x: int) -> int:
        return x + 1


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    with sky.Compute(name="sent", provider=sky.Local(device="cpu"), nodes=2) as pool:
        yield pool


@pytest.fixture(params=[0, 1], ids=["the same process", "another one"])
def rank(request: pytest.FixtureRequest) -> int:
    """Where the caller runs; the actor is on rank 0."""
    return int(request.param)


@pytest.fixture
def store(pool: sky.Compute) -> Store:
    return Store.on(pool, rank=0)()


# --- tasks ------------------------------------------------------------------------------------------------------------


@sky.function
def put_all(store: Any, count: int) -> list[int]:
    return [store.put((sky.instance_info().rank, number)) for number in range(count)]


def test_a_task_calls_the_actor_in_order(pool: sky.Compute, store: Store, rank: int) -> None:
    assert put_all(store, 5).on(rank) >> pool == [1, 2, 3, 4, 5]
    assert store.all() == [(rank, number) for number in range(5)]


def test_tasks_and_the_program_call_it_at_the_same_time_each_in_its_order(pool: sky.Compute, store: Store) -> None:
    futures = [put_all(store, 20).on(rank) > pool for rank in (0, 1)]
    own = [store.put((2, number)) for number in range(20)]
    counts = [count for future in futures for count in future.result(PATIENCE_SECONDS)]
    assert sorted(counts + own) == list(range(1, 61))
    for rank in range(3):
        assert [number for of, number in store.all() if of == rank] == list(range(20))


@sky.function
async def twice_at_once(store: Any) -> list[float]:
    return [float(one.sum()) for one in await asyncio.gather(*(store.twice(torch.ones(2) * n) for n in range(4)))]


def test_coroutines_and_tensors(pool: sky.Compute, store: Store, rank: int) -> None:
    assert twice_at_once(store).on(rank) >> pool == [0.0, 4.0, 8.0, 12.0]


@sky.function
def from_threads(store: Any) -> None:
    threads = [threading.Thread(target=store.put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_of_a_task_call_it(pool: sky.Compute, store: Store) -> None:
    from_threads(store).on(1) >> pool
    assert sorted(store.all()) == [0, 1, 2, 3]


@sky.function
def call_it(method: Any, *args: Any) -> Any:
    return method(*args)


@sky.function
def give_back(handle: Any) -> Any:
    return [handle, handle.put]


def test_methods_travel_and_handles_come_back_as_what_they_were(pool: sky.Compute, store: Store, rank: int) -> None:
    assert call_it(store.put, "x").on(rank) >> pool == 1
    assert call_it(store, 3).on(rank) >> pool == 4
    handle, method = give_back(store).on(rank) >> pool
    assert handle is store
    assert method("y") == 2


def test_a_group_travels(pool: sky.Compute) -> None:
    group = Store.on_all(pool)()

    @sky.function
    def ask_each(group: Any) -> list[int]:
        return [one.rank() for one in group]

    @sky.function
    def broadcast(group: Any) -> None:
        group.broadcast(Store.rank)

    assert ask_each(group).on(1) >> pool == [0, 1]
    with pytest.raises(ConfigurationError, match="for the program that made the group"):
        broadcast(group) >> pool


def test_exceptions_keep_their_class(pool: sky.Compute, store: Store, rank: int) -> None:
    with pytest.raises(OwnError) as caught:
        call_it(store.fail).on(rank) >> pool
    assert caught.value.number == 7
    with pytest.raises(TypeError, match="cannot be sent to whoever"):
        call_it(store.unreadable).on(rank) >> pool


def test_what_cannot_be_is_said(pool: sky.Compute, store: Store) -> None:
    @sky.function
    def attribute(handle: Any) -> Any:
        return handle.items

    @sky.function
    def change(handle: Any) -> None:
        handle.items = []

    @sky.function(isolate=True)
    def apart(handle: Any) -> None:
        handle.all()

    with pytest.raises(AttributeError, match="attributes live on the worker"):
        attribute(store) >> pool
    with pytest.raises(AttributeError, match="cannot be set"):
        change(store) >> pool
    with pytest.raises(ConfigurationError, match="returns a list"):
        call_it(store.each) >> pool
    with pytest.raises(TypeError, match="put"):
        call_it(store.put) >> pool
    with pytest.raises(ConfigurationError, match=r"not with isolate=True"):
        apart(store) >> pool


# --- actors -----------------------------------------------------------------------------------------------------------


def test_an_actor_has_another_one_as_an_attribute(pool: sky.Compute, store: Store, rank: int) -> None:
    other = Store.on(pool, rank=rank)(store)
    assert [other.put_elsewhere(item) for item in "abc"] == [1, 2, 3]
    assert store.all() == ["a", "b", "c"]
    assert other.ask_other("rank") == 0


def test_an_actor_that_only_others_hold_lives_on(pool: sky.Compute) -> None:
    outer = Store.on(pool, rank=1)(Store.on(pool, rank=0)())
    assert [outer.put_elsewhere(number) for number in range(3)] == [1, 2, 3]


def test_actors_that_would_wait_for_each_other_forever_are_told(pool: sky.Compute, store: Store) -> None:
    other = Store.on(pool, rank=1)(store)
    store.take(other)
    assert store.go_round(1) == 1
    for go_round in (store.go_round, lambda times: store.go_round_later(times).result(PATIENCE_SECONDS)):  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="would wait forever"):
            go_round(2)
    store.take(store)
    with pytest.raises(ConfigurationError, match="would wait forever"):
        store.ask_other("rank")
    store.take(None)
    assert other.go_round(1) == 1  # nobody waits any more


@sky.actor(concurrency=2)
class Busy(Store):
    """It runs two calls at a time, so that one may ask another one of it."""


def test_one_that_runs_more_calls_at_a_time_may_ask_itself(pool: sky.Compute) -> None:
    busy = Busy.on(pool)()
    busy.take(busy)
    assert busy.go_round(1) == 1


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_cancelled_task_waits_no_more_and_its_call_of_the_actor_is_cancelled(
    pool: sky.Compute, store: Store, rank: int, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    future = call_it(store.wait_for, str(go), str(begun)).on(rank) > pool
    wait_for(begun.exists, "the actor runs")
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    assert store.put(1) == 1  # its turn, although nobody has touched the file
    assert call_it(store.put, 2).on(rank) >> pool == 2  # and the task's process is free
    with pytest.raises(TimeoutError):
        call_it(store.wait_for, str(go), str(begun)).with_timeout(0.5).on(rank) >> pool
    assert store.put(3) == 3


def test_the_death_of_an_actor_is_told() -> None:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2) as pool:
        store = Store.on(pool, rank=0)()
        with pytest.raises(ActorDiedError, match=r"died while Store.die ran.*code 5"):
            call_it(store.die).on(1) >> pool
        with pytest.raises(ActorDiedError, match="is dead"):
            call_it(store.all).on(1) >> pool


def test_an_actor_of_a_pool_that_was_closed_has_ended(pool: sky.Compute) -> None:
    with sky.Compute(provider=sky.Local(device="cpu")) as other:
        store = Store.on(other)()
        holder = Store.on(pool)(store)
        assert holder.put_elsewhere(1) == 1  # also between pools
        identity = store.__dict__["_sky_calls"].place.identity
        assert SENT_HANDLES.find(identity) is store
    assert SENT_HANDLES.find(identity) is None
    with pytest.raises(ActorDiedError, match="has ended"):
        holder.put_elsewhere(2)
    with pytest.raises(ConfigurationError, match="has ended"):
        pickle.dumps(store)


def test_outside_of_a_call_nobody_can_be_asked() -> None:
    handle = SentActor(Store, "1f3a")
    with pytest.raises(ConfigurationError, match="from functions of a pool"):
        handle.all()


# --- trust ------------------------------------------------------------------------------------------------------------


@sky.function
def ask_for(handle: Any, actor: str, method: str) -> None:
    from skyproxy.payloads.sent_actors import _open, _pickle
    from skyproxy.runtime import current_call

    call = current_call()
    assert call is not None
    assert call.ask is not None
    _open(call.ask({"actor": actor, "method": method, "asker": ""}, _pickle(((), {})))())


def test_a_worker_reaches_methods_of_actors_that_it_was_sent_and_nothing_else(pool: sky.Compute, store: Store) -> None:
    kept = Store.on(pool, rank=0)()
    unsent = kept.__dict__["_sky_calls"].place.identity
    sent = store.__dict__["_sky_calls"].place.identity
    pickle.dumps(store)
    with pytest.raises(ActorDiedError, match="has ended"):
        ask_for(None, unsent, "all").on(1) >> pool
    for name in ("_sky_calls", "__reduce__", "__init__", "items"):
        with pytest.raises(AttributeError):
            ask_for(None, sent, name).on(1) >> pool
    assert store.all() == []


def test_no_handle_shows_its_secret(pool: sky.Compute, store: Store) -> None:
    @sky.function
    def show(handle: Any) -> str:
        return f"{handle!r} {handle.put!r} {handle}"

    identity = store.__dict__["_sky_calls"].place.identity
    text = (show(store).on(1) >> pool) + repr(store) + repr(store.put)
    assert "actor Store" in text
    assert identity not in text
    assert len(bytes.fromhex(identity)) == 16
