"""The calls of drawn programs that change something: tensors, memory, graphs of autograd, random states."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F

from tests.conformance.program_calls import Call
from tests.conformance.program_draws import Draws

_IN_PLACE_BINARY = (
    "add_ sub_ mul_ div_ pow_ fmod_ remainder_ atan2_ logical_and_ logical_or_ logical_xor_ bitwise_and_ "
    "bitwise_or_ bitwise_xor_ floor_divide_ hypot_ copysign_ xlogy_ ldexp_ nextafter_ gcd_ lcm_ eq_ ne_ lt_ ge_ "
    "float_power_ fill_ copy_ heaviside_ true_divide_ bitwise_left_shift_ clamp_min_ clamp_max_"
)
_IN_PLACE_UNARY = (
    "neg_ abs_ exp_ sin_ sqrt_ sigmoid_ tanh_ floor_ round_ trunc_ frac_ sign_ logical_not_ bitwise_not_ square_ "
    "log1p_ zero_ relu_ conj_physical_ nan_to_num_ erfinv_ rsqrt_ sgn_ reciprocal_ tril_ triu_ detach_"
)
_OUT_BINARY = (
    "add sub mul div pow maximum eq lt logical_and bitwise_xor atan2 matmul outer fmod hypot copysign cross mm"
)
_OUT_UNARY = "neg abs exp sin sqrt floor isnan logical_not sigmoid sign angle round log softplus gelu"


def _optional(d: Draws, x: torch.Tensor, y: torch.Tensor) -> Any:
    return d.one(y, y, d.number(), d.number_or_scalar())


def _put(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    x[d.index(x)] = d.one(y, d.number(), d.number_or_scalar())


def _change_part(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    index = d.index(x)
    if d.chance(0.5):
        x[index] += d.one(y, d.number())
    else:
        x[index] *= d.one(y, d.number())


def _index_put(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    index = (d.positions(2, x.shape[0] if x.dim() else 0),)
    x.index_put_(index, d.one(y, torch.ones((), device=d.device, dtype=x.dtype)), accumulate=d.chance(0.3))


def _change_rows(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    dim = d.dim(x)
    n = y.shape[dim] if -y.dim() <= dim < y.dim() else 1
    index = torch.arange(n, device=d.device)
    kind = d.one("add", "copy", "fill", "reduce")
    if kind == "add":
        x.index_add_(dim, index, y, alpha=d.one(1, 2, 0.5))
    elif kind == "copy":
        x.index_copy_(dim, index, y)
    elif kind == "fill":
        x.index_fill_(dim, index[:1], d.number_or_scalar())
    else:
        x.index_reduce_(dim, index, y, d.one("prod", "amax", "mean"))


def _scatter(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    index = torch.zeros(y.shape, dtype=torch.long, device=d.device)
    if d.chance(0.5):
        x.scatter_(d.dim(x), index, d.one(y, d.number()))
    else:
        x.scatter_add_(d.dim(x), index, y)


def _masked(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    if d.chance(0.6):
        x.masked_fill_(y.bool(), d.one(d.number(), d.number_or_scalar()))
    else:
        x.masked_scatter_(y.bool(), z)


def _change_shape(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    kind = d.one("t_", "squeeze_", "unsqueeze_", "transpose_", "swapdims_")
    {
        "t_": x.t_,
        "squeeze_": x.squeeze_,
        "unsqueeze_": lambda: x.unsqueeze_(d.dim(x)),
        "transpose_": lambda: x.transpose_(d.dim(x), d.dim(x)),
        "swapdims_": lambda: x.swapdims_(d.dim(x), d.dim(x)),
    }[kind]()


def _fresh_out(d: Draws, x: torch.Tensor) -> torch.Tensor:
    """What `out=` may be: of the right size or to be resized, of any dtype, of any order of memory."""
    size = d.one(list(x.shape), list(x.shape), [0], d.size())
    made = d.values(size, d.one(x.dtype, x.dtype, d.dtype()))
    return made.permute(d.order(made)) if d.chance(0.3) else made


def _out(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    kind = d.one("binary", "unary", "reduction", "cat", "select", "cumsum", "clamp", "sort", "where", "number")
    mine = {t.untyped_storage()._cdata for t in (x, y)}
    out = d.one(_fresh_out(d, x) if z.untyped_storage()._cdata in mine else z, _fresh_out(d, x), _fresh_out(d, x))
    if kind == "binary":
        getattr(torch, d.one(*_OUT_BINARY.split()))(x, y, out=out)
    elif kind == "unary":
        function = d.one(*_OUT_UNARY.split())
        getattr(torch, function, None)(x, out=out) if hasattr(torch, function) else torch.abs(x, out=out)
    elif kind == "reduction":
        d.one(torch.sum, torch.prod, torch.amax, torch.any, torch.logsumexp, torch.argmax)(
            x, d.dim(x), keepdim=d.chance(0.5), out=out
        )
    elif kind == "cat":
        torch.cat([x, y], d.dim(x), out=out)
    elif kind == "select":
        torch.index_select(x, d.dim(x), torch.tensor([0], device=d.device), out=out)
    elif kind == "cumsum":
        torch.cumsum(x, d.dim(x), out=out)
    elif kind == "clamp":
        torch.clamp(x, -1, 1, out=out)
    elif kind == "sort":
        torch.sort(x, dim=d.dim(x), stable=True, out=(out, torch.empty(0, dtype=torch.long, device=d.device)))
    elif kind == "where":
        torch.where(x.bool(), x, y, out=out)
    else:
        d.one(torch.mul, torch.add, torch.pow)(x, d.number(), out=out)
    return out


def _foreach(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    name = d.one("add", "mul", "sub", "div", "maximum", "clamp_min")
    if d.chance(0.3):
        name = d.one("sqrt", "neg", "abs", "exp", "reciprocal", "zero_", "sigmoid")
        return getattr(torch, f"_foreach_{name}")([x, z])
    other = d.one([y, z], d.number(), [2, 0.5])
    if d.chance(0.5):
        return getattr(torch, f"_foreach_{name}_")([x, z], other)
    return getattr(torch, f"_foreach_{name}")([x, z], other)


def _foreach_more(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    kind = d.one("addcmul", "lerp", "norm", "pow", "copy", "scalar")
    if kind == "addcmul":
        return d.one(torch._foreach_addcmul_, torch._foreach_addcdiv_)([x], [y], [z], value=d.one(1, 0.5))
    if kind == "lerp":
        return torch._foreach_lerp_([x], [y], 0.25)
    if kind == "norm":
        return torch._foreach_norm([x, y], d.one(2, 1))
    if kind == "pow":
        return torch._foreach_pow([x, y], d.one(2, 0.5))
    if kind == "copy":
        return torch._foreach_copy_([x, z], [y, z])
    return torch._foreach_mul_([x, z], torch.tensor(d.one(2.0, 0.5), device="cpu"))


def _leaf(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return d.one(x.detach().clone, x.detach)().requires_grad_()


def _parameter(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(x.detach(), requires_grad=d.chance(0.9))


def _total(d: Draws, *tensors: torch.Tensor) -> torch.Tensor:
    """A number that depends on all of the tensors that can have gradients."""
    parts = [t.abs() if t.is_complex() else t for t in tensors if t.requires_grad]
    return sum(
        (d.one(lambda p: p.sum(), lambda p: (p * p).sum(), lambda p: p.mean())(p) for p in parts),
        start=torch.zeros((), device=d.device),
    )  # type: ignore[return-value]


def _backward(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    if d.chance(0.3):
        x.backward(torch.ones_like(x), retain_graph=d.chance(0.3))
        return
    total = _total(d, x, y)
    total.backward(retain_graph=d.chance(0.3), create_graph=d.chance(0.1))


def _grad(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    inputs = d.one([x], [x, y], [z])
    outputs = d.one(_total(d, x, y), (x * z).sum(), x)
    found = torch.autograd.grad(
        outputs,
        inputs,
        torch.ones_like(outputs),
        create_graph=d.chance(0.4),
        allow_unused=True,
        materialize_grads=d.chance(0.3),
    )
    return [g for g in found if g is not None]


def _second(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    function = d.one(
        torch.sin,
        torch.exp,
        torch.sigmoid,
        lambda t: t**3,
        lambda t: t.softmax(-1),
        lambda t: F.gelu(t),
        lambda t: t @ t.mT,
    )
    leaf = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad((first * first).sum(), leaf)


def _hook(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    kind = d.one("tensor", "retain", "accumulated")
    if kind == "tensor":
        x.register_hook(d.one(lambda g: g * 2, lambda g: None, lambda g: g.clone()))
    elif kind == "retain":
        x.retain_grad()
    else:
        x.register_post_accumulate_grad_hook(lambda t: t.grad.mul_(2))


def _use_grad(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    kind = d.one("take", "clear", "set", "zero", "flag")
    if kind == "take":
        return x.grad
    if kind == "flag":
        x.requires_grad_(d.chance(0.7))
    elif kind == "zero":
        x.grad.zero_()  # type: ignore[union-attr]
    else:
        x.grad = None if kind == "clear" else torch.ones_like(x, requires_grad=False)
    return None


def _optimizer(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    leaves = [t for t in {id(t): t for t in (x, y, z)}.values() if t.is_leaf and t.requires_grad]
    kind = d.one("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adadelta", "Adamax", "Rprop", "ASGD", "RAdam")
    more: dict[str, Any] = {"momentum": d.one(0.0, 0.9)} if kind in ("SGD", "RMSprop") else {}
    if kind == "SGD":
        more["nesterov"] = more["momentum"] > 0 and d.chance(0.5)
    if kind in ("Adam", "AdamW"):
        more |= {"amsgrad": d.chance(0.3)}
        more |= d.one({"fused": True}, {"foreach": False}, {}, {"capturable": False})
    else:
        more["foreach"] = d.one(None, True, False)
    optimizer = getattr(torch.optim, kind)(leaves, lr=0.1, weight_decay=d.one(0, 0.1), maximize=d.chance(0.2), **more)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=d.chance(0.8))
        sum((leaf * leaf).abs().sum() for leaf in leaves).backward()
        if d.chance(0.3):
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()


def _assign_data(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    value = d.one(y, y.detach(), y.detach().clone())
    if value.is_inference() == x.is_inference():  # PyTorch's CPU alone lets the one become the other
        x.data = value


def _set(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    kind = d.one("tensor", "storage", "nothing", "sized")
    if kind in ("storage", "sized") and x.dtype is not y.dtype:
        return  # memory beyond the other's would hold anything
    if kind == "tensor":
        x.set_(y)
    elif kind == "nothing":
        x.set_()
    elif kind == "storage":
        x.set_(y.untyped_storage(), 0, [d.int(0, min(y.numel(), 1))], [1])
    else:
        start = d.int(0, max(y.numel() - 1, 0))
        x.set_(y, start, (d.int(0, y.numel() - start),), (d.int(0, 1),))


def _resize(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    """Sizes that need no memory beyond what is there, for new memory holds anything."""
    kept = [d.int(0, n) for n in x.shape]
    if x.is_contiguous():
        d.one(lambda: x.resize_(kept), lambda: x.resize_as_(x[tuple(slice(n) for n in kept)]))()


def _memory(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    kind = d.one("size", "alias", "fill", "copy", "slice", "shared", "element", "clone", "list")
    storage = x.untyped_storage()
    if kind == "size":
        return d.note([storage.nbytes(), x.nbytes, x.element_size(), storage.size()])
    if kind == "alias":
        return torch.empty(0, dtype=x.dtype, device=d.device).set_(storage)
    if kind == "fill":
        storage.fill_(0)
    elif kind == "copy":
        storage.copy_(storage.clone())
    elif kind == "slice":
        return d.note(list(storage[: d.int(0, 4)]))
    elif kind == "shared":
        return d.note([x.is_shared(), x.is_pinned(), x.is_set_to(y)])
    elif kind == "element":
        storage[0] = 0
    elif kind == "clone":
        return torch.empty(0, dtype=torch.uint8, device=d.device).set_(storage.clone())
    else:
        return d.note(storage.tolist()[:8])
    return None


def _travel(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    kind = d.one("deepcopy", "copy", "pickle", "save", "together")
    if kind == "deepcopy":
        return copy.deepcopy(x)
    if kind == "copy":
        return copy.copy(x)
    if kind == "pickle":
        return pickle.loads(pickle.dumps(x))
    file = io.BytesIO()
    torch.save([x, y] if kind == "together" else x, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location=d.one(None, d.device))


class Named(torch.Tensor):
    """A class of a user's without anything of its own."""


def _subclass(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(d.one(Named, torch.Tensor))


_FUNCTIONS: tuple[Any, ...] = (
    torch.sin,
    lambda t: t * 2,
    lambda t: t.sum(),
    lambda t: t.softmax(-1),
    lambda t: t @ t.mT,
    lambda t: t[0],
    lambda t: torch.where(t > 0, t, 0.0),
    lambda t: t.unsqueeze(0).expand(2, *t.shape),
    lambda t: F.layer_norm(t, t.shape[-1:]),
    lambda t: t.clone().mul_(2),
    lambda t: torch.cat([t, t]),
    lambda t: t.cumsum(-1),
)


def _transform(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    function = d.one(*_FUNCTIONS)
    kind = d.one("vmap", "vmap", "grad", "jvp", "vjp", "jacrev", "jacfwd", "both", "functionalize", "linearize")
    if kind == "vmap":
        return torch.func.vmap(function, in_dims=d.one(0, d.dim(x)), out_dims=d.one(0, -1))(x)
    if kind == "both":
        return torch.func.vmap(torch.func.grad(lambda t: function(t).sum()))(x)
    if kind == "grad":
        return torch.func.grad_and_value(lambda t: function(t).sum())(x)
    if kind == "jvp":
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))
    if kind == "vjp":
        value, back = torch.func.vjp(function, x)
        return value, *back(torch.ones_like(value))
    if kind == "functionalize":
        return torch.func.functionalize(function)(x)
    if kind == "linearize":
        value, forward = torch.func.linearize(function, x)
        return value, forward(torch.ones_like(x))
    return getattr(torch.func, kind)(function)(x)


def _random(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    kind = d.one(
        "uniform_",
        "normal_",
        "bernoulli_",
        "random_",
        "exponential_",
        "rand",
        "randn_like",
        "randint",
        "randperm",
        "dropout",
        "multinomial",
        "seed",
    )
    generator = d.one(None, torch.Generator(device=d.device).manual_seed(d.int(0, 99)))
    if kind == "seed":
        torch.manual_seed(d.int(0, 99))
        return None
    if kind == "rand":
        return torch.rand(d.size(), device=d.device, generator=generator, dtype=d.one(None, torch.float64))
    if kind == "randn_like":
        return d.one(torch.randn_like, torch.rand_like)(x)
    if kind == "randint":
        return torch.randint(-3, 9, d.size(), device=d.device, generator=generator)
    if kind == "randperm":
        return torch.randperm(d.int(0, 6), device=d.device, generator=generator)
    if kind == "dropout":
        return d.one(F.dropout, F.dropout1d)((x.abs() if x.is_complex() else x).detach(), 0.5)
    if kind == "multinomial":
        return torch.multinomial(x.abs(), d.int(1, 2), replacement=True, generator=generator)
    return getattr(x, kind)(*((d.one(0.3, 0.5),) if kind == "bernoulli_" else ()), generator=generator)


def _sparse(d: Draws, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    layout = d.one("coo", "csr", "csc")
    made = x.to_sparse() if layout == "coo" else getattr(x, f"to_sparse_{layout}")()
    return d.one(
        lambda: made.to_dense(),
        lambda: made @ y,
        lambda: (made * 2).to_dense(),
        lambda: made.values(),
        lambda: made.sum(),
    )()


EFFECTS: dict[str, Call] = {
    "in place": lambda d, x, y, z: getattr(x, d.one(*_IN_PLACE_BINARY.split()))(_optional(d, x, y)) is None or None,
    "in place again": lambda d, x, y, z: (
        getattr(x, d.one(*_IN_PLACE_BINARY.split()))(_optional(d, x, y)) is None or None
    ),
    "in place unary": lambda d, x, y, z: getattr(x, d.one(*_IN_PLACE_UNARY.split()))() is None or None,
    "in place result": lambda d, x, y, z: x.add_(d.number()),
    "add_ alpha": lambda d, x, y, z: x.add_(y, alpha=d.number()) is None or None,
    "clamp_": lambda d, x, y, z: x.clamp_(d.one(None, -1, y), d.one(1, 0.5)) is None or None,
    "addcmul_": lambda d, x, y, z: d.one(x.addcmul_, x.addcdiv_)(y, z, value=d.number()) is None or None,
    "addmm_": lambda d, x, y, z: d.one(x.addmm_, x.baddbmm_)(y, z, beta=d.one(1, 0, 2)) is None or None,
    "lerp_": lambda d, x, y, z: x.lerp_(y, d.one(0.25, z)) is None or None,
    "cumsum_": lambda d, x, y, z: x.cumsum_(d.dim(x)) is None or None,
    "fill_diagonal_": lambda d, x, y, z: x.fill_diagonal_(d.number()) is None or None,
    "put_": lambda d, x, y, z: (
        x.put_(torch.zeros(1, dtype=torch.long, device=d.device), y.flatten()[:1].to(x.dtype), accumulate=d.chance(0.5))
        is None
        or None
    ),
    "swap into": lambda d, x, y, z: x.__ior__(y) is None or None,
    "set item": _put,
    "set item again": _put,
    "change part": _change_part,
    "index_put_": _index_put,
    "change rows": _change_rows,
    "scatter_": _scatter,
    "masked": _masked,
    "change shape": _change_shape,
    "as_strided_": lambda d, x, y, z: x.as_strided_([d.int(0, 2)], [d.int(0, 1)]) is None or None,
    "out": _out,
    "out again": _out,
    "foreach": _foreach,
    "foreach more": _foreach_more,
    "leaf": _leaf,
    "parameter": _parameter,
    "backward": _backward,
    "backward again": _backward,
    "grad": _grad,
    "second": _second,
    "hook": _hook,
    "use of grad": _use_grad,
    "optimizer": _optimizer,
    "data": _assign_data,
    "set_": _set,
    "resize_": _resize,
    "memory": _memory,
    "travel": _travel,
    "subclass": _subclass,
    "transform": _transform,
    "transform again": _transform,
    "random": _random,
    "random again": _random,
    "sparse": _sparse,
}
