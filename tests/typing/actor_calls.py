"""What type checkers know of actors, and the mistakes that they must find.

Not run; see `pool_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import skyproxy as sky
from skyproxy.pools import PoolFuture


class Model(sky.Actor):
    def __init__(self, width: int, *, name: str = "") -> None:
        self.width = width

    def step(self, x: float) -> float:
        return x * self.width

    async def later(self, x: int) -> str:
        return str(x)

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)


@sky.actor(max_restarts=2, retry=True)
class Lasting(Model):
    def size(self) -> int:
        return self.width


def what_is_known(pool: sky.Compute, node: sky.Node) -> None:
    model = Model.on(pool)(3, name="x")
    assert_type(model, Model)
    assert_type(model.step(1.0), float)
    assert_type(model.count(3), Iterator[int])
    assert_type(Lasting.on(node, rank=0)(3).size(), int)
    assert_type(Model.on(pool).submit(3), PoolFuture[Model])
    assert_type(pool.submit(model.step, 1.0), PoolFuture[float])
    assert_type(pool.submit(model.later, 1), PoolFuture[str])
    assert_type(pool.map(model.step, [1.0]), Iterator[float])
    assert_type(pool.map(model.later, [1]), Iterator[str])
    step = sky.function(model.step)
    assert_type(step(1.0) >> pool, float)
    assert_type((step(1.0) & step(2.0)) >> pool, tuple[float, float])
    assert_type(sky.function(model.count)(3).stream(pool), Iterator[int])
    group = Model.on_all(pool)(4)
    assert_type(group, sky.ActorGroup[Model])
    assert_type(group[0].step(1.0), float)
    assert_type(group.broadcast(Model.step, 1.0), list[float])
    assert_type(group.broadcast(Model.later, 1), list[str])
    assert_type(group.submit(Model.step, 1.0), PoolFuture[list[float]])


async def what_is_awaited(pool: sky.Compute) -> None:
    model = await Model.on(pool).submit(3)
    assert_type(model, Model)
    assert_type(await model.later(1), str)
    assert_type(await pool.submit(model.step, 1.0), float)


def mistakes(pool: sky.Compute) -> None:
    Model.on(pool)("3")  # type: ignore[arg-type]
    Model.on(pool)(3, nam="x")  # type: ignore[call-arg]
    Model.on(3)  # type: ignore[arg-type]
    model = Model.on(pool)(3)
    model.step("x")  # type: ignore[arg-type]
    model.stop()  # type: ignore[attr-defined]
    text: str = model.step(1.0)  # type: ignore[assignment]
    pool.submit(model.step, "x")  # type: ignore[call-overload]
    pool.map(model.step, ["x"])  # type: ignore[arg-type]
    pool.map(model.step, [1.0], [2.0])  # type: ignore[arg-type]
    sky.function(model.step)("x") >> pool  # type: ignore[arg-type]
    group = Model.on_all(pool)(4)
    group.broadcast(Model.step, "x")  # type: ignore[call-overload]
    one: float = group.broadcast(Model.step, 1.0)  # type: ignore[assignment]
    group.step(1.0)  # type: ignore[attr-defined]
    sky.actor(max_restart=1)  # type: ignore[call-overload]
    print(text, one)
