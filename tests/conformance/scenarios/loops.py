"""Loops whose steps are the same, but for one thing once in a while: what is kept of a step answers for no other."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from tests.conformance.scenario_fuzz import Run

_LIKE: tuple[tuple[Any, ...], ...] = (
    (1, True, 1.0, 1 + 0j),
    (0, 0.0, -0.0, False, 0j),
    (2, 2.0, 3, 2.5),
    (-1, -1.0, -2),
    (0.1, 0.1 + 2**-54, -0.1, float("nan"), float("inf"), 1e-45, 1e300),
    (127, 128, 129, 127.0, 128.0, 300),
    (2**31 - 1, 2**31, 2**53, 2**53 + 1, float(2**53), 2**62 + 1),
)
"""Numbers that are easily taken for one another."""


def _number(r: Run, like: int, odd: bool) -> Any:
    number = r.one(*_LIKE[like]) if odd else _LIKE[like][0]
    if odd and r.chance(0.3):
        return torch.tensor(
            number, dtype=None if not isinstance(number, float) else r.one(None, torch.float64), device="cpu"
        )
    return number


Operation = Callable[["Run", torch.Tensor, torch.Tensor, Any], Any]
OPERATIONS: tuple[Operation, ...] = (
    lambda r, x, y, n: x + n,
    lambda r, x, y, n: n - x,
    lambda r, x, y, n: x * n,
    lambda r, x, y, n: x / n,
    lambda r, x, y, n: x // n,
    lambda r, x, y, n: x % n,
    lambda r, x, y, n: x**n,
    lambda r, x, y, n: n**x,
    lambda r, x, y, n: torch.add(x, y, alpha=n),
    lambda r, x, y, n: torch.where(x > y, x, n),
    lambda r, x, y, n: torch.where(y > 0, n, x),
    lambda r, x, y, n: x.clamp(min=n),
    lambda r, x, y, n: x.masked_fill(y > 0, n),
    lambda r, x, y, n: torch.full_like(x, n),
    lambda r, x, y, n: torch.full(x.shape, n, device=r.device),
    lambda r, x, y, n: torch.full(x.shape, n, device=r.device, dtype=x.dtype),
    lambda r, x, y, n: torch.tensor([n, n], device=r.device)[0] + x,
    lambda r, x, y, n: torch.as_tensor(n, device=r.device) * x,
    lambda r, x, y, n: x.addcmul(x, y, value=n),
    lambda r, x, y, n: torch.lerp(x, y, n),
    lambda r, x, y, n: x.fill_(n),
    lambda r, x, y, n: x.add_(y, alpha=n),
    lambda r, x, y, n: x.mul_(n),
    lambda r, x, y, n: x.copy_(y),
    lambda r, x, y, n: x.__setitem__((..., 0), n),
    lambda r, x, y, n: torch._foreach_add([x, y], n),
    lambda r, x, y, n: torch._foreach_mul([x, y, x], [n, 2.0, n]),
    lambda r, x, y, n: torch._foreach_pow([x, y], [n, n]),
    lambda r, x, y, n: torch._foreach_sub_([x], [n]),
    lambda r, x, y, n: torch.arange(0, 4, n, device=r.device) + x[..., :1],
    lambda r, x, y, n: torch.linspace(n, 2, 4, device=r.device) * x,
    lambda r, x, y, n: x == n,
    lambda r, x, y, n: x.eq_(n),
    lambda r, x, y, n: (x < n).sum(),
    lambda r, x, y, n: torch.isclose(x, y, rtol=n),
    lambda r, x, y, n: F.threshold(x, n, n),
    lambda r, x, y, n: F.leaky_relu(x, n),
    lambda r, x, y, n: F.softplus(x, beta=n),
    lambda r, x, y, n: F.elu(x, n),
    lambda r, x, y, n: x.norm(n),
    lambda r, x, y, n: torch.linalg.vector_norm(x, n, -1),
    lambda r, x, y, n: torch.addmm(x, y, x, beta=n) if x.dim() == 2 else x,
    lambda r, x, y, n: torch.baddbmm(x, x, y, alpha=n) if x.dim() == 3 else x @ y.mT if x.dim() > 1 else x,
    lambda r, x, y, n: F.layer_norm(x, x.shape[-1:]),
    lambda r, x, y, n: F.rms_norm(x, x.shape[-1:]),
    lambda r, x, y, n: x.softmax(-1),
    lambda r, x, y, n: x.cumsum(-1),
    lambda r, x, y, n: x.sum(0) if x.dim() else x,
    lambda r, x, y, n: x.mean(),
    lambda r, x, y, n: F.linear(x, y) if x.dim() == 2 else x,
    lambda r, x, y, n: torch.cat([x, y]),
    lambda r, x, y, n: torch.stack([x, y])[1],
    lambda r, x, y, n: x.to(y.dtype),
    lambda r, x, y, n: x.float(),
    lambda r, x, y, n: x[..., :2],
    lambda r, x, y, n: x.mT.contiguous().mT if x.dim() > 1 else x.clone(),
    lambda r, x, y, n: x.detach(),
    lambda r, x, y, n: x.t() if x.dim() == 2 else x,
    lambda r, x, y, n: x.conj(),
    lambda r, x, y, n: torch._neg_view(x) if x.is_floating_point() else x,
    lambda r, x, y, n: x.sigmoid().neg(),
    lambda r, x, y, n: x.masked_select(y > 0),
    lambda r, x, y, n: x[y > 0],
    lambda r, x, y, n: x.nonzero(),
    lambda r, x, y, n: x.unique(),
    lambda r, x, y, n: torch.nan_to_num(x, nan=n),
    lambda r, x, y, n: F.pad(x, (1, 0), value=n),
    lambda r, x, y, n: x.new_full((2,), n),
    lambda r, x, y, n: torch.heaviside(x, y),
    lambda r, x, y, n: torch.bucketize(x, y.reshape(-1).sort()[0]),
    lambda r, x, y, n: x.index_fill(0, torch.tensor([0], device=r.device), n),
    lambda r, x, y, n: x.scatter(0, torch.zeros_like(x, dtype=torch.long), n),
    lambda r, x, y, n: x.std(correction=n),
    lambda r, x, y, n: x.quantile(0.5),
    lambda r, x, y, n: torch.randn(3, generator=torch.Generator(r.device).manual_seed(3), device=r.device) * n,
    lambda r, x, y, n: torch.rand_like(x),
    lambda r, x, y, n: F.dropout(x, 0.5),
    lambda r, x, y, n: F.gelu(x, approximate="tanh"),
    lambda r, x, y, n: x.reciprocal().rsqrt(),
    lambda r, x, y, n: torch.autograd.grad((x * y).sum(), x)[0] if x.requires_grad else x,
    lambda r, x, y, n: (x * x).sum().backward() if x.requires_grad else None,
)

_VARIANTS: tuple[Callable[[Run, torch.Tensor], torch.Tensor], ...] = (
    lambda r, x: x.to(r.one(torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float32)),
    lambda r, x: x.mT.contiguous().mT if x.dim() > 1 else x.repeat(2)[::2],
    lambda r, x: torch.stack([x, x], -1)[..., 0],
    lambda r, x: x[..., :1].expand(x.shape) if x.dim() else x.expand(()),
    lambda r, x: x.detach().requires_grad_() if x.is_floating_point() else x,
    lambda r, x: torch.nn.Parameter(x.detach(), requires_grad=False),
    lambda r, x: torch._neg_view(x) if x.is_floating_point() else x,
    lambda r, x: x.conj() if x.is_complex() else x.neg(),
    lambda r, x: (1j * x).conj().imag if x.dtype is torch.float32 else x.clone(),
    lambda r, x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
    lambda r, x: torch.cat([x, x]),
    lambda r, x: x.sum(),
    lambda r, x: x.clone(memory_format=torch.preserve_format),
    lambda r, x: x.view(x.shape),
)

_AROUND: tuple[Callable[[Run], Any], ...] = (
    lambda r: torch.no_grad(),
    lambda r: torch.inference_mode(),
    lambda r: torch.autocast(r.device.type, torch.bfloat16),
    lambda r: torch.enable_grad(),
    lambda r: torch.device(r.device),
)


def _read(r: Run, x: torch.Tensor, how: int) -> Any:
    return (
        lambda: x.reshape(-1)[0].item(),
        lambda: x.tolist(),
        lambda: bool((x != 0).any()),
        lambda: int((x > 0).sum()),
        lambda: str(x.detach().cpu()),
        lambda: x[x != 0].shape,
        lambda: float(x.abs().max()) > 1,
        lambda: x.nonzero().tolist(),
    )[how]()


def loops(r: Run) -> None:
    """Run a few operations in a loop on tensors that stay, and change one thing about one of them now and then."""
    size = r.one([4, 4], [4, 4], [3], [2, 3, 3], [], [2, 2, 2, 2])
    dtypes = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.complex64)
    first = [r.values(size, r.one(*dtypes)) for _ in range(3)]
    if r.chance(0.4):
        first = [x.requires_grad_() if x.is_floating_point() else x for x in first]
    body = [
        (r.int(0, len(OPERATIONS) - 1), r.int(0, 4), r.int(0, 4), r.int(0, 4), r.int(0, len(_LIKE) - 1))
        for _ in range(r.int(3, 9))
    ]
    reads = {at: r.int(0, 7) for at in range(len(body)) if r.chance(0.15)}
    sees = {at for at in range(len(body)) if r.chance(0.2)}
    share, kept = r.one(0.0, 0.02, 0.1), r.one(0, 0, 1, 5)
    keeps: list[Any] = []
    state = r.chance(0.5)
    pool = [*first, first[0], first[1]]
    for number in range(r.int(6, 30)):
        if not state:
            pool = [*first, first[0], first[1]]
        for at, (which, x, y, target, like) in enumerate(body):
            odd = r.chance(share)
            a, b = pool[x], pool[y]
            around: Any = contextlib.nullcontext()
            if odd and r.chance(0.5):
                variant = r.one(*_VARIANTS)
                a = r.attempt(f"variant {number}", lambda a=a, v=variant: v(r, a))
                a = pool[x] if a is None else a
                if r.chance(0.3):
                    b = a
            elif odd and r.chance(0.4):
                around = r.one(*_AROUND)(r)
            n = _number(r, like, odd)
            with around:
                made = r.attempt(f"{number}.{at} op {which} of {x}, {y}, {n!r}", lambda: OPERATIONS[which](r, a, b, n))
            made = made[0] if isinstance(made, list | tuple) and made else made
            if isinstance(made, torch.Tensor) and made.numel() < 300:
                pool[target] = made
                if kept:
                    keeps.append(made)
                    del keeps[:-kept]
                if at in sees:
                    r.see(f"result {number}.{at}", made)
            if at in reads:
                found = r.attempt(f"read {number}.{at}", lambda: _read(r, pool[target], reads[at]))
                r.see(f"read {number}.{at}", found)
        if r.chance(0.05):
            gc.collect(r.int(0, 1))
        if r.chance(0.03):
            first = [r.values(size, r.one(*dtypes)) for _ in range(3)]
    for at, x in enumerate([*first, *pool]):
        r.see(f"tensor {at} at the end", x)
        if x.is_leaf and x.grad is not None:
            r.see(f"grad {at} at the end", x.grad)
