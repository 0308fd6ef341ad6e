"""Shape rules for Fourier transforms and for linear algebra, whose results lie column by column.

See `shapes.rules`; this module completes its table. Of Fourier transforms, those along the last dimension alone: what
others give lies as each device's library likes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.lists import RULES
from skyproxy.tensor.shapes.networks import FULL_PRECISION
from skyproxy.tensor.shapes.rules import Look, RuleResult, row_major, rule
from skyproxy.tensor.shapes.selections import fresh, plain
from skyproxy.torch_codec import contiguous_stride

_COMPLEX = frozenset({torch.complex64, torch.complex128})
Ints = tuple[int, ...]

# --- Fourier transforms ----------------------------------------------------------------------------------------------


def _is_of_last(x: Meta, dim: Sequence[int]) -> bool:
    """Return whether the transform of a row-major tensor is one along its last dimension."""
    return row_major(x) and 0 not in x.size and len(x.size) > 0 and list(dim) == [len(x.size) - 1]


@rule("_fft_r2c")
def _transform_of_real(x: Meta, dim: Sequence[int], norm: object, onesided: object) -> RuleResult:
    if not _is_of_last(x, dim) or x.dtype not in FULL_PRECISION:
        return None
    return [fresh((*x.size[:-1], x.size[-1] // 2 + 1 if onesided else x.size[-1]), x.dtype.to_complex())]


@rule("_fft_c2r")
def _transform_to_real(x: Meta, dim: Sequence[int], norm: object, length: int) -> RuleResult:
    fits = _is_of_last(x, dim) and x.dtype in _COMPLEX and type(length) is int and length > 0
    return [fresh((*x.size[:-1], length), x.dtype.to_real())] if fits and length // 2 + 1 == x.size[-1] else None


@rule("_fft_c2c")
def _transform(x: Meta, dim: Sequence[int], norm: object, forward: object) -> RuleResult:
    return [fresh(x.size, x.dtype)] if _is_of_last(x, dim) and x.dtype in _COMPLEX else None


# --- linear algebra --------------------------------------------------------------------------------------------------


def _are_matrices(*tensors: Meta) -> bool:
    """Return whether all are matrices, or batches of them, of one dtype of full precision, and none is empty."""
    first = tensors[0]
    return (
        plain(*tensors)
        and first.dtype in FULL_PRECISION
        and all(t.dtype is first.dtype and len(t.size) > 1 for t in tensors)
    )


def _are_square(*tensors: Meta) -> bool:
    return _are_matrices(*tensors) and all(t.size[-1] == t.size[-2] for t in tensors)


def _column_look(size: Ints, dtype: torch.dtype) -> Look:
    """Matrices whose columns lie one behind the other."""
    return plain_meta(size, dtype, (*contiguous_stride(size)[:-2], 1, size[-2])), None


def _codes(size: Ints) -> Look:
    return fresh(size, torch.int32)


@rule("linalg_inv_ex linalg_cholesky_ex")
def _inverse(a: Meta, **options: object) -> RuleResult:
    return [_column_look(a.size, a.dtype), _codes(a.size[:-2])] if _are_square(a) else None


@rule("_linalg_solve_ex")
def _solution(a: Meta, b: Meta, *, left: object = True, check_errors: object = False) -> RuleResult:
    if not _are_square(a) or not _are_matrices(b) or a.dtype is not b.dtype or a.size[:-1] != b.size[:-1] or not left:
        return None
    looks = _column_look(b.size, b.dtype), _column_look(a.size, a.dtype)
    return [*looks, _codes(a.size[:-1]), _codes(a.size[:-2])]


@rule("_linalg_det")
def _determinant(a: Meta) -> RuleResult:
    if not _are_square(a):
        return None
    return [fresh(a.size[:-2], a.dtype), _column_look(a.size, a.dtype), _codes(a.size[:-1])]


@rule("_linalg_slogdet")
def _log_determinant(a: Meta) -> RuleResult:
    found = _determinant(a)
    return None if found is None else [found[0], *found]


@rule("linalg_qr")
def _orthogonal(a: Meta, mode: str = "reduced") -> RuleResult:
    if not _are_matrices(a) or mode != "reduced":
        return None
    *batch, rows, columns = a.size
    rank = min(rows, columns)
    return [_column_look((*batch, rows, rank), a.dtype), _column_look((*batch, rank, columns), a.dtype)]


@rule("_linalg_eigh")
def _eigenvectors(a: Meta, triangle: object = "L", compute_v: object = True) -> RuleResult:
    if not _are_square(a):
        return None
    return [fresh(a.size[:-1], a.dtype), _column_look(a.size, a.dtype) if compute_v else fresh((0,), a.dtype)]


@rule("linalg_matrix_exp")
def _exponential(a: Meta) -> RuleResult:
    return [fresh(a.size, a.dtype)] if _are_square(a) and row_major(a) else None


@rule("linalg_cross")
def _cross(a: Meta, b: Meta, *, dim: int = -1) -> RuleResult:
    fits = plain(a, b) and a.dtype is b.dtype and a.size == b.size
    fits = fits and type(dim) is int and -len(a.size) <= dim < len(a.size)
    return [fresh(a.size, a.dtype)] if fits and a.size[dim] == 3 and a.dtype is not torch.bool else None


__all__ = ["RULES"]
