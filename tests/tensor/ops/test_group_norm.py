"""Group norms, and other norms, of half precision with parameters of another dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from skyproxy import torch_versions
from skyproxy.tensor.ops import group_norm as group_norm_module

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NORMS: dict[str, Norm] = {
    "group": lambda x, w: F.group_norm(x, 2, w, w * 2),
    "layer": lambda x, w: F.layer_norm(x.transpose(1, -1), (4,), w, w * 2),
    "batch": lambda x, w: F.batch_norm(x, None, None, w, w * 2, training=True),
    "instance": lambda x, w: F.instance_norm(x, weight=w, bias=w * 2),
}
FORMATS = (torch.contiguous_format, torch.channels_last)
TOLERANCE = 0.0 if torch_versions.minor(torch.__version__) < (2, 14) else 1e-5
"""Since 2.14 PyTorch adds what third derivatives and those of statistics are made of in another order."""


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


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_group_norm_without_gradients_goes_through_autograd_only_where_somebody_listens(
    sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[object] = []
    stock = group_norm_module.call_stock
    monkeypatch.setattr(group_norm_module, "call_stock", lambda op, *args: (passed.append(op), stock(op, *args))[1])
    x, weight = torch.randn(2, 4, 3, 3), torch.ones(4, requires_grad=True)
    ours, our_weight = x.to(sky), weight.detach().to(sky).requires_grad_()
    assert torch.equal(F.group_norm(ours, 2).cpu(), F.group_norm(x, 2))
    with torch.no_grad():
        assert torch.equal(F.group_norm(ours, 2, our_weight).cpu(), F.group_norm(x, 2, weight))
    assert passed == []
    F.group_norm(ours, 2, our_weight).square().sum().backward()
    F.group_norm(x, 2, weight).square().sum().backward()
    assert torch.equal(our_weight.grad.cpu(), weight.grad)
    assert len(passed) == 1
    with Names() as names:
        F.group_norm(ours, 2)
    assert "aten::native_group_norm" in names.seen
    with forward_ad.dual_level():
        tangents = [
            forward_ad.unpack_dual(F.group_norm(forward_ad.make_dual(t, torch.ones_like(t)), 2)).tangent
            for t in (ours, x)
        ]
    assert torch.allclose(tangents[0].cpu(), tangents[1], atol=1e-6)


@pytest.mark.parametrize("size", [(2, 4, 3, 3), (1, 4, 4, 4), (2, 4, 3, 3, 3)])
def test_images_that_need_no_gradient_may_lie_channels_last(size: tuple[int, ...], sky: str) -> None:
    """Up to 2.13, the kernel ends the process that asks for the gradients of the weights alone."""
    images = torch.randn(size)
    order = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    there = images.to(sky).contiguous(memory_format=order)
    weight, bias = (torch.ones(4, device=sky, requires_grad=True) for _ in range(2))
    F.group_norm(there, 2, weight, bias).square().sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    found = F.group_norm(images, 2)
    sums = [n for n in range(len(size)) if n != 1]
    torch.testing.assert_close(weight.grad.cpu(), (2 * (found + 1) * found).sum(sums))
    torch.testing.assert_close(bias.grad.cpu(), (2 * (found + 1)).sum(sums))


@pytest.mark.parametrize("wanted", ["xwb", "x", "wb", "b"])
@pytest.mark.parametrize("size", [(2, 4, 3, 3), (1, 4, 2, 3, 2)])
def test_channels_last_images_are_differentiated_three_times_as_on_the_cpu(
    size: tuple[int, ...], wanted: str, sky: str
) -> None:
    torch.manual_seed(0)
    images = torch.randn(size).contiguous(memory_format=FORMATS[1] if len(size) == 4 else torch.channels_last_3d)
    weight, bias, factors = torch.randn(4), torch.randn(4), torch.randn(size)
    found: list[list[torch.Tensor]] = []
    for device in ("cpu", sky):
        given = {name: t.to(device) for name, t in zip("xwb", (images, weight, bias))}
        inputs = [given[name].requires_grad_() for name in wanted]
        result = F.group_norm(given["x"], 2, given["w"], given["b"])
        loss = (result.pow(3) * factors.to(device)).sum()
        results = [result]
        for _ in range(3):
            gradients = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
            results += gradients
            loss = torch.stack([g.square().sum() for g in gradients]).sum()
            if not loss.requires_grad:
                break
        found.append([t.detach().cpu() for t in results])
    for a, b in zip(*found, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def test_statistics_of_channels_last_images_have_gradients(sky: str) -> None:
    torch.manual_seed(0)
    images, found = torch.randn(2, 4, 3, 3).contiguous(memory_format=FORMATS[1]), []
    for device in ("cpu", sky):
        x = images.to(device).requires_grad_()
        _, mean, deviation = torch.native_group_norm(x, None, None, 2, 4, 9, 2, 1e-5)
        found.append(torch.autograd.grad((mean * deviation).sum(), x)[0].cpu())
    torch.testing.assert_close(*found, rtol=TOLERANCE, atol=TOLERANCE)
