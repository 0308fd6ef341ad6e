"""The calls that drawn programs are made of: each takes what is drawn for it and tensors of the pool.

`d` is what parameters are drawn from; x, y and z are tensors of the pool. What a call returns goes into the pool. A
call that PyTorch refuses is fine: the device must refuse it, too. What has side effects is in `program_effects`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tests.conformance.program_draws import Draws

Call = Callable[[Draws, torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _narrow(d: Draws, x: torch.Tensor, *_: Any) -> torch.Tensor:
    dim = d.dim(x)
    n = x.shape[dim] if x.dim() else 0
    start = d.int(0, n)
    return x.narrow(dim, start, d.int(0, n - start))


def _expand(d: Draws, x: torch.Tensor, *_: Any) -> torch.Tensor:
    sizes = [d.int(0, 3) if n == 1 and d.chance(0.6) else d.one(n, -1) for n in x.shape]
    return x.expand([d.int(1, 2), *sizes] if d.chance(0.4) else sizes)


def _as_strided(d: Draws, x: torch.Tensor, *_: Any) -> torch.Tensor:
    size = [d.int(0, 3) for _ in range(d.int(0, 3))]
    return x.as_strided(size, [d.int(0, 3) for _ in size], d.one(None, 0, 1))


def _where_lies(x: torch.Tensor) -> list[int]:
    return [n if n else 1 for n in x.shape] or [1]


def _zeros_index(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.long)


VIEWS: dict[str, Call] = {
    "t": lambda d, x, y, z: x.t(),
    "T": lambda d, x, y, z: d.one(x.T, x.T) if x.dim() < 3 else x.mT,
    "H": lambda d, x, y, z: x.mH if x.dim() != 2 else x.H,
    "permute": lambda d, x, y, z: x.permute(d.order(x)),
    "transpose": lambda d, x, y, z: x.transpose(d.dim(x), d.dim(x)),
    "movedim": lambda d, x, y, z: x.movedim(d.dim(x), d.dim(x)),
    "index": lambda d, x, y, z: x[d.index(x)],
    "index twice": lambda d, x, y, z: x[d.index(x)][..., :1],
    "view": lambda d, x, y, z: x.view(d.sizes_of(x.numel())),
    "reshape": lambda d, x, y, z: x.reshape(d.sizes_of(x.numel())),
    "expand": _expand,
    "expand_as": lambda d, x, y, z: x.expand_as(y),
    "unsqueeze": lambda d, x, y, z: x.unsqueeze(d.dim(x)),
    "squeeze": lambda d, x, y, z: d.one(lambda: x.squeeze(), lambda: x.squeeze(d.dim(x)))(),
    "flatten": lambda d, x, y, z: x.flatten(d.dim(x)),
    "unflatten": lambda d, x, y, z: x.unflatten(d.dim(x), d.one((1, -1), (-1, 1), (-1, 2))),
    "ravel": lambda d, x, y, z: x.ravel(),
    "diagonal": lambda d, x, y, z: x.diagonal(d.int(-2, 2), d.dim(x), d.dim(x)),
    "unfold": lambda d, x, y, z: x.unfold(d.dim(x), d.int(0, 2), d.int(1, 2)),
    "narrow": _narrow,
    "select": lambda d, x, y, z: x.select(d.dim(x), d.int(-2, 1)),
    "as_strided": _as_strided,
    "real": lambda d, x, y, z: x.real,
    "imag": lambda d, x, y, z: x.imag,
    "conj": lambda d, x, y, z: x.conj(),
    "neg_view": lambda d, x, y, z: (
        torch._neg_view(x)
        if x.dtype.is_floating_point
        else x.alias_copy()
        if hasattr(x, "alias_copy")
        else x.view(x.shape)
    ),
    "view dtype": lambda *a: _dtype_view(*a),
    "split": lambda d, x, y, z: x.split(d.one(d.int(1, 3), [1, max(x.shape[0] - 1, 0)] if x.dim() else 1), d.dim(x)),
    "chunk": lambda d, x, y, z: x.chunk(d.int(1, 3), d.dim(x)),
    "tensor_split": lambda d, x, y, z: x.tensor_split(d.one(d.int(1, 3), (1, 2), (0, 5)), d.dim(x)),
    "unbind": lambda d, x, y, z: x.unbind(d.dim(x)),
    "detach": lambda d, x, y, z: x if x.is_inference() else x.detach(),
    "view_as_real": lambda d, x, y, z: torch.view_as_real(x),
    "view_as_complex": lambda d, x, y, z: torch.view_as_complex(x),
    "broadcast_to": lambda d, x, y, z: torch.broadcast_to(x, y.shape),
    "broadcast_tensors": lambda d, x, y, z: torch.broadcast_tensors(x, y),
    "atleast": lambda d, x, y, z: d.one(torch.atleast_1d, torch.atleast_2d, torch.atleast_3d)(x),
    "hsplit": lambda d, x, y, z: d.one(torch.hsplit, torch.vsplit, torch.dsplit)(x, d.int(1, 2)),
    "swapaxes": lambda d, x, y, z: x.swapaxes(d.dim(x), d.dim(x)),
    "view_as": lambda d, x, y, z: x.view_as(y),
    "values of": lambda d, x, y, z: x if x.is_inference() else x.data,
}

COPIES: dict[str, Call] = {
    "clone": lambda d, x, y, z: x.clone(memory_format=d.one(torch.preserve_format, torch.contiguous_format)),
    "contiguous": lambda d, x, y, z: x.contiguous(
        memory_format=d.one(torch.contiguous_format, torch.channels_last) if x.dim() == 4 else torch.contiguous_format
    ),
    "to dtype": lambda d, x, y, z: x.to(d.dtype(), copy=d.chance(0.3)),
    "to format": lambda d, x, y, z: x.to(memory_format=torch.channels_last),
    "to other": lambda d, x, y, z: x.to(y),
    "there and back": lambda d, x, y, z: x.detach().cpu().clone().to(d.device),
    "resolve": lambda d, x, y, z: d.one(torch.resolve_conj, torch.resolve_neg)(x),
    "conj_physical": lambda d, x, y, z: x.conj_physical(),
    "zeros_like": lambda d, x, y, z: d.one(torch.zeros_like, torch.ones_like)(x, dtype=d.one(None, d.dtype())),
    "full_like": lambda d, x, y, z: torch.full_like(x, d.number()),
    "new_zeros": lambda d, x, y, z: x.new_zeros(d.size()),
    "new_full": lambda d, x, y, z: x.new_full(d.size(), d.number()),
    "new_tensor": lambda d, x, y, z: x.new_tensor(d.one([1, 2], 3.5, [[True], [False]])),
    "tensor of": lambda d, x, y, z: torch.tensor(
        d.one([1, 2.5], [], 3, [[1, 2]], 1j), device=d.device, dtype=d.one(None, d.dtype())
    ),
    "arange": lambda d, x, y, z: torch.arange(d.number(), d.one(5, 7.5), d.one(1, 0.5, 2), device=d.device),
    "linspace": lambda d, x, y, z: torch.linspace(
        0, d.one(1, x.sum() if x.numel() == 1 else 2), d.int(0, 5), device=d.device
    ),
    "eye": lambda d, x, y, z: torch.eye(d.int(0, 3), d.int(0, 3), device=d.device, dtype=d.dtype()),
    "full": lambda d, x, y, z: torch.full(d.size(), d.number(), device=d.device),
    "asarray": lambda d, x, y, z: torch.asarray(x, dtype=d.one(None, torch.float32), copy=d.one(None, True)),
    "repeat": lambda d, x, y, z: x.repeat(*([d.int(0, 2)] * max(x.dim(), 1))),
    "tile": lambda d, x, y, z: x.tile(d.int(0, 2)),
    "repeat_interleave": lambda d, x, y, z: x.repeat_interleave(
        d.one(2, torch.tensor([2], device=d.device)), d.one(None, d.dim(x))
    ),
    "cat": lambda d, x, y, z: torch.cat(d.one([x, y], [x, y, x], [x], [x[:0], y]) if x.dim() else [x, y], d.dim(x)),
    "stack": lambda d, x, y, z: torch.stack(d.one([x, x], [x, y]), d.dim(x)),
    "hstack": lambda d, x, y, z: d.one(torch.hstack, torch.vstack, torch.dstack, torch.column_stack)([x, y]),
    "flip": lambda d, x, y, z: x.flip(d.dim(x)),
    "roll": lambda d, x, y, z: x.roll(d.int(-2, 2), d.one(d.dim(x), ())),
    "rot90": lambda d, x, y, z: x.rot90(d.int(-1, 3), d.one((0, 1), (1, 0), (0, 0))),
    "tril": lambda d, x, y, z: d.one(torch.tril, torch.triu)(x, d.int(-1, 1)),
    "diag": lambda d, x, y, z: x.diag(d.int(-1, 1)),
    "diag_embed": lambda d, x, y, z: x.diag_embed(d.int(-1, 1)),
    "pad": lambda d, x, y, z: F.pad(
        x, d.one((1, 0), (1, 2, 0, 1), (-1, 1)), mode=d.one("constant", "reflect", "replicate")
    ),
    "index_select": lambda d, x, y, z: x.index_select(
        k := d.dim(x), d.places(d.int(0, 3), x.shape[k] if x.dim() else 1)
    ),
    "gather": lambda d, x, y, z: x.gather(
        d.dim(x), d.one(_zeros_index(x), _zeros_index(x)[:1] if x.dim() else _zeros_index(x))
    ),
    "take": lambda d, x, y, z: x.take(d.positions(d.int(0, 3), x.numel()).to(d.device)),
    "take_along_dim": lambda d, x, y, z: torch.take_along_dim(x, x.argsort(k := d.dim(x), stable=True), k),
    "masked_select": lambda d, x, y, z: x.masked_select(y.bool()),
    "masked_fill": lambda d, x, y, z: x.masked_fill(y.bool(), d.number_or_scalar()),
    "nonzero": lambda d, x, y, z: x.nonzero(as_tuple=d.chance(0.3)),
    "scatter": lambda d, x, y, z: x.scatter(d.dim(x), _zeros_index(y), d.one(d.number(), y)),
    "scatter_add": lambda d, x, y, z: x.scatter_add(d.dim(x), _zeros_index(y), y),
    "scatter_reduce": lambda d, x, y, z: x.scatter_reduce(
        d.dim(x), _zeros_index(x), x, d.one("sum", "prod", "mean", "amax"), include_self=d.chance(0.5)
    ),
    "index_add": lambda d, x, y, z: x.index_add(
        k := d.dim(x), d.places(y.shape[k] if -y.dim() <= k < y.dim() else 1, 1), y
    ),
    "index_fill": lambda d, x, y, z: x.index_fill(d.dim(x), torch.tensor([0], device=d.device), d.number_or_scalar()),
    "select_scatter": lambda d, x, y, z: x.select_scatter(x.select(k := d.dim(x), 0) * 2, k, 0),
    "slice_scatter": lambda d, x, y, z: x.slice_scatter(x[:1] * 2, 0, 0, 1),
    "diagonal_scatter": lambda d, x, y, z: x.diagonal_scatter(x.diagonal().clone()),
    "where": lambda d, x, y, z: torch.where(x.bool(), d.one(y, d.number_or_scalar()), d.one(z, d.number())),
    "where alone": lambda d, x, y, z: torch.where(x),
}

_BINARY = (
    "add sub mul div true_divide pow fmod remainder maximum minimum fmax fmin eq ne lt le gt ge atan2 logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor floor_divide hypot copysign heaviside xlogy ldexp "
    "nextafter gcd lcm float_power bitwise_left_shift bitwise_right_shift rsub logaddexp isclose polar complex"
)
_UNARY = (
    "neg abs exp exp2 expm1 sin cos tan asin acosh sqrt rsqrt sigmoid tanh erf erfinv floor ceil round trunc frac "
    "sign sgn logical_not bitwise_not square log log1p log2 isnan isinf isfinite signbit reciprocal angle "
    "positive nan_to_num deg2rad digamma lgamma i0 sinc relu isposinf isreal"
)
_ACTIVATIONS = (
    "gelu silu mish softplus elu selu celu leaky_relu hardtanh hardswish hardsigmoid logsigmoid softsign "
    "tanhshrink relu6 softshrink hardshrink glu"
)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b,
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
    "<=": lambda a, b: a <= b,
}

POINTWISE: dict[str, Call] = {
    "binary": lambda d, x, y, z: getattr(torch, d.one(*_BINARY.split()))(x, y),
    "binary with a number": lambda d, x, y, z: getattr(torch, d.one(*_BINARY.split()))(x, d.number_or_scalar()),
    "operator": lambda d, x, y, z: _OPERATORS[d.one(*_OPERATORS)](x, y),
    "operator with a number": lambda d, x, y, z: _OPERATORS[d.one(*_OPERATORS)](x, d.number_or_scalar()),
    "operator with a number first": lambda d, x, y, z: _OPERATORS[d.one(*_OPERATORS)](d.number_or_scalar(), x),
    "unary": lambda d, x, y, z: getattr(torch, d.one(*_UNARY.split()))(x),
    "unary again": lambda d, x, y, z: getattr(torch, d.one(*_UNARY.split()))(x),
    "activation": lambda d, x, y, z: getattr(F, d.one(*_ACTIVATIONS.split()))(x),
    "add alpha": lambda d, x, y, z: d.one(torch.add, torch.sub)(x, y, alpha=d.number()),
    "div mode": lambda d, x, y, z: torch.div(x, d.one(y, d.number()), rounding_mode=d.one("floor", "trunc")),
    "clamp": lambda d, x, y, z: x.clamp(d.one(None, d.number(), y), d.one(1, 2.5)),
    "clamp tensors": lambda d, x, y, z: torch.clamp(x, y, z),
    "lerp": lambda d, x, y, z: torch.lerp(x, y, d.one(0.25, z)),
    "addcmul": lambda d, x, y, z: d.one(torch.addcmul, torch.addcdiv)(x, y, z, value=d.number()),
    "round decimals": lambda d, x, y, z: x.round(decimals=d.int(-1, 2)),
    "threshold": lambda d, x, y, z: F.threshold(x, 0.1, d.number()),
    "prelu": lambda d, x, y, z: F.prelu(x, y),
    "frexp": lambda d, x, y, z: torch.frexp(x),
    "dropout of nothing": lambda d, x, y, z: F.dropout(x, 0.0),
    "cast of types": lambda d, x, y, z: d.one(x.float, x.double, x.half, x.bfloat16, x.long, x.int, x.bool, x.cfloat)(),
    "type_as": lambda d, x, y, z: x.type_as(y),
    "can_cast": lambda d, x, y, z: d.note(torch.can_cast(x.dtype, torch.result_type(x, d.one(y, d.number())))),
}


def _dims(d: Draws, x: torch.Tensor) -> Any:
    return d.one(d.dim(x), d.dim(x), (d.dim(x),), tuple(range(x.dim())), None)


REDUCTIONS: dict[str, Call] = {
    "sum": lambda d, x, y, z: x.sum(_dims(d, x), keepdim=d.chance(0.5), dtype=d.one(None, None, d.dtype())),
    "mean": lambda d, x, y, z: d.one(torch.mean, torch.nansum, torch.nanmean)(x, _dims(d, x), keepdim=d.chance(0.5)),
    "whole": lambda d, x, y, z: getattr(
        x, d.one("sum", "mean", "prod", "max", "min", "any", "all", "std", "var", "median", "argmax", "norm", "amax")
    )(),
    "prod": lambda d, x, y, z: x.prod(d.dim(x), keepdim=d.chance(0.5)),
    "max": lambda d, x, y, z: d.one(torch.max, torch.min, torch.median, torch.mode, torch.cummax, torch.cummin)(
        x, d.dim(x)
    ),
    "amax": lambda d, x, y, z: d.one(torch.amax, torch.amin, torch.aminmax)(x, dim=d.dim(x), keepdim=d.chance(0.5)),
    "any": lambda d, x, y, z: d.one(torch.any, torch.all)(x, d.dim(x), keepdim=d.chance(0.5)),
    "argmax": lambda d, x, y, z: d.one(torch.argmax, torch.argmin)(x, d.one(None, d.dim(x)), keepdim=d.chance(0.5)),
    "cumsum": lambda d, x, y, z: d.one(torch.cumsum, torch.cumprod, torch.logcumsumexp)(x, d.dim(x)),
    "sort": lambda d, x, y, z: x.sort(d.dim(x), descending=d.chance(0.5), stable=True),
    "argsort": lambda d, x, y, z: x.argsort(d.dim(x), stable=True),
    "topk": lambda d, x, y, z: x.topk(d.int(0, 2), d.dim(x))[0],
    "kthvalue": lambda d, x, y, z: x.kthvalue(1, d.dim(x))[0],
    "softmax": lambda d, x, y, z: d.one(torch.softmax, torch.log_softmax)(
        x, d.dim(x), dtype=d.one(None, None, torch.float32)
    ),
    "logsumexp": lambda d, x, y, z: x.logsumexp(_dims(d, x), keepdim=d.chance(0.5)),
    "var": lambda d, x, y, z: d.one(torch.var, torch.std, torch.var_mean, torch.std_mean)(
        x, dim=_dims(d, x), correction=d.one(0, 1), keepdim=d.chance(0.5)
    ),
    "norm": lambda d, x, y, z: x.norm(d.one(2, 1, float("inf"), 0, 3), d.dim(x), keepdim=d.chance(0.5)),
    "vector_norm": lambda d, x, y, z: torch.linalg.vector_norm(
        x, d.one(2, 1, float("inf"), 0.5), d.one(None, d.dim(x)), dtype=d.one(None, torch.float64)
    ),
    "count_nonzero": lambda d, x, y, z: x.count_nonzero(d.one(None, d.dim(x))),
    "diff": lambda d, x, y, z: x.diff(d.int(0, 2), d.dim(x)),
    "trace": lambda d, x, y, z: x.trace(),
    "unique": lambda d, x, y, z: x.unique(return_inverse=d.chance(0.5), dim=d.one(None, None, 0)),
    "unique_consecutive": lambda d, x, y, z: x.unique_consecutive(return_counts=d.chance(0.5)),
    "bincount": lambda d, x, y, z: x.flatten().abs().bincount(minlength=d.int(0, 4)),
    "histc": lambda d, x, y, z: x.float().histc(4, -2, 2),
    "quantile": lambda d, x, y, z: d.one(torch.quantile, torch.nanquantile)(x, d.one(0.5, 0.3), d.one(None, d.dim(x))),
    "searchsorted": lambda d, x, y, z: torch.searchsorted(x.sort()[0], d.one(y, 0.5), right=d.chance(0.5)),
    "bucketize": lambda d, x, y, z: torch.bucketize(x, d.floats(3).sort()[0]),
    "isin": lambda d, x, y, z: torch.isin(x, d.one(y, 1)),
    "equal": lambda d, x, y, z: d.note(d.one(torch.equal, torch.allclose)(x, y)),
    "cov": lambda d, x, y, z: d.one(torch.cov, torch.corrcoef)(x),
    "trapezoid": lambda d, x, y, z: torch.trapezoid(x, dim=d.dim(x)),
    "nan_median": lambda d, x, y, z: x.nanmedian(),
    "renorm": lambda d, x, y, z: x.renorm(2, d.dim(x), 1.0),
    "read": lambda d, x, y, z: d.note(
        d.one(
            lambda: x.item(),
            lambda: x.tolist(),
            lambda: bool(x),
            lambda: float(x),
            lambda: len(x),
            lambda: [int(v) for v in x],
        )()
    ),
    "numpy": lambda d, x, y, z: torch.from_numpy(x.detach().resolve_neg().resolve_conj().cpu().numpy().copy()).to(
        d.device
    ),
}


def _conv(d: Draws, x: torch.Tensor, *_: Any) -> torch.Tensor:
    kind = {2: F.conv1d, 3: d.one(F.conv1d, F.conv_transpose1d), 4: d.one(F.conv2d, F.conv_transpose2d)}.get(
        x.dim(), F.conv3d
    )
    channels = x.shape[1] if x.dim() > 2 else 1
    weight = torch.ones(2, channels, *[d.int(1, 2)] * max(x.dim() - 2, 1), device=d.device, dtype=x.dtype)
    if d.chance(0.4) and weight.dim() == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    if "transpose" in kind.__name__:
        weight = weight.transpose(0, 1)
    return kind(x, weight, padding=d.int(0, 1), stride=d.int(1, 2))


def _pool(d: Draws, x: torch.Tensor, *_: Any) -> Any:
    n = {2: 1, 3: 1, 4: 2, 5: 3}.get(x.dim(), 2)
    kind = d.one("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    function = getattr(F, f"{kind}{n}d")
    x = x if x.is_floating_point() else (x * 1.0).abs().float()  # pooling of integers is known for some layouts only
    return function(x, 2.0, 2) if kind == "lp_pool" else function(x, d.int(1, 2))


def _loss(d: Draws, x: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    kind = d.one(
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "binary_cross_entropy_with_logits",
        "poisson_nll_loss",
    )
    return getattr(F, kind)(x, y, reduction=d.one("mean", "sum", "none"))


def _classes(d: Draws, x: torch.Tensor, *_: Any) -> torch.Tensor:
    targets = d.places(x.shape[0], max(x.shape[-1], 1)).long() if x.dim() == 2 else x.real.argmax()
    return F.cross_entropy(x, targets, reduction=d.one("mean", "sum", "none"), label_smoothing=d.one(0.0, 0.1))


def _attention(d: Draws, x: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    x, y = (t if t.is_floating_point() else (t * 1.0).abs().float() for t in (x, y))
    return F.scaled_dot_product_attention(x, d.one(x, y), x, is_causal=d.chance(0.5))


@contextlib.contextmanager
def _numbers_from(seed: int) -> Iterator[None]:
    """Draws of the CPU start from a seed; nothing is drawn where the program runs."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _dtype_view(d: Draws, x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Not of inference: PyTorch's kernels for the CPU alone forget that there."""
    return x if x.is_inference() or torch.is_inference_mode_enabled() else x.view(d.dtype())


def _module(d: Draws, x: torch.Tensor, *_: Any) -> Any:
    """A module with parameters that are the same on either side, on a tensor of three dimensions."""
    n = x.shape[-1] if x.dim() else 1
    channels = x.shape[1] if x.dim() > 1 else 1
    kind, seed = (
        d.one("linear", "layer", "group", "batch", "rms", "gru", "lstm", "mha", "embedding", "bilinear"),
        d.int(0, 99),
    )
    with _numbers_from(seed), torch.device("cpu"):
        module: Any = {
            "linear": lambda: torch.nn.Linear(n, 3),
            "layer": lambda: torch.nn.LayerNorm(n),
            "group": lambda: torch.nn.GroupNorm(1, channels),
            "batch": lambda: torch.nn.BatchNorm2d(channels) if x.dim() == 4 else torch.nn.BatchNorm1d(channels),
            "rms": lambda: torch.nn.RMSNorm(n),
            "gru": lambda: torch.nn.GRU(n, 2),
            "lstm": lambda: torch.nn.LSTM(n, 2, batch_first=True),
            "mha": lambda: torch.nn.MultiheadAttention(n, 1),
            "embedding": lambda: torch.nn.EmbeddingBag(6, 2) if x.dim() == 2 else torch.nn.Embedding(6, 2),
            "bilinear": lambda: torch.nn.Bilinear(n, n, 2),
        }[kind]()
    module = module.to(d.device)
    if d.chance(0.3):
        module.eval()
    if kind in ("mha", "bilinear"):
        return module(x, x, x) if kind == "mha" else module(x, x)
    found = module(x.abs() if kind == "embedding" else x)
    return found[0] if kind in ("gru", "lstm") else found


PRODUCTS: dict[str, Call] = {
    "matmul": lambda d, x, y, z: x @ y,
    "matmul with itself": lambda d, x, y, z: x @ x.mT,
    "product": lambda d, x, y, z: getattr(
        torch, d.one("mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "kron", "matmul")
    )(x, y),
    "addmm": lambda d, x, y, z: d.one(torch.addmm, torch.baddbmm, torch.addbmm)(
        x, y, z, beta=d.one(1, 0, 2), alpha=d.one(1, 0.5)
    ),
    "addmv": lambda d, x, y, z: d.one(torch.addmv, torch.addr)(x, y, z),
    "linear": lambda d, x, y, z: F.linear(x, y, d.one(None, z)),
    "linear of ones": lambda d, x, y, z: F.linear(x, torch.ones(2, x.shape[-1], device=d.device, dtype=x.dtype)),
    "einsum": lambda d, x, y, z: torch.einsum(
        d.one("ij,jk->ki", "i,j->ij", "bij,bjk->bik", "ij->ji", "ii->i", "...i,i->..."),
        x,
        *([y] if d.chance(0.9) else []),
    ),
    "tensordot": lambda d, x, y, z: torch.tensordot(x, y, d.int(0, 1)),
    "cross": lambda d, x, y, z: torch.linalg.cross(x, y, dim=d.dim(x)),
    "cdist": lambda d, x, y, z: torch.cdist(x, y),
    "cosine_similarity": lambda d, x, y, z: F.cosine_similarity(x, y, dim=d.dim(x)),
    "normalize": lambda d, x, y, z: F.normalize(x, dim=d.dim(x)),
    "layer_norm": lambda d, x, y, z: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda d, x, y, z: F.group_norm(x, 1),
    "instance_norm": lambda d, x, y, z: d.one(F.instance_norm, lambda t: F.batch_norm(t, None, None, training=True))(x),
    "convolution": _conv,
    "pooling": _pool,
    "loss": _loss,
    "cross_entropy": _classes,
    "attention": _attention,
    "module": _module,
    "interpolate": lambda d, x, y, z: F.interpolate(
        x, scale_factor=d.one(2, 1.5), mode=d.one("nearest", "linear", "bilinear")
    ),
    "pixel_shuffle": lambda d, x, y, z: d.one(F.pixel_shuffle, F.pixel_unshuffle)(x, d.int(1, 2)),
    "unfold of images": lambda d, x, y, z: F.unfold(x, d.int(1, 2)),
    "fft": lambda d, x, y, z: getattr(torch.fft, d.one("fft", "ifft", "rfft", "irfft", "fft2", "fftshift"))(x),
    "one_hot": lambda d, x, y, z: F.one_hot(x.abs(), d.one(-1, 8)),
    "embedding": lambda d, x, y, z: F.embedding(d.places(3, 2), x),
    "solve": lambda d, x, y, z: d.one(
        torch.linalg.det, torch.linalg.inv, torch.linalg.cholesky, torch.linalg.matrix_exp
    )(x),
    "matrix_power": lambda d, x, y, z: torch.linalg.matrix_power(x, d.int(0, 2)),
    "vander": lambda d, x, y, z: torch.vander(x, d.int(0, 3)),
    "meshgrid": lambda d, x, y, z: torch.meshgrid(x, y, indexing=d.one("ij", "xy")),
    "cartesian_prod": lambda d, x, y, z: torch.cartesian_prod(x, y),
    "block_diag": lambda d, x, y, z: torch.block_diag(x, y),
}
