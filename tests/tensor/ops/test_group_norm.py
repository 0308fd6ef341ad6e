"""Group norms, and other norms, of half precision with parameters of another dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NORMS: dict[str, Norm] = {
    "group": lambda x, w: F.group_norm(x, 2, w, w * 2),
    "layer": lambda x, w: F.layer_norm(x.transpose(1, -1), (4,), w, w * 2),
    "batch": lambda x, w: F.batch_norm(x, None, None, w, w * 2, training=True),
    "instance": lambda x, w: F.instance_norm(x, weight=w, bias=w * 2),
}
FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_mixed_dtypes_are_those_of_the_cpu(
    name: str, dtype: torch.dtype, weights: torch.dtype, sky1: str
) -> None:
    """Statistics are kept in the dtype of the parameters then, which fake tensors do not know."""
    torch.manual_seed(0)
    for batch, memory_format, gradients in itertools.product((1, 2), FORMATS, (True, False)):
        images = torch.randn(batch, 4, 3, 3).to(dtype).contiguous(memory_format=memory_format)
        found: list[list[torch.Tensor] | None] = []
        for device in ("cpu", sky1):
            x, w = images.to(device), torch.arange(4.0).to(weights).to(device)
            x, w = x.requires_grad_(gradients), w.requires_grad_(gradients)
            try:
                result = NORMS[name](x, w)
                more = torch.autograd.grad(result.float().square().sum(), [x, w]) if gradients else ()
                found.append([t.detach().cpu() for t in (result, *more)])
            except RuntimeError:  # dtypes that no kernel of the CPU mixes
                found.append(None)
        theirs, ours = found
        assert (ours is None) is (theirs is None)
        for a, b in zip(ours or (), theirs or ()):
            assert a.dtype is b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
