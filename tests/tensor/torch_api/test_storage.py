"""What PyTorch's C++ is told of remote storages."""

from __future__ import annotations

import weakref

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


def test_a_tensor_whose_storage_was_asked_for_is_swapped_with_another(sky1: str) -> None:
    a, b = torch.zeros(3, device=sky1), torch.ones(2, device=sky1)
    storages = a.untyped_storage(), b.untyped_storage()
    torch.utils.swap_tensors(a, b)
    assert (a.tolist(), b.tolist()) == ([1, 1], [0, 0, 0])
    assert (b.untyped_storage(), a.untyped_storage()) == storages
    assert a.untyped_storage() is storages[1]


def test_a_storage_that_a_tensor_has_left_is_freed(sky1: str) -> None:
    x = torch.zeros(3, device=sky1)
    left = weakref.ref(x.untyped_storage())
    assert x.untyped_storage() is left()
    x.data = torch.ones(2, device=sky1)
    assert left() is None
    assert x.untyped_storage().nbytes() == 8
    kept = weakref.ref(x.untyped_storage())
    x.unsqueeze_(0)
    assert x.untyped_storage() is kept()
