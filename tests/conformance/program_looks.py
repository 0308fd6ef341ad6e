"""What a program can see of its tensors, and how two sides differ in that: looks, who shares memory, and bits."""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.program_effects import Named

_LINEAR = "LinearBackward0"
Apart = dict[str, int]
"""How far the counts of a tensor are apart from the start, by name."""


def said(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def look(x: torch.Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {
        "class": "Parameter" if isinstance(x, torch.nn.Parameter) else "Named" if isinstance(x, Named) else "Tensor",
        "shape": tuple(x.shape),
        "dtype": x.dtype,
        "layout": x.layout,
        "requires_grad": x.requires_grad,
        "is_inference": x.is_inference(),
    }
    if x.layout is torch.strided:
        row |= {
            "strides": x.stride(),
            "offset": x.storage_offset(),
            "conj": x.is_conj(),
            "neg": x.is_neg(),
            "bytes": x.untyped_storage().nbytes(),
        }
    if not x.is_inference():
        row["version"] = x._version
    try:
        return row | _history(x)
    except RuntimeError as error:  # PyTorch makes that of a view when it is asked for, and may refuse to
        return row | {"history": said(error)}


def _history(x: torch.Tensor) -> dict[str, Any]:
    made_by = x.grad_fn
    return {
        "is_leaf": x.is_leaf,
        "grad_fn": type(made_by).__name__ if made_by is not None else None,
        "has grad": x.is_leaf and x.grad is not None,
        "next": tuple(type(f).__name__ for f, _ in made_by.next_functions) if made_by is not None else (),
    }


def is_made_again(name: str, mine: dict[str, Any], expected: Any, history: Any) -> bool:
    """Whether it is the history of a view that changed with its base: for the CPU, PyTorch makes one by strides.

    Or that of a linear layer, which has one node here, where the CPU has one for each of its parts.
    """
    if name in ("next", "grad_fn") and _LINEAR in (mine.get("grad_fn"), *mine.get("next", ())):
        return True
    found = mine.get(name)
    if name == "next":
        return history == "AsStridedBackward0" or "AsStridedBackward0" in expected
    return name == "grad_fn" and found is not None and expected == "AsStridedBackward0"


def counts_apart(mine: torch.Tensor, other: torch.Tensor) -> Apart:
    """How far numbers are apart from the start: what made a tensor may have taken other steps, or more memory."""
    return {
        name: number - expected
        for name, number, expected in zip(("version", "bytes"), _counts(mine), _counts(other))
        if number != expected
    }


def _counts(x: torch.Tensor) -> tuple[int, int]:
    strided = x.layout is torch.strided
    return 0 if x.is_inference() else x._version, x.untyped_storage().nbytes() if strided else 0


def metadata(ours: list[torch.Tensor], theirs: list[torch.Tensor], apart: list[Apart]) -> tuple[str, str] | None:
    """What of the looks of tensors, and of who shares memory with whom, is not the same."""
    for number, (a, b) in enumerate(zip(ours, theirs)):
        mine, other = look(a), look(b)
        for name, expected in other.items():
            if name in apart[number]:
                expected += apart[number][name]
            if mine.get(name) != expected and not is_made_again(name, mine, expected, other.get("grad_fn")):
                return name, f"tensor {number} {brief(b)}: {name} {mine.get(name)} instead of {expected}"
        if other.get("has grad"):
            grad, expected_grad = a.grad, b.grad
            assert grad is not None
            assert expected_grad is not None
            found = metadata([grad], [expected_grad], [counts_apart(grad, expected_grad)])
            if found is not None:
                return f"grad's {found[0]}", f"grad of tensor {number}: {found[1]}"
    for number, (a, b) in enumerate(zip(ours, theirs)):
        shared = _sharing(theirs).count(_sharing(theirs)[number]) > 1
        if shared and (a._base is None) is not (b._base is None):
            return "base", f"tensor {number} {brief(b)} is {'no' if a._base is None else 'a'} view"
    if _sharing(ours) != _sharing(theirs):
        return "sharing", f"memory is shared as {_sharing(ours)} instead of {_sharing(theirs)}"
    return None


def _sharing(tensors: list[torch.Tensor]) -> list[int]:
    seen: dict[int, int] = {}
    return [
        seen.setdefault(x.untyped_storage()._cdata, number) if x.layout is torch.strided else number
        for number, x in enumerate(tensors)
    ]


def brief(x: torch.Tensor) -> str:
    laid_out = f"strides {list(x.stride())}" if x.layout is torch.strided else str(x.layout)
    return f"({str(x.dtype).removeprefix('torch.')} {list(x.shape)}, {laid_out})"


def has_history(x: torch.Tensor) -> bool:
    """Whether an operation made it; also if PyTorch refuses to say which."""
    try:
        return x.grad_fn is not None
    except RuntimeError:
        return True


def _gradient(x: torch.Tensor) -> torch.Tensor | None:
    """What a leaf has collected, if its history may be looked at."""
    try:
        return x.grad if x.is_leaf else None
    except RuntimeError:
        return None


def values(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[str, str] | None:
    """Which values are not the same to the bit; a NaN is as good as any other."""
    for number, (a, b) in enumerate(zip(ours, theirs)):
        pairs = [("values", a, b)]
        grads = _gradient(a), _gradient(b)
        if grads[0] is not None and grads[1] is not None:
            pairs.append(("grad's values", *grads))
        for kind, mine, expected in pairs:
            try:
                got = bits(mine.detach().cpu())
            except Exception as error:
                return "reading", f"tensor {number} {brief(b)} cannot be read: {said(error)}"
            wanted = bits(expected.detach())
            if not torch.equal(got, wanted):
                return kind, f"tensor {number} {brief(b)}:\n{mine.detach().cpu()}\n    instead of\n{expected.detach()}"
    return None


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    x = x.as_subclass(torch.Tensor)
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    if x.dtype.is_floating_point:
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.reshape(-1).view(_WHOLE[x.element_size()]) if x.dtype is not torch.bool else x.reshape(-1).to(torch.uint8)
