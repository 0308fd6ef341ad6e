"""What PyTorch's C++ is told of remote storages."""

from __future__ import annotations

import torch


def test_uses_of_a_storage_are_counted_without_a_crash(sky1: str) -> None:
    """`_cdata` is where PyTorch's C++ would look for the number; programs that move activations ask for it."""
    x, local = torch.zeros(4, device=sky1), torch.zeros(4)
    part, kept = x[1:], local[1:]
    storage = local.untyped_storage()
    assert torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 1
    assert torch._C._storage_Use_Count(part.untyped_storage()._cdata) == 1
    assert torch._C._storage_Use_Count(storage._cdata) >= 2
    assert kept.untyped_storage()._cdata == storage._cdata
