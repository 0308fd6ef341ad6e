"""Rules that answer for tensors in any order of memory, held against PyTorch for slices, transposed and other ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tensor.rule_checking import answer_of, mismatch, tensors

Arguments = Callable[[torch.Tensor], tuple[Any, ...]]
_INDEX = torch.zeros(2, dtype=torch.int64)


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.int64)


def _classes_of(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        raise IndexError("chances of classes have two dimensions here")
    return torch.zeros(len(x), dtype=torch.int64)


def _keys_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() != 4 or 0 in x.shape:
        raise IndexError("attention is of four dimensions")
    keys = torch.zeros(*x.shape[:2], 7, x.shape[3])
    return keys, keys


CASES: dict[str, Arguments] = {
    "index.Tensor": lambda x: (x, [_INDEX]),
    "index.Tensor behind": lambda x: (x, [None, _INDEX]),
    "index.Tensor apart": lambda x: (x, [_INDEX, None, _INDEX]),
    "index_put": lambda x: (x, [_INDEX], torch.zeros(())),
    "index_put_": lambda x: (x, [_INDEX], torch.zeros(())),
    "index_select": lambda x: (x, -1, _INDEX),
    "index_select by places apart": lambda x: (x, -1, torch.zeros(2, 3, dtype=torch.int32)[:, 1]),
    "isin.Tensor_Tensor": lambda x: (x, torch.zeros(5)),
    "isin.Tensor_Tensor of integers": lambda x: (x.int(), x[..., :1].int()),
    "scatter_.value": lambda x: (x, 0, _places(x), 1),
    "scatter_.value of booleans": lambda x: (x > 0, 0, _places(x), True),
    "scatter_.value of integers": lambda x: (x.int(), 0, _places(x), 2),
    "_scaled_dot_product_flash_attention_for_cpu": lambda x: (x, *_keys_of(x)),
    "_scaled_dot_product_flash_attention_for_cpu of a part": lambda x: (x[:, :, :, 1:], *_keys_of(x[:, :, :, 1:])),
    "scatter.src": lambda x: (x, 0, _places(x), x),
    "scatter_add": lambda x: (x, 0, _places(x), x),
    "scatter.value": lambda x: (x, 0, _places(x), 1.0),
    "sort": lambda x: (x, 0),
    "topk": lambda x: (x, 1, 0),
    "flip": lambda x: (x, (0,)),
    "roll": lambda x: (x, (1,), (0,)),
    "roll all": lambda x: (x, (1,)),
    "repeat": lambda x: (x, [2] * (x.dim() + 1)),
    "clamp_min.Tensor": lambda x: (x, x[..., :1]),
    "clamp_max.Tensor of integers": lambda x: (x.int(), x),
    "avg_pool2d with a divisor": lambda x: (x, [1, 1], [], [0], False, True, 3),
    "deg2rad_": lambda x: (x,),
    "rad2deg_": lambda x: (x,),
    "sgn_": lambda x: (x,),
    "logit_": lambda x: (x, 0.1),
    "heaviside_": lambda x: (x, x[:1].clone()),
    "igamma_": lambda x: (x, x[:1].clone()),
    "igammac_": lambda x: (x, x[:1].clone()),
    "cummax": lambda x: (x, 0),
    "cumsum": lambda x: (x, 0),
    "median": lambda x: (x,),
    "norm.ScalarOpt_dim": lambda x: (x, 2, [0]),
    "argmax": lambda x: (x, 0),
    "argmin all": lambda x: (x,),
    "tril": lambda x: (x,),
    "triu": lambda x: (x, 1),
    "native_layer_norm": lambda x: (x, x.shape[-1:], None, None, 1e-5),
    "hardtanh": lambda x: (x,),
    "nan_to_num": lambda x: (x,),
    "hardshrink": lambda x: (x,),
    "softshrink": lambda x: (x,),
    "celu": lambda x: (x,),
    "threshold": lambda x: (x, 0.5, 0.1),
    "glu": lambda x: (torch.cat((x, x)).transpose(0, -1), -1),
    "im2col": lambda x: (x, [2, 2], [1, 1], [1, 1], [1, 1]),
    "avg_pool2d": lambda x: (x, [2, 2]),
    "max_pool2d_with_indices": lambda x: (x, [2, 2]),
    "_cdist_forward": lambda x: (x, x[..., :1, :], 2.0, None),
    "clone": lambda x: (x,),
    "fmod_.Tensor": lambda x: (x, x[-1:].clone()),
    "remainder_.Scalar": lambda x: (x, 2),
    "pow_.Tensor": lambda x: (x, x),
    "hypot_": lambda x: (x, x),
    "logical_not_": lambda x: (x,),
    "binary_cross_entropy": lambda x: (x, x),
    "sigmoid_backward": lambda x: (x, x),
    "sigmoid_backward of a gate": lambda x: (x.contiguous(), x),
    "tanh_backward": lambda x: (x, x.contiguous()),
    "tanh_backward of an expanded gradient": lambda x: (torch.zeros(()).expand(x.shape), x),
    "split.Tensor": lambda x: (x, 2, -1),
    "unsafe_split.Tensor": lambda x: (x, 2, 0),
    "unsafe_split_with_sizes": lambda x: (x, [1, x.shape[0] - 1], 0),
    "binary_cross_entropy of each": lambda x: (x, x, None, 0),
    "cat": lambda x: ([x, x], -1),
    "cat of two dtypes": lambda x: ([x, x.long()], 0),
    "stack": lambda x: ([x, x],),
    "stack behind": lambda x: ([x.int(), x.int()], -1),
    "stack of masks": lambda x: ([x > 0, x > 0], 1),
    "constant_pad_nd": lambda x: (x, [1, 0]),
    "constant_pad_nd that cuts": lambda x: (x, [-1, 0]),
    "reflection_pad1d": lambda x: (x, [1, 1]),
    "reflection_pad2d": lambda x: (x, [1, 1, 0, 1]),
    "replication_pad2d": lambda x: (x, [1, 1, 0, 1]),
    "amax": lambda x: (x.long(), []),
    "max": lambda x: (x,),
    "prod": lambda x: (x.int(),),
    "prod.dim_int": lambda x: (x > 0, 0),
    "cumsum of integers": lambda x: (x.int(), 0),
    "argmax of integers": lambda x: (x.long(), -1),
    "masked_fill.Scalar": lambda x: (x.long(), x > 0, 3),
    "masked_fill_.Scalar": lambda x: (x > 0, x > 1, True),
    "index_fill.int_Scalar": lambda x: (x, 0, _INDEX, 1.0),
    "scatter.value of integers": lambda x: (x.int(), 0, _places(x), 1),
    "scatter_reduce.two": lambda x: (x, 0, _places(x), x, "amax"),
    "logical_and_": lambda x: (x > 0, x > 1),
    "bitwise_or_.Tensor": lambda x: (x.int(), x.int()),
    "pow.Tensor_Scalar of integers": lambda x: (x.int(), 2),
    "bitwise_not": lambda x: (x.int(),),
    "clamp of integers by fractions": lambda x: (x.int(), 0.5, 3),
    "take": lambda x: (x, _INDEX),
    "log_sigmoid_forward": lambda x: (x,),
    "elu_backward": lambda x: (x, 1.0, 1.0, 1.0, False, x.contiguous()),
    "threshold_backward": lambda x: (x, x.contiguous(), 0.0),
    "threshold_backward of a row-major gradient": lambda x: (x.contiguous(), x, 0.0),
    "threshold_backward of an expanded gradient": lambda x: (torch.zeros(()).expand(x.shape), x, 0.0),
    "nll_loss_backward of each": lambda x: (x[:, 0], x, _classes_of(x), None, 0, -100, torch.zeros(())),
    "nll_loss_backward of an expanded gradient": lambda x: (
        torch.zeros(()).expand(x.shape[:1]),
        x,
        _classes_of(x),
        None,
        0,
        -100,
        torch.zeros(()),
    ),
    "block_diag": lambda x: ([x, x.contiguous()],),
    "leaky_relu_backward": lambda x: (x, x.contiguous(), 0.1, False),
    "hardswish_backward": lambda x: (x.contiguous(), x),
    "native_dropout_backward": lambda x: (x, x > 0, 2.0),
    "native_layer_norm of halves": lambda x: (x.bfloat16(), x.shape[-1:], None, None, 1e-5),
    "upsample_nearest2d": lambda x: (x, [3, 5]),
    "_upsample_bilinear2d_aa": lambda x: (x, [3, 5], False),
    "soft_margin_loss": lambda x: (x, x.contiguous(), 0),
    "mse_loss_backward": lambda x: (torch.zeros(()), x, x.contiguous(), 1),
    "log_sigmoid_backward": lambda x: (x, x.contiguous(), x.contiguous()),
    "scatter_reduce_.two": lambda x: (x, 0, _places(x), x.clone(), "amax"),
    "abs": lambda x: (torch.complex(x, x),),
    "sgn": lambda x: (torch.complex(x, x),),
    "polygamma": lambda x: (1, x),
    "view_as_real": lambda x: (torch.complex(x, x),),
    "view_as_complex": lambda x: (torch.stack((x, x), -1),),
    "select_scatter": lambda x: (x[:1].expand(x.shape), x[0], 0, 0),
    "addmv": lambda x: (x[:, 0], x.view(x.shape), x[0]),
    "addbmm": lambda x: (x[0], x, x.new_zeros(x.shape[0], x.shape[2], x.shape[2])),
    "max_pool1d": lambda x: (x, [2]),
    "index.Tensor of complex numbers": lambda x: (torch.complex(x, x), [None, _INDEX]),
    "index_put of complex numbers": lambda x: (torch.complex(x, x), [_INDEX], torch.zeros((), dtype=torch.complex64)),
    "pow.Tensor_Scalar of complex numbers": lambda x: (torch.complex(x, x), 1.5),
    "mean of complex numbers": lambda x: (torch.complex(x, x),),
    "mul_.Tensor of masks": lambda x: (x > 0, x > 1),
    "add_.Scalar of masks": lambda x: (x > 0, True),
    "baddbmm_": lambda x: (x, x.new_zeros(*x.shape[:2], 5), x.new_zeros(x.shape[0], 5, x.shape[2])),
    "normal.Tensor_Tensor": lambda x: (x, x[-1:] + 1),
    "normal.float_Tensor": lambda x: (2.0, x),
    "linalg_pinv.atol_rtol_tensor": lambda x: (x,),
    "histogram.bin_ct": lambda x: (x, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_agrees_with_pytorch_in_any_order_of_memory(case: str) -> None:
    name, wrong, others = case.split(" ")[0], [], 0
    for x in tensors():
        try:
            args = CASES[case](x)
        except (IndexError, RuntimeError):  # too few dimensions for the case
            continue
        problem = mismatch(name, args, {})
        if problem is not None:
            wrong.append(f"{tuple(x.shape)} {x.stride()}: {problem}")
        elif answer_of(name, args, {}) is not None:
            others += not x.is_contiguous()
    assert not wrong
    assert others > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_norms_in_another_dtype_look_as_pytorch_makes_them(dtype: torch.dtype) -> None:
    known = 0
    for x in tensors():
        for keepdim in (False, True):
            assert mismatch("linalg_vector_norm", (x, 2, [0], keepdim), {"dtype": dtype}) is None
            known += answer_of("linalg_vector_norm", (x, 2, [0], keepdim), {"dtype": dtype}) is not None
    assert (known > 0) is (dtype in (torch.float32, torch.float64))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
@pytest.mark.parametrize("name", ["clone", "_to_copy", "empty_like", "zeros_like"])
def test_copies_in_a_format_look_as_pytorch_makes_them(name: str, memory_format: torch.memory_format) -> None:
    known = 0
    for x in tensors():
        if memory_format is torch.channels_last and x.dim() != 4:
            continue
        assert mismatch(name, (x,), {"memory_format": memory_format}) is None
        known += answer_of(name, (x,), {"memory_format": memory_format}) is not None
    assert known > 0


@pytest.mark.parametrize(("rank", "transposed"), [(3, False), (2, True)])
def test_sizes_of_convolutions_over_volumes_and_of_transposed_ones(rank: int, transposed: bool) -> None:
    known = 0
    for step, pad, gap, extra in [(1, 0, 1, 0), (2, 1, 1, 1), (2, 0, 2, 1), (1, 2, 1, 0)]:
        x = torch.zeros(2, 3, *range(7, 7 + rank))
        weight = torch.zeros(*((3, 4) if transposed else (4, 3)), *[3] * rank)
        for bias in (None, torch.zeros(4)):
            numbers = [[n] * rank for n in (step, pad, gap)]
            args = (x, weight, bias, *numbers, transposed, [extra * transposed] * rank, 1)
            assert mismatch("convolution", args, {}) is None
            known += answer_of("convolution", args, {}) is not None
    assert known == 8


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("addmv_", (torch.zeros(3), torch.zeros(4, 3).t(), torch.zeros(4))),
        ("affine_grid_generator", (torch.zeros(2, 3, 2).transpose(1, 2), [2, 5, 3, 4], False)),
        ("affine_grid_generator", (torch.zeros(2, 3, 4), [2, 1, 3, 4, 5], True)),
        ("empty_permuted", ([2, 3, 4, 5], [0, 2, 3, 1])),
        ("empty_permuted", ([2, 0, 4], [2, 0, 1])),
        ("fractional_max_pool2d", (torch.zeros(2, 3, 7, 8), [2, 3], [3, 4], torch.zeros(2, 3, 2))),
        ("fractional_max_pool3d", (torch.zeros(3, 7, 8, 9), [2, 2, 2], [3, 4, 5], torch.zeros(1, 3, 3))),
        (
            "fractional_max_pool2d_backward",
            (torch.zeros(3, 3, 4), torch.zeros(3, 7, 8), [2, 2], [3, 4], torch.zeros(3, 3, 4, dtype=torch.int64)),
        ),
        ("multilabel_margin_loss_forward", (torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64), 0)),
        ("multilabel_margin_loss_forward", (torch.zeros(4), torch.zeros(4, dtype=torch.int64), 0)),
        ("multilabel_margin_loss_forward", (torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64), 1)),
        (
            "multilabel_margin_loss_backward",
            (torch.zeros(3), torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64), 0, torch.zeros(3, 4)),
        ),
    ],
    ids=lambda a: a if isinstance(a, str) else str(a[1]),
)
def test_what_depends_on_several_arguments_looks_as_pytorch_makes_it(name: str, args: tuple[Any, ...]) -> None:
    assert mismatch(name, args, {}) is None
    assert answer_of(name, args, {}) is not None


@pytest.mark.parametrize("name", ["scatter_.reduce", "scatter_.value_reduce"])
def test_scatters_that_combine_leave_their_targets_as_they_were(name: str) -> None:
    for x in tensors():
        source = x.clone() if name == "scatter_.reduce" else 2.0
        args = (x.clone(), 0, _places(x), source)
        assert mismatch(name, args, {"reduce": "multiply"}) is None
    assert answer_of(name, (torch.zeros(2, 3), 0, torch.zeros(2, 3, dtype=torch.int64), 2.0), {"reduce": "add"}) == []
