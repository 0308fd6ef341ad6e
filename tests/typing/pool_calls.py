"""What type checkers know of calls on pools, and seven mistakes that they must find.

Not run: `make types` checks this file with mypy --strict and with pyright, which both know these comments, and for
which one that ignores nothing is an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import skyproxy as sky
from skyproxy.pools import PendingCompute, PoolFuture


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


def plain(x: int) -> str:
    return str(x)


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


async def what_is_awaited(pool: sky.Compute, node: sky.Node) -> None:
    assert_type(await node.execute(plain, 1), str)
    assert_type(await (double(1) > pool), int)
    assert_type(await fit(3), float)


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
