"""Shape rules for Fourier transforms and for linear algebra, whose results lie column by column.

See `shapes.rules`; this module completes its table. What Fourier transforms give lies as the kernels of MKL leave it;
where a worker's library likes another order, it is mended there.
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

COMPLEX = frozenset({torch.complex64, torch.complex128})
_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
Ints = tuple[int, ...]

# --- Fourier transforms ----------------------------------------------------------------------------------------------


def can_be_transformed(x: Meta, dims: Sequence[int], dtypes: frozenset[torch.dtype]) -> bool:
    rank = len(x.size)
    fits = x.plain and x.dtype in dtypes and 0 not in x.size and rank > 0 and len(dims) > 0
    return fits and all(type(d) is int and 0 <= d < rank for d in dims) and len(set(dims)) == len(dims)


def transform_look(x: Meta, dims: Sequence[int], size: Ints, dtype: torch.dtype, *, sorted_but: int) -> Meta:
    """Return what a transform gives, as `_exec_fft` lays it out: the dimensions that are not transformed come first,
    in the order of their strides, and then the others.

    Args:
        dims: those that are transformed.
        size: of the result.
        sorted_but: how many of the last ones keep their places, where the others are ordered by their strides.
    """
    strides = x.stride
    turned = list(dims[: len(dims) - sorted_but])
    turned.sort(key=lambda d: -strides[d])
    order = _other_dimensions(len(size), dims)
    order.sort(key=lambda d: -strides[d])
    order += [*turned, *dims[len(dims) - sorted_but :]]
    stride = [0] * len(size)
    running = 1
    for d in reversed(order):
        stride[d] = running
        running *= size[d]
    return plain_meta(size, dtype, tuple(stride))


def _other_dimensions(rank: int, dims: Sequence[int]) -> list[int]:
    """Return the dimensions that are not among these, in the order in which `std::partition` leaves them."""
    order, first, last = list(range(rank)), 0, rank
    while True:
        while first < last and order[first] not in dims:
            first += 1
        while first < last and order[last - 1] in dims:
            last -= 1
        if first >= last:
            return order[:first]
        order[first], order[last - 1] = order[last - 1], order[first]


@rule("_fft_r2c")
def _transform_of_real(x: Meta, dim: Sequence[int], norm: object, onesided: object) -> RuleResult:
    if not can_be_transformed(x, dim, FULL_PRECISION):
        return None
    last = dim[-1]
    size = (*x.size[:last], x.size[last] // 2 + 1, *x.size[last + 1 :]) if onesided else x.size
    return [(transform_look(x, dim, size, x.dtype.to_complex(), sorted_but=1), None)]


@rule("_fft_c2r")
def _transform_to_real(x: Meta, dim: Sequence[int], norm: object, length: int) -> RuleResult:
    if not can_be_transformed(x, dim, COMPLEX) or type(length) is not int or length < 1:
        return None
    last = dim[-1]
    if length // 2 + 1 != x.size[last]:
        return None
    if len(dim) > 1:  # in two steps
        x = transform_look(x, dim[:-1], x.size, x.dtype, sorted_but=0)
    size = (*x.size[:last], length, *x.size[last + 1 :])
    return [(transform_look(x, dim[-1:], size, x.dtype.to_real(), sorted_but=0), None)]


@rule("_fft_c2c")
def _transform(x: Meta, dim: Sequence[int], norm: object, forward: object) -> RuleResult:
    if not can_be_transformed(x, dim, COMPLEX):
        return None
    return [(transform_look(x, dim, x.size, x.dtype, sorted_but=0), None)]


# --- linear algebra --------------------------------------------------------------------------------------------------


def are_matrices(*tensors: Meta) -> bool:
    """Return whether all are matrices, or batches of them, of one dtype of full precision, and none is empty."""
    first = tensors[0]
    return (
        plain(*tensors)
        and first.dtype in FULL_PRECISION
        and all(t.dtype is first.dtype and len(t.size) > 1 for t in tensors)
    )


def are_square(*tensors: Meta) -> bool:
    return are_matrices(*tensors) and all(t.size[-1] == t.size[-2] for t in tensors)


def _column_stride(size: Ints) -> Ints:
    """The strides of matrices whose columns lie one behind the other."""
    return (*contiguous_stride(size)[:-2], 1, size[-2])


def column_look(size: Ints, dtype: torch.dtype) -> Look:
    return plain_meta(size, dtype, _column_stride(size)), None


def _codes(size: Ints) -> Look:
    return fresh(size, torch.int32)


@rule("linalg_inv_ex linalg_cholesky_ex")
def _inverse(a: Meta, **options: object) -> RuleResult:
    return [column_look(a.size, a.dtype), _codes(a.size[:-2])] if are_square(a) else None


@rule("_linalg_solve_ex")
def _solution(a: Meta, b: Meta, *, left: object = True, check_errors: object = False) -> RuleResult:
    if not are_square(a) or not plain(b) or a.dtype is not b.dtype:
        return None
    if b.size == a.size[:-1] and left:  # vectors, whose last two dimensions lie as those of a matrix would
        look = column_look(b.size, b.dtype) if len(b.size) > 1 else fresh(b.size, b.dtype)
    elif len(b.size) == len(a.size) and left and a.size[:-1] == b.size[:-1]:
        look = column_look(b.size, b.dtype)
    elif len(b.size) == len(a.size) and not left and a.size[:-2] == b.size[:-2] and a.size[-1] == b.size[-1]:
        look = fresh(b.size, b.dtype)
    else:
        return None
    return [look, column_look(a.size, a.dtype), _codes(a.size[:-1]), _codes(a.size[:-2])]


@rule("_linalg_det")
def _determinant(a: Meta) -> RuleResult:
    if not are_square(a):
        return None
    return [fresh(a.size[:-2], a.dtype), column_look(a.size, a.dtype), _codes(a.size[:-1])]


@rule("_linalg_slogdet")
def _log_determinant(a: Meta) -> RuleResult:
    found = _determinant(a)
    return None if found is None else [found[0], *found]


@rule("linalg_qr")
def _orthogonal(a: Meta, mode: str = "reduced") -> RuleResult:
    if not are_matrices(a) or mode not in ("reduced", "complete", "r"):
        return None
    *batch, rows, columns = a.size
    rank = rows if mode == "complete" else min(rows, columns)
    q = fresh((0,), a.dtype) if mode == "r" else column_look((*batch, rows, rank), a.dtype)
    return [q, column_look((*batch, rank, columns), a.dtype)]


@rule("_linalg_svd")
def _singular_values(
    a: Meta, full_matrices: object = False, compute_uv: object = True, *, driver: object = None
) -> RuleResult:
    if not are_matrices(a) or driver is not None:
        return None
    *batch, rows, columns = a.size
    rank = min(rows, columns)
    values = fresh((*batch, rank), a.dtype)
    if not compute_uv:
        return [fresh((0,), a.dtype), values, fresh((0,), a.dtype)]
    left = column_look((*batch, rows, rows if full_matrices else rank), a.dtype)
    return [left, values, column_look((*batch, columns if full_matrices else rank, columns), a.dtype)]


@rule("linalg_eig")
def _eigen_decomposition(a: Meta) -> RuleResult:
    if not are_square(a):
        return None
    dtype = a.dtype.to_complex()
    return [fresh(a.size[:-1], dtype), column_look(a.size, dtype)]


@rule("_linalg_eigvals")
def _eigenvalues(a: Meta) -> RuleResult:
    return [fresh(a.size[:-1], a.dtype.to_complex())] if are_square(a) else None


@rule("linalg_lu_factor_ex")
def _triangular_factors(a: Meta, *, pivot: object = True, check_errors: object = False) -> RuleResult:
    if not are_matrices(a) or not pivot:
        return None
    pivots = _codes((*a.size[:-2], min(a.size[-2:])))
    return [column_look(a.size, a.dtype), pivots, _codes(a.size[:-2])]


@rule("linalg_lu")
def _factors(a: Meta, *, pivot: object = True) -> RuleResult:
    return _unpacked_factors(a) if are_matrices(a) and pivot else None


def _unpacked_factors(a: Meta, *, data: bool = True, pivots: bool = True) -> RuleResult:
    *batch, rows, columns = a.size
    rank, nothing = min(rows, columns), fresh((0,), a.dtype)
    return [
        fresh((*batch, rows, rows), a.dtype) if pivots else nothing,
        fresh((*batch, rows, rank), a.dtype) if data else nothing,
        fresh((*batch, rank, columns), a.dtype) if data else nothing,
    ]


@rule("lu_unpack")
def _unpack_factors(a: Meta, pivots: Meta, unpack_data: object = True, unpack_pivots: object = True) -> RuleResult:
    fits = are_matrices(a) and pivots.plain and pivots.dtype is torch.int32
    if not fits or pivots.size != (*a.size[:-2], min(a.size[-2:])):
        return None
    return _unpacked_factors(a, data=bool(unpack_data), pivots=bool(unpack_pivots))


@rule("linalg_lu_solve")
def _solution_of_factors(
    factors: Meta, pivots: Meta, b: Meta, *, left: object = True, adjoint: object = False
) -> RuleResult:
    fits = are_square(factors) and are_matrices(b, factors) and pivots.plain and pivots.dtype is torch.int32
    if not fits or pivots.size != factors.size[:-1] or b.size[:-2] != factors.size[:-2]:
        return None
    if b.size[-2 if left else -1] != factors.size[-1]:
        return None
    return [column_look(b.size, b.dtype) if left else fresh(b.size, b.dtype)]


@rule("linalg_solve_triangular")
def _triangular_solution(
    a: Meta, b: Meta, *, upper: object, left: object = True, unitriangular: object = False
) -> RuleResult:
    fits = are_square(a) and are_matrices(b, a) and b.size[:-2] == a.size[:-2]
    return [column_look(b.size, b.dtype)] if fits and b.size[-2 if left else -1] == a.size[-1] else None


@rule("cholesky_solve")
def _cholesky_solution(b: Meta, a: Meta, upper: object = False) -> RuleResult:
    fits = are_square(a) and are_matrices(b, a) and b.size[:-1] == a.size[:-1]
    return [column_look(b.size, b.dtype)] if fits else None


@rule("cholesky_inverse")
def _cholesky_inverse(a: Meta, upper: object = False) -> RuleResult:
    return [column_look(a.size, a.dtype)] if are_square(a) else None


@rule("linalg_householder_product")
def _householder_product(a: Meta, tau: Meta) -> RuleResult:
    fits = are_matrices(a) and plain(tau) and tau.dtype is a.dtype and tau.size[:-1] == a.size[:-2]
    fits = fits and a.size[-2] >= a.size[-1] >= tau.size[-1] and len(tau.size) == len(a.size) - 1
    return [column_look(a.size, a.dtype)] if fits else None


@rule("geqrf")
def _reflectors(a: Meta) -> RuleResult:
    return [column_look(a.size, a.dtype), fresh((*a.size[:-2], min(a.size[-2:])), a.dtype)] if are_matrices(a) else None


@rule("_linalg_eigh")
def _eigenvectors(a: Meta, triangle: object = "L", compute_v: object = True) -> RuleResult:
    if not are_square(a) or triangle not in ("L", "U"):
        return None
    return [fresh(a.size[:-1], a.dtype), column_look(a.size, a.dtype) if compute_v else fresh((0,), a.dtype)]


@rule("linalg_matrix_exp")
def _exponential(a: Meta) -> RuleResult:
    return [fresh(a.size, a.dtype)] if are_square(a) and row_major(a) else None


@rule("linalg_pinv.atol_rtol_tensor")
def _pseudoinverse(a: Meta, *, atol: object = None, rtol: object = None, hermitian: object = False) -> RuleResult:
    given = [t for t in (atol, rtol) if t is not None]
    # Tolerances with dimensions are broadcast with the matrices.
    fits = are_matrices(a) and all(type(t) is Meta and not t.size and not t.dtype.is_complex for t in given)
    fits = fits and (not hermitian or a.size[-1] == a.size[-2])
    return [fresh((*a.size[:-2], a.size[-1], a.size[-2]), a.dtype)] if fits else None


@rule("_grouped_mm")
def _grouped_product(
    a: Meta, b: Meta, offsets: Meta | None = None, bias: object = None, out_dtype: object = None
) -> RuleResult:
    """Products of groups of rows or columns; lines of the result begin at multiples of 16 bytes."""
    fits = _have_aligned_lines(a, b) and a.dtype is b.dtype and a.dtype in _GROUPED and a.size[-1] == b.size[-2]
    if not fits or bias is not None or out_dtype not in (None, a.dtype):
        return None
    groups = [t.size[:1] for t in (a, b) if len(t.size) == 3]
    if offsets is not None:
        if not plain(offsets) or offsets.dtype is not torch.int32 or len(offsets.size) != 1 or len(groups) == 2:
            return None
        groups.append(offsets.size)
    elif len(groups) < 2:
        return None
    if groups[0] != groups[-1]:
        return None
    step = 16 // a.dtype.itemsize
    width = (b.size[-1] + step - 1) // step * step
    rows, columns = a.size[-2], b.size[-1]
    if len(a.size) != len(b.size):
        return [(plain_meta((rows, columns), a.dtype, (width, 1)), None)]
    return [(plain_meta((*groups[0], rows, columns), a.dtype, (rows * width, width, 1)), None)]


def _have_aligned_lines(*tensors: Meta) -> bool:
    """Return whether these are matrices, or batches of them, whose rows or columns begin at multiples of 16 bytes."""
    for t in tensors:
        if not plain(t) or len(t.size) not in (2, 3):
            return False
        (rows, columns), (down, along) = t.size[-2:], t.stride[-2:]
        line = along if down == 1 and along >= rows else down if along == 1 and down >= columns else 0
        if not line or line * t.dtype.itemsize % 16 or t.offset * t.dtype.itemsize % 16:
            return False
    return True


@rule("linalg_cross")
def _cross(a: Meta, b: Meta, *, dim: int = -1) -> RuleResult:
    fits = plain(a, b) and a.dtype is b.dtype and a.size == b.size
    fits = fits and type(dim) is int and -len(a.size) <= dim < len(a.size)
    return [fresh(a.size, a.dtype)] if fits and a.size[dim] == 3 and a.dtype is not torch.bool else None


__all__ = ["RULES"]
