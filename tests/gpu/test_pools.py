"""A pool on a machine with CUDA: a rank for each device, and results that arrive on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy as sky

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    plugins = [sky.plugins.torch(init="always")]
    with sky.Compute(provider=sky.Local(), procs_per_node="gpu", plugins=plugins) as opened:
        yield opened


@sky.compute
def on_the_gpu() -> dict[str, Any]:
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return {
        "current": torch.cuda.current_device(),
        "local_rank": device.index,
        "backend": dist.get_backend(),
        "total": (total,),
        "half": torch.arange(4.0, device=device, dtype=torch.bfloat16),
        "sparse": torch.eye(3, device=device).to_sparse(),
        "model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device),
    }


def test_there_is_a_rank_for_each_device_on_nccl(pool: Any) -> None:
    results = on_the_gpu() @ pool
    count = torch.cuda.device_count()
    assert len(results) == count
    assert [result["local_rank"] for result in results] == list(range(count))
    assert [result["current"] for result in results] == list(range(count))
    assert {result["backend"] for result in results} == {"nccl"}
    assert [result["total"][0].item() for result in results] == [count] * count


def test_results_from_cuda_arrive_on_the_cpu(pool: Any) -> None:
    result = on_the_gpu().on(0) >> pool
    assert result["total"][0].device.type == "cpu"
    assert result["half"].tolist() == [0, 1, 2, 3]
    assert torch.equal(result["sparse"].to_dense(), torch.eye(3))
    state = [*result["model"].parameters(), *result["model"].buffers()]
    assert {tensor.device.type for tensor in state} == {"cpu"}
    assert result["model"].eval()(torch.ones(1, 3)).shape == (1, 2)
