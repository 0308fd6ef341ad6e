"""Small tensors that are written in every way that PyTorch has, and read in every way: no copy of them may be old."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from tests.conformance.scenario_fuzz import Run

_DTYPES = (torch.int64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16)


def _made(r: Run) -> torch.Tensor:
    size = r.one([], [1], [5], [5], [2, 3], [40], [3000])
    dtype = r.one(*_DTYPES)
    kind = r.one("uploaded", "uploaded", "tensor", "zeros", "arange", "full", "compared", "number", "parts")
    if kind == "uploaded":
        return r.values(size, dtype)
    if kind == "tensor":
        return torch.tensor([r.int(0, 9) for _ in range(r.int(1, 6))], dtype=dtype, device=r.device)
    if kind == "zeros":
        return r.one(torch.zeros, torch.ones)(size, dtype=dtype, device=r.device)
    if kind == "arange":
        return torch.arange(r.int(1, 9), dtype=r.one(torch.int64, torch.int32, torch.float32), device=r.device)
    if kind == "full":
        return torch.full(size, r.int(0, 1), dtype=dtype, device=r.device)
    if kind == "number":
        return torch.tensor(r.one(0, 1, 7, True, 2.5, -0.0), device=r.device)
    if kind == "parts":
        return r.values([6, 2], dtype)[r.int(0, 2) :: 2, r.int(0, 1)]
    return r.values([5], torch.int64) > r.int(-2, 2)


def _other(r: Run, x: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same size and dtype."""
    return r.values(list(x.shape), x.dtype)


def _alias(r: Run, x: torch.Tensor) -> torch.Tensor:
    """Something in the same memory."""
    return r.one(
        lambda: x.view(-1) if x.is_contiguous() else x[...],
        lambda: x.detach(),
        lambda: x.data,
        lambda: x[...],
        lambda: x.reshape(-1)[: r.int(1, 3)] if x.is_contiguous() else x.t() if x.dim() < 3 else x[:1],
        lambda: x.unsqueeze(0),
        lambda: x.as_strided(x.shape, x.stride(), x.storage_offset()),
        lambda: torch.empty(0, dtype=x.dtype, device=r.device).set_(
            x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        ),
        lambda: x.view(torch.uint8) if x.dtype is torch.bool else x.view(x.dtype),
        lambda: x.view(torch.int8) if x.dtype is torch.uint8 else x.expand(x.shape),
        lambda: x.select(0, -1) if x.dim() else x.view(1),
        lambda: torch.nn.Parameter(x, requires_grad=False),
        lambda: copy.copy(x),
    )()


def _whole(x: torch.Tensor) -> torch.Tensor:
    """What may be `out=`: of an expanded tensor a copy, for kernels of the CPU differ in whether they take it."""
    return x.clone() if 0 in x.stride() else x


def _split(r: Run, x: torch.Tensor) -> list[int]:
    sizes = x.reshape(-1)[:5].long().abs().clamp(max=9).tolist()
    return [len(part) for part in torch.arange(90, device=r.device).split([*sizes, 90 - sum(sizes)])]


def _hidden(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    x.copy_(other)
    return x.sum()


class _Writer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.copy_(other)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@torch.library.custom_op("skyfuzz::overwrite", mutates_args={"x"})
def _overwrite(x: torch.Tensor, other: torch.Tensor) -> None:
    x.copy_(other)


@_overwrite.register_fake
def _(x: torch.Tensor, other: torch.Tensor) -> None:
    return None


def _step(r: Run, x: torch.Tensor) -> None:
    """What an optimizer, or a module, writes."""
    kind = r.one("sgd", "adam", "norm", "embedding", "scale", "average", "vector", "init", "fused")
    y = x.detach()
    if kind == "norm":
        layer = torch.nn.BatchNorm1d(2, device=r.device)
        layer.num_batches_tracked, layer.running_mean = y, torch.zeros(2, device=r.device)
        layer(torch.ones(3, 2, device=r.device))
    elif kind == "embedding":
        F.embedding(torch.zeros(1, dtype=torch.long, device=r.device), y.view(-1, 1), max_norm=0.5)
    elif kind == "scale":
        found = torch.zeros((), device=r.device)
        torch._amp_foreach_non_finite_check_and_unscale_([y], found, torch.full((), 0.5, device=r.device))
    elif kind == "average":
        layer = torch.nn.BatchNorm1d(y.numel(), affine=False, device=r.device)
        layer.running_mean = y.view(-1)
        layer(torch.arange(2.0 * y.numel(), device=r.device).view(2, -1))
    elif kind == "vector":
        torch.nn.utils.vector_to_parameters(_other(r, x).view(-1), [torch.nn.Parameter(x)])
    elif kind == "init":
        r.one(torch.nn.init.ones_, torch.nn.init.zeros_, lambda t: torch.nn.init.constant_(t, 3))(y)
    else:
        p = torch.nn.Parameter(y)
        p.grad = torch.ones_like(p)
        if kind == "sgd":
            torch.optim.SGD([p], lr=0.5, momentum=r.one(0, 0.5), foreach=r.one(None, True, False)).step()
        else:
            torch.optim.Adam([p], lr=0.5, fused=kind == "fused" or None).step()


WRITES: dict[str, Callable[[Run, torch.Tensor], Any]] = {
    "add_": lambda r, x: x.add_(r.one(1, 2, 1.0, True)),
    "logical_not_": lambda r, x: x.logical_not_(),
    "fill_": lambda r, x: x.fill_(r.one(0, 1, 3, True)),
    "fill_ tensor": lambda r, x: x.fill_(torch.tensor(r.int(0, 1), device=r.one(r.device, "cpu"))),
    "copy_": lambda r, x: x.copy_(_other(r, x)),
    "copy_ late": lambda r, x: x.copy_(_other(r, x), non_blocking=True),
    "copy_ from here": lambda r, x: x.copy_(_other(r, x).cpu()),
    "set item": lambda r, x: x.__setitem__(r.one(..., 0, -1, slice(1, None)), r.one(0, 1, 5)),
    "set by mask": lambda r, x: x.__setitem__(x > 1, r.one(0, 1)),
    "out": lambda r, x: torch.add(_other(r, x), 1, out=_whole(x)),
    "out of factory": lambda r, x: torch.zeros(x.shape, out=_whole(x)),
    "out of arange": lambda r, x: torch.arange(x.numel(), out=_whole(x)) if x.dim() == 1 else x.zero_(),
    "out of stack": lambda r, x: (
        torch.cat([_other(r, x)], out=_whole(x)) if x.dim() else torch.mul(x, 2, out=_whole(x))
    ),
    "out of second": lambda r, x: torch.max(
        r.values([5, 3], torch.float32), 1, out=(torch.empty(5, device=r.device), _whole(x))
    ),
    "foreach": lambda r, x: r.one(
        lambda: torch._foreach_add_([x, _other(r, x)], 1),
        lambda: torch._foreach_copy_([x], [_other(r, x)]),
        lambda: torch._foreach_zero_([x]),
        lambda: torch._foreach_mul_([_other(r, x) for _ in range(12)] + [x], 2),
    )(),
    "index_put_": lambda r, x: x.index_put_((torch.tensor([0], device=r.device),), x.new_ones(()), r.chance(0.5)),
    "index_fill_": lambda r, x: x.index_fill_(0, torch.tensor([0], device=r.device), 1),
    "index_copy_": lambda r, x: x.index_copy_(0, torch.arange(x.shape[0], device=r.device), _other(r, x)),
    "scatter_": lambda r, x: x.scatter_(0, torch.zeros_like(x, dtype=torch.long), r.one(1, _other(r, x))),
    "masked_fill_": lambda r, x: x.masked_fill_(_other(r, x).bool(), r.one(0, 1)),
    "masked_scatter_": lambda r, x: x.masked_scatter_(_other(r, x).bool(), _other(r, x)),
    "put_": lambda r, x: x.put_(torch.tensor([0], device=r.device), x.new_ones(1)),
    "storage": lambda r, x: r.one(
        lambda: x.untyped_storage().fill_(r.int(0, 1)),
        lambda: x.untyped_storage().copy_(torch.ones_like(x).untyped_storage()),
        lambda: x.untyped_storage().__setitem__(0, 1),
    )(),
    "data": lambda r, x: setattr(x, "data", _other(r, x)),
    "set_": lambda r, x: x.set_(_other(r, x)),
    "swap": lambda r, x: torch.utils.swap_tensors(x, _other(r, x)),
    "custom": lambda r, x: _overwrite(x, _other(r, x)),
    "function": lambda r, x: _Writer.apply(x, _other(r, x)),
    "functionalize": lambda r, x: torch.func.functionalize(_hidden)(x, _other(r, x)),
    "vmap": lambda r, x: torch.func.vmap(lambda t, o: t.copy_(o))(x, _other(r, x)),
    "step": _step,
    "random": lambda r, x: r.one(x.random_, x.bernoulli_, lambda: x.random_(0, 2))(),
    "relu": lambda r, x: F.relu(x, inplace=True),
    "clamp": lambda r, x: r.one(x.clamp_, lambda a: torch.clamp(x, a, out=_whole(x)))(1),
    "sort": lambda r, x: torch.sort(
        _other(r, x), stable=True, out=(_whole(x), torch.empty(0, dtype=torch.long, device=r.device))
    ),
    "counter": lambda r, x: x.__iadd__(1),
    "tril": lambda r, x: x.tril_(),
    "resize": lambda r, x: x.resize_(r.one([1], [2], [0])) if x.numel() > 2 else None,
    "zero and add": lambda r, x: x.zero_().add_(_other(r, x)),
    "swap bytes": lambda r, x: x.view(torch.uint8).bitwise_xor_(1),
    "exponent": lambda r, x: torch.frexp(
        r.values([5], torch.float32), out=(torch.empty(5, device=r.device), _whole(x))
    ),
    "cummax": lambda r, x: torch.cummax(
        r.values([5], torch.float32), 0, out=(torch.empty(5, device=r.device), _whole(x))
    ),
}

READS: dict[str, Callable[[Run, torch.Tensor], Any]] = {
    "item": lambda r, x: x.reshape(-1)[0].item(),
    "last": lambda r, x: x.reshape(-1)[-1].item(),
    "tolist": lambda r, x: x.tolist(),
    "bool": lambda r, x: bool(x.any()),
    "all": lambda r, x: bool((x == x.reshape(-1)[0]).all()),
    "number": lambda r, x: float(x) if x.numel() == 1 else int(x.sum()),
    "compare": lambda r, x: (x > 1).tolist(),
    "compare with itself": lambda r, x: bool((x[..., 1:] > x[..., :-1]).all()) if x.dim() else bool(x > 0),
    "nonzero": lambda r, x: x.nonzero().tolist(),
    "masked": lambda r, x: x[x > 0].tolist(),
    "equal": lambda r, x: torch.equal(x, x.clone()),
    "unique": lambda r, x: x.unique().tolist(),
    "max": lambda r, x: int(x.max()),
    "iterate": lambda r, x: [bool(v) for v in x.reshape(-1)[:4]],
    "cpu": lambda r, x: x.cpu().tolist(),
    "numpy": lambda r, x: x.cpu().float().numpy().tolist(),
    "repr": lambda r, x: repr(x.detach().cpu()),
    "argmax": lambda r, x: x.int().argmax().item(),
    "cumsum": lambda r, x: x.cumsum(-1).tolist() if x.dtype in (torch.int64, torch.bool) else x.tolist(),
    "select": lambda r, x: torch.arange(12, device=r.device)[x.long().abs().clamp(max=9)].tolist(),
    "repeat": lambda r, x: torch.repeat_interleave(x.reshape(-1).long().abs().clamp(max=3)).tolist(),
    "split": lambda r, x: _split(r, x),
    "one_hot": lambda r, x: F.one_hot(x.long().abs().clamp(max=9)).shape,
    "bincount": lambda r, x: x.reshape(-1).long().abs().clamp(max=99).bincount().tolist(),
    "index": lambda r, x: list(range(20))[int(x.reshape(-1)[0].long().clamp(0, 9)) : 12],
    "format": lambda r, x: f"{x.reshape(-1)[0].float().item():.3f}",
    "where": lambda r, x: torch.where(x > 0)[0].tolist(),
    "in": lambda r, x: (1 in x) if x.dim() else None,
    "len": lambda r, x: [p.numel() for p in x.reshape(-1)[:8].tensor_split(2)],
}


def writes(r: Run) -> None:
    """Make, alias, write, and read a few small tensors, and what was computed of them."""
    pool = [_made(r) for _ in range(4)]
    for _ in range(r.int(10, 50)):
        at = r.int(0, len(pool) - 1)
        x = pool[at]
        kind = r.one("write", "write", "write", "read", "read", "read", "alias", "derive", "make", "drop", "see")
        if kind == "write":
            name = r.one(*WRITES)
            r.attempt(f"{name} of {at}", lambda x=x, name=name: WRITES[name](r, x))
            r.see(f"after {name}", x) if r.chance(0.1) else None
        elif kind == "read":
            name = r.one(*READS)
            found = r.attempt(f"{name} of {at}", lambda x=x, name=name: READS[name](r, x))
            r.see(f"{name} of {at}", found)
        elif kind == "alias":
            made = r.attempt(f"alias of {at}", lambda x=x: _alias(r, x))
            if isinstance(made, torch.Tensor):
                pool[r.int(0, len(pool) - 1)] = made
        elif kind == "derive":
            made = r.attempt(
                f"derive of {at}",
                lambda x=x: r.one(
                    lambda: x + 1,
                    lambda: x > 1,
                    lambda: x.cumsum(-1),
                    lambda: x == x,
                    lambda: x.long(),
                    lambda: x.clone(),
                    lambda: x.flip(0),
                    lambda: x[..., :2],
                    lambda: -x.long(),
                    lambda: x.any(),
                    lambda: x.sum(),
                    lambda: x.contiguous(),
                    lambda: torch.cat([x, x]),
                    lambda: x.bool(),
                    lambda: x.expand(2, *x.shape),
                )(),
            )
            if isinstance(made, torch.Tensor):
                pool[r.int(0, len(pool) - 1)] = made
        elif kind == "make":
            pool[at] = _made(r)
        elif kind == "drop":
            pool[at] = _made(r)
            gc.collect(0)
        else:
            r.see(f"tensor {at}", x)
    for at, x in enumerate(pool):
        r.see(f"tensor {at} at the end", x)
