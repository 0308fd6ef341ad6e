"""Memory that a kernel leaves as it was may be what another session freed: what an op gives of it is zeroed first.

In a worker that has only ever had one client, who may run code there anyway, memory comes from that client itself.
"""

from __future__ import annotations

import torch


class _Process:
    """Knowledge of this process: if its freed memory can be anybody's but the one session's that runs in it."""

    has_strangers = True


def only_one_session(alone: bool) -> None:
    """Tells whether this process has only ever served the session that it serves now."""
    _Process.has_strangers = not alone


def clear(tensor: torch.Tensor) -> torch.Tensor:
    """Fills the memory of a fresh tensor with zeros, gaps between its elements included, and returns the tensor."""
    if _Process.has_strangers and tensor.layout is torch.strided:
        clear_from(tensor, 0)
    return tensor


def clear_from(tensor: torch.Tensor, former_bytes: int) -> None:
    """Fills what a tensor's storage has gained since it had `former_bytes` with zeros."""
    if not _Process.has_strangers or tensor.layout is not torch.strided:
        return
    storage = tensor.untyped_storage()
    gained = storage.nbytes() - former_bytes
    if gained > 0:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(storage, former_bytes, (gained,), (1,)).zero_()


def clear_elements(tensor: torch.Tensor) -> None:
    """Fills the elements of a tensor with zeros, and nothing else of its storage."""
    if _Process.has_strangers and tensor.layout is torch.strided:
        tensor.zero_()


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's storage; 0 for layouts without one."""
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
