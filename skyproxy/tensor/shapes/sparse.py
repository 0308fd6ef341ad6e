"""Shape rules for sparse tensors: for what looks the same whatever number of elements they hold."""

from __future__ import annotations

import torch

from skyproxy.tensor.core.metadata import Meta, intern_meta, plain_meta
from skyproxy.tensor.shapes.recurrent import RULES
from skyproxy.tensor.shapes.rules import FLOATS, TARGET, RuleResult, keeps_target, rule
from skyproxy.torch_codec import Description

_add_dense, _clone_dense = RULES["aten::add_.Tensor"], RULES["aten::clone"]
_detach_dense, _neg_dense = RULES["aten::detach"], RULES["aten::neg"]
_mm_dense, _addmm_dense, _matmul_dense = RULES["aten::mm"], RULES["aten::addmm"], RULES["aten::matmul"]
_ROWS_OR_COLUMNS = (torch.sparse_csr, torch.sparse_csc)
_KERNELS_OF_PRODUCTS = (torch.float32, torch.float64)
_MODE_MAX = 2  # of bags: there are no sparse gradients of it


def _coordinates(size: tuple[int, ...], dtype: torch.dtype) -> Meta:
    return intern_meta(Description(size, (), 0, dtype, torch.sparse_coo))


@rule("_sparse_coo_tensor_with_dims_and_tensors")
def _constructor(
    sparse_dim: int, dense_dim: int, size: list[int], indices: object, values: object, **options: object
) -> RuleResult:
    if type(indices) is not Meta or type(values) is not Meta or not indices.plain or not values.plain:
        return None
    fits = indices.dtype is torch.int64 and len(indices.size) == 2 and len(size) == sparse_dim + dense_dim
    whole = (*indices.size[1:], *size[sparse_dim:])
    if not fits or indices.size[0] != sparse_dim or values.size != whole or options.get("dtype") != values.dtype:
        return None
    return ((_coordinates(tuple(size), values.dtype), None),)


@rule("sparse_mask")
def _mask(x: Meta, mask: Meta) -> RuleResult:
    if not x.plain or mask.layout is not torch.sparse_coo or x.size != mask.size:
        return None
    return ((_coordinates(mask.size, x.dtype), None),)


@rule("add_.Tensor")
def _add_in_place(target: Meta, other: object, alpha: object = 1) -> RuleResult:
    if type(other) is not Meta or other.layout is not torch.sparse_coo:
        return _add_dense(target, other, alpha)
    fits = other.size == target.size and other.dtype is target.dtype and target.dtype in FLOATS
    return TARGET if fits and type(alpha) in (int, float) and keeps_target(target) else None


@rule("clone")
def _clone(x: Meta, memory_format: torch.memory_format | None = None) -> RuleResult:
    if x.layout is not torch.sparse_coo or x.conjugate or x.negative:
        return _clone_dense(x, memory_format)
    return ((x, None),) if memory_format is None else None  # no kernel takes another


@rule("detach")
def _detach(x: Meta) -> RuleResult:
    if x.layout is torch.strided:
        return _detach_dense(x)
    return ((x, None),) if not x.conjugate and not x.negative else None


@rule("neg")
def _neg(x: Meta) -> RuleResult:
    if x.layout is not torch.sparse_coo:
        return _neg_dense(x)
    return ((x, None),) if x.dtype in FLOATS and not x.conjugate and not x.negative else None


@rule("_coalesce")
def _coalesce(x: Meta) -> RuleResult:
    return ((x, None),) if x.layout is torch.sparse_coo and not x.conjugate and not x.negative else None


@rule("_to_dense")
def _to_dense(x: Meta, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> RuleResult:
    known = x.layout is torch.sparse_coo or (x.layout in _ROWS_OR_COLUMNS and len(x.size) == 2)
    if not known or x.dtype not in FLOATS or dtype is not None:
        return None
    return ((plain_meta(x.size, x.dtype), None),)


def _multiplies(a: Meta, b: Meta) -> bool:
    """Return whether a compressed matrix is multiplied with a dense one to a dense one, which all builds can."""
    fits = len(a.size) == len(b.size) == 2 and a.size[1] == b.size[0]
    return fits and a.layout in _ROWS_OR_COLUMNS and b.plain and a.dtype is b.dtype and a.dtype in _KERNELS_OF_PRODUCTS


@rule("mm")
def _mm(a: Meta, b: Meta) -> RuleResult:
    return ((plain_meta((a.size[0], b.size[1]), a.dtype), None),) if _multiplies(a, b) else _mm_dense(a, b)


@rule("matmul")
def _matmul(a: Meta, b: Meta) -> RuleResult:
    return _mm(a, b) if _multiplies(a, b) else _matmul_dense(a, b)


@rule("addmm")
def _addmm(bias: Meta, a: Meta, b: Meta, **options: object) -> RuleResult:
    if a.layout not in _ROWS_OR_COLUMNS:
        return _addmm_dense(bias, a, b, **options)
    size = (a.size[0], b.size[1]) if _multiplies(a, b) else None
    same = size is not None and bias.plain and bias.dtype is a.dtype and bias.size == size
    return ((plain_meta(size, a.dtype), None),) if same and size is not None and not options else None


@rule("_embedding_bag_backward")
def _bag_gradient(
    grad: Meta,
    indices: Meta,
    offsets: Meta,
    bags: Meta,
    bag_sizes: Meta,
    maxima: Meta,
    rows: int,
    by_count: bool,
    mode: int,
    sparse: bool,
    *rest: object,
) -> RuleResult:
    if not sparse or mode == _MODE_MAX or indices.dtype is not torch.int64:
        return None
    fits = grad.plain and grad.dtype in FLOATS and len(grad.size) == 2 and indices.plain and len(indices.size) == 1
    return ((_coordinates((rows, grad.size[1]), grad.dtype), None),) if fits else None


__all__ = ["RULES"]
