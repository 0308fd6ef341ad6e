"""The decorator without the plugin: the first task joins the process group, the pool's end leaves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import skyproxy as sky
from skyproxy.errors import RankErrors

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2) as opened:
        yield opened


@sky.compute
@sky.integrations.torch(backend="gloo")
@sky.stdout(only="head")
def train(number: int) -> dict[str, Any]:
    """The same code for one node and for many."""
    import torch.distributed as dist

    total = torch.tensor([float(number)])
    if dist.is_initialized():
        total += dist.get_rank()
        dist.all_reduce(total)
    print(f"number {number}")
    return {"rank": sky.instance_info().rank, "total": total.item(), "port": os.environ.get("MASTER_PORT")}


@sky.integrations.torch
@sky.compute
def above(fails: bool) -> str:
    import torch.distributed as dist

    if fails and dist.get_rank() == 1:
        raise ValueError("on rank 1")
    dist.barrier()
    return dist.get_backend()


@sky.compute
def plain() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


@sky.compute
def by_hand() -> float:
    import torch.distributed as dist

    info = sky.instance_info()
    where = f"tcp://{info.head_addr}:{info.head_port}"
    dist.init_process_group("gloo", init_method=where, rank=info.rank, world_size=info.world_size)
    total = torch.tensor(float(info.rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_framework_can_be_set_up_by_hand(pool: Any) -> None:
    assert by_hand() @ pool == [3.0, 3.0]


def test_the_first_task_joins_and_the_others_find_it(pool: Any, capfd: pytest.CaptureFixture) -> None:
    assert plain() @ pool == [False, False]
    calls = [train(number).submit_to_all(pool) for number in (10, 20, 30)]
    results = [call.result(120) for call in calls]
    assert [[row["rank"] for row in rows] for rows in results] == [[0, 1]] * 3
    assert [rows[0]["total"] for rows in results] == [21.0, 41.0, 61.0]
    assert len({row["port"] for rows in results for row in rows}) == 1  # joined once
    assert plain() @ pool == [True, True]
    assert capfd.readouterr().out.count("number") == 3  # the head's alone


def test_it_may_stand_above_and_takes_a_backend_by_itself(pool: Any) -> None:
    assert isinstance(above(False), sky.PendingCompute)
    assert above(False) @ pool == ["gloo", "gloo"]


def test_after_a_failure_the_next_task_joins_anew(pool: Any) -> None:
    port = (train(1) @ pool)[0]["port"]
    with pytest.raises(RankErrors) as caught:
        above(True) @ pool
    assert caught.value.first == 1
    again = train(1) @ pool
    assert [row["total"] for row in again] == [3.0, 3.0]
    assert again[0]["port"] != port


def test_on_one_node_it_does_nothing() -> None:
    assert train.local(5)["total"] == 5.0
