"""Attention and dropout under function transforms have the CPU's bits and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from skyproxy.tensor.ops import transformed_composites

DROPOUTS: dict[str, Callable[[torch.Tensor], object]] = {
    "vmap": lambda x: vmap(lambda t: F.dropout(t, 0.3), randomness="different")(x),
    "vmap of the second dimension": lambda x: vmap(lambda t: F.dropout(t, 0.3), 1, randomness="different")(x),
    "vmap with one mask": lambda x: vmap(lambda t: F.dropout(t, 0.3), randomness="same")(x),
    "vmap of what has no batch": lambda x: vmap(lambda t: t + F.dropout(x[0], 0.3), randomness="different")(x),
    "vmap of vmap": lambda x: vmap(vmap(lambda t: F.dropout(t, 0.3), randomness="same"), randomness="different")(x),
    "grad": lambda x: grad(lambda t: F.dropout(t, 0.3).sin().sum())(x),
    "vmap of grad": lambda x: vmap(grad(lambda t: F.dropout(t, 0.3).sin().sum()), 1, randomness="different")(x),
    "jvp": lambda x: torch.stack(jvp(lambda t: F.dropout(t, 0.3), (x,), (x.cos(),))),
    "nothing dropped": lambda x: vmap(lambda t: F.dropout(t, 0.0) + F.dropout(t, 0.3, False))(x),
    "all dropped": lambda x: vmap(lambda t: F.dropout(t, 1.0))(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_under_transforms_is_that_of_the_cpu(name: str, dtype: torch.dtype, sky1: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 40, dtype=dtype)
    found = []
    for device in ("cpu", sky1):
        torch.manual_seed(1)
        found.append(DROPOUTS[name](x.to(device)).cpu())  # type: ignore[attr-defined]
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, on the CPU as well
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batches", [(3,), (3, 2), (2, 2, 2)], ids=str)
def test_attention_under_vmap_is_that_of_the_cpu(batches: tuple[int, ...], causal: bool, sky1: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*batches, 4, 6, 8) for _ in range(3)]

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.3)

    found = []
    for device in ("cpu", sky1):
        query, *others = (t.to(device) for t in tensors)
        query.requires_grad_()
        result = vmap(call)(query, *others)
        shared = vmap(call, (0, None, None))(query, *(t[0] for t in others))
        (gradient,) = torch.autograd.grad((result * shared).sin().sum(), query)
        found.append([t.detach().cpu() for t in (result, shared, gradient)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_nobody_is_warned_that_kernels_are_replaced(
    sky1: str, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.library, "_impls", set())  # before 2.13, PyTorch refuses a second kernel of Python's
    library, always = torch.library.Library("aten", "IMPL"), torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else PyTorch tells it once a process
    try:
        transformed_composites._put(library)
    finally:
        torch.set_warn_always(always)
        library._destroy()
    assert not recwarn.list
