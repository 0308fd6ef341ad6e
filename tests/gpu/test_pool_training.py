"""Ranks that share one GPU, or have one each: DDP and FSDP2 beside a single process that trains on all the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import skyproxy as sky

pytestmark = pytest.mark.timeout(300)
STEPS = 4


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def _data() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 8).reshape(4, 8)


@sky.compute
def train(kind: str, how: str) -> list[float]:
    """The mean losses of all ranks over a few steps."""
    import torch.distributed as dist
    from torch import nn

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(kind, (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.linspace(-1, 1, 4 * 8).reshape(4, 8).chunk(world)[rank].to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def expected() -> torch.Tensor:
    model, data, losses = _model(), _data(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


# Two ranks of NCCL refuse to share a GPU, so ranks that do talk through gloo.
@pytest.mark.parametrize(
    ("how", "backend", "ranks"),
    [("ddp", "gloo", 2), ("ddp", "nccl", 1), ("fsdp2", "nccl", 1), ("fsdp2", "gloo", 2)],
)
def test_ranks_train_as_one_process_does(kind: str, how: str, backend: str, ranks: int) -> None:
    if backend == "nccl" and kind == "cpu":
        pytest.skip("nccl needs a GPU")
    if how == "fsdp2" and backend == "gloo" and kind == "cuda":
        pytest.skip("gloo gathers no shards that lie on a GPU")
    plugins = [sky.plugins.torch(backend=backend, init="always")]
    with sky.Compute(provider=sky.Local(), procs_per_node=ranks, plugins=plugins) as pool:
        found = train(kind, how) @ pool
    for losses in found:
        torch.testing.assert_close(torch.tensor(losses), expected(), rtol=1e-4, atol=1e-6)
