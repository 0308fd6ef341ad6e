"""Operations of every kind on shapes that never came before: what no cache helps with, here or on the worker."""

from __future__ import annotations

import itertools
import random
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
        "addcmul": lambda x: torch.addcmul(x, x, x),
        "lerp": lambda x: torch.lerp(x, x, 0.5),
    }


WITH_GRADIENT = (
    "x[1:, ::2]", "x[:, index]", "cat, last dim", "stack", "sum((1, 2))", "mean(-1, keepdim)", "var(-1)", "x + row",
    "x * column", "where", "masked_fill", "gather", "x @ x.mT", "transpose, reshape", "chunk", "pad", "max_pool2d",
    "conv2d", "linear", "layer_norm", "softmax", "gelu", "cumsum", "topk",
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
    of operations that the worker is sent for it, on both sides.
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
            bench.compare("new shapes", label, "us/op", figures, () if learns else (value_at_most(30),))


__all__ = ["never_seen_kinds", "operations"]
