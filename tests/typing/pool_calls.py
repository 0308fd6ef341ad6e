"""What type checkers know of calls on pools, and the mistakes that they must find.

Not run: `make types` checks this file with mypy --strict and with pyright, which both know these comments, and for
which one that ignores nothing is an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Unpack, assert_type

import skyproxy as sky
from skyproxy import client as renamed
from skyproxy.pools import PendingCompute, PoolFuture, RemoteFunction

if TYPE_CHECKING:
    from skyproxy.pools.provisioned import WorkerArguments


@sky.compute
def double(x: int, *, times: int = 1) -> int:
    return 2 * x * times


@sky.function(timeout=60)
def name_of(x: int) -> str:
    return str(x)


@sky.compute
async def later(x: int) -> float:
    return x / 2


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
async def count_later(n: int) -> AsyncIterator[int]:
    yield n


@sky.compute(name="fit", provider=sky.Local())
async def fit(node: sky.Node, steps: int) -> float:
    return float(steps)


class Model:
    @sky.compute
    def score(self, x: int) -> float:
        return float(x)


@sky.compute(
    name="all",
    provider=sky.Local(),
    accelerator="A100",
    nodes=sky.Nodes(1, 2),
    procs_per_node="gpu",
    vcpus=1.5,
    memory_gb=2,
    resources={"cpu": 1},
    image=sky.Image(),
    plugins=[sky.plugins.torch(), sky.plugins.jax(init="always")],
    volumes=[{"name": "cache", "storage": "10Gi", "path": "/cache"}],
    env={"N": 1},
    concurrency=2,
    retry=sky.Retry(times=2),
    timeout="15m",
    idle_timeout="5m",
    max_lifetime=60.0,
    keep=False,
    on_event=print,
    progress=True,
    tolerations=[{"key": "gpu"}],
)
def with_every_argument(node: sky.Compute) -> None: ...


def takes_them(**arguments: Unpack[WorkerArguments]) -> sky.Compute:
    return sky.Compute(**arguments)


@sky.compute
def joined(x: int, y: str = "", *more: float) -> bytes:
    return b""


@renamed.compute
def of_the_second_name(rows: list[int]) -> int:
    (own,) = [sky.shard(rows, shuffle=True)]
    return len(own)


def plain(x: int) -> str:
    return str(x)


async def plain_later(x: int, y: str) -> float:
    return 0.5


def what_is_known(pool: sky.Compute, node: sky.Node) -> None:
    assert_type(double(1), PendingCompute[int])
    assert_type(double(1) >> pool, int)
    assert_type(double(1, times=2) >> node, int)
    assert_type(double(1) @ pool, list[int])
    assert_type(double(1) > pool, PoolFuture[int])
    assert_type((double(1) > pool).result(), int)
    assert_type(double(1).with_timeout(5).on("head").with_retry(2).remote() >> pool, int)
    assert_type((double(1) & name_of(2)) >> pool, tuple[int, str])
    assert_type((double(1) & name_of(2) & later(3)) >> pool, tuple[int, str, float])
    assert_type(sky.gather(double(1), name_of(2)) >> pool, tuple[int, str])
    assert_type(later(1) >> pool, float)
    assert_type(count(3).stream(pool), Iterator[int])
    assert_type(count(3) >> pool, Iterator[int])
    assert_type(count_later(3) >> pool, Iterator[int])
    assert_type(Model().score(1) >> pool, float)
    assert_type(node.run(plain, 1), str)
    assert_type(pool.run(plain, 1), str)
    assert_type(pool.run(double, 1, times=3), int)
    assert_type(pool.submit(double, 1), PoolFuture[int])
    assert_type(pool.broadcast(plain, 1), list[str])
    assert_type(pool.map(double, [1, 2]), Iterator[int])
    assert_type(pool.map(plain, [1, 2]), Iterator[str])
    assert_type(pool.map(later, [1, 2], timeout=3, retry=2), Iterator[float])
    assert_type(pool.map(plain_later, [1], ["a"]), Iterator[float])
    assert_type(pool.map(joined, [1], ["a"], [0.5]), Iterator[bytes])
    assert_type(pool.map(joined, [1], ["a"], [0.5], [0.5]), Iterator[bytes])
    assert_type(pool.map(lambda x, y: x + len(y), [1], ["a"]), Iterator[int])
    assert_type(double.local(1), int)
    here: Coroutine[Any, Any, float] = later.local(1)
    here.close()
    assert_type(count_later.local(1), AsyncIterator[int])
    assert_type(Model().score.local(1), float)
    assert_type(sky.shard([1], "ab", (3.0,)), tuple[list[int], str, tuple[float]])
    assert_type(of_the_second_name([1]) >> pool, int)
    named: RemoteFunction[[int], str] = name_of
    assert_type(named(1) >> pool, str)


async def what_is_awaited(pool: sky.Compute, node: sky.Node) -> None:
    assert_type(await node.execute(plain, 1), str)
    assert_type(await (double(1) > pool), int)
    assert_type(await fit(3), float)
    async with renamed.Cluster(renamed.Compute(), renamed.Compute()) as (trainer, other):
        trainer.device("cuda")
        other.device("cuda")


def seven_mistakes(pool: sky.Compute) -> None:
    double("1") >> pool  # type: ignore[arg-type]
    double() >> pool  # type: ignore[call-arg]
    double(1, time=2) >> pool  # type: ignore[call-arg]
    text: str = double(1) >> pool  # type: ignore[assignment]
    one: int = double(1) @ pool  # type: ignore[assignment]
    number: int = double(1) > pool  # type: ignore[assignment]
    double >> pool  # type: ignore[operator]
    print(text, one, number)


async def more_mistakes(pool: sky.Compute, node: sky.Node) -> None:
    double(1) + 1  # type: ignore[operator]
    double(1) & double(2) >> pool  # type: ignore[operator]
    double(1) >> 3  # type: ignore[operator]
    for _ in count(3):  # type: ignore[attr-defined]
        pass
    await double(1)  # type: ignore[misc]
    await fit("3")  # type: ignore[arg-type]
    node.run(plain, "x")  # type: ignore[call-overload]
    pool.run(plain, "x")  # type: ignore[call-overload]
    pool.map(double, ["x"])  # type: ignore[arg-type]
    double(1).stream(pool)  # type: ignore[misc]
    Model().score("x") >> pool  # type: ignore[arg-type]
    pool.map(joined, ["x"], [1])  # type: ignore[arg-type]
    pool.map(joined, [1], [2])  # type: ignore[arg-type]
    pool.map(plain, [1], [2])  # type: ignore[arg-type]
    pool.map(plain, [1], timeout="3")  # type: ignore[call-overload]
    text: str = double.local(1)  # type: ignore[assignment]
    number: int = later.local(1)  # type: ignore[assignment]
    rows: str = sky.shard([1])  # type: ignore[assignment]
    sky.Compute(nodez=2)  # type: ignore[call-arg]
    sky.Compute(tolerations="gpu")  # type: ignore[arg-type]
    sky.Compute(plugins=[sky.plugins.torch])  # type: ignore[list-item]
    sky.plugins.torch(backed="gloo")  # type: ignore[call-arg]
    sky.compute(timout=3)  # type: ignore[call-overload]
    sky.compute(nmae="x", image="y")  # type: ignore[call-overload]
    sky.functionn(plain)  # type: ignore[attr-defined]
    renamed.Computer()  # type: ignore[attr-defined]
    print(text, number, rows)
