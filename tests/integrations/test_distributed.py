"""What `torch.distributed` of this process can do with tensors of workers: nothing, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from skyproxy.errors import UnsupportedOpError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_collectives_of_remote_tensors_are_refused_with_the_way_to_do_it(sky1: str) -> None:
    x = torch.ones(2, device=sky1)
    with pytest.raises(UnsupportedOpError, match=r"on a pool.*skyproxy\.Compute"):
        dist.all_reduce(x)
    with pytest.raises(UnsupportedOpError, match=r"on a pool.*skyproxy\.Compute"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(sky1))
    assert x.tolist() == [1, 1]


@pytest.mark.usefixtures("group")
def test_copies_on_the_cpu_are_reduced(sky1: str) -> None:
    copy = torch.ones(2, device=sky1).cpu()
    dist.all_reduce(copy)
    assert copy.to(sky1).tolist() == [1, 1]
