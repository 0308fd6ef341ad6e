"""Kernels that may run here, to see whether they take the dtypes and numbers of a call, see `kernel_trials`."""

from __future__ import annotations

import torch

from skyproxy.tensor.core.torch_private import OpOverload

_TRIED = frozenset(
    "aten::" + name
    for words in (
        "add addbmm addmm addmv addr baddbmm bmm convolution dist div dot linalg_cross linear mm mul mv sub trace vdot",
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d",
        "_cdist_forward _fft_c2c _fft_c2r _fft_r2c _pdist_forward bucketize grid_sampler_2d grid_sampler_3d",
        "_linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _trilinear cholesky",
        "cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex",
        "linalg_ldl_factor_ex linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_qr linalg_solve_triangular ormqr",
        "_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data log_softmax",
        "group_norm layer_norm logcumsumexp logsumexp native_group_norm native_layer_norm softmax",
        "triangular_solve",
        "_batch_norm_with_update _native_batch_norm_legit native_batch_norm",
        "bernoulli cauchy exponential geometric log_normal multinomial normal rrelu_with_noise uniform",
        "hardtanh_backward rrelu_with_noise_functional",
        "_prelu_kernel celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish",
        "relu silu softplus softshrink threshold",
        "aminmax all amax amin any argmax argmin count_nonzero cummax cummin cumprod cumsum kthvalue max mean median",
        "min mode nanmedian nansum prod quantile sort std std_mean sum topk var var_mean",
        "col2im complex hash_tensor im2col max_pool2d polar",
        "binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss multi_margin_loss smooth_l1_loss",
        "huber_loss_backward mse_loss_backward nll_loss2d_forward nll_loss_forward smooth_l1_loss_backward",
        "soft_margin_loss",
        "embedding gather index index_add index_copy index_fill index_reduce index_select take",
        "index_put masked_scatter put",
        "scatter scatter_add scatter_reduce linalg_vector_norm norm renorm",
        "max_pool2d_with_indices max_pool3d_with_indices reflection_pad1d reflection_pad2d replication_pad1d",
        "replication_pad2d _upsample_nearest_exact1d _upsample_nearest_exact2d upsample_bicubic2d upsample_bilinear2d",
        "upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact3d max_pool1d reflection_pad3d",
        "replication_pad3d _standard_gamma poisson random searchsorted fill full full_like masked_fill new_full",
        "_addmm_activation flip floor_divide linear matmul rsub scalar_tensor tril triu",
        "arange bartlett_window blackman_window eye fft_fftfreq fft_rfftfreq hamming_window hann_window kaiser_window",
    )
    for name in words.split()
)
"""Ops that compute no element for itself alone and may run here on numbers that mean nothing: no value leads their
kernels out of their operands, and they do nothing else than compute. What warns is not here: it would warn twice."""
_FILLS = frozenset(
    {
        "aten::fill",
        "aten::floor_divide",
        "aten::full_like",
        "aten::index_fill",
        "aten::index_reduce",
        "aten::masked_fill",
        "aten::scatter",
        "aten::scatter_reduce",
    }
)
"""More ops of which a trial may take tensors with fewer elements: what they refuse is the number."""
_TRIED_WITH = {
    "aten::fractional_max_pool2d": (0,),
    "aten::fractional_max_pool3d": (0,),
    "aten::linalg_ldl_solve": (1,),
    "aten::linalg_lu_solve": (1,),
    "aten::max_pool2d_with_indices_backward": (0,),
    "aten::max_pool3d_with_indices_backward": (0,),
}
"""More of them, with the only value that does not lead their kernels out of their operands: pivots count from one, and
positions in a window from zero."""
_TRUST_SIZES = frozenset({"aten::_fft_c2r"})
"""Ops that are not tried on smaller tensors: some of their kernels read as many elements as a number says."""
_TRIAL_VALUES = (0, 1)
"""Values that others are tried with: ones for what divides."""
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset(
    {
        torch.bool,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
DRAWN = dict.fromkeys(
    ("aten::rand", "aten::rand_like", "aten::randn", "aten::randn_like"), _FLOATS | {torch.complex64, torch.complex128}
) | {"aten::randint_like": _FLOATS | _INTEGERS}
"""Dtypes in which some ops draw random numbers; for others, the worker is asked."""


def may_be_tried(func: OpOverload, draws: bool) -> bool:
    """Return whether the kernel of an op may run here, for no other effect than its error.

    Args:
        func: the overload.
        draws: whether it takes a generator, so that it may get another one than the program's.
    """
    name = func.name()
    if not name.startswith("aten::") or func.is_view:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags and not draws:
        return False
    if name.startswith("aten::_foreach_"):
        return True
    packet = name.partition(".")[0]
    return (_is_pointwise(func) and not draws) or packet.removesuffix("_") in _TRIED or packet in _TRIED_WITH


def shrinks(func: OpOverload) -> bool:
    """Return whether a trial may take tensors with fewer elements than a call."""
    return func.name().partition(".")[0].removesuffix("_") in _FILLS or _is_pointwise(func)


def trusts_sizes(func: OpOverload) -> bool:
    """Return whether no trial may take tensors with fewer elements than a call."""
    return func.name().partition(".")[0] in _TRUST_SIZES


def trial_values(func: OpOverload) -> tuple[int, ...]:
    """Return the values of the operands of trials; one that goes well is enough."""
    return _TRIED_WITH.get(func.name().partition(".")[0], _TRIAL_VALUES)


def _is_pointwise(func: OpOverload) -> bool:
    """Return whether an op, or that which it is the form in place of, computes each element for itself."""
    if torch.Tag.pointwise in func.tags:
        return True
    packet, _, overload = func.name().removeprefix("aten::").partition(".")
    fresh = getattr(torch.ops.aten, packet.removesuffix("_"), None) if packet.endswith("_") else None
    return fresh is not None and torch.Tag.pointwise in getattr(getattr(fresh, overload or "default", None), "tags", ())


__all__ = ["DRAWN", "may_be_tried", "shrinks", "trial_values", "trusts_sizes"]
