"""Right calls of operators that no sample of PyTorch reaches: written by hand, and other forms of known calls.

Backward kernels, quantization, attention, packing and sparse operators are called with what their forward ops would
hand on. `out=` and in-place overloads, and the operators that PyTorch divides into others, come from the calls of
their plain forms.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.security.seeds import Seed

Tensor = torch.Tensor
aten = torch.ops.aten


def _t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = max(torch.Size(shape).numel(), 1)
    return torch.linspace(0.1, 1.0, count)[: torch.Size(shape).numel()].reshape(shape).to(dtype)


def _i(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _quantization() -> dict[str, list[tuple[Any, ...]]]:
    tensor, scales, zeros = _t(2, 3, 4), _t(3), _i(0, 1, 2, dtype=torch.int32)
    points, mask = _t(3), torch.ones(2, 3, 4, dtype=torch.bool)
    one, zero = torch.ones(1), torch.zeros(1)
    switch = torch.ones(1, dtype=torch.int64)
    packed = aten._convert_weight_to_int4pack_for_cpu(torch.ones(64, 64, dtype=torch.int32), 2)
    half, brain = torch.float16, torch.bfloat16
    moving = (switch, switch, one, one, one, _i(0, dtype=torch.int32), 0.1, 0, 255, 0, False, False)
    rows = (switch, switch, _t(2), _t(2), _t(2), _i(0, 0, dtype=torch.int32), 0.1, 0, 255, 0, True, False)
    return {
        "_convert_weight_to_int4pack_for_cpu": [(torch.ones(64, 64, dtype=torch.int32), 2)],
        "_weight_int4pack_mm_for_cpu": [
            (_t(3, 64, dtype=kind), packed, 32, _t(2, 64, 2, dtype=kind)) for kind in (brain, half, torch.float32)
        ],
        "_weight_int8pack_mm": [
            (_t(3, 64, dtype=kind), torch.ones(32, 64, dtype=torch.int8), _t(32, dtype=kind)) for kind in (brain, half)
        ],
        "_fake_quantize_learnable_per_channel_affine": [(tensor, scales, points, 1, 0, 255, 1.0)],
        "_fake_quantize_learnable_per_channel_affine_backward": [(tensor, tensor, scales, points, 1, 0, 255, 1.0)],
        "_fake_quantize_learnable_per_tensor_affine": [(tensor, one, zero, 0, 255, 1.0)],
        "_fake_quantize_learnable_per_tensor_affine_backward": [(tensor, tensor, one, zero, 0, 255, 1.0)],
        "fake_quantize_per_channel_affine": [(tensor, scales, zeros, 1, 0, 255), (tensor, scales, points, 1, 0, 255)],
        "fake_quantize_per_channel_affine_cachemask": [(tensor, scales, zeros, 1, 0, 255)],
        "fake_quantize_per_channel_affine_cachemask_backward": [(tensor, mask)],
        "fake_quantize_per_tensor_affine_cachemask": [(tensor, 0.1, 3, 0, 255)],
        "fake_quantize_per_tensor_affine_cachemask_backward": [(tensor, mask)],
        "fake_quantize_per_tensor_affine.tensor_qparams": [(tensor, one, zeros[:1], 0, 255)],
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": [(tensor, one, zeros[:1], switch, 0, 255)],
        "fused_moving_avg_obs_fake_quant": [(_t(2, 3), *moving), (_t(2, 3), *rows)],
        "_fused_moving_avg_obs_fq_helper": [(_t(2, 3), *moving), (_t(2, 3), *rows)],
        "_fused_moving_avg_obs_fq_helper_functional": [(_t(2, 3), *moving), (_t(2, 3), *rows)],
        "_int_mm": [(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 16, dtype=torch.int8))],
    }


def _attention() -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for kind in (torch.float32, torch.bfloat16):
        query, key, mask = _t(2, 2, 5, 8, dtype=kind), _t(2, 2, 7, 8, dtype=kind), _t(2, 1, 5, 7, dtype=kind)
        forward, backward = found.setdefault("_scaled_dot_product_flash_attention_for_cpu", []), []
        for given in ({}, {"attn_mask": mask}, {"attn_mask": mask, "scale": 0.5}):
            forward.append((query, key, key, 0.0, False, given))
            out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, key, 0.0, False, **given)
            backward.append((torch.ones_like(out), query, key, key, out, sums, 0.0, False, given))
        found.setdefault("_scaled_dot_product_flash_attention_for_cpu_backward", []).extend(backward)
        found.setdefault("scaled_dot_product_attention", []).append((query, key, key, mask))
        found.setdefault("_scaled_dot_product_attention_math", []).append((query, key, key, mask))
        found.setdefault("_fused_sdp_choice", []).append((query, key, key, mask))
    source, wide, bias = _t(2, 3, 8), _t(24, 8), _t(24)
    heads = (8, 2, wide, bias, _t(8, 8), _t(8))
    padding = torch.tensor([[False, False, True]] * 2)
    norms, ffn = (_t(8), _t(8), _t(8), _t(8)), (_t(16, 8), _t(16), _t(8, 16), _t(8))
    layer = (source, *heads, False, False, 1e-5, *norms, *ffn)
    return found | {
        "_native_multi_head_attention": [
            (source, source, source, *heads),
            (source, source, source, *heads, padding, True, True, 1),
            (source, source, source, *heads, torch.zeros(3, 3, dtype=torch.bool), False, False, 0),
        ],
        "_transformer_encoder_layer_fwd": [layer, (*layer, padding, 1)],
        "_transform_bias_rescale_qkv": [(_t(2, 3, 24), bias, 2)],
        "_masked_softmax": [
            (_t(2, 2, 3, 3), torch.zeros(2, 2, 3, 3, dtype=torch.bool), 3, 2),
            (_t(2, 2, 3, 3), padding, 3, 1),
            (_t(2, 2, 3, 3), torch.zeros(3, 3, dtype=torch.bool), 3, 0),
        ],
        "_masked_softmax_backward": [(_t(2, 3), _t(2, 3), torch.zeros(2, 3, dtype=torch.bool), 1)],
        "_nested_tensor_from_mask": [(source, ~padding)],
        "_nested_tensor_from_mask_left_aligned": [(source, ~padding)],
    }


def _derivatives() -> dict[str, list[tuple[Any, ...]]]:
    logs = _t(6, 2, 4).log_softmax(-1)
    targets = torch.tensor([[1, 2, 1], [2, 3, 0]])
    loss, alpha = aten._ctc_loss(logs, targets, [6, 5], [3, 2])
    lengths = (_i(6, 5), _i(3, 2))
    image, kernel = _t(1, 2, 5, 5), _t(3, 2, 2, 2)
    volume, cube = _t(1, 2, 4, 4, 4), _t(3, 2, 2, 2, 2)
    places = _i(0, 1, 0).view(1, 3)
    indices = _i(0, 5, 10, 3).view(1, 1, 2, 2)
    bag = (_i(1, 2, 0, 3), _i(0, 2), _i(0, 0, 1, 1), _i(2, 2), _i(-1, -1))
    return {
        "_ctc_loss": [(logs, targets, [6, 5], [3, 2]), (logs, targets.view(-1)[:5], [6, 5], [3, 2])],
        "_ctc_loss.Tensor": [(logs, targets, *lengths)],
        "ctc_loss.IntList": [(logs, targets, [6, 5], [3, 2])],
        "ctc_loss.Tensor": [(logs, targets, *lengths)],
        "_ctc_loss_backward": [(torch.ones(2), logs, targets, [6, 5], [3, 2], loss, alpha, 0)],
        "_ctc_loss_backward.Tensor": [(torch.ones(2), logs, targets, *lengths, loss, alpha, 0)],
        "cummaxmin_backward": [(_t(1, 3), _t(1, 3), places, 1)],
        "value_selecting_reduction_backward": [(_t(2), 1, _i(0, 2), [2, 3], False)],
        "index_select_backward": [(_t(3, 2), [4, 2], 0, _i(0, 1, 3))],
        "gather_backward": [(_t(1, 3), _t(2, 3), 0, places, False), (_t(1, 3), _t(2, 3), 0, places, True)],
        "_gather_sparse_backward": [(_t(2, 3), 0, places, _t(1, 3))],
        "masked_select_backward": [(_t(2), _t(3), torch.tensor([True, False, True]))],
        "masked_scatter_backward": [(_t(3), torch.tensor([True, False, True]), [3])],
        "trace_backward": [(_t(), [3, 3])],
        "conv_tbc": [(_t(5, 2, 3), _t(2, 3, 4), _t(4), 1)],
        "conv_tbc_backward": [(_t(6, 2, 4), _t(5, 2, 3), _t(2, 3, 4), _t(4), 1)],
        "max_unpool2d": [(_t(1, 1, 2, 2), indices, [4, 4])],
        "max_unpool3d": [(_t(1, 1, 1, 2, 2), indices.view(1, 1, 1, 2, 2), [2, 4, 4], [2, 2, 2], [0, 0, 0])],
        "fractional_max_pool2d": [(image, [2, 2], [3, 3], torch.full((1, 2, 2), 0.3))],
        "fractional_max_pool3d": [(volume, [2, 2, 2], [2, 2, 2], torch.full((1, 2, 3), 0.3))],
        "slow_conv_dilated2d": [(image, kernel, [2, 2], _t(3), [1, 1], [0, 0], [2, 2])],
        "slow_conv_dilated3d": [(volume, cube, [2, 2, 2], _t(3), [1, 1, 1], [0, 0, 0], [2, 2, 2])],
        "slow_conv_transpose2d": [(image, _t(2, 3, 2, 2), [2, 2], _t(3))],
        "slow_conv_transpose3d": [(volume, _t(2, 3, 2, 2, 2), [2, 2, 2], _t(3))],
        "slow_conv3d_forward": [(volume, cube, [2, 2, 2], _t(3), [1, 1, 1], [0, 0, 0])],
        "slow_conv3d": [(volume, cube, [2, 2, 2], _t(3), [1, 1, 1], [0, 0, 0])],
        "_slow_conv2d_forward": [(image, kernel, [2, 2], _t(3), [1, 1], [0, 0])],
        "_slow_conv2d_backward.output_mask": [
            (_t(1, 3, 4, 4), image, kernel, [2, 2], [1, 1], [0, 0], [True, True, True])
        ],
        "thnn_conv2d": [(image, kernel, [2, 2], _t(3), [1, 1], [0, 0])],
        "_convolution_double_backward": [
            (image, kernel, _t(3), _t(1, 3, 4, 4), kernel, image, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
        ],
        "convolution_backward": [
            (_t(1, 3, 4, 4), image, kernel, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
        ],
        "native_dropout_backward": [(_t(2, 3), torch.ones(2, 3, dtype=torch.bool), 2.0)],
        "rrelu_with_noise": [(_t(2, 3), _t(2, 3), 0.1, 0.3, True)],
        "rrelu_with_noise_backward": [(_t(2, 3), _t(2, 3), _t(2, 3), 0.1, 0.3, True, False)],
        "_fused_rms_norm": [(_t(2, 3), [3], _t(3), 1e-5)],
        "native_group_norm_backward": [
            (_t(2, 4, 3), _t(2, 4, 3), _t(2, 2), _t(2, 2), _t(4), 2, 4, 3, 2, [True] * 3),
            (images := _t(2, 4, 3, 3).to(memory_format=torch.channels_last), images)
            + (_t(2, 2), _t(2, 2), _t(4), 2, 4, 9, 2, [False, True, True]),
        ],
        "_embedding_bag_backward": [
            (_t(2, 3), *bag, 5, False, 0, False, None, -1),
            (_t(2, 3), *bag, 5, False, 1, True, None, -1),
        ],
        "_embedding_bag_dense_backward": [(_t(2, 3), _i(1, 2, 0, 3), *bag[2:], 5, False, 0, _t(4), -1)],
        "_embedding_bag_sparse_backward": [(_t(2, 3), *bag[:4], 5, False, 1, None, -1)],
        "_embedding_bag_per_sample_weights_backward": [(_t(2, 3), _t(5, 3), *bag[:3], 0, -1)],
        "_embedding_bag_forward_only": [(_t(5, 3), *bag[:2], False, mode) for mode in (0, 1, 2)],
        "embedding_bag": [(_t(5, 3), *bag[:2], False, mode) for mode in (0, 1, 2)]
        + [(_t(5, 3), *bag[:2], False, 0, False, _t(4), True)],
        "embedding_renorm_": [(_t(5, 3), _i(1, 2, 2), 0.1, 2.0)],
        "embedding_backward": [(_t(3, 2), _i(0, 1, 3), 4, -1, False, False)],
        "embedding_sparse_backward": [(_t(3, 2), _i(0, 1, 3), 4, -1, False)],
        "_pack_padded_sequence_backward": [(_t(5, 3), [3, 2, 3], _i(2, 2, 1), False)],
        "affine_grid_generator_backward": [(_t(1, 2, 2, 2), [1, 1, 2, 2], False)],
        "_standard_gamma_grad": [(_t(2, 3), _t(2, 3))],
        "_dirichlet_grad": [(_t(2, 3), _t(2, 3), _t(2, 3))],
        "_weight_norm_differentiable_backward": [(_t(2, 3), _t(2, 3), _t(2, 1), _t(2, 1), 0)],
        "infinitely_differentiable_gelu_backward": [(_t(2, 3), _t(2, 3))],
        "multilabel_margin_loss_forward": [(_t(2, 3), torch.tensor([[1, -1, 0], [0, 2, -1]]), 1)],
        "multi_margin_loss": [(_t(2, 3), _i(1, 0), 1, 1, _t(3), 1), (_t(2, 3), _i(1, 0))],
        "nll_loss_forward": [(_t(2, 3), _i(1, 0), _t(3), 1, -100), (_t(2, 3), _i(1, 0), None, 0, -100)],
        "nll_loss2d_forward": [
            (_t(1, 3, 2, 2), _i(1, 0, 2, 1).view(1, 2, 2), _t(3), reduction, 1) for reduction in (0, 1)
        ],
        "_grid_sampler_2d_cpu_fallback": [(image, _t(1, 2, 2, 2), 0, 0, False)],
        "_grid_sampler_2d_cpu_fallback_backward": [(_t(1, 2, 2, 2), image, _t(1, 2, 2, 2), 0, 0, False)],
    }


def _norms_and_steps() -> dict[str, list[tuple[Any, ...]]]:
    image, three = _t(2, 3, 4), _t(3)
    parameters = [_t(2, 3), _t(4)]
    step = [torch.ones(()), torch.ones(())]
    found = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
    adam = {**found, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
    sgd = {**found, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    return {
        "batch_norm_update_stats": [(image, three, three, 0.1)],
        "_batch_norm_no_update": [(image, three, three, three, three, 0.1, 1e-5)],
        "_native_batch_norm_legit_functional": [(image, three, three, three, three, True, 0.1, 1e-5)],
        "_native_batch_norm_legit_no_training": [(image, three, three, three, three, 0.1, 1e-5)],
        "_batch_norm_with_update_functional": [(image, three, three, three, three, 0.1, 1e-5)],
        "_amp_foreach_non_finite_check_and_unscale_": [(parameters, torch.zeros(1), torch.ones(1))],
        "_amp_update_scale_": [(torch.ones(1), _i(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 10)],
        "_fused_adam_": [(parameters, parameters, parameters, parameters, [], step, adam)],
        "_fused_adamw_": [(parameters, parameters, parameters, parameters, [], step, adam)],
        "_fused_sgd_": [(parameters, parameters, parameters, sgd)],
        "_fused_adagrad_": [(parameters, parameters, parameters, step, {**found, "lr_decay": 0.0, "eps": 1e-8})],
        "flatten_dense_tensors": [(parameters,)],
        "unflatten_dense_tensors": [(_t(10), parameters)],
        "_rowwise_prune": [(_t(3, 2), torch.tensor([True, False, True]), torch.int32)],
        "_foreach_copy_": [(parameters, parameters)],
        "_foreach_norm.Scalar": [(parameters, 2)],
        "_foreach_lerp.Scalar": [(parameters, parameters, 0.5)],
        "_foreach_addcmul.ScalarList": [(parameters, parameters, parameters, [1.0, 2.0])],
        "_foreach_addcmul.Tensor": [(parameters, parameters, parameters, _t(2))],
        "_foreach_addcdiv_.Tensor": [(parameters, parameters, parameters, _t(2))],
        "_foreach_pow.ScalarAndTensor": [(2.0, parameters)],
        "_foreach_max": [(parameters,)],
        "_foreach_mul.Tensor": [(parameters, _t())],
        "_chunk_cat": [([_t(4, 3), _t(2, 3)], 0, 2)],
    }


def _sparse() -> dict[str, list[tuple[Any, ...]]]:
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0], [0.0, 0.0, 4.0]])
    coo, rows, columns = dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()
    blocks = _t(4, 4).to_sparse_bsr((2, 2))
    compressed = (_i(0, 1, 3, 4), _i(1, 0, 2, 2), _t(4))
    layouts = {"layout": torch.sparse_csr}
    return {
        "_sparse_mm": [(coo, dense), (rows, dense), (coo, coo)],
        "_sparse_sparse_matmul": [(coo, coo)],
        "_sparse_addmm": [(dense, coo, dense), (dense, rows, dense)],
        "addmm": [(dense, layout, dense) for layout in (rows, columns, coo)] + [(_t(4, 4), blocks, _t(4, 4))],
        "mm": [(layout, dense) for layout in (rows, columns, coo)] + [(rows, rows), (dense, columns)],
        "sspaddmm": [(coo, coo, dense)],
        "hspmm": [(coo, dense)],
        "smm": [(coo, dense)],
        "sparse_sampled_addmm": [(rows, dense, dense)],
        "triangular_solve": [(dense, rows)],
        "addmv": [(_t(3), rows, _t(3))],
        "_sparse_softmax": [(coo, 1, False), (coo, 0, False)],
        "_sparse_log_softmax": [(coo, 1, False)],
        "_sparse_softmax_backward_data": [(coo, coo, 1, coo), (coo, coo, 0, coo)],
        "_sparse_log_softmax_backward_data": [(coo, coo, 1, coo)],
        "_sparse_sum.dim": [(coo, [0])],
        "_sparse_sum_backward": [(_t(), coo, [0, 1]), (_t(3).to_sparse(), coo, [0])],
        "_sparse_csr_sum.dim_dtype": [(rows, [1], True)],
        "_sparse_csr_prod.dim_dtype": [(rows, [1], True)],
        "_sparse_mask_projection": [(coo, coo), (coo, coo, True)],
        "_sparse_broadcast_to": [(coo, [2, 3, 3])],
        "sparse_mask": [(dense, coo), (dense, rows), (coo, coo)],
        "to_dense": [(layout,) for layout in (coo, rows, columns, blocks)],
        "to_dense_backward": [(dense, coo)],
        "_to_dense": [(coo,), (rows,)],
        "add.Tensor": [(dense, coo), (coo, coo), (rows, rows), (dense, rows)],
        "mul.Tensor": [(dense, coo), (coo, coo), (rows, dense)],
        "index_select": [(coo, 0, _i(0, 2)), (coo, 1, _i(2, 1, 1))],
        "copy_": [(coo, coo), (rows, rows)],
        "copy_sparse_to_sparse_": [(coo, coo)],
        "clone": [(rows,), (coo,)],
        "transpose.int": [(rows, 0, 1), (coo, 0, 1)],
        "cat": [([coo, coo], 0)],
        "select.int": [(rows, 0, 1), (coo, 0, 1)],
        "sparse_coo_tensor.indices_size": [(_i(0, 1, 1, 2).view(2, 2), _t(2), [3, 3])],
        "sparse_compressed_tensor.comp_plain_value_size": [(*compressed, [3, 3], layouts)],
        "sparse_csr_tensor.crow_col_value_size": [(*compressed, [3, 3], {})],
        "sparse_csc_tensor.ccol_row_value_size": [(*compressed, [3, 3], {})],
        "sparse_bsr_tensor.crow_col_value_size": [
            (_i(0, 1, 2), _i(0, 1), _t(2, 2, 2), [4, 4], {}),
        ],
        "sparse_resize_": [(coo, [4, 4], 2, 0)],
        "sparse_resize_and_clear_": [(coo, [4, 4], 2, 0)],
        "resize_as_sparse_": [(coo, coo), (rows, rows)],
        "_sparse_mm_reduce_impl": [(rows, dense, name) for name in ("sum", "amax", "mean")],
        "_to_sparse_csr": [(dense,), (coo,), (columns,)],
        "_to_sparse_csc": [(dense,), (rows,)],
        "_to_sparse_bsr": [(_t(4, 4), [2, 2])],
        "_to_sparse_bsc": [(_t(4, 4), [2, 2])],
        "sum.dim_IntList": [(rows, [0], True), (coo, [0])],
        "_jagged_to_padded_dense_forward": [(_t(5, 2), [_i(0, 2, 5)], [3])],
        "_padded_dense_to_jagged_forward": [(_t(2, 3, 2), [_i(0, 2, 5)], 5)],
    }


def _others() -> dict[str, list[tuple[Any, ...]]]:
    points = _t(6, 2)
    edges = [_t(3), _t(4)]
    matrix, weights = _t(4, 4), _t(6)
    cell = (_t(8, 3), _t(8, 2), _t(8), _t(8))
    state = _t(1, 2, 2)
    factors, pivots = torch.linalg.lu_factor(matrix + torch.eye(4))
    return {
        "_histogramdd_bin_edges": [(points, [3, 4], {"range": [0.0, 1.0, 0.0, 1.0], "weight": weights})],
        "_histogramdd_from_bin_cts": [(points, [3, 4], {"range": [0.0, 1.0, 0.0, 1.0], "weight": weights})],
        "_histogramdd_from_bin_tensors": [(points, edges, {"weight": weights})],
        "histogram.bins_tensor": [(weights, _t(3), {"weight": weights})],
        "histogram.bin_ct": [(weights, 4, {"range": [0.0, 1.0], "weight": weights})],
        "bincount": [(_i(0, 1, 5), _t(3), 2)],
        "_index_put_impl_": [
            (matrix, [_i(0, 3), _i(1, 2)], _t(2), accumulate, unsafe)
            for accumulate in (False, True)
            for unsafe in (False, True)
        ],
        "searchsorted.Tensor": [(_t(2, 4), _t(2, 3), {"sorter": _i(0, 1, 2, 3, 0, 1, 2, 3).view(2, 4)})],
        "bucketize.Tensor": [(_t(2, 3), _t(4))],
        "put_": [(matrix, _i(0, 15, 3), _t(3), accumulate) for accumulate in (False, True)],
        "take": [(matrix, _i(0, 15, -16))],
        "multinomial": [(_t(2, 5), 3, False), (_t(2, 5), 7, True)],
        "nonzero_static": [(matrix, {"size": 3})],
        "unique_dim": [(_i(1, 2, 1, 2).view(2, 2), 0, True, True, True)],
        "repeat_interleave.Tensor": [(_i(1, 0, 3),), (_i(1, 0, 3), {"output_size": 4})],
        "_unsafe_masked_index": [(matrix, torch.ones(2, dtype=torch.bool), [_i(0, 3), _i(1, 2)], 0.0)],
        "_unsafe_masked_index_put_accumulate": [(matrix, torch.ones(2, dtype=torch.bool), [_i(0, 3), _i(1, 2)], _t(2))],
        "_trilinear": [(_t(2, 3), _t(2, 3), _t(2, 3), [], [], [], [0], 1)],
        "_cholesky_solve_helper": [(_t(4, 2), matrix, False)],
        "cholesky_inverse": [(matrix,)],
        "ormqr": [(matrix, _t(4), _t(4, 2))],
        "linalg_householder_product": [(matrix, _t(3))],
        "linalg_lu_solve": [(factors, pivots, _t(4, 2)), (factors, pivots, _t(2, 4), {"left": False})],
        "lu_solve": [(_t(4, 2), factors, pivots)],
        "lu_unpack": [(factors, pivots)],
        "linalg_ldl_solve": [(matrix, _i(1, 2, 3, 4, dtype=torch.int32), _t(4, 2))],
        "linalg_solve_triangular": [(matrix, _t(4, 2), {"upper": True})],
        "_cdist_forward": [(_t(3, 2), _t(4, 2), 2.0, None), (_t(3, 2), _t(4, 2), 1.0, None)],
        "_cdist_backward": [(_t(3, 4), _t(3, 2), _t(4, 2), p, _t(3, 4)) for p in (0.5, 1.0, 2.0, 3.0)],
        "segment_reduce": [(_t(5, 2), "max", {"lengths": _i(2, 3)}), (_t(5), "sum", {"offsets": _i(0, 2, 5)})],
        "lstm.input": [(_t(3, 2, 3), [state, state], list(cell), True, 1, 0.0, False, False, False)],
        "lstm.data": [(_t(5, 3), _i(2, 2, 1), [state, state], list(cell), True, 1, 0.0, False, False)],
        "gru.data": [(_t(5, 3), _i(2, 2, 1), state, [_t(6, 3), _t(6, 2), _t(6), _t(6)], True, 1, 0.0, False, False)],
        "gru.input": [(_t(3, 2, 3), state, [_t(6, 3), _t(6, 2), _t(6), _t(6)], True, 1, 0.0, False, False, False)],
        "rnn_tanh.data": [
            (_t(5, 3), _i(2, 2, 1), state, [_t(2, 3), _t(2, 2), _t(2), _t(2)], True, 1, 0.0, False, False)
        ],
        "rnn_relu.input": [(_t(3, 2, 3), state, [_t(2, 3), _t(2, 2), _t(2), _t(2)], True, 1, 0.0, False, False, False)],
        "lstm_cell": [(_t(2, 3), [_t(2, 2), _t(2, 2)], *cell)],
        "gru_cell": [(_t(2, 3), _t(2, 2), _t(6, 3), _t(6, 2), _t(6), _t(6))],
        "_grouped_mm": [
            (
                _t(4, 16, dtype=torch.bfloat16),
                _t(2, 16, 8, dtype=torch.bfloat16),
                {"offs": _i(2, 4, dtype=torch.int32)},
            ),
            (_t(8, 16, dtype=torch.bfloat16), _t(16, 8, dtype=torch.bfloat16), {"offs": _i(8, 16, dtype=torch.int32)}),
            (
                _t(2, 4, 16, dtype=torch.bfloat16),
                _t(16, 16, dtype=torch.bfloat16),
                {"offs": _i(8, 16, dtype=torch.int32)},
            ),
        ],
        "_scaled_mm": [
            (
                _t(16, 16).to(torch.float8_e4m3fn),
                _t(16, 16).to(torch.float8_e4m3fn).t(),
                torch.ones(()),
                torch.ones(()),
            ),
        ],
        "_pad_circular": [(_t(1, 2, 4), [1, 2])],
        "_pad_enum": [(_t(1, 2, 4), [1, 2], mode) for mode in (0, 1, 2, 3)],
        "channel_shuffle": [(_t(1, 4, 2, 2), 2)],
        "native_channel_shuffle": [(_t(1, 4, 2, 2), 2)],
        "stft": [(_t(32), 8, 4, 8, _t(8), False, True, True)],
        "istft": [(torch.stft(_t(32), 8, return_complex=True, window=_t(8)), 8, 2, 8, _t(8))],
        "_sobol_engine_draw": [(_i(0, 0), 3, torch.ones(2, 30, dtype=torch.int64), 2, 0, torch.float32)],
        "_sobol_engine_ff_": [(_i(0, 0), 3, torch.ones(2, 30, dtype=torch.int64), 2, 0)],
        "kthvalue": [(matrix, 2, 1)],
        "_cummax_helper": [(matrix, _t(4, 4), torch.zeros(4, 4, dtype=torch.int64), 0)],
        "_cummin_helper": [(matrix, _t(4, 4), torch.zeros(4, 4, dtype=torch.int64), 0)],
        "_logcumsumexp": [(matrix, 0)],
        "_upsample_nearest_exact2d_backward": [(_t(1, 2, 4, 4), [4, 4], [1, 2, 2, 2])],
        "_upsample_nearest_exact3d_backward": [(_t(1, 2, 4, 4, 4), [4, 4, 4], [1, 2, 2, 2, 2])],
        "upsample_nearest3d_backward": [(_t(1, 2, 4, 4, 4), [4, 4, 4], [1, 2, 2, 2, 2])],
        "_upsample_bicubic2d_aa_backward": [(_t(1, 2, 4, 4), [4, 4], [1, 2, 2, 2], False)],
        "_upsample_lanczos2d_aa": [(_t(1, 2, 4, 4), [2, 2], False)],
        "_upsample_lanczos2d_aa_backward": [(_t(1, 2, 4, 4), [4, 4], [1, 2, 2, 2], False)],
        "binomial": [(torch.full((2, 3), 5.0), _t(2, 3))],
        "hash_tensor": [(matrix, [0])],
        "renorm_": [(matrix, 2, 0, 1.0)],
        "block_diag": [([matrix, _t(2, 3)],)],
        "fill_diagonal_": [(matrix, 1.0, True)],
    }


def _layers() -> dict[str, list[tuple[Any, ...]]]:
    line, image, volume = _t(1, 2, 6), _t(1, 2, 5, 5), _t(1, 2, 4, 4, 4)
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0], [0.0, 0.0, 4.0]])
    coo, rows, columns = dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()
    state, two = _t(1, 2, 2), _t(2)
    options = (False, [], 2, 2, 1, True, False, False)
    cell = (_t(8, 3), _t(8, 2), _t(8), _t(8))
    out, hidden, memory, space = aten.mkldnn_rnn_layer(_t(3, 2, 3), *cell, state, state, *options, True)
    back = (_t(3, 2, 3), *cell, state, state, out, hidden, memory, out, hidden, memory)
    sparse_form = (_i(0, 1, 1, 2).view(2, 2), _t(2), [3, 3])
    found: dict[str, list[tuple[Any, ...]]] = {
        "mkldnn_rnn_layer": [(_t(3, 2, 3), *cell, state, state, *options, True)],
        "mkldnn_rnn_layer_backward": [(*back, *options[:1], 2, 2, 1, True, True, False, [], False, space)],
        "max_pool1d": [(line, [2])],
        "max_pool1d_with_indices": [(line, [2])],
        "adaptive_max_pool1d": [(line, [2])],
        "adaptive_avg_pool1d": [(line, [2])],
        "avg_pool1d": [(line, [2])],
        "max_pool2d": [(image, [2, 2])],
        "max_pool3d": [(volume, [2, 2, 2])],
        "adaptive_avg_pool2d": [(image, [2, 2])],
        "adaptive_avg_pool3d": [(volume, [2, 2, 2])],
        "grid_sampler": [(image, _t(1, 2, 2, 2), 0, 0, False), (volume, _t(1, 2, 2, 2, 3), 1, 2, True)],
        "embedding_bag.padding_idx": [(_t(5, 3), _i(1, 2, 0, 3), _i(0, 2), False, 2, False, None, False, 0)],
        "nll_loss": [(_t(2, 3), _i(1, 0), _t(3), 1, -100)],
        "nll_loss2d": [(_t(1, 3, 2, 2), _i(1, 0, 2, 1).view(1, 2, 2), _t(3), 1, -100)],
        "nll_loss_nd": [(_t(1, 3, 2, 2), _i(1, 0, 2, 1).view(1, 2, 2), _t(3), 1, -100)],
        "cross_entropy_loss": [(_t(2, 3), _i(1, 0), _t(3), 1, -100, 0.1)],
        "multilabel_margin_loss": [(_t(2, 3), torch.tensor([[1, -1, 0], [0, 2, -1]]), 1)],
        "batch_norm": [(image, two, two, two, two, training, 0.1, 1e-5, False) for training in (True, False)],
        "instance_norm": [(image, two, two, two, two, True, 0.1, 1e-5, False)],
        "_native_batch_norm_legit": [(image, two, two, two, two, True, 0.1, 1e-5)],
        "bilinear": [(_t(3, 2), _t(3, 4), _t(5, 2, 4), _t(5))],
        "conv1d": [(line, _t(3, 2, 2), _t(3))],
        "conv_transpose1d": [(line, _t(2, 3, 2), _t(3))],
        "conv_transpose2d.input": [(image, _t(2, 3, 2, 2), _t(3))],
        "_convolution": [(image, _t(3, 2, 2, 2), _t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *[False] * 4)],
        "tensordot": [(_t(2, 3), _t(3, 4), [1], [0])],
        "einsum": [("ij,jk->ik", [_t(2, 3), _t(3, 4)])],
        "gradient.tensorarray": [(_t(4, 4), {"spacing": [_t(4), _t(4)], "dim": [0, 1]})],
        "histogramdd.TensorList_bins": [(_t(6, 2), [_t(3), _t(4)], {"weight": _t(6)})],
        "scatter.value_reduce": [(_t(3, 3), 0, _i(0, 2).view(1, 2), 2.0, {"reduce": "add"})],
        "narrow.Tensor": [(_t(5), 0, _i(1)[0], 2)],
        "to_padded_tensor": [(torch.nested.as_nested_tensor([_t(2, 3), _t(1, 3)]), 0.0, [2, 4, 4])],
        "nested_to_padded_tensor": [(torch.nested.as_nested_tensor([_t(2, 3), _t(1, 3)]), 0.0, [2, 4, 4])],
        "_nested_tensor_from_tensor_list": [([_t(2, 3), _t(1, 3)],)],
        "_sparse_coo_tensor_unsafe": [(*sparse_form, {})],
        "_sparse_coo_tensor_with_dims_and_tensors": [
            (2, 0, [3, 3], *sparse_form[:2], {"dtype": torch.float32, "layout": torch.sparse_coo})
        ],
        "_validate_sparse_coo_tensor_args": [sparse_form],
        "_validate_sparse_csr_tensor_args": [(_i(0, 1, 3, 4), _i(1, 0, 2, 2), _t(4), [3, 3])],
        "_sparse_mm.reduce": [(rows, dense, "amax")],
        "_spdiags": [(_t(2, 3), _i(0, 1), [3, 3])],
    }
    for name in ("_values", "_indices", "_nnz", "coalesce", "values", "indices"):
        found[name] = [(coo,)]
    for name, matrix in (("crow_indices", rows), ("col_indices", rows), ("ccol_indices", columns)):
        found[name] = found[f"{name}_copy"] = [(matrix,)]
    for kind, dimensions, tensor in (("linear", 1, line), ("bicubic", 2, image), ("bilinear", 2, image)):
        found[f"upsample_{kind}{dimensions}d.vec"] = [(tensor, [7] * dimensions, False, None)]
    for dimensions, tensor in ((1, line), (2, image), (3, volume)):
        sizes = [7] * dimensions
        for name in ("upsample_nearest", "_upsample_nearest_exact"):
            found[f"{name}{dimensions}d"] = [(tensor, sizes)]
            found[f"{name}{dimensions}d.vec"] = [(tensor, sizes, None), (tensor, None, [2.0] * dimensions)]
        for name in ("reflection_pad", "replication_pad"):
            padding = [1, 2] * dimensions
            padded = getattr(aten, f"{name}{dimensions}d")(tensor, padding)
            found[f"{name}{dimensions}d"] = [(tensor, padding), (tensor[0], padding)]
            found[f"{name}{dimensions}d_backward"] = [(padded, tensor, padding)]
    found["_upsample_bicubic2d_aa"] = [(image, [3, 3], False)]
    found["_upsample_bilinear2d_aa"] = [(image, [3, 3], False)]
    return found


def written_seeds() -> dict[str, list[Seed]]:
    """Calls that are written here, by operator."""
    found: dict[str, list[Seed]] = {}
    for part in (_quantization, _attention, _derivatives, _norms_and_steps, _sparse, _others, _layers):
        for name, calls in part().items():
            for call in calls:
                kwargs = call[-1] if call and isinstance(call[-1], dict) else {}
                found.setdefault(f"aten::{name}", []).append((call[: len(call) - isinstance(call[-1], dict)], kwargs))
    return found
