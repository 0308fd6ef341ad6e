"""Composites that are sent whole where no gradient is wanted: one op instead of the five that `linear` consists of.

PyTorch divides them above autograd, for its derivatives are those of the parts. Where nothing is differentiated, in
`torch.no_grad()` or because no argument requires a gradient or has a tangent, the worker's own kernel does the same
work, to the last bit. And composites that CPUs divide otherwise than accelerators, for workers on CPUs.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    DispatchKey,
    OpOverload,
    has_modes_or_transforms,
    is_forward_ad_active,
)
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, plain_op
from skyproxy.tensor.dispatch.recording import run
from skyproxy.tensor.ops.linear_gradients import one_node
from skyproxy.tensor.ops.nested_batches import NestedBatch

aten = torch.ops.aten
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_records_graphs = torch.is_grad_enabled
_ONLY_REMOTE = {RemoteTensor}
_requires_gradients = attrgetter("requires_grad")


def _kernel(op: OpOverload) -> object:
    divide = op._op_dk
    take_one_node = one_node if op is aten.linear.default else None

    def kernel(*args: Any) -> object:
        # Every argument is a plain remote tensor, and nothing sees the parts, as modes and transforms such as vmap do.
        # Complex products are decomposed: which of the parts resolves a conjugate view decides the last bit. Products
        # of integers are so rare that they stay what they are locally, views of a part.
        given = args if args[-1] is not None else args[:-1]
        if set(map(type, given)) == _ONLY_REMOTE and given[0].is_floating_point() and not _is_watched():
            if not (_records_graphs() and any(map(_requires_gradients, given))):
                return dispatch_remote(RemoteTensor, op, (), given)
            if take_one_node is not None and (result := take_one_node(given)) is not None:
                return result
        if type(args[0]) is NestedBatch:
            return NestedBatch.__torch_dispatch__(op, (), args)
        result = divide(_COMPOSITE, *args)
        if len(args) > 2 and result.dtype is not args[0].dtype:
            # ATen adds a bias to a tensor of a class in Python by another sum, whose dtype is what the two promote to.
            return divide(_COMPOSITE, *args[:2]).add_(args[2])
        return result

    return kernel


def _is_watched() -> bool:
    """Return whether somebody sees the parts of a composite, or wants tangents, which ignore `no_grad`."""
    return has_modes_or_transforms() or is_forward_ad_active()


def _one_hot(classes: torch.Tensor, count: int = -1) -> object:
    """`aten::one_hot` on the worker, which refuses classes that are out of range.

    For tensors of Python PyTorch takes a form that makes rows of zeros of them.
    """
    if type(classes) is not RemoteTensor or has_modes_or_transforms():
        return aten.one_hot.default._op_dk(_COMPOSITE, classes, count)
    if classes.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if count == -1:
        if not classes.numel():
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        count = max(int(classes.max()) + 1, 1)  # where all are negative, the worker says so
    return dispatch_remote(RemoteTensor, aten.one_hot.default, (), (classes, count))


def _is_plain(args: tuple[object, ...]) -> bool:
    """Return whether all tensors among the arguments are remote, and neither gradients nor modes want the parts."""
    records = _records_graphs()
    for a in args:
        if type(a) is RemoteTensor:
            if records and a.requires_grad:
                return False
        elif isinstance(a, torch.Tensor):
            return False
    return not _is_watched()


def _one_result(op: OpOverload) -> object:
    """A kernel for what is divided into an op that notes for derivatives, too: without these, one tensor is made."""
    divide = op._op_dk

    def kernel(x: torch.Tensor, *args: object) -> object:
        if _records_graphs() and x.requires_grad:  # as in each step of training
            return divide(_COMPOSITE, x, *args)
        if type(x) is RemoteTensor and _is_plain((x, *args)):
            return dispatch_remote(RemoteTensor, op, (), (x, *args))
        return divide(_COMPOSITE, x, *args)

    return kernel


def _max_pool1d(x: torch.Tensor, *options: Any, **named: Any) -> object:
    """`aten::max_pool1d` whole on the CPU, which has a kernel for what nobody differentiates, and divided elsewhere."""
    if type(x) is RemoteTensor and _is_plain((x,)) and x._sky.device.place[0] == "cpu":
        return dispatch_remote(RemoteTensor, aten.max_pool1d.default, (), (x, *options), named)
    return aten.max_pool1d.default._op_dk(_COMPOSITE, x, *options, **named)


def _dropout(input: torch.Tensor, p: float, train: bool) -> object:
    """`aten::dropout` on a CPU worker in the CPU's form: accelerators scale by another rounding, also in gradients.

    ATen takes its fused kernel for devices such as ours, which CPUs do not use. What transforms make of it is in
    `transformed_composites`.
    """
    is_usual = isinstance(input, RemoteTensor) and train and 0 < p < 1 and input.numel()
    if not is_usual or DEVICES.of(input.device).place[0] != "cpu":
        return aten.dropout.default._op_dk(_COMPOSITE, input, p, train)
    return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)


@implements("aten::dropout")
def _undivided_dropout(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """In inference mode the op arrives here undecomposed."""
    return _dropout(*args, **kwargs)


@implements("aten::_convert_indices_from_coo_to_csr")
def _compress_indices(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Row pointers of sorted rows, as torch_geometric asks for them.

    PyTorch's kernel writes where its input says, so workers do not have it; searching gives the same.
    """
    rows, size = args
    if rows.dim() != 1:
        raise RuntimeError(f"Input is supposed to be a vector, but got {rows.dim()} dimensional tensor.")
    places = torch.arange(size + 1, dtype=rows.dtype, device=rows.device)
    return torch.searchsorted(rows.contiguous(), places, **kwargs)


@implements("aten::_convert_indices_from_csr_to_coo")
def _expand_indices(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Indices of each element, (dimensions, elements), of row pointers and columns, with any number of batches."""
    pointers, columns = args
    *batch, rows = pointers.shape
    rows -= 1
    elements = columns.numel()
    lines = torch.arange(math.prod(batch) * rows, device=columns.device)
    lines = lines.repeat_interleave(pointers.diff().flatten(), output_size=elements)
    pair = [lines.remainder(rows), columns.flatten()]
    if kwargs.pop("transpose", False):
        pair.reverse()
    outer = torch.unravel_index(lines // rows, batch) if batch else ()
    return torch.stack([*outer, *pair]).to(torch.int32 if kwargs.get("out_int32") else torch.int64)


@implements("aten::sspaddmm.out")
def _add_to_sparse_product(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """`smm` adds nothing to the tensor that it fills, which has no size before; a worker fills results apart."""
    target, left, right = args
    if target is kwargs["out"] and kwargs.get("beta", 1) == 0 and left.dim() == right.dim() == 2:
        size = (left.shape[0], right.shape[1])
        target = torch.empty(size, dtype=left.dtype, layout=torch.sparse_coo, device=left.device)
    return run(BoundCall(info, (target, left, right), kwargs))


_WEIGHTS = {aten._native_multi_head_attention.default: 5, aten._transformer_encoder_layer_fwd.default: 3}
"""Positions of the weights that the first argument is multiplied with, if it is query, key and value at once."""
_attention = plain_op(aten._native_multi_head_attention.default)


@implements("aten::_native_multi_head_attention")
def _attend(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return dispatch_remote(RemoteTensor, _attention, (), rows_at_once(func, args), kwargs)


def rows_at_once(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a layer of attention, with a batch that a worker multiplies as PyTorch does here.

    Such a layer's kernel sees in inference mode that its weights require gradients, and multiplies all rows of the
    batch at once (`multiplies_alike`). On a worker no weights do; but a batch without gaps is multiplied so, too.
    """
    at = _WEIGHTS.get(op)
    if at is None or not torch.is_inference_mode_enabled() or not args[at].requires_grad or args[at].is_inference():
        return args
    rows = args[0]
    if rows.dim() != 3 or rows.stride(0) == rows.stride(1) * rows.size(1) or any(a is not rows for a in args[: at - 2]):
        return args
    copy = rows.clone(memory_format=torch.contiguous_format)
    return tuple([copy if a is rows else a for a in args])


def install(library: torch.library.Library) -> None:
    """Puts the choice before PyTorch's division."""
    library.impl(aten.dropout.default, _dropout, "AutogradPrivateUse1")
    library.impl(aten.one_hot.default, _one_hot, "AutogradPrivateUse1")
    library.impl(aten.max_pool1d.default, _max_pool1d, "AutogradPrivateUse1")
    for op in (aten.linear.default, aten.matmul.default):
        library.impl(op, _kernel(op), "AutogradPrivateUse1")
    for op in (aten.group_norm.default, aten.layer_norm.default, aten.max_pool2d.default):
        library.impl(op, _one_result(op), "AutogradPrivateUse1")
