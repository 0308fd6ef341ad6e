"""Graphs of autograd with hooks, checkpoints, functions of a user's, packed tensors, and second derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.scenario_fuzz import Run


class _Cube(torch.autograd.Function):
    """Saves its input and its output, and has a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x**3
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * torch.where(x == 0, 0.0, 3 * y / x)


class _Doubled(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class _Sorted(torch.autograd.Function):
    """Gives something that has no gradient, and may get no gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, order = x.sort(-1, stable=True)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order)
        return values, order

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(-1, order, grads[0])


class _New(torch.autograd.Function):
    """In the form that transforms take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w.sin(), grads[0] * x * w.cos()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, w = ctx.saved_tensors
        return tangents[0] * w.sin() + tangents[1] * x * w.cos()


_STEPS: tuple[Callable[[Run, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda r, x, w: x * w,
    lambda r, x, w: x @ w,
    lambda r, x, w: F.linear(x, w, w[0]),
    lambda r, x, w: x.sin() + w,
    lambda r, x, w: x.softmax(-1),
    lambda r, x, w: F.layer_norm(x, (4,), w[0]),
    lambda r, x, w: _Cube.apply(x),
    lambda r, x, w: _Doubled.apply(x.clone()),
    lambda r, x, w: _Sorted.apply(x)[0],
    lambda r, x, w: _New.apply(x, w),
    lambda r, x, w: x.clone().mul_(w),
    lambda r, x, w: x.clone().index_put_((torch.tensor([1], device=r.device),), w[0]),
    lambda r, x, w: x.reshape(2, 8).t().reshape(4, 4),
    lambda r, x, w: torch.cat([x[:2], w[2:]]),
    lambda r, x, w: torch.stack(x.unbind(1), 0),
    lambda r, x, w: torch.where(x > 0, x, w),
    lambda r, x, w: x.cumsum(0),
    lambda r, x, w: F.dropout(x, 0.3),
    lambda r, x, w: x.detach() * w,
    lambda r, x, w: x.abs().sqrt(),
    lambda r, x, w: x.expand(2, 4, 4).sum(0),
    lambda r, x, w: x.double().matmul(w.double()).float(),
    lambda r, x, w: F.scaled_dot_product_attention(x[None], w[None], x[None])[0],
    lambda r, x, w: x.max(0, keepdim=True)[0] + x,
    lambda r, x, w: _part_written(x, w),
)


def _part_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1].mul_(w[0])
    y[:, 2] = w[3]
    return y


def _chain(r: Run, x: torch.Tensor, ws: list[torch.Tensor], depth: int, seen: list[torch.Tensor]) -> torch.Tensor:
    for _ in range(r.int(1, 4)):
        step, w = r.one(*_STEPS), r.one(*ws)
        how = r.one("plain", "plain", "plain", "checkpoint", "reentrant", "cpu", "hooks", "retain", "hook", "broken")
        if how in ("checkpoint", "reentrant"):
            x = checkpoint(lambda t, w=w, step=step: step(r, t.sigmoid(), w) * t, x, use_reentrant=how == "reentrant")
        elif how == "cpu":
            with torch.autograd.graph.save_on_cpu():
                x = step(r, x.tanh(), w)
        elif how == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
                x = step(r, x, w)
        else:
            x = step(r, x, w)
        if how == "retain" and x.requires_grad:
            x.retain_grad()
            seen.append(x)
        elif how == "hook" and x.requires_grad:
            bound = r.int(1, 3)
            x.register_hook(lambda g, bound=bound: g.clamp(-bound, bound))
        elif how == "broken":
            x = x.exp()
            r.attempt("write to what is saved", lambda x=x: x.detach().add_(0) if r.chance(0.3) else x.detach())
    return x


def graphs(r: Run) -> None:
    """Build graphs of a few leaves, differentiate them in several ways, and go on with what that left."""
    ws = [r.values([4, 4], torch.float32).requires_grad_(r.chance(0.85)) for _ in range(3)]
    for number, w in enumerate(ws):
        if w.requires_grad and r.chance(0.2):
            w.register_hook(lambda g: g * 2)
        if w.requires_grad and r.chance(0.2):
            w.register_post_accumulate_grad_hook(lambda t: t.grad.mul_(0.5))
        r.see(f"leaf {number}", w)
    for number in range(r.int(1, 4)):
        seen: list[torch.Tensor] = []
        x = r.attempt("chain", lambda seen=seen: _chain(r, r.one(*ws), ws, 0, seen))
        if x is None:
            continue
        how = r.one(
            "backward",
            "backward",
            "twice",
            "grad",
            "second",
            "batched",
            "penalty",
            "edge",
            "func",
            "jacobian",
            "jvp",
            "partial",
        )
        leaves = [w for w in ws if w.requires_grad]
        found = r.attempt(f"{how} {number}", lambda x=x, how=how: _differentiate(r, x, leaves, ws, how))
        for at, g in enumerate(found or ()):
            if isinstance(g, torch.Tensor):
                r.see(f"{how} {number} {at}", g)
        for at, each in enumerate(seen if how != "batched" else ()):  # there, what `vmap` wraps has got out
            r.see(f"retained {number} {at}", each.grad if each.grad is not None else "none")
        for at, w in enumerate(ws):
            r.see(f"grad {number} {at}", w.grad if w.grad is not None else "none")
        if r.chance(0.4):
            with torch.no_grad():
                for w in leaves:
                    if w.grad is not None:
                        w.sub_(w.grad, alpha=0.1)
        if r.chance(0.4):
            for w in ws:
                w.grad = None
    for number, w in enumerate(ws):
        r.see(f"leaf {number} at the end", w)


def _differentiate(r: Run, x: torch.Tensor, leaves: list[torch.Tensor], ws: list[torch.Tensor], how: str) -> Any:
    loss = (x * x).sum()
    if how == "backward":
        loss.backward()
        return None
    if how == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
        return None
    if how == "partial":
        loss.backward(inputs=leaves[:1])
        return None
    if how == "grad":
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=r.chance(0.5))
    if how == "edge":
        edge = torch.autograd.graph.get_gradient_edge(x)
        return torch.autograd.grad(edge, leaves, torch.ones_like(x), allow_unused=True)
    if how == "second":
        first = [g for g in torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True) if g is not None]
        return torch.autograd.grad(sum((g * g).sum() for g in first), leaves, allow_unused=True)
    if how == "penalty":
        first = [g for g in torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True) if g is not None]
        (loss + sum(g.norm() for g in first)).backward()
        return None
    if how == "batched":
        grads = torch.eye(16, device=r.device).view(16, 4, 4)[:5]
        return torch.autograd.grad(x, leaves, grads, is_grads_batched=True, allow_unused=True)
    step, w = r.one(*_STEPS), ws[0].detach()
    function = lambda t: step(r, t, w).sum(0)
    start = x.detach()
    if how == "func":
        return [
            torch.func.vmap(torch.func.grad(lambda t: (t * w[0]).sin().sum()))(start),
            *torch.func.vjp(function, start)[:1],
        ]
    if how == "jacobian":
        return [torch.func.jacrev(function)(start), torch.func.hessian(lambda t: function(t).sum())(start)]
    return torch.func.jvp(function, (start,), (torch.ones_like(start),))
