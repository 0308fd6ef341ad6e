"""Nested tensors of PyTorch's strided layout, `torch.nested.nested_tensor(...)` without a `layout`.

Their kernels look into each component, and their derivatives are formulas of their own. So the worker has them whole,
with its own PyTorch's kernels and derivatives: an operation that is differentiated leaves its graph there, and backward
asks for the gradients of it. What a result looks like only the worker knows, so each operation waits once.

The jagged layout is PyTorch's own subclass made of ordinary tensors, and needs nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from skyproxy import patching, torch_codec
from skyproxy.errors import ProtocolError, UnsupportedOpError
from skyproxy.tensor.core.devices import Handle
from skyproxy.tensor.core.host_copies import escape
from skyproxy.tensor.core.metadata import plain_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.core.torch_private import (
    BelowAutograd,
    DisableTorchFunctionSubclass,
    DispatchKey,
    DispatchKeySet,
    ExcludedKeys,
    OpOverload,
    make_wrapper_subclass,
    pytree,
)
from skyproxy.tensor.dispatch import recording, replies
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, info_of
from skyproxy.tensor.ops.nested_copies import convert_nested, copy_nested
from skyproxy.torch_codec import contiguous_stride

_VIEWS = DispatchKeySet(DispatchKey.ADInplaceOrView)
_EXPLICIT = DispatchKey.CompositeExplicitAutograd
aten = torch.ops.aten
_make_wrapper = make_wrapper_subclass
Sizes = list[list[int]]


class RemoteNestedTensor(torch.Tensor):
    """A strided nested tensor on a worker. To PyTorch's C++ it looks like the padded batch.

    Attributes:
        held: a tensor of that look, whose slot holds the nested one. It is for recording only.
        component_sizes, component_strides, component_offsets: of each component, in the one buffer of all.
        shares_memory: whether a part of it, or what it is a part of, has a history that autograd knows.
    """

    held: RemoteTensor
    shares_memory = False
    component_sizes: Sizes
    component_strides: Sizes
    component_offsets: list[int]

    is_nested = True

    @staticmethod
    def holding(handle: Handle, fields: list[Any]) -> RemoteNestedTensor:
        """The nested tensor in a slot, by the worker's description of it."""
        _, dtype, sizes, strides, offsets = fields
        if dtype not in torch_codec.DTYPES:
            raise ProtocolError(f"the worker describes a nested tensor of {dtype!r:.40}")
        rank = len(sizes[0]) if sizes else 0
        padded = (len(sizes), *(max(size[d] for size in sizes) for d in range(rank)))
        handle.meta = plain_meta(padded, torch_codec.DTYPES[dtype])
        escape(handle)  # neither its bytes nor what its parts have of them lie as this says
        return _wrap(make_tensor(handle.meta, handle), sizes, strides, offsets)

    def __new__(cls, *args: object, **kwargs: Any) -> Any:
        """`type(tensor)(values)`, as if it were of PyTorch's own class."""
        return torch.Tensor(*args, **kwargs)

    @property
    def shape(self) -> object:  # type: ignore[override]
        raise RuntimeError("Internal error: NestedTensorImpl doesn't support sizes. Please file an issue.")

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        rank = self.dim()
        if not -rank <= dim < rank:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})"
            )
        found = {size[dim % rank - 1] for size in self.component_sizes} if dim % rank else {len(self.component_sizes)}
        if len(found) != 1:
            raise RuntimeError(f"Given dimension {dim % rank} is irregular and does not have a size.")
        return found.pop()

    def stride(self, dim: int | None = None) -> NoReturn:
        raise RuntimeError("Internal error: NestedTensorImpl doesn't support strides. Please file an issue.")

    def numel(self) -> int:
        return sum(map(math.prod, self.component_sizes))

    nelement = numel

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        begin = 0
        for size, stride, offset in zip(
            self.component_sizes, self.component_strides, self.component_offsets, strict=True
        ):
            if tuple(stride) != contiguous_stride(tuple(size)) or offset != begin:
                return False
            begin += math.prod(size)
        return memory_format is torch.contiguous_format

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    def __len__(self) -> int:
        return len(self.component_sizes)

    def __iter__(self) -> object:
        return iter(self.unbind())

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        parts = ",\n".join(f"  {component!r}" for component in self.detach().unbind())
        graph = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        leaf = ", requires_grad=True" if self.requires_grad and not graph else ""
        return f"nested_tensor([\n{parts}\n], device='{self.device}'{graph or leaf})"

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _rebuild, (list(self.detach().unbind()), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy")
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_function__(
        cls, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        with DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "").partition(".")[0]
            if name in _NO_OPERATIONS or name in _CONVERSIONS:
                return func(*args, **(kwargs or {}))
            if func is torch.numel:
                return cls.numel(*args, **(kwargs or {}))  # type: ignore[arg-type]
            # Composites arrive here whole: PyTorch would decompose them by sizes that nested tensors do not have.
            with BelowAutograd(), ExcludedKeys(_VIEWS):
                return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        info = info_of(func)
        answer = _ANSWERS.get(info.name)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        if info.name in _LIKE and type(args[0]) is RemoteNestedTensor:
            like = convert_nested(args[0], (kwargs or {}).get("device"))  # type: ignore[arg-type]
            if like is not args[0]:
                return func(like, *args[1:], **(kwargs or {}))
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        differentiated = (
            torch.is_grad_enabled()
            and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
            and info.name not in _WITHOUT_GRADIENTS
        )
        if not differentiated:
            return _run(info, *pytree.tree_unflatten(leaves, spec))
        if info.writes:
            return _change(info, spec, leaves)
        if _gives_parts(info):
            for leaf in leaves:
                if type(leaf) is RemoteNestedTensor:
                    leaf.shares_memory = True
        flat = _Differentiated.apply(info, spec, None, *leaves)  # type: ignore[no-untyped-call]
        if _gives_parts(info):
            for part in flat:
                part.shares_memory = True
        return flat[0] if len(flat) == 1 and not _gives_list(info) else flat


_NO_OPERATIONS = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "backward",
        "detach_",
        "dim",
        "ndimension",
        "element_size",
        "get_device",
        "is_complex",
        "is_conj",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "is_same_size",
        "is_shared",
        "is_pinned",
        "is_signed",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "type",
        "__hash__",
    }
)
"""Functions and attributes that are about autograd, or about a tensor as such."""
_CONVERSIONS = frozenset(
    {
        *("to", "cpu", "sky", "type_as", "_to_copy"),
        *("double", "float", "half", "bfloat16", "cdouble", "cfloat", "chalf"),
        *("bool", "byte", "char", "short", "int", "long"),
    }
)
"""Functions that PyTorch divides into a copy with a derivative of its own: what they give may be another class."""
_OVERWRITES = frozenset({"aten::zero_", "aten::fill_.Scalar", "aten::copy_"})
_WITHOUT_GRADIENTS = frozenset({"aten::detach", "aten::zeros_like", "aten::ones_like", "aten::empty_like"})


def _wrap(held: RemoteTensor, sizes: Sizes, strides: Sizes, offsets: list[int]) -> RemoteNestedTensor:
    handle = held._sky
    meta = handle.meta
    made: RemoteNestedTensor = _make_wrapper(
        RemoteNestedTensor, meta.size, meta.stride, dtype=meta.dtype, device=handle.device.torch_device
    )
    made.held, made.component_sizes = held, sizes
    made.component_strides, made.component_offsets = strides, offsets
    return made


def _rebuild(components: list[torch.Tensor], requires_grad: bool) -> torch.Tensor:
    return torch.nested.nested_tensor(components, device=components[0].device, requires_grad=requires_grad)


def _gives_parts(info: OpInfo) -> bool:
    """Tell whether the results of an op that changes nothing share the memory of its argument."""
    return any(result.alias_info is not None for result in info.func._schema.returns)


def _gives_list(info: OpInfo) -> bool:
    returns = info.func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


# --- on the worker ---------------------------------------------------------------------------------------------------


def _run(
    info: OpInfo, args: tuple[object, ...], kwargs: dict[str, object], graph: list[object] | None = None
) -> object:
    """Runs an op on the worker, and waits for what its results look like.

    Args:
        graph: to be filled, if the op is differentiated: a handle of its graph on the worker, and the tensors that the
            gradients are of.
    """
    nested: dict[int, RemoteNestedTensor] = {}

    def held(a: object) -> object:
        if type(a) is RemoteNestedTensor:
            nested[id(a.held)] = a
            return a.held
        return a

    args, kwargs = pytree.tree_map(held, (args, kwargs))
    if info.name in _PLACED:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
    call = BoundCall(info, args, kwargs)
    recorded: Callable[[list[object]], None] | None = None
    if graph is not None:
        differentiable = [t for t in call.tensors if t.dtype.is_floating_point or t.dtype.is_complex]
        handle = call.device.new_handle(plain_meta((), torch.uint8))
        graph += [handle, [nested.get(id(t), t) for t in differentiable]]

        def recorded(command: list[object]) -> None:
            slots = [t._sky.slot for t in differentiable]
            call.device.session.call("differentiated", handle.slot, slots, command)

    results = recording.ask(call, record=recorded)
    return nested.get(id(results), results)


def _change(info: OpInfo, spec: pytree.TreeSpec, leaves: list[Any]) -> object:
    """Differentiate an op that changes its first argument: by the one that gives a fresh result, and a copy of that.

    Raises:
        UnsupportedOpError: if there is no such op, or if another tensor with a history shares the memory.
    """
    changed, pure = leaves[0], _pure_form(info)
    if pure is None and info.name not in _OVERWRITES:
        raise UnsupportedOpError(
            f"{info.name}: strided nested tensors of a worker that require gradients are not changed in place by this "
            "operation. Use the form without a trailing underscore"
        )
    if type(changed) is not RemoteNestedTensor or changed.shares_memory:
        raise UnsupportedOpError(
            f"{info.name}: what shares its memory with a part of a strided nested tensor of a worker is not changed in "
            "place while gradients are wanted. Use the form without a trailing underscore"
        )
    if pure is None:
        _Overwritten.apply(info, spec, *leaves)  # type: ignore[no-untyped-call]
    else:
        _Differentiated.apply(pure, spec, changed, *leaves)  # type: ignore[no-untyped-call]
    return changed


def _pure_form(info: OpInfo) -> OpInfo | None:
    """Return the op that gives as a result of its own what another one makes of its first argument, if there is one."""
    schema = info.func._schema
    packet = getattr(aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    if info.name in _OVERWRITES or not schema.name.endswith("_") or info.writes != (info.names[0],):
        return None
    forms = [getattr(packet, name) for name in (packet.overloads() if packet is not None else [])]
    taken = [(a.name, str(a.type), a.kwarg_only) for a in schema.arguments]
    same = (f for f in forms if [(a.name, str(a.type), a.kwarg_only) for a in f._schema.arguments] == taken)
    return next((info_of(form) for form in same if not info_of(form).writes), None)


class _Overwritten(torch.autograd.Function):
    """An op that fills a tensor, which is nothing afterwards that depends on what it was."""

    @staticmethod
    def forward(ctx: Any, info: OpInfo, spec: pytree.TreeSpec, changed: RemoteNestedTensor, *rest: Any) -> object:
        args, kwargs = pytree.tree_unflatten([changed, *rest], spec)
        source = rest[0] if rest and isinstance(rest[0], torch.Tensor) else None
        if source is not None and (type(source) is not RemoteNestedTensor or source.dtype is not changed.dtype):
            raise UnsupportedOpError(
                f"{info.name}: a nested tensor of a worker that requires gradients takes values of its own dtype and "
                "device only. Convert the source first"
            )
        _run(info, args, kwargs)
        ctx.count, ctx.has_source = len(rest), source is not None
        ctx.mark_dirty(changed)
        return changed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[object, ...]:
        rest: list[object] = [None] * ctx.count
        if ctx.has_source:
            rest[0] = gradient
        return None, None, torch.zeros_like(gradient), *rest


class _Differentiated(torch.autograd.Function):
    """An op whose graph the worker keeps.

    Where a tensor is given to be changed, the op's result is copied into it.
    """

    @staticmethod
    def forward(
        ctx: Any, info: OpInfo, spec: pytree.TreeSpec, changed: RemoteNestedTensor | None, *leaves: object
    ) -> tuple[object, ...]:
        graph: list[Any] = []
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        results = _run(info, args, kwargs, graph)
        flat = tuple(results) if isinstance(results, list | tuple) else (results,)
        ctx.graph, differentiable = graph
        places = {id(tensor): number for number, tensor in enumerate(differentiable)}
        # A tensor that occurs several times has one gradient.
        ctx.places = [places.pop(id(leaf), None) for leaf in leaves]
        ctx.set_materialize_grads(False)
        if changed is not None:
            _run(info_of(aten.copy_.default), (changed, *flat), {})
            ctx.mark_dirty(changed)
            return (changed,)
        ctx.mark_non_differentiable(
            *(t for t in flat if isinstance(t, torch.Tensor) and not (t.is_floating_point() or t.is_complex()))
        )
        return flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
        wanted = [i for i, place in enumerate(ctx.places) if place is not None and ctx.needs_input_grad[i + 3]]
        found: list[object] = [None] * (len(ctx.places) + 3)
        if wanted and any(gradient is not None for gradient in gradients):
            session, device = ctx.graph.device.session, ctx.graph.device
            slots = [0 if g is None else getattr(g, "held", g)._sky.slot for g in gradients]
            made = [device.new_handle(None) for _ in wanted]
            places = [ctx.places[i] for i in wanted]
            session.call("differentiate", ctx.graph.slot, slots, places, [handle.slot for handle in made])
            rows = session.describe("gradients", [handle.slot for handle in made], [])
            for i, handle, row in zip(wanted, made, rows, strict=True):
                found[i + 3] = replies.wrap_answer(handle, row)
        return tuple(found)


# --- what is known here ----------------------------------------------------------------------------------------------


def _numbers(rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


_ANSWERS: dict[str, Callable[..., object]] = {
    "aten::_nested_tensor_size": lambda x: _numbers(x.component_sizes),
    "aten::_nested_tensor_strides": lambda x: _numbers(x.component_strides),
    "aten::_nested_tensor_storage_offsets": lambda x: _numbers(x.component_offsets),
    "aten::_to_copy": copy_nested,
    "aten::to.device": convert_nested,
    "aten::to.dtype": lambda x, dtype, *rest, **options: convert_nested(x, None, dtype, *rest, **options),
    "aten::to.dtype_layout": convert_nested,
    "aten::to.other": lambda x, other, *rest, **options: convert_nested(x, other.device, other.dtype, *rest, **options),
    "aten::type_as": lambda x, other: convert_nested(x, other.device, other.dtype),
    "aten::is_same_size": lambda x, other: (
        getattr(x, "component_sizes", None) == getattr(other, "component_sizes", None)
    ),
    "aten::is_contiguous": lambda x: x.is_contiguous(),
    "aten::is_pinned": lambda x, device=None: False,
    "aten::size.int": lambda x, dim: x.size(dim),
    "aten::numel": lambda x: x.numel(),
}
_LIKE = frozenset(f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn"))
_PLACED = frozenset({"aten::_nested_tensor_from_tensor_list"})


@implements("aten::_nested_tensor_from_tensor_list")
def _from_list(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Components, wherever they are, to a nested tensor of the device that is asked for, or of theirs."""
    given: dict[str, Any] = dict(zip(info.names, args, strict=False)) | kwargs
    components, dtype, device = given["list"], given.get("dtype"), given.get("device")
    if device is None:
        device = next(t.device for t in components if t.device.type == "sky")
    moved = [t.to(device, dtype if dtype is not None else t.dtype) for t in components]
    if not moved:
        raise UnsupportedOpError("a nested tensor without components has nothing on a worker. Make it on the CPU")
    return _run(info, (moved,), {})


@implements("aten::_nested_view_from_buffer")
def _refuse_places(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    raise UnsupportedOpError(
        f"{info.name} places components anywhere in a memory, which workers do not do for clients. "
        "Use torch.nested.nested_tensor(list of components)"
    )


def _from_list_here(*args: Any, **kwargs: Any) -> object:
    """The same for components on the CPU, which PyTorch would take for a nested tensor of the CPU."""
    info = info_of(aten._nested_tensor_from_tensor_list.default)
    device = (dict(zip(info.names, args, strict=False)) | kwargs).get("device")
    if device is not None and torch.device(device).type == "sky":
        return _from_list(info, info.func, args, kwargs)
    return info.func._op_dk(_EXPLICIT, *args, **kwargs)


def install() -> None:
    """Lets nested tensors be made on a worker of what lies here, and of what a worker describes as one."""
    replies.wrap_described[torch_codec.NESTED] = RemoteNestedTensor.holding
    library = torch.library.Library("aten", "IMPL")
    library.impl("_nested_tensor_from_tensor_list", _from_list_here, "CPU")
    library.impl("_to_copy", copy_nested, "NestedTensorPrivateUse1")
    patching.registered(
        "kernel of `aten::_nested_tensor_from_tensor_list` for the CPU",
        library._destroy,
        why="a nested tensor for a worker is made of components on the CPU, which would make it one of the CPU",
        test="tests/tensor/ops/test_nested_tensors.py::test_an_operation_gives_what_it_gives_on_the_cpu",
    )


__all__ = ["RemoteNestedTensor"]
