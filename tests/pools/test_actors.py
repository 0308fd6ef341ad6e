"""Actors on a pool of two real worker processes: their state, their calls, and their end."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy as sky
from skyproxy.errors import ActorDiedError, ConfigurationError, SessionLostError
from skyproxy.pools import Compute, PoolFuture
from skyproxy.runtime.actors import ACTORS, Actors
from tests.integration.programs import wait_for

pytestmark = pytest.mark.timeout(300)
PATIENCE_SECONDS = 100


class MadeWrongError(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(what)
        self.number = number


class Counter(sky.Actor):
    def __init__(self, start: int = 0, *, broken: bool = False) -> None:
        if broken:
            raise MadeWrongError("no counter", 3)
        self.count = start
        self.seen: list[Any] = []

    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    add_five = functools.partialmethod(add, 5)

    def note(self, item: Any) -> list[Any]:
        self.seen.append(item)
        return self.seen

    async def later(self) -> int:
        return self.count

    def upto(self, end: int) -> Iterator[int]:
        for number in range(end):
            self.count = number
            yield number

    async def upto_later(self, end: int) -> AsyncIterator[int]:
        for number in range(end):
            yield number

    @sky.compute
    def decorated(self, x: int) -> int:
        return self.count + x

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    def __call__(self, x: int) -> int:
        return self.count * x

    def speak(self) -> None:
        print(f"count {self.count}")

    def fail(self) -> None:
        raise MadeWrongError("in a method", 7)

    def where(self) -> tuple[int, int]:
        return sky.instance_info().rank, os.getpid()

    def keep(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def total(self) -> torch.Tensor:
        return self.tensor.sum()

    def wait_for(self, path: str, begun: str = "") -> int:
        if begun:
            Path(begun).touch()
        while not os.path.exists(path):
            time.sleep(0.01)
        return self.add()

    def die_once(self, path: str, marker: str, code: int = 7) -> str:
        if os.path.exists(marker):
            return "lived"
        while not os.path.exists(path):
            time.sleep(0.01)
        Path(marker).touch()
        os._exit(code)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_SECONDS)


@sky.actor(max_restarts=1)
class Restarted(Counter):
    pass


@sky.actor(max_restarts=1, retry=True)
class Retried(Counter):
    pass


@sky.actor(remote=True, timeout=PATIENCE_SECONDS)
class Plain:
    """Without the base class."""

    def ones(self) -> torch.Tensor:
        return torch.ones(2)


@pytest.fixture(scope="module")
def pool() -> Iterator[Compute]:
    with Compute(name="actors", provider=sky.Local(device="cpu"), nodes=2) as pool:
        yield pool


@pytest.fixture
def lonely() -> Iterator[Compute]:
    """A pool of one process, which may die."""
    with Compute(provider=sky.Local(device="cpu")) as pool:
        yield pool


def is_kept(identity: str) -> bool:
    return any(name == identity for _, name in ACTORS._actors)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_state_stays_with_the_actor(pool: Compute) -> None:
    one, two = Counter.on(pool)(10), Counter.on(pool)()
    assert [one.add(), one.add(5), two.add(), one.add()] == [11, 16, 1, 17]
    assert Counter(3).add() == 4  # an ordinary object, here


def test_calls_of_one_caller_keep_their_order(pool: Compute) -> None:
    counter = Counter.on(pool)()
    futures = [pool.submit(counter.note, number) for number in range(50)]
    assert futures[-1].result(PATIENCE_SECONDS) == list(range(50))


def test_several_threads_lose_no_call_and_each_keeps_its_order(pool: Compute) -> None:
    counter = Counter.on(pool)()

    def call(name: str) -> None:
        for number in range(10):
            counter.note((name, number))

    threads = [threading.Thread(target=call, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    seen = counter.note(None)[:-1]
    assert len(seen) == 30
    for name in "abc":
        assert [number for who, number in seen if who == name] == list(range(10))


def test_methods_go_where_functions_go(pool: Compute) -> None:
    counter = Counter.on(pool)()
    assert pool.run(counter.add, 2) == 2
    assert list(pool.map(counter.add, [1, 1, 1])) == [3, 4, 5]
    add = sky.function(counter.add)
    assert add() >> pool == 6
    assert (add() & add(10)) >> pool == (7, 17)
    assert (add() > pool).result(PATIENCE_SECONDS) == 18
    assert add().on(counter.where()[0]) >> pool == 19
    with pytest.raises(TypeError, match="missing a required argument"):
        pool.submit(counter.note)


def test_methods_of_every_kind(pool: Compute) -> None:
    counter = Counter.on(pool)(4)
    later = counter.later()
    assert isinstance(later, PoolFuture)
    assert later.result(PATIENCE_SECONDS) == 4
    assert (counter.twice(3), counter(5), counter.add_five()) == (6, 20, 9)
    assert counter.decorated(1) == 10  # type: ignore[comparison-overlap]  # the decorator says: a call
    assert list(counter.upto(3)) == [0, 1, 2]
    assert list(counter.upto_later(3)) == [0, 1, 2]  # type: ignore[call-overload]
    assert counter.add() == 3  # what the generator has left
    assert list(Counter.on(pool)().upto(2)) == [0, 1]  # nobody else holds this one


def test_futures_of_actors_can_be_awaited(pool: Compute) -> None:
    import asyncio

    async def main() -> tuple[int, int]:
        counter = await Counter.on(pool).submit(1)
        return await counter.later(), await pool.submit(counter.add)

    assert asyncio.run(main()) == (1, 2)


def test_exceptions_keep_their_class(pool: Compute) -> None:
    counter = Counter.on(pool)()
    with pytest.raises(MadeWrongError, match="in a method") as raised:
        counter.fail()
    assert raised.value.number == 7
    assert "def fail" in str(raised.value.__cause__) or "in fail" in str(raised.value.__cause__)
    assert counter.add() == 1
    with pytest.raises(MadeWrongError, match="no counter"):
        Counter.on(pool)(broken=True)


def test_output_appears_here_with_its_rank(pool: Compute, capsys: pytest.CaptureFixture[str]) -> None:
    Counter.on(pool, rank=1)(5).speak()
    assert "[1] count 5\n" in capsys.readouterr().out


def test_one_on_each_rank(pool: Compute) -> None:
    group = Counter.on_all(pool)(2)
    assert len(group) == 2
    assert [rank for rank, _ in group.broadcast(Counter.where)] == [0, 1]
    assert group.broadcast(Counter.add, 3) == [5, 5]
    assert group[1].add() == 6
    assert group.submit(Counter.add).result(PATIENCE_SECONDS) == [6, 7]
    assert group.broadcast(Counter.later) == [6, 7]
    with pytest.raises(TypeError, match="not a method of Counter"):
        group.broadcast(len)  # type: ignore[arg-type]
    with pytest.raises(MadeWrongError):
        group.broadcast(Counter.fail)


def test_actors_spread_over_the_ranks(pool: Compute) -> None:
    actors = [Counter.on(pool)() for _ in range(2)]
    busy = [0, 0]
    for calls in list(pool._actors):
        busy[calls.place.rank] += calls.is_open
    assert min(busy) >= 1
    assert Counter.on(pool, rank="head")().where()[0] == 0
    assert Counter.on(pool.nodes[1])().where()[0] == 1
    del actors


def test_tasks_run_beside_an_actor(pool: Compute, tmp_path: Path) -> None:
    counter = Counter.on(pool, rank=0)()
    waiting = pool.submit(counter.wait_for, str(tmp_path / "go"), str(tmp_path / "begun"))
    wait_for((tmp_path / "begun").exists, "it begins")
    assert sky.function(abs)(-1).on(0) >> pool == 1
    (tmp_path / "go").touch()
    assert waiting.result(PATIENCE_SECONDS) == 1


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_remote_tensors_are_attributes_without_a_copy(pool: Compute) -> None:
    tensor = torch.ones(3, device=pool.nodes[1].device("cpu"))
    counter = Counter.on(pool, rank=1)()
    counter.keep(tensor)
    tensor.add_(1)  # the same memory
    assert counter.total().item() == 6
    assert counter.total().device.type == "cpu"
    total = sky.function(counter.total, remote=True)() >> pool
    assert total.device == tensor.device
    assert total.item() == 6


def test_tensors_of_another_rank_are_refused(pool: Compute) -> None:
    tensor = torch.ones(3, device=pool.nodes[1].device("cpu"))
    with pytest.raises(ConfigurationError, match="do not live with the actor Counter on rank 0"):
        Counter.on(pool, rank=0)().keep(tensor)
    with pytest.raises(ConfigurationError, match="live on rank 1, not on rank 0"):
        Counter.on(pool, rank=0)(tensor)  # type: ignore[arg-type]
    assert Counter.on(pool)(tensor).where()[0] == 1  # type: ignore[arg-type]


def test_an_actor_may_leave_its_results_there(pool: Compute) -> None:
    plain: Any = Plain
    assert plain.on(pool)().ones().device.type == "sky"


# --- limits and ends --------------------------------------------------------------------------------------------------


def test_a_timeout_ends_the_call_and_not_the_actor(pool: Compute, tmp_path: Path) -> None:
    counter = Counter.on(pool)()
    waits = sky.function(counter.wait_for)(str(tmp_path / "never"))
    with pytest.raises(TimeoutError):
        waits.with_timeout(0.2) >> pool
    assert counter.add() == 1


def test_cancelled_calls_leave_the_actor_as_it_is(pool: Compute, tmp_path: Path) -> None:
    counter = Counter.on(pool)()
    running = pool.submit(counter.wait_for, str(tmp_path / "never"), str(tmp_path / "begun"))
    queued = pool.submit(counter.add)
    last = pool.submit(counter.add, 10)
    wait_for((tmp_path / "begun").exists, "it begins")
    assert queued.cancel()
    assert running.cancel()
    assert last.result(PATIENCE_SECONDS) == 10


def test_a_wait_in_the_midst_of_its_own_stream_is_refused(pool: Compute) -> None:
    counter = Counter.on(pool)()
    for _ in counter.upto(3):
        with pytest.raises(ConfigurationError, match="busy with a stream"):
            counter.add()
        break
    assert counter.add() >= 1


def test_an_actor_that_nobody_holds_is_let_go(pool: Compute) -> None:
    kept = sky.function(is_kept, on=0)
    counter = Counter.on(pool, rank=0)()
    identity = counter.__dict__["_sky_calls"].place.identity
    last = pool.submit(counter.add)
    assert kept(identity) >> pool
    del counter
    assert last.result(PATIENCE_SECONDS) == 1  # a call keeps it
    del last

    def gone() -> bool:
        gc.collect()
        return not kept(identity) >> pool

    wait_for(gone, "it is gone")


def test_a_dead_process_is_named(lonely: Compute, tmp_path: Path) -> None:
    counter = Counter.on(lonely)()
    (tmp_path / "go").touch()
    with pytest.raises(ActorDiedError, match=r"actor Counter on rank 0 died while Counter.die_once ran.*code 7"):
        counter.die_once(str(tmp_path / "go"), str(tmp_path / "marker"))
    with pytest.raises(ActorDiedError, match="max_restarts=1"):
        counter.add()
    assert issubclass(ActorDiedError, SessionLostError)
    again = Counter.on(lonely)(5)  # another one, in the process that took its place
    assert again.add() == 6
    with pytest.raises(ActorDiedError, match="SIGKILL"):
        again.kill()


def test_a_restarted_actor_begins_anew(lonely: Compute, tmp_path: Path) -> None:
    counter = Restarted.on(lonely)(100)
    assert counter.add() == 101
    dying = lonely.submit(counter.die_once, str(tmp_path / "go"), str(tmp_path / "marker"))
    waited = lonely.submit(counter.add)
    (tmp_path / "go").touch()
    with pytest.raises(ActorDiedError, match="The next call recreates it"):
        dying.result(PATIENCE_SECONDS)
    with pytest.raises(ActorDiedError, match=r"died while Restarted\.add waited"):
        waited.result(PATIENCE_SECONDS)
    assert counter.add() == 101
    with pytest.raises(ActorDiedError, match="as often as max_restarts says"):
        counter.kill()
    with pytest.raises(ActorDiedError, match="is dead"):
        counter.add()


def test_retried_calls_run_on_the_new_one(lonely: Compute, tmp_path: Path) -> None:
    counter = Retried.on(lonely)(100)
    dying = lonely.submit(counter.die_once, str(tmp_path / "go"), str(tmp_path / "marker"))
    waited = [lonely.submit(counter.add) for _ in range(3)]
    (tmp_path / "go").touch()
    assert dying.result(PATIENCE_SECONDS) == "lived"
    assert [future.result(PATIENCE_SECONDS) for future in waited] == [101, 102, 103]


def test_closing_the_pool_ends_its_actors(tmp_path: Path) -> None:
    with Compute(provider=sky.Local(device="cpu")) as pool:
        counter = Counter.on(pool)()
        running = pool.submit(counter.wait_for, str(tmp_path / "never"), str(tmp_path / "begun"))
        queued = pool.submit(counter.add)
        wait_for((tmp_path / "begun").exists, "it begins")
    for future in (running, queued):
        with pytest.raises(CancelledError):
            future.result(PATIENCE_SECONDS)
    with pytest.raises(ConfigurationError, match="is not running"):
        counter.add()
    with pytest.raises(ConfigurationError, match="is not running"):
        Counter.on(pool)()


def blocks() -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "howto" / "actors.md"
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


PRINTED = ["2", "1", r"\[1, 2, 3\]", "actor Trainer on rank 0 died while Trainer.crash ran: .*", "3"]
"""What the blocks print, one after the other."""
RUNNER = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')\n"


def test_the_blocks_of_the_documentation_run(tmp_path: Path) -> None:
    """Each is a program of its own, but they share a process, and so what starts their workers."""
    files = [tmp_path / f"block_{number}.py" for number in range(3)]
    for file, block in zip(files, blocks()):
        file.write_text(block)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(sky.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(PRINTED), done.stdout
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(PRINTED, lines)), done.stdout


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_mistakes_are_explained(pool: Compute) -> None:
    counter: Any = Counter.on(pool)()
    with pytest.raises(AttributeError, match="attributes live on the worker"):
        counter.count
    with pytest.raises(AttributeError, match="cannot be set"):
        counter.count = 3
    with pytest.raises(TypeError, match=r"Counter.add\(\): too many"):
        counter.add(1, 2)
    with pytest.raises(TypeError, match=r"Counter\(\): got an unexpected"):
        Counter.on(pool)(begin=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="on every rank"):
        sky.function(counter.add)() @ pool
    with pytest.raises(ConfigurationError, match="rank 7"):
        Counter.on(pool, rank=7)
    with pytest.raises(ConfigurationError, match="is not a rank"):
        Counter.on(pool, rank="tail")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lives on a pool"):
        Counter.on("pool")  # type: ignore[arg-type]
    other = counter.where()[0]
    with pytest.raises(ConfigurationError, match="cannot run on rank"):
        sky.function(counter.add)().on(1 - other) >> pool


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": "1s"}, "timeout='1s'"),
        ({"retry": True}, "max_restarts=1"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        sky.actor(**options)


def test_only_classes_are_actors() -> None:
    decorate: Any = sky.actor
    with pytest.raises(ConfigurationError, match="decorates classes"):
        decorate(lambda: 1)

    class Taken:
        on = 1

    with pytest.raises(ConfigurationError, match=r"a method on\(\), and it already has one"):
        sky.actor(Taken)


def test_a_session_takes_its_actors_along() -> None:
    actors = Actors()
    actors.put("a", "one", 1)
    actors.put("b", "one", 2)
    assert actors.get("a", "one") == 1
    actors.forget("a")
    with pytest.raises(ActorDiedError):
        actors.get("a", "one")
    assert actors.get("b", "one") == 2
    actors.drop("b", "one")
    actors.drop("b", "one")
