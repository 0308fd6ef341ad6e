"""Arguments that PyTorch's kernels of forward ops believe: what is right passes unchanged, what is not ends nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from skyproxy_server.allowed_ops import find_overload, is_allowed
from skyproxy_server.op_functions import function_of
from skyproxy_server.safe_forms import SAFE_FORMS
from skyproxy_server.unwritten_results import UNWRITTEN

Tensor = torch.Tensor
aten = torch.ops.aten


def f(*sizes: int) -> Tensor:
    return torch.linspace(0.1, 0.9, max(torch.Size(sizes).numel(), 1))[: torch.Size(sizes).numel()].reshape(sizes)


def i(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


HEADS = {"query": f(2, 4, 5, 8), "key": f(2, 2, 7, 8), "value": f(2, 2, 7, 8)}
OWN = {"query": f(2, 2, 5, 8), "key": f(2, 2, 7, 8), "value": f(2, 2, 7, 8)}
_OUT, _SUMS = aten._scaled_dot_product_flash_attention_for_cpu(*OWN.values())
BACK = {"grad_out": f(2, 2, 5, 8), **OWN, "out": _OUT, "logsumexp": _SUMS, "dropout_p": 0.0, "is_causal": False}
CTC = {
    "log_probs": f(6, 2, 4).log_softmax(-1),
    "targets": i(1, 2, 1, 2, 3, 0).view(2, 3),
    "input_lengths": [6, 5],
    "target_lengths": [3, 2],
}
_LOSS, _ALPHA = aten._ctc_loss(*CTC.values())
CTC_BACK = {"grad": f(2), **CTC, "neg_log_likelihood": _LOSS, "log_alpha": _ALPHA, "blank": 0}
GRADIENT = torch.ops.aten._cdist_backward.default._schema.arguments[0].name  # "grad_output" from torch 2.14 on
DISTANCES = {GRADIENT: f(3, 4), "x1": f(3, 2), "x2": f(4, 2), "p": 2.0, "cdist": f(3, 4)}
EXTREMES = {"self": f(4, 4), "values": f(4, 4), "indices": torch.zeros(4, 4, dtype=torch.int64), "dim": 1}
HALF = torch.bfloat16
_PACKED = aten._convert_weight_to_int4pack_for_cpu(torch.ones(64, 64, dtype=torch.int32), 2)
INT4 = {"self": f(3, 64).to(HALF), "mat2": _PACKED, "qGroupSize": 32, "qScaleAndZeros": f(2, 64, 2).to(HALF)}
INT8 = {"self": f(3, 64).to(HALF), "mat2": torch.ones(32, 64, dtype=torch.int8), "scales": f(32).to(HALF)}
CONV3 = {"self": f(1, 2, 4, 4, 4), "weight": f(3, 2, 2, 2, 2), "kernel_size": [2, 2, 2]}
TRANSPOSED = {"self": f(1, 2, 5, 5), "weight": f(2, 3, 2, 2), "kernel_size": [2, 2]}
LAYER = {
    "query": f(2, 3, 8),
    "key": f(2, 3, 8),
    "value": f(2, 3, 8),
    "embed_dim": 8,
    "num_head": 2,
    "qkv_weight": f(24, 8),
    "qkv_bias": f(24),
    "proj_weight": f(8, 8),
    "proj_bias": f(8),
}
PADDED = {"self": f(2, 2, 3, 3), "mask": torch.zeros(2, 3, dtype=torch.bool), "dim": 3, "mask_type": 1}
GROUPS = {"self": f(4, 16).to(HALF), "mat2": f(2, 16, 8).to(HALF), "offs": i(2, 4, dtype=torch.int32)}
TWICE = {
    "ggI": f(1, 2, 5, 5),
    "ggW": f(3, 2, 2, 2),
    "ggb": f(3),
    "gO": f(1, 3, 4, 4),
    "weight": f(3, 2, 2, 2),
    "self": f(1, 2, 5, 5),
    "stride": [1, 1],
    "padding": [0, 0],
    "dilation": [1, 1],
    "transposed": False,
    "output_padding": [0, 0],
    "groups": 1,
    "output_mask": [True] * 3,
}
SEGMENTS = {
    "grad": f(2, 3),
    "output": f(2, 3),
    "data": f(5, 3),
    "reduce": "sum",
    "lengths": i(2, 3),
}
SLOW = {"self": f(1, 2, 5, 5), "weight": f(3, 2, 2, 2), "kernel_size": [2, 2], "bias": None, "stride": [1, 1]}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((FLASH, HEADS, wrong) for wrong in ({"key": f(1, 2, 7, 8), "value": f(1, 2, 7, 8)}, {"value": f(2, 2, 6, 8)})),
    (FLASH, HEADS, {"key": f(2, 3, 7, 8), "value": f(2, 3, 7, 8)}),
    (FLASH, HEADS, {"key": f(2, 2, 0, 8), "value": f(2, 2, 0, 8)}),
    (FLASH, HEADS, {"value": f(2, 2, 7, 8).double()}),
    (FLASH, {**HEADS, "attn_mask": f(2, 1, 5, 7)}, {"attn_mask": f(2, 1, 4, 7)}),
    (FLASH, {**HEADS, "attn_mask": f(5, 7)}, {"attn_mask": f(7)}),
    *(
        (f"{FLASH}_backward", BACK, wrong)
        for wrong in (
            {"logsumexp": f(2, 2, 4)},
            {"out": f(2, 2, 4, 8)},
            {"grad_out": f(2, 2, 5, 4)},
            {"key": f(2, 1, 7, 8)},
        )
    ),
    (f"{FLASH}_backward", BACK, {"logsumexp": f(2, 2, 5).double()}),
    *(
        ("_ctc_loss_backward", CTC_BACK, wrong)
        for wrong in (
            {"grad": f(1)},
            {"log_alpha": f(2, 6, 3)},
            {"neg_log_likelihood": f(1)},
            {"input_lengths": [7, 5]},
            {"input_lengths": [6]},
            {"target_lengths": [4, 2]},
            {"target_lengths": [3, -1]},
            {"targets": i(1, 2, 1)},
            {"blank": 4},
        )
    ),
    *(("_cdist_backward", DISTANCES, wrong) for wrong in ({"cdist": f(0)}, {GRADIENT: f(3, 3)}, {"x1": f(2, 2)})),
    *(
        (name, EXTREMES, wrong)
        for name in ("_cummax_helper", "_cummin_helper")
        for wrong in ({"self": f(16)}, {"values": f(4, 3)}, {"indices": EXTREMES["indices"][:3]}, {"dim": -1})
    ),
    *(("_weight_int4pack_mm_for_cpu", INT4, wrong) for wrong in ({"qGroupSize": 64}, {"mat2": _PACKED[:, :16]})),
    *(("_weight_int8pack_mm", INT8, wrong) for wrong in ({"scales": f(31).to(HALF)}, {"mat2": INT8["mat2"][:, :32]})),
    *(("slow_conv3d", CONV3, wrong) for wrong in ({"kernel_size": [3, 2, 2]}, {"weight": f(3, 2, 2, 2, 1)})),
    ("slow_conv3d_forward", {**CONV3, "bias": None, "stride": [1] * 3, "padding": [0] * 3}, {"kernel_size": [2, 2, 3]}),
    ("slow_conv_transpose2d", TRANSPOSED, {"kernel_size": [4, 2]}),
    ("slow_conv_dilated2d", {**TRANSPOSED, "weight": f(3, 2, 2, 2)}, {"kernel_size": [1, 2]}),
    ("_slow_conv2d_forward", {**SLOW, "padding": [0, 0]}, {"padding": [0, (1 << 63) - 1]}),
    ("_slow_conv2d_forward", {**SLOW, "padding": [0, 0]}, {"kernel_size": [3, 3]}),
    *(("_native_multi_head_attention", LAYER, wrong) for wrong in ({"num_head": 0}, {"qkv_bias": f(24).to(HALF)})),
    *(("_masked_softmax", PADDED, wrong) for wrong in ({"self": f(2, 2, 3, 6)}, {"mask_type": 2}, {"mask_type": 0})),
    ("_linalg_eigvals", {"self": f(3, 3)}, {"self": f(3, 3) / 0}),
    ("_sparse_broadcast_to", {"self": f(2, 2).to_sparse(), "size": [3, 2, 2]}, {"size": [0, 2, 2]}),
    ("_spdiags", {"diagonals": f(2, 3), "offsets": i(0, 1), "shape": [3, 3]}, {"shape": [3, -1]}),
    ("binary_cross_entropy", {"self": f(3), "target": f(3)}, {"target": f(0)}),
    ("_convolution_double_backward", TWICE, {"gO": f()}),
    ("max_pool1d", {"self": f(1, 2, 6), "kernel_size": [2]}, {"kernel_size": [1 << 40]}),
    ("repeat_interleave.self_Tensor", {"self": f(4), "repeats": i(1, 2, 0, 1)}, {"repeats": i(*[1 << 62] * 4)}),
    ("_segment_reduce_backward", SEGMENTS, {"lengths": i(*[(1 << 63) - 1] * 2)}),
    ("_transform_bias_rescale_qkv", {"qkv": f(2, 3, 24), "qkv_bias": f(24), "num_heads": 2}, {"qkv": f(0, 3, 24)}),
    ("copy", {"self": f(3), "src": f(3)}, {"self": None}),
    (
        "_adaptive_avg_pool2d_backward",
        {"grad_output": f(1, 2, 2, 2), "self": f(1, 2, 4, 4)},
        {"self": f(1, 2, 4, 0)},
    ),
]


def call(name: str, given: dict[str, Any], function: Any) -> Any:
    """Call an op by the names of its arguments."""
    positional = [a.name for a in find_overload(f"aten::{name}")._schema.arguments if not a.kwarg_only]
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
    args = []
    for argument in positional:
        if argument not in copies:
            break
        args.append(copies.pop(argument))
    return function(*args, **copies)


@pytest.mark.parametrize(("name", "right", "wrong"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_that_a_forward_kernel_believes_belong_together(
    name: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    overload = find_overload(f"aten::{name}")
    checked = function_of(f"aten::{name}", overload, on_cpu=True)
    found, expected = call(name, right, checked), call(name, right, overload)
    if isinstance(expected, Tensor) and expected.layout is torch.strided:
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError):
        call(name, {**right, **wrong}, checked)


@pytest.mark.parametrize("name", ["as_strided", "as_strided_", "as_strided_copy", "_reshape_alias"])
@pytest.mark.parametrize(
    "place", [([3], [(1 << 61) - 4]), ([3], [1 << 61]), ([5], [1 << 60]), ([2, 3], [1 << 62, (1 << 61) - 4])], ids=str
)
def test_no_strides_lead_around_the_end_of_all_addresses(name: str, place: tuple[list[int], list[int]]) -> None:
    """Their products have 64 bits, and become small again: -4 floats from the tensor is the memory of another."""
    with pytest.raises(RuntimeError):
        function_of(f"aten::{name}", find_overload(f"aten::{name}"), on_cpu=True)(torch.ones(4), *place)


@pytest.mark.parametrize("name", ["as_strided", "as_strided_", "as_strided_copy"])
def test_no_offset_leads_around_the_end_of_all_addresses(name: str) -> None:
    function = function_of(f"aten::{name}", find_overload(f"aten::{name}"), on_cpu=True)
    for offset in ((1 << 61) + 1, (1 << 62) + 1, (1 << 63) - 1):
        with pytest.raises(RuntimeError):
            function(torch.ones(4), [1], [1], offset)
    assert function(torch.ones(4), [2], [2], 1).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["replication_pad2d.out", "replication_pad3d.out", "add.out", "_cdist_forward.out"])
def test_no_result_is_written_to_less_memory_than_it_has_elements(name: str) -> None:
    given = {
        "replication_pad2d.out": (f(2, 3, 3), [1, 1, 1, 1]),
        "replication_pad3d.out": (f(2, 3, 3, 3), [1] * 6),
        "add.out": (f(2, 3), f(2, 3)),
        "_cdist_forward.out": (f(3, 2), f(4, 2), 2.0, None),
    }[name]
    function = function_of(f"aten::{name}", find_overload(f"aten::{name}"), on_cpu=True)
    packet = getattr(aten, name.partition(".")[0])
    result = (packet.Tensor if packet is aten.add else packet.default)(*given)
    assert torch.equal(function(*given, out=torch.empty_like(result)), result)
    with pytest.raises(RuntimeError, match="single memory location"):
        function(*given, out=torch.ones(1).expand(result.shape))


@pytest.mark.parametrize("name", ["median.dim", "nanmedian.dim"])
def test_a_median_of_one_number_many_times_reads_only_that(name: str) -> None:
    values, _ = SAFE_FORMS[f"aten::{name}"](torch.full((1,), 3.0).expand(4, 100), 1)
    assert values.tolist() == [3.0] * 4


def test_heads_that_are_shared_have_derivatives() -> None:
    flash, query, (key, value) = "aten::_scaled_dot_product_flash_attention_for_cpu", f(2, 6, 5, 4), f(2, 2, 3, 5, 4)
    out, sums = SAFE_FORMS[flash](query, key, value, 0.0, True)
    found = SAFE_FORMS[f"{flash}_backward"](torch.ones_like(out), query, key, value, out, sums, 0.0, True)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    right = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    right.backward(torch.ones_like(right))
    torch.testing.assert_close(list(found), [leaf.grad for leaf in leaves])


def one(*sizes: int) -> torch.Tensor:
    """One number, many times."""
    return torch.full((1,) * len(sizes), 2.0).expand(sizes)


NO_RNN = (False, [], 2, 3, 1, True, False, False, True)
SPREAD: dict[str, tuple[object, ...]] = {
    "native_group_norm": (f(2, 4, 3), one(4), one(4), 2, 4, 3, 2, 1e-5),
    "native_group_norm_backward": (f(2, 4, 3), f(2, 4, 3), one(2, 2), one(2, 2), one(4), 2, 4, 3, 2, [True] * 3),
    "_embedding_bag": (one(5, 3), torch.ones(1, dtype=torch.int64).expand(4), torch.tensor([0, 2])),
    "_embedding_bag_forward_only": (one(5, 3), torch.ones(1, dtype=torch.int64).expand(4), torch.tensor([0, 2])),
    "_slow_conv2d_backward.output_mask": (
        one(1, 2, 3, 3),
        f(1, 1, 3, 3),
        one(2, 1, 1, 1),
        [1, 1],
        [1, 1],
        [0, 0],
        [True] * 3,
    ),
    "_rowwise_prune": (f(4, 3), torch.ones(1, dtype=torch.bool).expand(4), torch.int64),
    "mkldnn_rnn_layer": (f(2, 1, 4), one(12, 4), one(12, 3), one(12), one(12), one(1, 1, 3), one(1, 1, 3), *NO_RNN),
}


@pytest.mark.parametrize("name", SPREAD)
def test_one_number_many_times_is_as_so_many_numbers(name: str) -> None:
    packet, _, overload = name.partition(".")
    plain = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in SPREAD[name]]
    right = getattr(getattr(aten, packet), overload or "default")(*plain)
    results = SAFE_FORMS[f"aten::{name}"](*SPREAD[name])
    compared = 3 if name == "mkldnn_rnn_layer" else len(right)  # what is left of its workspace is in no order
    assert all(torch.equal(result, other) for result, other in zip(results[:compared], right[:compared], strict=True))


def test_statistics_that_share_memory_are_not_written_to() -> None:
    switch, scale, point = torch.ones(1, dtype=torch.int64), torch.ones(4), torch.zeros(4, dtype=torch.int32)
    form = SAFE_FORMS["aten::_fused_moving_avg_obs_fq_helper"]
    with pytest.raises(Exception, match="running_min share memory"):
        form(f(4, 2), switch, switch, one(4), torch.ones(4), scale, point, 0.1, 0, 255, 0, True, False)
    with pytest.raises(Exception, match="noise share memory"):
        SAFE_FORMS["aten::rrelu_with_noise"](f(40, 20), one(40, 20), 0.1, 0.3, True)


def test_one_deviation_of_all_rows_is_read_as_often_as_there_are_rows() -> None:
    tensor, rows, one = f(4, 3), torch.zeros(4, 1), torch.full((1,), 3.0)
    form = SAFE_FORMS["aten::native_layer_norm_backward"]
    found = form(tensor, tensor, [3], rows, one.expand(4, 1), None, None, [True, False, False])[0]
    assert torch.equal(found, form(tensor, tensor, [3], rows, one.repeat(4, 1), None, None, [True, False, False])[0])


def test_labels_that_no_class_has_are_read_from_no_other_memory() -> None:
    for name in ("_ctc_loss", "ctc_loss.IntList"):
        for label in (-1, 4, -(1 << 20), 1 << 40):
            targets = CTC["targets"].clone()
            targets[0, 0] = label
            clamped = targets.clamp(0, 3)
            found = SAFE_FORMS[f"aten::{name}"](CTC["log_probs"], targets, [6, 5], [3, 2])
            expected = SAFE_FORMS[f"aten::{name}"](CTC["log_probs"], clamped, [6, 5], [3, 2])
            pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            assert all(torch.equal(*pair) for pair in pairs)


def test_labels_behind_the_end_of_a_target_may_be_anything() -> None:
    targets = CTC["targets"].clone()
    targets[1, 2] = -100
    loss, _ = SAFE_FORMS["aten::_ctc_loss"](CTC["log_probs"], targets, [6, 5], [3, 2])
    assert torch.equal(loss, _LOSS)


def test_nothing_is_left_of_what_was_in_the_memory_of_alignments() -> None:
    _, alpha = SAFE_FORMS["aten::_ctc_loss"](*CTC.values())
    kept = torch.full_like(alpha, 7.0)
    UNWRITTEN["_ctc_loss"](CTC, (_LOSS, kept))
    unwritten = kept == 0
    assert unwritten[1, 5].all()  # a step more than the sequence has
    assert unwritten[1, :, 5:].all()  # places of a longer target
    assert not unwritten[0].any()
    assert (alpha[unwritten] == 0).all()
    assert torch.equal(alpha[~unwritten], _ALPHA[~unwritten])
    grads = [aten._ctc_loss_backward(*{**CTC_BACK, "log_alpha": a}.values()) for a in (alpha, _ALPHA)]
    assert torch.equal(*grads)


def test_nothing_is_left_of_what_was_in_the_memory_behind_groups() -> None:
    form = SAFE_FORMS["aten::_grouped_mm"]
    result = form(GROUPS["self"].repeat(2, 1), GROUPS["mat2"], GROUPS["offs"])
    assert torch.equal(result[:4], aten._grouped_mm(*GROUPS.values()))
    assert not result[4:].any()
    for ends in ([-1, -1], [-(1 << 31), 9], [4, 2]):
        form(GROUPS["self"], GROUPS["mat2"], i(*ends, dtype=torch.int32))
    both = form(f(8, 16).to(HALF), f(16, 8).to(HALF), i(8, 8, dtype=torch.int32))
    assert not both[1].any()


@pytest.mark.parametrize("name", ["gcd", "lcm", "gcd_", "lcm_"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_least_integer_has_divisors_and_ends_nobody(name: str, dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    numbers = i(least, 12, least, 5, dtype=dtype)
    found = SAFE_FORMS[f"aten::{name}"](numbers, i(-1, 18, least, 0, dtype=dtype))
    assert found[1] == {"g": 6, "l": 36}[name[0]]
    assert (found is numbers) == name.endswith("_")


@pytest.mark.parametrize("name", ["div.Tensor_mode", "div_.Tensor_mode", "div.Scalar_mode", "div_.Scalar_mode"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8])
def test_the_least_integer_divided_by_minus_one_ends_nobody(name: str, dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    numbers = i(least, 12, least, 5, -7, dtype=dtype)
    others: list[Any] = [-1, 2]
    if "Tensor" in name:
        others = [i(-1, -1, 1, 2, -1, dtype=dtype), i(-1, dtype=torch.int64)[0]]
    for other in others:
        exact = numbers.double() / (other.double() if isinstance(other, Tensor) else other)
        found = SAFE_FORMS[f"aten::{name}"](numbers.clone(), other, rounding_mode="trunc")
        assert found.dtype is dtype
        right = exact.trunc() != -float(least)  # there it wraps, as machines do
        assert torch.equal(found.double()[right], exact.trunc()[right])
        assert (found[~right] == least).all()


@pytest.mark.parametrize("number", [7, -7, True, torch.iinfo(torch.int64).min])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32])
def test_a_number_is_divided_by_a_tensor(number: int, dtype: torch.dtype) -> None:
    divisors = i(1, 2, 5, dtype=torch.int64).to(dtype)
    if torch.result_type(number, divisors) is torch.bool:
        return  # nothing divides booleans
    for mode in ("trunc", "floor", None):
        found = SAFE_FORMS["aten::div.Tensor_mode"](number, divisors, rounding_mode=mode)
        expected = torch.div(number, divisors, rounding_mode=mode)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    assert SAFE_FORMS["aten::div.Tensor_mode"](number, i(-1, dtype=torch.int32), rounding_mode="trunc").shape == (1,)


@pytest.mark.parametrize("turned", [(False, True), (True, False), (True, True)], ids=str)
def test_quotients_have_the_order_of_memory_of_the_dividend(turned: tuple[bool, bool]) -> None:
    a, b = torch.arange(24).view(2, 3, 4), torch.arange(1, 25).view(2, 3, 4)
    a, b = (x.mT.contiguous().mT if is_turned else x for x, is_turned in zip((a, b), turned))
    found = SAFE_FORMS["aten::div.out_mode"](a, b, rounding_mode="trunc", out=i())
    assert found.stride() == torch.div(a, b, rounding_mode="trunc").stride()


def test_a_number_of_trials_that_is_none_is_not_drawn_for_ever() -> None:
    drawn = SAFE_FORMS["aten::binomial"](torch.tensor([float("nan"), 4.0]), torch.tensor([0.5, 1.0]))
    assert drawn.tolist() == [0, 4]


def test_a_slope_is_drawn_into_a_result_of_the_inputs_size() -> None:
    out = torch.empty(1)
    form = function_of("aten::rrelu_with_noise.out", find_overload("aten::rrelu_with_noise.out"), on_cpu=True)
    assert form(f(5), f(5), 0.1, 0.3, True, out=out).shape == (5,)


def test_what_batch_norm_saves_in_a_result_without_size_is_nothing_of_others() -> None:
    form = function_of(
        "aten::_native_batch_norm_legit.out", find_overload("aten::_native_batch_norm_legit.out"), on_cpu=True
    )
    tensor = f(3, 2, 4).transpose(0, 2).contiguous().transpose(0, 2)
    saved = [torch.empty(0), torch.empty(0)]
    for _ in range(3):
        torch.full((2,), 7.5)  # freed at once: the memory that comes next
        form(tensor, f(2), f(2), f(2), f(2), True, 0.1, 1e-5, out=f(3, 2, 4), save_mean=saved[0], save_invstd=saved[1])
        assert not any((vector == 7.5).any() for vector in saved)


def test_bags_of_a_whole_layer_are_checked_as_its_parts_are() -> None:
    form = SAFE_FORMS["aten::embedding_bag"]
    rows, places = f(5, 3), i(1, 2, 0, 3)
    assert torch.equal(form(rows, places, i(0, 2))[0], aten.embedding_bag(rows, places, i(0, 2))[0])
    with pytest.raises(RuntimeError):
        SAFE_FORMS["aten::embedding_bag.padding_idx"](rows, places, i(), False, 0, False, None, False, 2)
    with pytest.raises(RuntimeError, match="offsets of bags decrease"):
        form(rows, places, i(0, 2, 0))
    with pytest.raises(RuntimeError, match="unknown mode"):
        SAFE_FORMS["aten::grid_sampler"](f(1, 2, 4, 4), f(1, 2, 2, 2), 3, 0, False)


def test_what_batch_norm_with_update_saves_is_nothing_of_others() -> None:
    name = "aten::_batch_norm_with_update.out"
    form, tensor = function_of(name, find_overload(name), on_cpu=True), f(3, 2, 4).transpose(0, 2)
    tensor = tensor.transpose(0, 2).contiguous().transpose(1, 2).contiguous().transpose(1, 2)
    saved = {"save_mean": torch.empty(0), "save_invstd": torch.empty(0)}
    form(tensor, f(2), f(2), f(2), f(2), 0.1, 1e-5, out=f(3, 2, 4), **saved, reserve=torch.empty(0, dtype=torch.uint8))
    assert [vector.shape for vector in saved.values()] == [(2,), (2,)]


def test_recurrent_layers_are_called_in_their_parts_only() -> None:
    """As a whole, they hand sizes to a library that believes them; the client divides them."""
    assert not any(
        is_allowed(f"aten::{name}.{form}") for name in ("lstm", "gru", "rnn_tanh") for form in ("input", "data")
    )
