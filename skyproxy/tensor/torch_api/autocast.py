"""`torch.autocast("sky")`: the casts that PyTorch makes for the device of the worker, by the same lists of ops.

PyTorch has one list for CUDA and another one for the CPU, and which one counts is a matter of the tensors' own device.
The casts are made above autograd, on the dispatch key that PyTorch keeps for this, so that gradients flow through them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DispatchKey, DispatchKeySet, OpOverload, has_kernel, op_names_with_kernel
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import OpInfo, implements
from skyproxy.tensor.dispatch.recording import run
from skyproxy.tensor.ops.composites import rows_at_once

# One string a list, not a list of strings: so a line can be held against PyTorch's own.
# ruff: noqa: SIM905
# The names are those of ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP, _FP32, _FP32_SET_OPT_DTYPE,
# _DIFFERENT_REDISPATCH_SIGNATURE and _PROMOTE.
LOWER_PRECISION = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()
FULL_PRECISION = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
""".split()
if torch.__version__.startswith("2.11."):
    FULL_PRECISION.remove("rms_norm")  # there it is cast in pieces, by the ops that it consists of
FULL_PRECISION_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
NORMS = {"norm.Scalar": ("norm.ScalarOpt_dtype", 2), "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", 4)}
"""Ops that take the result's dtype in another overload only, after so many arguments."""
PROMOTE = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()

# Those of ATen/autocast_mode.cpp for the CPU, which is in no header; a test asks PyTorch's dispatcher.
LOWER_PRECISION_ON_CPU = """
conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input _convolution.deprecated bmm mm linalg_vecdot baddbmm addmm _addmm_activation addbmm linear matmul
mkldnn_rnn_layer prelu scaled_dot_product_attention _native_multi_head_attention
""".split()
FULL_PRECISION_ON_CPU = """
adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft
fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler
grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss
linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd
linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve _lu_with_info margin_ranking_loss max_pool3d max_unpool2d
max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile
nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod prod.dim_int qr quantile
quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss
soft_margin_loss stft stft.center svd trace triangular_solve triplet_margin_loss view_as_complex
""".split()
PROMOTE_ON_CPU = "cat index_copy stack".split()

COMPOSITES = """
arccos arcsin arctan2 bilinear chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
corrcoef cov cross_entropy_loss ctc_loss cumulative_trapezoid einsum frobenius_norm gru gru_cell inner istft
linalg_cond linalg_matmul linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_solve
linalg_tensorinv linalg_tensorsolve lstm lstm_cell matrix_power nanmean nll_loss_nd norm nuclear_norm pairwise_distance
pinverse rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell special_expm1 special_log1p special_log_softmax
special_logsumexp special_multigammaln special_softmax tensordot trapezoid trapz upsample_bicubic2d upsample_bilinear2d
_upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_trilinear3d
vander
""".split()
"""Composites that consist of ops of these lists. In inference mode PyTorch would hand them on undivided, to where
autocast looks switched off."""
CAST_INSIDE = "affine_grid_generator linalg_pinv.atol_rtol_tensor _trilinear _transformer_encoder_layer_fwd".split()
"""Ops whose kernels, which are the same for every device, call ops of these lists."""
_KERNELS_OF_OPS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CPU")

_KEY = "AutocastPrivateUse1"
_dispatch_key = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
_autograd: DispatchKey = torch._C.DispatchKey.AutogradPrivateUse1
_after = torch._C._dispatch_keyset_full_after(_dispatch_key)
_below = torch._C.DispatchKeySet(_dispatch_key)
_Without = torch._C._ExcludeDispatchKeyGuard
_keep: list[torch.library.Library] = []


class _Cache(threading.local):
    """Weights that were cast already; for each, the weight itself (so that its id stays its own) and the cast."""

    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


_cache = _Cache()


class _Region(threading.local):
    """A mark of the thread: an op of `CAST_INSIDE` is on its way to its kernel, where autocast looks switched off."""

    entered = False


_region = _Region()
_PLAIN = frozenset({type(None), bool, int, float})
_CAST = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype is not torch.float64
)
"""Dtypes that are cast."""


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "sky"
    )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with each of its floating-point tensors in `dtype`, double precision excepted."""
    kind = type(value)
    if kind is RemoteTensor:  # the usual case, for which nothing is asked of C++
        given = value._sky.meta.dtype
        if given is dtype or given not in _CAST:
            return value
    elif kind in _PLAIN:
        return value
    elif isinstance(value, list | tuple):
        return [cast(item, dtype) for item in value]
    elif not _is_eligible(value) or value.dtype is dtype:
        return value
    if not (
        value.requires_grad
        and value.is_leaf
        and value.dtype is torch.float32
        and dtype is torch.get_autocast_dtype("sky")
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    ):
        return value.to(dtype)
    # As PyTorch's: without gradients it finds the casts that were made with them, and makes them for both.
    key = (id(value), dtype)
    known = _cache.casts.get(key)
    if known is None:
        with torch.enable_grad():
            known = _cache.casts[key] = (value, value.to(dtype))
    return known[1]


def _all_cast(
    args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype
) -> tuple[list[object], dict[str, object]]:
    """Return the arguments of a call, with each of its floating-point tensors in `dtype`.

    From the last to the first, as compiled PyTorch evaluates them: where one tensor is given twice, its gradients are
    summed in the order of its casts.
    """
    named = {name: cast(kwargs[name], dtype) for name in reversed(kwargs)} if kwargs else kwargs
    made = [cast(value, dtype) for value in args[::-1]]
    made.reverse()
    return made, named


def kind_of_worker(values: Iterable[object]) -> str:
    """The type of the device behind the first remote tensor among some arguments, "cuda" where there is none."""
    for value in values:
        if type(value) is RemoteTensor:
            return str(value._sky.device.row["type"])
        if isinstance(value, torch.Tensor):
            if value.device.type == "sky":
                return str(DEVICES.of(value.device).row["type"])
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return kind_of_worker(value)
    return "cuda"


def _kernel_for_worker(
    op: OpOverload, on_cuda: Callable[..., object] | None, on_cpu: Callable[..., object] | None
) -> Callable[..., object]:
    """The kernel of an op: that of its worker's list, or none, if the op is not in it."""
    division = _division_of(op)

    def kernel(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        chosen = on_cpu if kind_of_worker((*args, *kwargs.values()) if kwargs else args) == "cpu" else on_cuda
        if chosen is not None:
            return chosen(*args, **kwargs)
        # Autocast goes on inside: the op may consist of others that are in the list.
        if division is not None and not keys.has(_autograd):
            return op._op_dk(division, *args, **kwargs)
        return op.redispatch(keys & _after, *args, **kwargs)

    return kernel


def _division_of(op: OpOverload) -> DispatchKey | None:
    """The key of the kernel that divides a composite, as autograd would; None: it is no composite."""
    if not has_kernel(op.name(), "CompositeImplicitAutograd"):
        return None
    return _autograd if has_kernel(op.name(), "AutogradPrivateUse1") else DispatchKey.CompositeImplicitAutograd


def _lower(op: OpOverload) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        dtype = torch.get_autocast_dtype("sky")
        with _Without(_below):
            cast_args, named = _all_cast(args, kwargs, dtype)
            return op(*cast_args, **named)

    return kernel


def _full_precision(op: OpOverload) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        with _Without(_below):
            cast_args, named = _all_cast(args, kwargs, torch.float32)
            return op(*cast_args, **named)

    return kernel


def _full_result(op: OpOverload) -> Callable[..., object]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: object, **kwargs: object) -> object:
        with _Without(_below):
            given = kwargs.get("dtype") if len(args) <= position else args[position]
            if _is_eligible(args[0]) and given is None:
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _norm(op: OpOverload, with_dtype: OpOverload, count: int) -> Callable[..., object]:
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*args: object, **kwargs: object) -> object:
        with _Without(_below):
            if not _is_eligible(args[0]):
                return op(*args, **kwargs)
            names = [argument.name for argument in op._schema.arguments]
            whole = [*args, *(kwargs.get(name, defaults[i]) for i, name in enumerate(names) if i >= len(args))]
            return with_dtype(*whole[:count], dtype=torch.float32)

    return kernel


def _promote(op: OpOverload) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        with _Without(_below):
            dtype = lower = torch.get_autocast_dtype("sky")
            for value in [*args, *kwargs.values()]:
                for item in value if isinstance(value, list | tuple) else (value,):
                    # One after the other, as `at::autocast::prioritize`: behind full precision, any other is welcome.
                    if _is_eligible(item) and dtype is not torch.float32:
                        if item.dtype not in (torch.float32, lower):
                            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
                        dtype = item.dtype
            cast_args, named = _all_cast(args, kwargs, dtype)
            return op(*cast_args, **named)

    return kernel


def _entering(op: OpOverload) -> Callable[..., object]:
    def kernel(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        before, _region.entered = _region.entered, True
        try:
            return op.redispatch(keys & _after, *args, **kwargs)
        finally:
            _region.entered = before

    return kernel


@implements(*(f"aten::{name}" for name in CAST_INSIDE))
def _divide(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run PyTorch's kernel here under autocast: it consists of ops that come back to us, each with its casts.

    A worker would run all of it in full precision.
    """
    # A key without a kernel of its own would be a crash, not an error.
    key = next((name for name in _KERNELS_OF_OPS if has_kernel(info.name, name)), None) if _region.entered else None
    if key is None:
        return run(BoundCall(info, rows_at_once(func, args), kwargs))
    _region.entered = False
    try:
        with torch.autocast("sky", torch.get_autocast_dtype("sky"), cache_enabled=torch.is_autocast_cache_enabled()):
            return func._op_dk(getattr(DispatchKey, key), *args, **kwargs)
    finally:
        _region.entered = True


def _network_in_halves(op: OpOverload) -> Callable[..., object]:
    """The form of cuDNN's recurrent networks, which are in float16 whatever the region's dtype is."""

    def kernel(x: Any, weights: list[Any], width: int, buffer: Any, hx: Any, cx: Any, *options: object) -> object:
        with _Without(_below):
            x, hx, cx = (cast(value, torch.float16) for value in (x, hx, cx))
            if _is_eligible(weights[0]):
                weights, buffer = [weight.to(torch.float16) for weight in weights], None
            return op(x, weights, width, buffer, hx, cx, *options)

    return kernel


def _refuse(*args: object, **kwargs: object) -> object:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    try:
        found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
        return found
    except AttributeError:
        raise ConfigurationError(
            f"torch {torch.__version__} has no aten::{name}, which skyproxy casts for autocast"
        ) from None


def _composites() -> list[str]:
    """The overloads of `COMPOSITES` that this torch has; those that write into a tensor have no casts."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    overloads = {name: _overload(name) for name in names if name.partition(".")[0] in COMPOSITES}
    return [name for name, op in overloads.items() if _division_of(op) and not op._schema.is_mutable]


def _forms(*lists: tuple[list[str], Callable[[OpOverload], Callable[..., object]]]) -> dict[str, Callable[..., object]]:
    return {name: make(_overload(name)) for names, make in lists for name in names}


def _forms_on_cuda() -> dict[str, Callable[..., object]]:
    """By op, what CUDA's autocast does."""
    forms = _forms(
        (LOWER_PRECISION, _lower),
        (FULL_PRECISION, _full_precision),
        (FULL_PRECISION_RESULT, _full_result),
        (PROMOTE, _promote),
    )
    forms.update({name: _norm(_overload(name), _overload(other), count) for name, (other, count) in NORMS.items()})
    forms["_cudnn_rnn"] = _network_in_halves(_overload("_cudnn_rnn"))
    return {**forms, "binary_cross_entropy": _refuse}


def _forms_on_cpu() -> dict[str, Callable[..., object]]:
    """By op, what the CPU's autocast does, as far as this version of PyTorch has the op in its list."""
    cast = set(op_names_with_kernel("AutocastCPU"))
    lists = [
        ([name for name in names if f"aten::{name}" in cast], make)
        for names, make in (
            (LOWER_PRECISION_ON_CPU, _lower),
            (FULL_PRECISION_ON_CPU, _full_precision),
            (PROMOTE_ON_CPU, _promote),
        )
    ]
    return _forms(*lists)


def install() -> None:
    """Registers the casts, and a cache that is emptied where PyTorch empties its own.

    Raises:
        ConfigurationError: this torch lacks one of the ops.
    """
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    on_cuda, on_cpu = _forms_on_cuda(), _forms_on_cpu()
    for name in {**on_cuda, **on_cpu, **dict.fromkeys(_composites())}:
        kernel = _kernel_for_worker(_overload(name), on_cuda.get(name), on_cpu.get(name))
        library.impl(name, kernel, _KEY, with_keyset=True)
    for name in CAST_INSIDE:
        library.impl(name, _entering(_overload(name)), _KEY, with_keyset=True)
    patching.registered(
        "kernels of `aten` for autocast of the device",
        lambda: [made._destroy() for made in (others, library)],
        why="each operation is cast as the worker's own autocast would",
        test="tests/tensor/torch_api/test_autocast.py::test_matrix_products_are_computed_in_low_precision",
    )
    patching.wrap(
        torch,
        "clear_autocast_cache",
        _clearing_ours,
        why="casts of weights are cached here, and are to be forgotten where PyTorch forgets its own",
        test="tests/tensor/torch_api/test_autocast.py::test_a_weight_that_changed_is_cast_anew_in_the_next_region",
    )


def _clearing_ours(clear: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(clear)
    def clear_autocast_cache() -> None:
        _cache.casts.clear()
        clear()

    return clear_autocast_cache
