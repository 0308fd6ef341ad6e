"""Rules for gradients of layers, held against PyTorch, for images and rows in any order of memory.

A rule that does not answer costs milliseconds for every new shape, so each must answer for what programs really do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

from tests.tensor.rule_checking import Checking, answer_of, mismatch

Layer = Callable[[torch.Tensor], torch.Tensor]
_CHANNELS = 8


def _weights(*size: int, learns: bool = True) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size).requires_grad_(learns)


_ROW, _FROZEN = _weights(_CHANNELS), _weights(_CHANNELS, learns=False)
_MATRIX = _weights(8, _CHANNELS, 3, 3)
_CLASSES = torch.zeros(1, dtype=torch.int64)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


IMAGES: dict[str, tuple[Layer, str]] = {
    "convolution": (lambda x: F.conv2d(x, _MATRIX, _ROW, padding=1), "convolution_backward"),
    "without bias": (lambda x: F.conv2d(x, _MATRIX, padding=1), "convolution_backward"),
    "of frozen weights": (lambda x: F.conv2d(x, _MATRIX.detach(), _FROZEN, padding=1), "convolution_backward"),
    "of the first layer": (lambda x: F.conv2d(x.detach(), _MATRIX, _ROW, padding=1), "convolution_backward"),
    "of halves": (lambda x: F.conv2d(x.bfloat16(), _MATRIX.bfloat16(), padding=1), "convolution_backward"),
    "of weights by channel": (
        lambda x: F.conv2d(x, _MATRIX.contiguous(memory_format=torch.channels_last)),
        "convolution_backward",
    ),
    "by depth": (lambda x: F.conv2d(x, _MATRIX[:, :1], padding=1, groups=8), "convolution_backward"),
    "transposed by depth": (
        lambda x: F.conv_transpose2d(x, _MATRIX[:, :1].contiguous(), groups=8),
        "convolution_backward",
    ),
    "transposed": (lambda x: F.conv_transpose2d(x, _MATRIX, _ROW, stride=2), "convolution_backward"),
    "batch norm": (
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), _ROW, _ROW, training=True),
        "native_batch_norm_backward",
    ),
    "batch norm, learned": (
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), _ROW, _FROZEN),
        "native_batch_norm_backward",
    ),
    "group norm": (lambda x: F.group_norm(x, 2, _ROW, _ROW), "native_group_norm_backward"),
    "group norm, frozen": (lambda x: F.group_norm(x, 2, _FROZEN, _FROZEN), "native_group_norm_backward"),
    "group norm, plain": (lambda x: F.group_norm(x, 2), "native_group_norm_backward"),
    "largest": (lambda x: F.max_pool2d(x, 2), "max_pool2d_with_indices_backward"),
    "mean": (lambda x: F.avg_pool2d(x, 2, padding=1), "avg_pool2d_backward"),
    "mean to a size": (lambda x: F.adaptive_avg_pool2d(x, 3), "_adaptive_avg_pool2d_backward"),
    "largest to a size": (lambda x: F.adaptive_max_pool2d(x, 2), "adaptive_max_pool2d_backward"),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), "upsample_nearest2d_backward"),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "upsample_bilinear2d_backward"),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), "upsample_bicubic2d_backward"),
    "bilinear, smoothed": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
        "_upsample_bilinear2d_aa_backward",
    ),
    "bicubic, smoothed": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True),
        "_upsample_bicubic2d_aa_backward",
    ),
    "padded": (lambda x: F.pad(x, (1, 2, 0, 1)), "constant_pad_nd"),
    "mirrored": (lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"), "reflection_pad2d_backward"),
    "repeated at its edges": (lambda x: F.pad(x, (1, 1, 2, 1), mode="replicate"), "replication_pad2d_backward"),
    "shuffled": (lambda x: F.pixel_shuffle(x, 2), "pixel_shuffle"),
    "unshuffled": (lambda x: F.pixel_unshuffle(x[..., :4, :4], 2), "pixel_unshuffle"),
    "in columns": (lambda x: F.unfold(x, 3), "col2im"),
    "sampled": (lambda x: F.grid_sample(x, _grid(x), align_corners=False), "grid_sampler_2d_backward"),
    "classes of pixels": (lambda x: F.cross_entropy(x, _CLASSES.expand(x[:, 0].shape)), "nll_loss2d_backward"),
    "joined parts": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), "cat"),
    "stacked": (lambda x: torch.stack(x.unbind(-1)[:2]), "stack"),
}  # fmt: skip


def _grid(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], 4, 5, 2, requires_grad=True)


ROWS: dict[str, tuple[Layer, str]] = {
    "layer norm": (lambda x: F.layer_norm(x, (8,), _ROW, _ROW), "native_layer_norm_backward"),
    "layer norm, frozen": (lambda x: F.layer_norm(x, (8,), _FROZEN, _FROZEN), "native_layer_norm_backward"),
    "layer norm, without bias": (lambda x: F.layer_norm(x, (8,), _ROW), "native_layer_norm_backward"),
    "layer norm of halves": (lambda x: F.layer_norm(x.bfloat16(), (8,)), "native_layer_norm_backward"),
    "layer norm of halves, learned": (
        lambda x: F.layer_norm(x.bfloat16(), (8,), _ROW, _ROW),
        "native_layer_norm_backward",
    ),
    "squares": (lambda x: F.mse_loss(x, x.detach().contiguous()), "mse_loss_backward"),
    "smooth squares": (lambda x: F.smooth_l1_loss(x, x.detach(), reduction="none"), "smooth_l1_loss_backward"),
    "logarithms": (F.logsigmoid, "log_sigmoid_backward"),
    "transposed convolution of rows": (
        lambda x: F.conv_transpose1d(x.transpose(1, 2).contiguous(), _MATRIX[..., 0].contiguous(), _ROW, stride=2),
        "convolution_backward",
    ),
    "with another part": (lambda x: x.contiguous().select_scatter(x[:, 0] * 2, 1, 0), "select_scatter"),
    "layer norm, plain": (lambda x: F.layer_norm(x, (8,)), "native_layer_norm_backward"),
    "dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], "native_dropout_backward"),
    "attention": (
        lambda x: F.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x)),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "convolution of rows": (
        lambda x: F.conv1d(x.transpose(1, 2), _MATRIX[..., 0].contiguous(), _ROW, padding=1),
        "convolution_backward",
    ),
    "batch norm of rows": (
        lambda x: F.batch_norm(x.transpose(1, 2), None, None, _ROW, _ROW, training=True),
        "native_batch_norm_backward",
    ),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, -1), "_safe_softmax"),
    "embedding": (
        lambda x: F.embedding((x[..., 0] * 0).long(), _MATRIX[..., 0, 0].contiguous()),
        "embedding_dense_backward",
    ),
    "chances": (lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()), "binary_cross_entropy_backward"),
    "weighted chances": (
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach().contiguous() * 0, pos_weight=_FROZEN.abs()),
        "binary_cross_entropy_with_logits",
    ),
    "soft margin": (lambda x: F.soft_margin_loss(x, x.detach().sign()), "soft_margin_loss_backward"),
    "distances": (lambda x: torch.cdist(x, x), "_cdist_backward"),
    "diagonal": (lambda x: x.diagonal(dim1=-2, dim2=-1), "diagonal_backward"),
    "windows": (lambda x: x.unfold(-1, 2, 1), "unfold_backward"),
    "of its largest": (lambda x: torch.maximum(x.max(), x.min()), "logical_or_"),
    "between bounds": (lambda x: x.clamp(-0.5, 0.5), "logical_and_"),
    "turned around": (lambda x: x.roll(1, 1), "roll"),
    "on a diagonal": (lambda x: torch.diag_embed(x, 1, 0, 2), "diag_embed"),
    "halves": (F.glu, "glu_backward"),
    "squares with doubles": (lambda x: F.mse_loss(x, x.detach().double()), "mse_loss_backward"),
    "smooth squares with doubles": (
        lambda x: F.smooth_l1_loss(x, x.detach().double(), reduction="none"),
        "smooth_l1_loss_backward",
    ),
    "soft margin with doubles": (lambda x: F.soft_margin_loss(x, x.detach().double()), "soft_margin_loss_backward"),
    "by channel": (lambda x: F.prelu(x.transpose(1, 2), _ROW), "_prelu_kernel_backward"),
    **{
        f"activation {name}": (getattr(torch, name, None) or getattr(F, name), f"{op or name}_backward")
        for name, op in {
            "mish": "", "leaky_relu": "", "softplus": "", "hardswish": "", "hardtanh": "", "hardsigmoid": "",
            "softshrink": "", "hardshrink": "", "logit": "", "elu": "", "selu": "elu", "celu": "elu",
            "relu6": "hardtanh",
        }.items()
    },
}  # fmt: skip


def _orders(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in several orders of memory, with gaps, alone in its batch, and with idle strides."""
    yield x
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield x.transpose(1, -1).contiguous().transpose(1, -1)
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x[:1]
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)
        yield x[:1].contiguous(memory_format=torch.channels_last)
        yield torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[:, : x.shape[1]]


def _gradients(like: torch.Tensor) -> Iterator[torch.Tensor]:
    yield torch.ones(like.shape)
    yield torch.ones(()).expand(like.shape)
    if like.dim() > 1:
        yield torch.ones(like.shape[::-1]).permute(*reversed(range(like.dim())))
    if like.dim() == 4:
        yield torch.ones(like.shape).contiguous(memory_format=torch.channels_last)


def _problems(layer: Layer, x: torch.Tensor) -> Checking:
    checking = Checking()
    for inputs in _orders(x):
        shape = layer(inputs.detach().requires_grad_())
        for gradient in _gradients(shape):
            leaf = torch.empty_like(inputs).copy_(inputs) if inputs.is_contiguous() else inputs.detach()
            with checking:
                result = layer(leaf.requires_grad_())
                if result.requires_grad:
                    result.backward(gradient.to(result.dtype))
    return checking


@pytest.mark.parametrize("size", [(2, 8, 6, 6), (3, 8, 4, 9)])
@pytest.mark.parametrize("case", IMAGES)
def test_gradients_of_images_look_as_pytorch_makes_them(case: str, size: tuple[int, ...]) -> None:
    layer, op = IMAGES[case]
    checking = _problems(layer, torch.linspace(-2, 2, torch.Size(size).numel()).view(size))
    assert not checking.wrong
    assert checking.answered.get("aten::" + op, 0) >= 4


def _takes_targets_of_another_dtype(op: torch._ops.OpOverloadPacket) -> bool:
    try:
        op(torch.ones(()), torch.ones(1), torch.ones(1, dtype=torch.float64), 1)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("size", [(2, 6, 8), (3, 9, 8)])
@pytest.mark.parametrize("case", ROWS)
def test_gradients_of_rows_look_as_pytorch_makes_them(case: str, size: tuple[int, ...]) -> None:
    layer, op = ROWS[case]
    if case == "squares with doubles" and not _takes_targets_of_another_dtype(torch.ops.aten.mse_loss_backward):
        pytest.skip("torch 2.11 has no such gradient")
    checking = _problems(layer, torch.linspace(0.05, 0.95, torch.Size(size).numel()).view(size))
    assert not checking.wrong
    assert checking.answered.get("aten::" + op, 0) >= 4


VOLUMES: dict[str, tuple[Layer, str]] = {
    "largest": (lambda x: F.max_pool3d(x, (2, 1, 2), padding=(1, 0, 1)), "max_pool3d_with_indices_backward"),
    "mean": (lambda x: F.avg_pool3d(x, 2, padding=1), "avg_pool3d_backward"),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), "upsample_nearest3d_backward"),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), "upsample_trilinear3d_backward"),
}


@pytest.mark.parametrize("size", [(2, 8, 4, 6, 5), (1, 8, 4, 3, 2), (2, 1, 4, 2, 3)])
@pytest.mark.parametrize("case", VOLUMES)
def test_gradients_of_volumes_look_as_pytorch_makes_them(case: str, size: tuple[int, ...]) -> None:
    layer, op = VOLUMES[case]
    checking = _problems(layer, torch.linspace(-2, 2, torch.Size(size).numel()).view(size))
    assert not checking.wrong
    assert checking.answered.get("aten::" + op, 0) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 3)])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_come_in_the_format_of_images_or_weights(
    dtype: torch.dtype, kernel: tuple[int, int], groups: int
) -> None:
    """With images of one pixel and of one channel, alone in their batch or not: both formats fit these."""
    answered = 0
    for channels, height, width in ((4, 6, 5), (1, 6, 5), (4, 1, 5), (4, 1, 1)):
        shared = groups if channels % groups == 0 else 1
        images = torch.zeros(2, channels, height, width, dtype=dtype)
        weights = torch.zeros(8, channels // shared, *kernel, dtype=dtype)
        for x, weight in itertools.product(_orders(images), _orders(weights)):
            numbers = [1, 1], [1, 1], [1, 1]
            args = (x, weight, torch.zeros(len(weight), dtype=dtype), *numbers, False, [0, 0], shared)
            if len(weight) % shared == 0:
                assert mismatch("convolution", args, {}) is None
                answered += answer_of("convolution", args, {}) is not None
    assert answered > 150


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_only_gradients_that_are_asked_for_exist(mask: tuple[bool, bool, bool]) -> None:
    x, weight, numbers = torch.ones(2, 3, 5, 5), torch.ones(4, 3, 3, 3), ([1, 1], [0, 0], [1, 1])
    args = (torch.ones(2, 4, 3, 3), x, weight, [4], *numbers, False, [0, 0], 1, list(mask))
    answer = answer_of("convolution_backward", args, {})
    results = torch.ops.aten.convolution_backward(*args)
    given = [result is not None for result in results]
    assert (answer is None) == (mask[1:] == (False, True))
    assert answer is None or [meta is not None for meta, _ in answer] == given == list(mask)


def test_gradients_of_slopes_have_the_size_of_all_three() -> None:
    """Batches of scalars have fewer dimensions than the others, under `torch.func.vmap`."""
    sizes = [(), (1,), (2,), (3, 2), (1, 2), (3, 1), (4, 1, 2)]
    for args in itertools.product([torch.ones(size) for size in sizes], repeat=3):
        assert mismatch("_prelu_kernel_backward", args, {}) is None
        assert answer_of("_prelu_kernel_backward", args, {}) is not None
