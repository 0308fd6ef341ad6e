"""Operations of every kind on shapes that never came before: what no cache helps with, here or on the worker."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from _figures import interleaved, value_at_most
from _links import Bench

Op = Callable[[torch.Tensor], object]
_INDEX = torch.tensor([0, 1, 0])
_TWO = torch.tensor(2.0)


def operations(device: str) -> dict[str, Op]:
    """Operations by kind, on a float32 tensor of four dimensions, each at least 2."""
    index = _INDEX.to(device)
    weight = torch.ones(3, 2, device=device)
    return {
        "x[1:, ::2]": lambda x: x[1:, ::2],
        "x[..., -1]": lambda x: x[..., -1],
        "x[:, None]": lambda x: x[:, None],
        "x[:, index]": lambda x: x[:, index],
        "x[index]": lambda x: x[index],
        "x[index, 1:]": lambda x: x[index, 1:],
        "x[index, index]": lambda x: x[index, index],
        "cat, last dim": lambda x: torch.cat((x, x), -1),
        "cat, dim 1": lambda x: torch.cat((x, x, x), 1),
        "stack": lambda x: torch.stack((x, x), 1),
        "sum(), all": lambda x: x.sum(),
        "sum((1, 2))": lambda x: x.sum((1, 2)),
        "mean(-1, keepdim)": lambda x: x.mean(-1, keepdim=True),
        "amax((0, 2))": lambda x: x.amax((0, 2)),
        "max(dim)": lambda x: x.max(1),
        "max(), all": lambda x: x.max(),
        "var(-1)": lambda x: x.var(-1),
        "std(1)": lambda x: x.std(1),
        "norm(dim=1)": lambda x: x.norm(dim=1),
        "argmax(-1)": lambda x: x.argmax(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "prod(1)": lambda x: x.prod(1),
        "any(-1)": lambda x: x.any(-1),
        "x + row": lambda x: x + x[0, 0, 0],
        "x * column": lambda x: x * x[..., :1],
        "x - x.mT": lambda x: x - x.mT.mT,
        "broadcast both": lambda x: x[:, :1] + x[:1],
        "x + 1": lambda x: x + 1,
        "x / 2": lambda x: x / 2,
        "x > 0": lambda x: x > 0,
        "x ** 2": lambda x: x**2,
        "x.int() + 1.5": lambda x: x.int() + 1.5,
        "x + x.double()": lambda x: x + x.double(),
        "where": lambda x: torch.where(x > 0, x, 0.0),
        "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
        "clamp": lambda x: x.clamp(0, 1),
        "gather": lambda x: x.gather(1, x.long().clamp(0, 1)),
        "scatter": lambda x: x.scatter(1, x.long().clamp(0, 1), x),
        "index_select": lambda x: x.index_select(1, index),
        "x[:, 0] = 1": lambda x: x.clone()[:, 0].fill_(1),
        "x @ x.mT": lambda x: x @ x.mT,
        "x @ vector": lambda x: x @ x[0, 0, 0],
        "matrix @ matrix": lambda x: x[0, 0] @ x[0, 0].t(),
        "bmm": lambda x: torch.bmm(x[0], x[0].mT),
        "einsum": lambda x: torch.einsum("abcd,abed->abce", x, x),
        "permute": lambda x: x.permute(3, 1, 0, 2),
        "permute, contiguous": lambda x: x.permute(3, 1, 0, 2).contiguous(),
        "transpose, reshape": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1),
        "flatten": lambda x: x.flatten(1),
        "view": lambda x: x.view(-1, x.shape[-1]),
        "expand": lambda x: x[:, :1].expand(x.shape),
        "unsqueeze, squeeze": lambda x: x.unsqueeze(2).squeeze(2),
        "chunk": lambda x: x.chunk(2, 1),
        "split": lambda x: x.split(1, -1),
        "unbind": lambda x: x.unbind(1),
        "narrow": lambda x: x.narrow(1, 1, 1),
        "roll": lambda x: x.roll(1, 2),
        "flip": lambda x: x.flip(1, 3),
        "repeat": lambda x: x.repeat(1, 2, 1, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
        "pad": lambda x: F.pad(x, (1, 2)),
        "pad, reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        "max_pool2d": lambda x: F.max_pool2d(x, 2),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "interpolate": lambda x: F.interpolate(x, scale_factor=2),
        "conv2d": lambda x: F.conv2d(x, x[:2, :, :2, :2]),
        "linear": lambda x: F.linear(x[..., :2], weight),
        "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
        "group_norm": lambda x: F.group_norm(x, 1),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(1),
        "gelu": lambda x: F.gelu(x),
        "embedding": lambda x: F.embedding(x.long().clamp(0, 1), weight),
        "cross_entropy": lambda x: F.cross_entropy(x[0, 0], x[0, 0, :, 0].long().clamp(0, 1)),
        "mse_loss": lambda x: F.mse_loss(x, x),
        "cumsum": lambda x: x.cumsum(1),
        "topk": lambda x: x.topk(1),
        "sort": lambda x: x.sort(-1),
        "tril": lambda x: x.tril(),
        "zeros_like": lambda x: torch.zeros_like(x),
        "new_zeros": lambda x: x.new_zeros(x.shape[0], 3),
        "to(float64)": lambda x: x.to(torch.float64),
        "clone": lambda x: x.clone(),
        "x[0, 1]": lambda x: x[0, 1],
        "x[:-1]": lambda x: x[:-1],
        "x[:, index] = 1": lambda x: x.clone().__setitem__((slice(None), index), 1.0),
        "x[mask] = 0": lambda x: x.clone().masked_fill_(x > 0, 0),
        "x[:, :1] = 0": lambda x: x.clone()[:, :1].zero_(),
        "cat of unequal parts": lambda x: torch.cat((x, x[:, :1]), 1),
        "cat of two dtypes": lambda x: torch.cat((x.int(), x)),
        "sum of a transpose": lambda x: x.mT.sum(1),
        "mean of a slice": lambda x: x[:, 1:].mean((1, 2)),
        "sum of a mask": lambda x: (x > 0).sum(),
        "sum of integers": lambda x: x.int().sum(1),
        "sum in float64": lambda x: x.sum(1, dtype=torch.float64),
        "var_mean": lambda x: torch.var_mean(x, 1),
        "aminmax": lambda x: x.aminmax(),
        "count_nonzero": lambda x: x.count_nonzero(1),
        "argmax(), all": lambda x: x.argmax(),
        "median": lambda x: x.median(1),
        "cummax": lambda x: x.cummax(1),
        "x * 0-dim": lambda x: x * x[0, 0, 0, 0],
        "x + 0-dim of the CPU": lambda x: x + _TWO,
        "x + 1j": lambda x: x + 1j,
        "2 ** x": lambda x: 2**x,
        "x ** x": lambda x: x**x,
        "x // 2": lambda x: x // 2,
        "x % 3": lambda x: x % 3,
        "hypot": lambda x: torch.hypot(x, x),
        "logaddexp": lambda x: torch.logaddexp(x, x),
        "where, rows": lambda x: torch.where(x > 0, x, x[:1]),
        "clamp between tensors": lambda x: x.clamp(x, x),
        "isfinite": lambda x: x.isfinite(),
        "x.int() & 1": lambda x: x.int() & 1,
        "x.int() << 1": lambda x: x.int() << 1,
        "sign": lambda x: x.sign(),
        "mish": lambda x: F.mish(x),
        "silu": lambda x: F.silu(x),
        "linear, of a slice": lambda x: F.linear(x[..., :2], weight),
        "x @ matrix": lambda x: x @ x[0, 0].t(),
        "x.mT @ x": lambda x: x.mT @ x,
        "einsum, matrices": lambda x: torch.einsum("ij,kj->ik", x[0, 0], x[0, 0]),
        "baddbmm": lambda x: torch.baddbmm(x[0, :, :1, :1], x[0], x[0].mT),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
        "softmax of a transpose": lambda x: x.mT.softmax(-1),
        "softmax in float64": lambda x: x.softmax(-1, dtype=torch.float64),
        "normalize": lambda x: F.normalize(x, dim=1),
        "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "conv2d, strided": lambda x: F.conv2d(x, x[:1, :, :1, :1], stride=2),
        "conv1d": lambda x: F.conv1d(x[0], x[0].new_ones(2, x.shape[2], 1)),
        "pad, four sides": lambda x: F.pad(x, (1, 2, 0, 1)),
        "pad, circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
        "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "embedding, new table": lambda x: F.embedding(index, x[0, 0]),
        "one_hot": lambda x: F.one_hot(x.long().clamp(0, 1), 2),
        "squeeze()": lambda x: x[:1].squeeze(),
        "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1),
        "unfold": lambda x: x.unfold(1, 2, 1),
        "index_add": lambda x: x.index_add(1, index[:1], x[:, :1]),
        "scatter_add": lambda x: x.scatter_add(1, x.long().clamp(0, 1), x),
        "gather, expanded": lambda x: x.gather(1, index[:1].view(1, 1, 1, 1).expand(x.shape[0], 1, *x.shape[2:])),
        "rotate halves": lambda x: torch.cat((-x[..., 1:], x[..., :1]), -1),
        "causal mask": lambda x: x.masked_fill(torch.ones(x.shape[-2:], device=device).triu(1) > 0, -1.0),
        "zeros": lambda x: torch.zeros(x.shape, device=device),
        "arange": lambda x: torch.arange(x.shape[-1], device=device),
        "randn": lambda x: torch.randn(x.shape, device=device),
        "add_": lambda x: x.clone().add_(x[:1]),
        "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, x),
        "x[:, index], 32 bits": lambda x: x[:, index.int()],
        "cat of masks": lambda x: torch.cat((x > 0, x < 5), 1),
        "cat of transposed": lambda x: torch.cat((x.mT, x.mT), -1),
        "cat of channels-last": lambda x: torch.cat([x.contiguous(memory_format=torch.channels_last)] * 2),
        "cat with nothing": lambda x: torch.cat((x.new_zeros(0), x[0, 0, 0])),
        "stack of integers": lambda x: torch.stack((x.int(), x.int())),
        "stack of masks": lambda x: torch.stack((x > 0, x < 5), -1),
        "stack of views": lambda x: torch.stack((x[:, 0], x[:, 1])),
        "stack of transposed": lambda x: torch.stack((x.mT, x.mT), 1),
        "stack of two dtypes": lambda x: torch.stack((x.int(), x)),
        "cumsum of a mask": lambda x: (x > 0).long().cumsum(-1) - 1,
        "cumsum in float64": lambda x: x.int().cumsum(1, dtype=torch.float64),
        "argmax of integers": lambda x: x.int().argmax(-1),
        "amax of integers": lambda x: x.int().amax(1),
        "amin of a mask": lambda x: (x > 0).amin((0, 2)),
        "amax(), all": lambda x: x.amax(),
        "max of a transpose": lambda x: x.mT.max(),
        "prod of integers": lambda x: x.int().prod(1),
        "prod of a slice": lambda x: x[:, 1:].prod(),
        "sum as int32": lambda x: x.int().sum(0, dtype=torch.int32),
        "trace": lambda x: x[0, 0].trace(),
        "dist": lambda x: torch.dist(x, x + 1),
        "sort, stable": lambda x: x.sort(stable=True),
        "isin": lambda x: torch.isin(x.long(), index),
        "searchsorted": lambda x: torch.searchsorted(x[0, 0].contiguous(), x[0, 0].contiguous()),
        "take of a slice": lambda x: x[:, 1:].take(index),
        "scatter into integers": lambda x: x.int().scatter(1, x.long().clamp(0, 1), 1),
        "scatter_reduce": lambda x: x.scatter_reduce(1, x.long().clamp(0, 1), x, "amax"),
        "index_fill": lambda x: x.index_fill(1, index, 0.0),
        "masked_fill of integers": lambda x: x.long().masked_fill(x > 0, 7),
        "masked_fill of a mask": lambda x: (x > 0).masked_fill(x > 0, False),
        "masked_fill_ of a mask": lambda x: (x > 0).masked_fill_(x > 1, False),
        "masked_scatter": lambda x: x.masked_scatter(x > 0, x),
        "mask &= mask": lambda x: (x > 0).logical_and_(x < 2).__iand__(x < 3),
        "x.int() ** 2": lambda x: x.int() ** 2,
        "2 ** x.int()": lambda x: 2 ** x.int(),
        "gcd": lambda x: torch.gcd(x.int(), x.int()),
        "~x.int()": lambda x: ~x.int(),
        "clamp of integers by fractions": lambda x: x.int().clamp(0.5, 3),
        "isclose": lambda x: torch.isclose(x, x),
        "nanmean": lambda x: x.nanmean(1),
        "logsigmoid": lambda x: F.logsigmoid(x),
        "pad, cut": lambda x: F.pad(x, (-1, 0)),
        "pad of a slice": lambda x: F.pad(x[:, 1:], (1, 1)),
        "pad of a transpose": lambda x: F.pad(x.mT, (1, 1)),
        "pad of channels-last": lambda x: F.pad(x.contiguous(memory_format=torch.channels_last), (1, 1)),
        "pad, replicate, volumes": lambda x: F.pad(x[None], (1, 1, 1, 1, 1, 1), mode="replicate"),
        "conv2d, one by one, bias": lambda x: F.conv2d(x, x.new_ones(2, x.shape[1], 1, 1), x.new_ones(2)),
        "conv2d, depthwise": lambda x: F.conv2d(x, x.new_ones(x.shape[1], 1, 1, 1), groups=x.shape[1]),
        "conv2d, batch of one": lambda x: F.conv2d(x[:1], x.new_ones(2, x.shape[1], 1, 1)),
        "conv3d": lambda x: F.conv3d(x[None], x.new_ones(2, x.shape[0], 1, 1, 1)),
        "max_pool1d": lambda x: F.max_pool1d(x[0], 2),
        "fold": lambda x: F.fold(F.unfold(x, 2), x.shape[2:], 2),
        "interpolate, lines": lambda x: F.interpolate(x[0], scale_factor=2, mode="linear"),
        "interpolate, exact": lambda x: F.interpolate(x, size=(3, 2), mode="nearest-exact"),
        "interpolate, antialias": lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
        "layer_norm, bfloat16": lambda x: F.layer_norm(x.bfloat16(), x.shape[-1:]),
        "addmm with a matrix": lambda x: torch.addmm(x.new_zeros(x.shape[2], x.shape[2]), x[0, 0], x[0, 0].t()),
        "embedding, slices": lambda x: F.embedding(x.long().clamp(0, 1)[:, 1:], weight.t()),
        "cross_entropy of images": lambda x: F.cross_entropy(x, x[:, 0].long().clamp(0, 1)),
        "mse_loss of slices": lambda x: F.mse_loss(x[:, 1:], x[:, :-1]),
        "ctc_loss": lambda x: F.ctc_loss(x[0].log_softmax(-1), index[:1].expand(x.shape[2], 1), *_lengths(x)),
        "arange, 32 bits": lambda x: torch.arange(x.shape[-1], dtype=torch.int32, device=device),
        "hann_window": lambda x: torch.hann_window(x.shape[-1], device=device),
        "full_like, mask": lambda x: torch.full_like(x, True, dtype=torch.bool),
        "addcmul": lambda x: torch.addcmul(x, x, x),
        "lerp": lambda x: torch.lerp(x, x, 0.5),
        **_layers(device),
        **_changes(device),
        **_algebra(device),
        **_less_usual(device),
    }


def _layers(device: str) -> dict[str, Op]:
    """Layers, activations and losses of networks, in half precision and other formats too."""
    gated, remembering = torch.nn.GRUCell(2, 3).to(device), torch.nn.LSTMCell(2, 3).to(device)
    return {
        "gru cell": lambda x: gated(x[0, 0, :, :2]),
        "lstm cell": lambda x: remembering(x[0, 0, :, :2])[0],
        "conv2d, bfloat16": lambda x: F.conv2d(x.bfloat16(), x.new_ones(2, x.shape[1], 1, 1, dtype=torch.bfloat16)),
        "conv2d of channels-last": lambda x: F.conv2d(
            x.contiguous(memory_format=torch.channels_last), x.new_ones(2, x.shape[1], 1, 1)
        ),
        "conv2d, same": lambda x: F.conv2d(x, x.new_ones(2, x.shape[1], 3, 3), padding="same"),
        "conv_transpose1d": lambda x: F.conv_transpose1d(x[0], x.new_ones(x.shape[2], 2, 2)),
        "conv_transpose2d": lambda x: F.conv_transpose2d(x, x.new_ones(x.shape[1], 2, 2, 2), stride=2),
        "linear, bias": lambda x: F.linear(x, x.new_ones(3, x.shape[-1]), x.new_ones(3)),
        "x @ x.mT, bfloat16": lambda x: x.bfloat16() @ x.bfloat16().mT,
        "softmax, bfloat16": lambda x: x.bfloat16().softmax(-1),
        "attention, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "attention with a mask": lambda x: F.scaled_dot_product_attention(
            x, x, x, attn_mask=x.new_zeros(x.shape[-2], x.shape[-2])
        ),
        "attention, bfloat16": lambda x: F.scaled_dot_product_attention(x.bfloat16(), x.bfloat16(), x.bfloat16()),
        "max_pool3d": lambda x: F.max_pool3d(x, 2),
        "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
        "avg_pool1d": lambda x: F.avg_pool1d(x[0], 2),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
        "interpolate, bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        "interpolate, trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
        "grid_sample": lambda x: F.grid_sample(x, x.new_zeros(x.shape[0], 3, 3, 2), align_corners=False),
        "instance_norm": lambda x: F.instance_norm(x),
        "batch_norm, learned": lambda x: F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])),
        "layer_norm, affine": lambda x: F.layer_norm(x, x.shape[-1:], x.new_ones(x.shape[-1]), x[0, 0, 0]),
        "group_norm, affine": lambda x: F.group_norm(x, 1, x.new_ones(x.shape[1]), x.new_ones(x.shape[1])),
        "glu": lambda x: F.glu(x.repeat(1, 1, 1, 2)),
        "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
        "softplus": lambda x: F.softplus(x),
        "leaky_relu": lambda x: F.leaky_relu(x),
        "relu_": lambda x: x.clone().relu_(),
        "prelu": lambda x: F.prelu(x, x.new_ones(1)),
        "dropout": lambda x: F.dropout(x, 0.5, True),
        "cosine_similarity": lambda x: F.cosine_similarity(x, x),
        "l1_loss": lambda x: F.l1_loss(x, x),
        "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
        "kl_div": lambda x: F.kl_div(x, x, reduction="batchmean"),
        "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.sign().detach()),
        "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x),
        "cross_entropy, smoothed": lambda x: F.cross_entropy(
            x[0, 0], x[0, 0, :, 0].long().clamp(0, 1), label_smoothing=0.1
        ),
    }


def _changes(device: str) -> dict[str, Op]:
    """Operations that write into their targets, and what copies, draws and rearranges."""
    index = _INDEX[:2].to(device)
    return {
        "copy_": lambda x: x.clone().copy_(x),
        "copy_ of integers": lambda x: x.clone().copy_(x.int()),
        "x[..., ::2] = 0": lambda x: x.clone().__setitem__((..., slice(None, None, 2)), 0.0),
        "x[:1] = x": lambda x: x.clone().__setitem__(slice(0, 1), x[1:2]),
        "mul_": lambda x: x.clone().mul_(2.0),
        "addcmul_": lambda x: x.clone().addcmul_(x, x),
        "lerp_": lambda x: x.clone().lerp_(x, 0.5),
        "clamp_": lambda x: x.clone().clamp_(0, 1),
        "sqrt_": lambda x: x.clone().sqrt_(),
        "tril_": lambda x: x.clone().tril_(),
        "index_put_, added": lambda x: x.clone().index_put_((index,), x[0, 0, 0], accumulate=True),
        "scatter_add_": lambda x: x.clone().scatter_add_(1, x.long().clamp(0, 1), x),
        "scatter_reduce_": lambda x: x.clone().scatter_reduce_(1, x.long().clamp(0, 1), x, "sum"),
        "index_copy_": lambda x: x.clone().index_copy_(0, index, x[:2]),
        "select_scatter": lambda x: x.select_scatter(x[:, 0], 1, 0),
        "uniform_": lambda x: x.clone().uniform_(),
        "bernoulli": lambda x: torch.bernoulli(x),
        "randn_like": lambda x: torch.randn_like(x),
        "randint": lambda x: torch.randint(0, 5, x.shape, device=device),
        "empty_like": lambda x: torch.empty_like(x),
        "eye": lambda x: torch.eye(x.shape[-1], device=device),
        "full": lambda x: torch.full(x.shape, 1.0, device=device),
        "bfloat16()": lambda x: x.bfloat16(),
        "bool()": lambda x: x.bool(),
        "_foreach_add": lambda x: torch._foreach_add([x, x, x], 1.0),
        "_foreach_mul_": lambda x: torch._foreach_mul_([x.clone(), x.clone()], 2.0),
        "_foreach_norm": lambda x: torch._foreach_norm([x, x, x]),
        "take_along_dim": lambda x: x.take_along_dim(x.long().clamp(0, 1), 1),
        "split of sizes": lambda x: x.split([1, x.shape[1] - 1], 1),
        "movedim": lambda x: x.movedim(0, -1),
        "meshgrid": lambda x: torch.meshgrid(x[0, 0, 0], x[0, 0, :, 0], indexing="ij"),
        "diag_embed": lambda x: x.diag_embed(),
        "nan_to_num": lambda x: x.nan_to_num(),
        "bucketize": lambda x: torch.bucketize(x, x[0, 0, 0]),
        "isin, a number": lambda x: torch.isin(x.long(), 1),
        "cumprod": lambda x: x.cumprod(1),
        "diff": lambda x: x.diff(dim=1),
    }


def _algebra(device: str) -> dict[str, Op]:
    """Products, complex numbers, linear algebra and Fourier transforms."""
    return {
        "outer": lambda x: torch.outer(x[0, 0, 0], x[0, 0, 1]),
        "kron": lambda x: torch.kron(x[0, 0], x[0, 0]),
        "cdist": lambda x: torch.cdist(x[0], x[0]),
        "dot": lambda x: x[0, 0, 0].dot(x[0, 0, 1]),
        "addmv": lambda x: torch.addmv(x[0, 0, :, 0], x[0, 0], x[0, 0, 0]),
        "addbmm": lambda x: torch.addbmm(x.new_zeros(x.shape[2], x.shape[2]), x[0], x[0].mT),
        "tensordot": lambda x: torch.tensordot(x, x, dims=([3], [3])),
        "cross product": lambda x: torch.linalg.cross(
            x[:1].expand(3, *x.shape[1:]), x[:1].expand(3, *x.shape[1:]), dim=0
        ),
        "complex": lambda x: torch.complex(x, x),
        "x * x, complex": lambda x: torch.complex(x, x) * torch.complex(x, x),
        "abs, complex": lambda x: torch.complex(x, x).abs(),
        "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(torch.stack((x, x), -1))),
        "rfft": lambda x: torch.fft.rfft(x),
        "irfft": lambda x: torch.fft.irfft(torch.complex(x, x)),
        "inverse": lambda x: torch.linalg.inv_ex(torch.eye(x.shape[-1], device=device)),
        "cholesky": lambda x: torch.linalg.cholesky_ex(torch.eye(x.shape[-1], device=device)),
        "solve": lambda x: torch.linalg.solve_ex(torch.eye(x.shape[-1], device=device), x[0, 0].t()),
        "qr": lambda x: torch.linalg.qr(x[0, 0])[0],
        "norm of matrices": lambda x: torch.linalg.matrix_norm(x),
        "singular values": lambda x: torch.linalg.svdvals(x),
        "lu": lambda x: torch.linalg.lu(x[0, 0])[1],
        "fft along another dimension": lambda x: torch.fft.fft(torch.complex(x, x), dim=1),
        "rfft2": lambda x: torch.fft.rfft2(x),
        "real part of a conjugate": lambda x: torch.complex(x, x).conj().real,
        "exp, complex": lambda x: torch.complex(x, x).exp(),
        "rot90": lambda x: x.rot90(1, (2, 3)),
        "addr": lambda x: torch.addr(x[0, 0], x[0, 0, :, 0], x[0, 0, 0]),
        "frexp": lambda x: torch.frexp(x),
        "transpose_": lambda x: x.clone().transpose_(1, 2),
        "add(out=)": lambda x: torch.add(x.detach(), 1, out=x.detach().clone()),
        "embedding_bag": lambda x: F.embedding_bag(x[0, 0].long().clamp(0, 1), x.new_ones(2, 3)),
        "group_norm, bfloat16": lambda x: F.group_norm(x.bfloat16(), 1),
        "max_pool2d, ceil": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        "standardize": lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-5),
    }


def _less_usual(device: str) -> dict[str, Op]:
    """Kinds that other people's measurements had, and this one had not."""
    index = _INDEX.to(device)
    return {
        "x[:, index], complex": lambda x: torch.complex(x, x)[:, index],
        "x ** 2, complex": lambda x: torch.complex(x, x) ** 2,
        "mean, complex": lambda x: torch.complex(x, x).mean(),
        "normal": lambda x: torch.normal(x, x.abs()),
        "empty_permuted": lambda x: torch.empty_permuted(x.shape, (0, 2, 3, 1), device=device),
        "baddbmm_": lambda x: x.new_zeros(x.shape[1], x.shape[2], x.shape[2]).baddbmm_(x[0], x[0].mT),
        "scatter_, multiplied": lambda x: x.clone().scatter_(1, x.long().clamp(0, 1), 2.0, reduce="multiply"),
        "pinv": lambda x: torch.linalg.pinv(x[0]),
        "histogram": lambda x: torch.histogram(x.flatten(), 4),
        "affine_grid": lambda x: F.affine_grid(x.new_zeros(x.shape[0], 2, 3), list(x.shape), align_corners=False),
        "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=1),
        "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x[0, 0], x[0, 0].long().clamp(0, 1)),
        "huber_loss": lambda x: F.huber_loss(x, x),
        "x[index, :, index]": lambda x: x[index, :, index],
        "renorm": lambda x: x.renorm(2, 0, 1.0),
        "grid_sample, nearest": lambda x: F.grid_sample(
            x, x.new_zeros(x.shape[0], 2, 5, 2), mode="nearest", align_corners=True
        ),
        "conv_transpose3d": lambda x: F.conv_transpose3d(x[None], x.new_ones(x.shape[0], 2, 1, 2, 2)),
    }


def _lengths(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """The lengths of inputs and targets for `ctc_loss`, of a batch whose targets have one label each."""
    return [x.shape[1]] * x.shape[2], [1] * x.shape[2]


WITH_GRADIENT = (
    "x[1:, ::2]", "x[:, index]", "cat, last dim", "stack", "sum((1, 2))", "mean(-1, keepdim)", "var(-1)", "x + row",
    "x * column", "where", "masked_fill", "gather", "x @ x.mT", "transpose, reshape", "chunk", "pad", "max_pool2d",
    "linear", "layer_norm", "softmax", "gelu", "cumsum", "topk", "conv2d, one by one, bias", "conv3d",
    "batch_norm", "group_norm", "logsigmoid", "mse_loss of slices", "cross_entropy of images",
    "stack of views", "fold", "layer_norm, bfloat16",
)  # fmt: skip


def _shapes() -> Iterator[tuple[int, ...]]:
    every = list(itertools.product(range(2, 14), repeat=4))
    random.Random(1).shuffle(every)
    return itertools.cycle(every)


_next_shape = _shapes()


def _inputs(device: str, count: int, *, learns: bool = False) -> list[torch.Tensor]:
    base = torch.ones(13**4, device=device)
    made = []
    for size in itertools.islice(_next_shape, count):
        length = size[0] * size[1] * size[2] * size[3]
        made.append(base[:length].view(size).detach().clone().requires_grad_(learns))
    return made


def _once(op: Op, inputs: list[torch.Tensor], *, learns: bool) -> float:
    started = time.perf_counter()
    for x in inputs:
        result = op(x)
        if learns:
            first = result[0] if isinstance(result, list | tuple) else result
            first.sum().backward()
    return (time.perf_counter() - started) / len(inputs) * 1e6


def never_seen_kinds(bench: Bench) -> None:
    """Microseconds of an operation on shapes that never came before, by kind; forward, and forward and backward.

    Most kinds are several operations: `x + x[0, 0, 0]` selects three times. The time of a kind is divided by the number
    of operations that the worker is sent for it, on both sides. An operation may take 30 us, and 3 us for each further
    tensor that it gives, which PyTorch makes an object of; where local PyTorch alone takes as long, as for attention,
    its time is the bound.
    """
    count = max(8, bench.scale.new_shapes // 10)
    for learns in (False, True):
        sky, local = operations(bench.device), operations(bench.local)
        for name in WITH_GRADIENT if learns else sky:

            def measure(op: Op, device: str, learns: bool = learns) -> float:
                inputs = _inputs(device, count, learns=learns)
                bench.synchronize()
                return _once(op, inputs, learns=learns)

            inputs = _inputs(bench.device, count, learns=learns)
            made = [sky[name](x) for x in inputs]
            further = sum(len(given) - 1 for given in made if isinstance(given, list | tuple)) / count
            before = torch.sky.stats()["ops"]
            _once(sky[name], inputs, learns=learns)  # what a process needs once
            sent = (torch.sky.stats()["ops"] - before) / count
            figures = interleaved(
                {
                    "sky": lambda op=sky[name], sent=sent: measure(op, bench.device) / sent,
                    "local": lambda op=local[name], sent=sent: measure(op, bench.local) / sent,
                },
                bench.scale.rounds,
            )
            label = f"new shapes: {name}" + (", forward and backward" if learns else "")
            bound = max(30 + 3 * further / sent, statistics.median(figures["local"]))
            bench.compare("new shapes", label, "us/op", figures, () if learns else (value_at_most(bound),))


__all__ = ["never_seen_kinds", "operations"]
