"""Kernels whose operands lie in different orders of memory: strides and bits of their results are local PyTorch's.

A gradient comes in the order in which it was computed, which need not be that of the input that it belongs to.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

aten = torch.ops.aten
Layout = Callable[[torch.Tensor], torch.Tensor]


def _idle(x: torch.Tensor, stride: int) -> torch.Tensor:
    return x.as_strided(x.shape, [stride if n == 1 else s for n, s in zip(x.shape, x.stride())])


def _reversed(x: torch.Tensor) -> torch.Tensor:
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


LAYOUTS: dict[str, Layout] = {
    "row-major": lambda x: x,
    "reversed": _reversed,
    "last two swapped": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "odd idle strides": lambda x: _idle(x, 4096),
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


def _norm_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    shape = x.shape[-1:]
    _, mean, deviation = aten.native_layer_norm(x, shape, None, None, 1e-5)
    weight = torch.ones(shape, device=x.device)
    return aten.native_layer_norm_backward(gradient, x, shape, mean, deviation, weight, weight, [True, True, True])


def _norm_of_rows_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    """Weights of several dimensions, laid out as the gradient is."""
    shape = x.shape[1:]
    _, mean, deviation = aten.native_layer_norm(x, shape, None, None, 1e-5)
    weight = gradient[0]
    return aten.native_layer_norm_backward(gradient, x, shape, mean, deviation, weight, weight, [True, True, True])


def _loss_of_pixels_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    target = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64, device=x.device)
    scale = torch.ones((), device=x.device)
    return aten.nll_loss2d_backward(gradient[:, 0].contiguous(), x, target, None, 0, -100, scale)


def _loss_of_pixels(targets: torch.Tensor, x: torch.Tensor) -> Any:
    return aten.nll_loss2d_forward(x, (targets[:, 0] > 9).long(), None, 0, -100)


def _batch_norm(rows: torch.Tensor, x: torch.Tensor) -> Any:
    weight = rows.reshape(-1)[:1].expand(x.shape[1])  # expanded: another kernel
    return aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)[:1]


def _batch_norm_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    ones = torch.ones(x.shape[1], device=x.device)
    return aten.native_batch_norm_backward(gradient, x, ones, ones, ones, ones, ones, True, 1e-5, [True] * 3)


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "layer norm": _norm_backward,
    "layer norm of rows": _norm_of_rows_backward,
    "loss of pixels": _loss_of_pixels,
    "gradient of a loss of pixels": _loss_of_pixels_backward,
    "batch norm": _batch_norm,
    "gradient of a batch norm": _batch_norm_backward,
    "relu": lambda g, x: aten.threshold_backward(g, x, 0),
    "gelu": lambda g, x: aten.gelu_backward(g, x),
    "silu": lambda g, x: aten.silu_backward(g, x),
    "tanh": lambda g, x: aten.tanh_backward(g, x),
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "hardsigmoid": lambda g, x: aten.hardsigmoid_backward(g, x),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1, 1),
    "leaky relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "elu": lambda g, x: aten.elu_backward(g, 1, 1, 1, False, x),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1, 20),
    "log sigmoid": lambda g, x: aten.log_sigmoid_backward(g, x, x.sigmoid()),
    "soft margin loss": lambda g, x: aten.soft_margin_loss_backward(x.mean(), x, g, 1),
    "logical or": lambda g, x: aten.logical_or(g, x[0]),
    "magnitude of complex numbers": lambda g, x: aten.abs(torch.complex(x, x)),
    "angle of complex numbers": lambda g, x: aten.angle(torch.complex(x, x)),
    "index add": lambda g, x: aten.index_add(x, 1, torch.zeros(4, dtype=torch.int64, device=x.device), g),
    "index add to a column": lambda g, x: x[..., 0:1].index_add(2, torch.tensor([0], device=x.device), g[..., 2:3]),
    "is in": lambda g, x: aten.isin(x, g),
    "an empty choice": lambda g, x: x[:, torch.zeros(0, dtype=torch.int64), :, 1:3],
    "a loss of each": lambda g, x: torch.nn.functional.mse_loss(x, g, reduction="none"),
    "a smooth loss of each": lambda g, x: torch.nn.functional.smooth_l1_loss(x, g, reduction="none"),
    "a soft loss of each": lambda g, x: torch.nn.functional.soft_margin_loss(x, g, reduction="none"),
    "samples at a grid": lambda g, x: torch.nn.functional.grid_sample(x, g[..., :2] / 9, align_corners=False),
    "an empty choice of nothing": lambda g, x: x[0, :0, :0, :1][torch.zeros(0, dtype=torch.bool)],
}


@pytest.mark.parametrize("name", OPS)
def test_operands_in_different_orders_of_memory_give_local_pytorchs_strides_and_bits(name: str, sky1: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for first, second in itertools.product(LAYOUTS, repeat=2):
        size = (1, 6, 3, 4) if name in ("batch norm", "gradient of a loss of pixels") else (1, 4, 1, 6)
        gradient, x = (torch.randn(size, generator=generator) for _ in range(2))
        try:
            expected = OPS[name](LAYOUTS[first](gradient), LAYOUTS[second](x))
        except RuntimeError:  # a kernel that does not take this order
            continue
        found = OPS[name](LAYOUTS[first](gradient.to(sky1)), LAYOUTS[second](x.to(sky1)))
        several = isinstance(expected, list | tuple)
        for ours, theirs in zip(found if several else [found], expected if several else [expected], strict=True):
            assert ours.stride() == theirs.stride(), (first, second)
            assert torch.equal(ours.cpu(), theirs), (first, second)


@pytest.mark.parametrize("exponent", [True, False, 2, 2.5])
def test_a_mask_to_a_power_has_local_pytorchs_dtype(exponent: Any, sky1: str) -> None:
    mask = torch.tensor([True, False])
    expected = mask**exponent
    found = mask.to(sky1) ** exponent
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("side", [1, 8])
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last, None])
@pytest.mark.parametrize("pixels", [1, 3])
@pytest.mark.parametrize("convolve", [torch.conv2d, torch.conv_transpose2d], ids=["to", "from"])
def test_gradients_of_small_convolutions_of_channels_last_images_lie_as_on_the_cpu(
    count: int, side: int, weight_format: torch.memory_format | None, pixels: int, convolve: Any, sky: str
) -> None:
    images = torch.randn(count, 8, side, side).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 8, pixels, pixels)
    weight = weight.transpose(0, 1) if weight_format is None else weight.to(memory_format=weight_format)

    def gradients(device: str) -> list[torch.Tensor]:
        sent = [tensor.detach().to(device).requires_grad_() for tensor in (images, weight)]
        result = convolve(*sent, padding=pixels // 2)
        return list(torch.autograd.grad(result.square().sum(), sent))

    for ours, theirs in zip(gradients(sky), gradients("cpu"), strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("layout", [*LAYOUTS, "channels-last"])
@pytest.mark.parametrize(
    "size", [(2, 3, 4, 5), (1, 2, 1, 4), (1, 4, 1, 3), (2, 3, 1, 1), (0, 3, 4, 4), (2, 3, 2, 2, 2)]
)
def test_images_that_are_rolled_or_shuffled_lie_as_on_the_cpu(size: tuple[int, ...], layout: str, sky1: str) -> None:
    arrange = LAYOUTS.get(layout) or _to_channels_last
    images = arrange(torch.arange(float(torch.Size(size).numel())).view(size))
    sent = arrange(torch.arange(float(torch.Size(size).numel()), device=sky1).view(size))
    for compute in (
        *(lambda x, n=n, d=d: x.roll(n, d) for n in (0, 1, -1) for d in (0, 1, -1)),
        lambda x: x.roll(1),
        lambda x: x.roll((1, 2), (0, 1)),
        lambda x: torch.nn.functional.channel_shuffle(x, 1),
        lambda x: torch.nn.functional.channel_shuffle(torch.complex(x, x), 1),
    ):
        ours, theirs = compute(sent), compute(images)
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.cpu(), theirs)
        assert (ours._base is None) == (theirs._base is None)
        if sent.numel() and layout != "expanded":
            shares = ours.data_ptr() == sent.data_ptr(), theirs.data_ptr() == images.data_ptr()
            assert shares[0] == shares[1]


def _to_channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@pytest.mark.parametrize("image", [(1, 2, 4, 1), (1, 2, 4, 3)], ids=str)
def test_gradients_of_weights_for_one_channel_lie_as_on_the_cpu(image: tuple[int, ...], sky1: str) -> None:
    """Whose order of memory is both formats: PyTorch reads it from the strides of that one channel."""
    images, weight = torch.randn(image).to(memory_format=torch.channels_last), torch.randn(2, 1, 2, 2)

    def gradient(device: str) -> torch.Tensor:
        sent = weight.to(device).requires_grad_()
        result = torch.conv_transpose2d(images.to(device), sent, stride=3, padding=1, output_padding=2)
        return torch.autograd.grad(result.square().sum(), sent)[0]

    assert gradient(sky1).stride() == gradient("cpu").stride()


_MODES = ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]
_IMAGES = [(1, 4, 1, 2), (2, 1, 2, 4), (2, 1, 4, 1), (1, 2, 1, 1), (1, 1, 3, 3), (2, 3, 4, 5)]


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("size", _IMAGES, ids=str)
def test_images_that_are_resized_lie_as_on_the_cpu(mode: str, size: tuple[int, ...], sky1: str) -> None:
    """Which format they come in is read from the strides, those of sides and counts of one included."""
    x = torch.arange(float(torch.Size(size).numel())).reshape(size)
    formats = [x, x.to(memory_format=torch.channels_last), _reversed(x), *(_idle(x, n) for n in (1, 2, 7, 4096))]
    for image, area in itertools.product(formats, [(1, 1), (2, 2), (8, 3), (1, 3)]):
        memory = image.as_strided((int(sum((n - 1) * s for n, s in zip(size, image.stride()))) + 1,), (1,))
        remote = memory.to(sky1).as_strided(size, image.stride())
        found = torch.nn.functional.interpolate(remote, size=area, mode=mode)
        expected = torch.nn.functional.interpolate(image, size=area, mode=mode)
        assert found.stride() == expected.stride(), (image.stride(), area)
        assert torch.equal(found.cpu(), expected)


GAPS: dict[str, Layout] = {
    "idle strides": lambda x: x.view(2, 3, 4, 1).as_strided((2, 3, 4, 1), (12, 1, 3, 12)),
    "windows": lambda x: x.view(2, 3, 4).unfold(0, 1, 1),
    "gaps": lambda x: x.as_strided((2, 2, 2), (2, 8, 4)),
    "nothing": lambda x: x.as_strided((2, 0, 2), (2, 8, 4)),
}
FRESH: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0], device=x.device), 1),
    "var_mean": lambda x: torch.var_mean(x.float(), dim=1, keepdim=True),
    "list and numbers": lambda x: torch._foreach_maximum([x, x], [2, 1]),
    "list and number": lambda x: torch._foreach_add([x], 2),
    "lists": lambda x: torch._foreach_mul([x], [x.transpose(0, 1).contiguous().transpose(0, 1)]),
    "unary on lists": lambda x: torch._foreach_neg([x]),
}


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.complex64])
@pytest.mark.parametrize("layout", GAPS)
@pytest.mark.parametrize("name", FRESH)
def test_fresh_results_of_gapped_and_empty_tensors_lie_as_on_the_cpu(
    name: str, layout: str, dtype: torch.dtype, sky1: str
) -> None:
    if dtype.is_complex and name in ("var_mean", "list and numbers"):
        return  # refused, or another value
    x = torch.arange(24.0).to(dtype)
    found, expected = FRESH[name](GAPS[layout](x.to(sky1))), FRESH[name](GAPS[layout](x))
    for ours, theirs in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (found, expected)), strict=True):
        assert ours.stride() == theirs.stride()


WITH_NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "% after a number": lambda x: 7 % x,
    "<< after a number": lambda x: 2 << x.int(),
    ">> after a number": lambda x: 64 >> x.int(),
    "** after a number": lambda x: 2**x,
    "xlog1py before": lambda x: torch.special.xlog1py(2, x),
    "xlog1py behind": lambda x: torch.special.xlog1py(x, 2),
    "zeta before": lambda x: torch.special.zeta(2, x),
    "zeta behind": lambda x: torch.special.zeta(x, 2),
    "polynomials of a number": lambda x: torch.special.hermite_polynomial_h(2, x),
    "polynomials of a degree": lambda x: torch.special.chebyshev_polynomial_t(x, 2),
    "gamma": aten._standard_gamma,
    "poisson": torch.poisson,
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("function", WITH_NUMBERS.values(), ids=WITH_NUMBERS)
def test_numbers_in_the_place_of_tensors_leave_the_strides_that_local_pytorch_gives(
    sky1: str, function: Callable[[torch.Tensor], Any], inference: bool
) -> None:
    images = torch.rand(2, 3, 4, 1) + 1.5
    tokens = (torch.rand(1, 3, 2, 2) + 1.5).flatten(2).transpose(1, 2).contiguous().transpose(1, 2).reshape(1, 3, 2, 2)
    with torch.inference_mode(inference):
        for x in (images.contiguous(memory_format=torch.channels_last).transpose(2, 3), tokens, _reversed(images)):
            sent = torch.empty_strided(x.shape, x.stride(), device=sky1).copy_(x)
            torch.manual_seed(0)
            expected = function(x)
            torch.manual_seed(0)
            result = function(sent)
            assert result.stride() == expected.stride()
            assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("size", [(4, 4, 4, 2), (4, 4, 4, 1), (2, 4, 4, 3)], ids=str)
@pytest.mark.parametrize("options", [(2,), (1, 1), (2, 1, 1)], ids=str)
def test_pooled_volumes_without_a_batch_lie_as_on_the_cpu(sky1: str, size: tuple[int, ...], options: Any) -> None:
    volume = torch.rand(size).permute(3, 0, 1, 2)
    for x in (volume, volume.contiguous(), volume.transpose(1, 2), _reversed(volume)):
        sent = torch.empty_strided(x.shape, x.stride(), device=sky1).copy_(x)
        expected = torch.nn.functional.max_pool3d_with_indices(x, *options)
        for ours, theirs in zip(torch.nn.functional.max_pool3d_with_indices(sent, *options), expected, strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_batch_norms_of_parts_of_channels_last_images_are_the_cpus(sky1: str, batch: int, training: bool) -> None:
    """A part has gaps: which kernel runs, and with it the last bit of gradients, depends on the order it suggests."""
    images = torch.randn(batch, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    volumes = torch.randn(batch, 8, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    for part in (images[:, :4], images[..., ::2], images[:, :, 1:3], volumes[:, 2:6], images.contiguous()[:, :4]):
        norm = torch.nn.BatchNorm2d(part.shape[1]) if part.dim() == 4 else torch.nn.BatchNorm3d(part.shape[1])

        def run(device: str, part: torch.Tensor = part, norm: torch.nn.Module = norm) -> tuple[torch.Tensor, ...]:
            x = torch.empty_strided(part.shape, part.stride(), device=device).copy_(part).requires_grad_()
            module = copy.deepcopy(norm).train(training).to(device)
            result = module(x)
            (result * result).sum().backward()
            assert x.grad is not None
            return result.detach(), x.grad, *(p.grad for p in module.parameters())

        for ours, theirs in zip(run(sky1), run("cpu"), strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_losses_of_images_are_row_major_whatever_the_order_of_their_classes(
    sky1: str, inference: bool, smoothing: float, weighted: bool
) -> None:
    images, classes = torch.rand(3, 5, 2, 4), torch.arange(24).reshape(4, 2, 3).remainder(5).permute(2, 1, 0)
    weights = torch.rand(5) if weighted else None
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
    with torch.inference_mode(inference):
        expected = torch.nn.functional.cross_entropy(images, classes, weights, **options)
        sent = (images.to(sky1), classes.to(sky1), None if weights is None else weights.to(sky1))
        result = torch.nn.functional.cross_entropy(*sent, **options)
        assert result.stride() == expected.stride()
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("size", [(1, 2, 1, 2), (2, 3, 4, 2), (1, 3, 1, 2, 2), (2, 1, 1)], ids=str)
def test_rms_norms_of_channels_last_images_stay_channels_last(
    sky1: str, size: tuple[int, ...], inference: bool
) -> None:
    x = torch.rand(size)
    with torch.inference_mode(inference):
        for part in (
            x.clone(),
            x.movedim(1, -1).contiguous().movedim(-1, 1),
            x.repeat_interleave(2, 1)[:, ::2],
            _reversed(x),
        ):
            for weight in (None, torch.rand(size[-1])):
                sent = torch.empty_strided(part.shape, part.stride(), device=sky1).copy_(part)
                expected = torch.nn.functional.rms_norm(part, size[-1:], weight)
                result = torch.nn.functional.rms_norm(sent, size[-1:], None if weight is None else weight.to(sky1))
                assert result.stride() == expected.stride()
                assert torch.equal(result.cpu(), expected)


def test_pixels_of_empty_images_are_unshuffled_as_locally_which_leaves_their_size(sky1: str) -> None:
    images = torch.rand(0, 2, 4, 4)
    for x in (
        images,
        images.contiguous(memory_format=torch.channels_last),
        torch.rand(2, 0, 4, 4),
        torch.rand(1, 0, 2),
        torch.rand(2, 3, 4, 0, 2),
    ):
        expected = torch.nn.functional.pixel_unshuffle(x, 2)
        result = torch.nn.functional.pixel_unshuffle(torch.empty_strided(x.shape, x.stride(), device=sky1), 2)
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize(("size", "stride"), [((0,), (0,)), ((0,), (1,)), ((1,), (5,)), ((4,), (3,)), ((2, 0), (1, 7))])
def test_vectors_that_are_rolled_lie_as_on_the_cpu(size: tuple[int, ...], stride: tuple[int, ...], sky1: str) -> None:
    ours, theirs = (torch.zeros(20, device=device).as_strided(size, stride).roll(-1) for device in (sky1, "cpu"))
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("stride", [(18, 3, 1), (1, 3, 1), (18, 1, 6), (6, 1, 6), (24, 4, 1)])
def test_gradients_of_group_norms_have_the_idle_strides_of_the_cpu(stride: tuple[int, ...], sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        x = torch.arange(40.0, device=device).as_strided((1, 6, 3), stride).detach().requires_grad_()
        result = torch.nn.functional.group_norm(x, 2)
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        found.append((result.stride(), gradient.stride(), gradient.cpu()))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
