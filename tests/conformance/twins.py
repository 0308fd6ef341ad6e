"""Copies of arguments on either side, alike in strides, aliases and bits, and the comparison of what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.reference import REFERENCE

NUMBERS = (bool, int, float, complex)


class Twins:
    """Copies values to one place; the same tensor is copied once, so that aliases among arguments stay aliases.

    Args:
        device: "cpu", "cuda" or "sky:k".
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._copied: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, *, requires_grad: bool | None = None) -> Any:
        """A copy of a tree of arguments; leaves that require gradients do so again, unless told otherwise."""
        return pytree.tree_map(lambda leaf: self._leaf(leaf, requires_grad), value)

    def _leaf(self, leaf: Any, requires_grad: bool | None) -> Any:
        # Entries name the devices that this machine has: the CPU, and where it has a GPU `cuda` or `cuda:0`.
        if isinstance(leaf, torch.device):
            return self.device if leaf.type in ("cpu", REFERENCE) else leaf
        if isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", REFERENCE):
            return str(self.device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self._copied:
            with torch.no_grad():
                copy = self._copy(leaf.detach())
            if isinstance(leaf, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=False)
            wanted = leaf.requires_grad if requires_grad is None else requires_grad
            self._copied[id(leaf)] = (leaf, copy.requires_grad_(wanted and leaf.requires_grad))
        return self._copied[id(leaf)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor.clone().to(self.device)
        if tensor.is_conj():
            return self._copy(tensor.conj()).conj()
        if tensor.is_neg():
            return self._copy(torch._neg_view(tensor))._neg_view()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
        offset = int(tensor.storage_offset())
        if tensor.numel() == 0 or (offset == 0 and extent == tensor.numel()):
            return tensor.clone().to(self.device)
        # Gaps, overlaps and offsets only survive a copy of what lies around them.
        around = torch.as_strided(tensor, (offset + extent,), (1,), 0).clone().to(self.device)
        return torch.as_strided(around, tensor.shape, tensor.stride(), offset)


def look(value: Any, *, memory: bool = True) -> Any:
    """Everything but the values and the device, comparable.

    Args:
        memory: whether strides and bits count, and whether it is a view.
    """
    if not isinstance(value, torch.Tensor):
        return type(value)
    row = [tuple(value.shape), value.dtype, value.layout, value.requires_grad, value.is_leaf]
    if value.layout is torch.strided and memory:
        strides = tuple(s if n > 1 and value.numel() else 0 for n, s in zip(value.shape, value.stride()))
        row += [strides, value.is_conj(), value.is_neg(), value._is_view()]
    return tuple(row)


_FIELDS = ("shape", "dtype", "layout", "requires_grad", "is_leaf", "stride", "is_conj", "is_neg", "is_view")


def look_difference(ours: Any, theirs: Any, *, memory: bool = True) -> str:
    """Which metadata differ, in words; empty if none does."""
    a, b = look(ours, memory=memory), look(theirs, memory=memory)
    if a == b:
        return ""
    if not isinstance(a, tuple) or not isinstance(b, tuple) or len(a) != len(b):
        return f"{a} instead of {b}"
    return "; ".join(f"{name} {x} instead of {y}" for name, x, y in zip(_FIELDS, a, b) if x != y)


def value_difference(ours: Any, theirs: Any) -> str:
    """How the values of two results differ; empty if they are equal within the tolerance of their dtype.

    Args:
        ours: a result of the device: a tensor there, or a number.
        theirs: the same from the local device.
    """
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor):
            return f"{type(ours).__name__} instead of a tensor"
        if ours.device.type != "sky":
            return f"the result lives on {ours.device}"
        ours, theirs = _dense(ours.detach().cpu()), _dense(theirs.detach().cpu())
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
    elif isinstance(theirs, NUMBERS):
        if type(ours) is not type(theirs):
            return f"{type(ours).__name__} instead of {type(theirs).__name__}"
    else:
        return "" if type(ours) is type(theirs) else f"{type(ours).__name__} instead of {type(theirs).__name__}"
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def tree_differences(ours: Any, theirs: Any, *, values: bool = True, memory: bool = True) -> list[str]:
    """The differences between two trees of results.

    Args:
        values: whether the values count.
        memory: whether strides and the like count.
    """
    flat_ours, spec_ours = pytree.tree_flatten(plain_tree(ours))
    flat_theirs, spec_theirs = pytree.tree_flatten(plain_tree(theirs))
    if len(flat_ours) != len(flat_theirs):
        return [f"{spec_ours} instead of {spec_theirs}"]
    found = []
    for number, (a, b) in enumerate(zip(flat_ours, flat_theirs)):
        for difference in (look_difference(a, b, memory=memory), value_difference(a, b) if values else ""):
            if difference:
                found.append(f"result {number}: {difference}")
    return found


def plain_tree(tree: Any) -> Any:
    """Named tuples of results as tuples: their classes are registered with pytree only in part."""
    if isinstance(tree, tuple | list):
        return tuple(plain_tree(item) for item in tree)
    if isinstance(tree, dict):
        return {key: plain_tree(item) for key, item in tree.items()}
    return tree
