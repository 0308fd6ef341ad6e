"""Writes `skyproxy_server/allowed_ops.txt`: the operators that a client may name.

    python tests/security/list_allowed_ops.py [--recorded FILE]

The list is made of PyTorch's public operators, and of the private ones below, without those that a review took out;
each of the latter stands here with its reason. `--recorded` names a JSON file with the operators that a client sent
over the operator database, modules and optimizers (`tests/security/record_ops.py`): all of them must be on the list.
Run it with the newest supported torch: names that only older ones have stay, and a worker ignores those that its own
does not have.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Collection
from pathlib import Path

import torch

TARGET = Path(__file__).parents[2] / "skyproxy_server" / "allowed_ops.txt"

PRIVATE = """
    __*__ _adaptive_avg_pool* _addmm_activation _aminmax _amp_* _assert_async _batch_norm_* _cast_* _cdist_* _chunk_cat
    _cholesky_solve_helper _coalesce _coalesced _coalesced_ _compute_linear_combination _conj _conj_copy _conj_physical
    _conj_physical_ _convolution _convolution_double_backward _convolution_mode _conv_depthwise2d
    _copy_from _copy_from_and_resize _ctc_loss _ctc_loss_backward _cudnn_init_dropout_state _cudnn_rnn
    _cudnn_rnn_backward _cummax_helper _cummin_helper _dimI _dimV _dim_arange
    _dirichlet_grad _embedding_bag* _euclidean_dist _fake_quantize_learnable_per_* _fake_quantize_per_tensor_affine_*
    _fft_* _foreach_* _functional_assert_async _fused_adagrad* _fused_adam* _fused_dropout _fused_rms_norm*
    _fused_moving_avg_obs_fq_helper* _fused_sgd* _gather_sparse_backward _grid_sampler_2d_cpu_fallback* _grouped_mm
    _fused_sdp_choice _histogramdd_* _index_put_impl* _indices _indices_copy _int_mm _is_all_true _is_any_true
    _jagged_to_padded_*
    _linalg_* _local_scalar_dense _log_softmax* _logcumsumexp _lu_with_info _masked_scale _masked_softmax*
    _native_batch_norm_* _neg_view _neg_view_copy _nnz _pack_padded_sequence_backward _padded_dense_to_jagged_*
    _pad_circular _pad_enum _pdist_* _prelu_kernel* _reshape_alias
    _safe_softmax _sample_dirichlet _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu*
    _scaled_addmm* _scaled_grouped_mm* _scaled_mm* _segment_reduce_backward _slow_conv2d_* _softmax* _sparse_addmm
    _sparse_broadcast_to* _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims* _sparse_csr_prod _sparse_csr_sum
    _sparse_log_softmax* _sparse_mask_projection _sparse_mm _sparse_mm_reduce_impl* _sparse_softmax* _sparse_sum*
    _sparse_sparse_matmul _spdiags _spsolve _standard_gamma* _thnn_fused_* _to_copy _to_cpu _to_dense _to_sparse*
    _transform_bias_rescale_qkv _trilinear _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index*
    _unsafe_view _upsample_* _validate_sparse_* _values _values_copy _weight_int4pack_mm_for_cpu
    _weight_int8pack_mm _weight_norm* _convert_weight_to_int4pack_for_cpu _sobol_engine_draw _sobol_engine_ff_
    _sobol_engine_initialize_state_ _sobol_engine_scramble_ _scaled_dot_product_efficient_attention*
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_cudnn_attention* _native_multi_head_attention _transformer_encoder_layer_fwd
    _nested_compute_contiguous_strides_offsets _nested_tensor_from_mask
    _nested_tensor_from_tensor_list _nested_tensor_from_mask_left_aligned
    _philox_* _rowwise_prune _shape_as_tensor
    _test_serialization_subcmul
""".split()  # noqa: SIM905
"""Private operators that PyTorch's own formulas, modules and optimizers divide public ones into."""

REVIEWED_OUT: dict[str, tuple[str, ...]] = {
    "reads files, or prints": ("from_file", "_print"),
    "changes a tensor behind autograd's or PyTorch's back": (
        "set_data",
        "shallow_copy_data_",
        "data",
        "_lazy_clone",
        "retain_grad",
    ),
    "names dimensions, which PyTorch gave up with 2.13": (
        "align_*",
        "refine_names",
        "rename",
        "rename_",
        "*.*[Dd]imname*",
        "*.*names*",
        "*.*named*",
    ),
    "belongs to autograd's graph, which a worker does not have": (
        "_backward",
        "get_gradients",
        "requires_grad_",
        "retains_grad",
        "output_nr",
        "is_leaf",
        "_version",
    ),
    "locks the host's memory, or orders streams": ("pin_memory", "is_pinned", "record_stream", "_pin_memory"),
    "takes packed weights or quantized tensors, whose pointers its kernels trust": (
        "fbgemm_*",
        "quantized_*",
        "quantize_per_*",
        "q_*",
        "qscheme",
        "int_repr",
        "empty_quantized",
        "dequantize",
        "choose_qparams_optimized",
    ),
    "makes tensors of oneDNN's own layout": ("to_mkldnn*", "mkldnn_[!r]*", "mkldnn_reorder_*"),
    "is the kernel of one vendor's library, which PyTorch chooses by itself below the public operator": (
        "cudnn_*",
        "miopen_*",
        "mps_*",
        "lstm_mps_backward",
        "is_vulkan_available",
        "_batch_norm_impl_index*",
    ),
    "crashes for lists of other lengths, and is sent by nobody": ("_foreach_copy",),
    "crashes for arguments that no formula gives it, and is sent by nobody": (
        "_cudnn_init_dropout_state.out",
        "_cudnn_rnn.out",
        "_weight_norm_interface.out",
        "range.out",
        "range.out_",
    ),
    "is divided before a client sends it, and would give its parts to kernels that trust them": (
        "lstm.*",
        "gru.*",
        "rnn_tanh.*",
        "rnn_relu.*",
    ),
    "gives memory as it was, for graphs that are traced": ("set", "resize", "resize_as", "resize_output*"),
    "is for graphs that are traced": ("sym_constrain_range*", "_functional_sym_*"),
}
"""Why operators that the rest of this file would let in are left out."""

UNSPEAKABLE = ("Storage", "Stream", "__torch__")
"""Types of arguments that cannot come over the wire; storages travel by controls."""


def candidates() -> dict[str, torch._ops.OpOverload]:
    """Every operator of PyTorch's dispatcher that Python can call, by name."""
    found: dict[str, torch._ops.OpOverload] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            function = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if function is not None:
                found[name] = function
    return found


def reason_against(name: str, function: torch._ops.OpOverload) -> str:
    """Why an operator is not on the list; empty if it is."""
    overload = name.partition("::")[2]
    packet = overload.partition(".")[0]
    for reason, patterns in REVIEWED_OUT.items():
        if any(fnmatch.fnmatchcase(called, pattern) for called in (packet, overload) for pattern in patterns):
            return reason
    if packet.startswith("_") and not any(fnmatch.fnmatchcase(packet, pattern) for pattern in PRIVATE):
        return "private, and nothing that a client sends"
    if "backward" in packet and any(a.kwarg_only and a.alias_info is not None for a in function._schema.arguments):
        return "is the out= form of a derivative, which no formula uses"
    kinds = {str(argument.real_type) for argument in function._schema.arguments}
    if any(mark in kind for kind in kinds for mark in UNSPEAKABLE):
        return "takes what cannot be sent"
    return ""


def allowed(listed: Collection[str]) -> list[str]:
    """The names, sorted.

    Args:
        listed: names of before; those stay that another version has and this one does not.
    """
    here = candidates()
    return sorted(
        {name for name, function in here.items() if not reason_against(name, function)} | set(listed) - set(here)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, help="what a client sent, by tests/security/record_ops.py")
    arguments = parser.parse_args()
    names = allowed(TARGET.read_text(encoding="ascii").split())
    if arguments.recorded is not None:
        missing = sorted(set(json.loads(arguments.recorded.read_text())) - set(names))
        if missing:
            print("a client sends these, and they are not on the list:", *missing, sep="\n  ", file=sys.stderr)
            return 1
    TARGET.write_text("".join(f"{name}\n" for name in names), encoding="ascii")
    print(f"{len(names)} of {len(candidates())} operators")
    return 0


if __name__ == "__main__":
    sys.exit(main())
