"""Rules for less usual functions, held against PyTorch for tensors of many sizes and orders of memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.tensor.rule_checking import answer_of, mismatch, tensors

Arguments = Callable[[torch.Tensor], tuple[Any, ...]]


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.complex64).fill_(1)


def _place(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


CALLS: dict[str, Arguments] = {
    "special_entr": lambda x: (x,),
    "special_i0e": lambda x: (x.long(),),
    "special_ndtri": lambda x: (x > 0,),
    "special_zeta": lambda x: (x, x),
    "special_zeta.other_scalar": lambda x: (x, 2.0),
    "igamma": lambda x: (x, x[:1] if x.dim() else x),
    "exp": lambda x: (_complex(x),),
    "div.Tensor": lambda x: (_complex(x), x),
    "eq.Scalar": lambda x: (_complex(x), 1j),
    "sum.dim_IntList": lambda x: (_complex(x), [0]),
    "mean.dim": lambda x: (_complex(x), [-1], True),
    "angle": lambda x: (x,),
    "angle of complex numbers": lambda x: (_complex(x),),
    "frexp.Tensor": lambda x: (x,),
    "mvlgamma": lambda x: (x + 5, 2),
    "poisson": lambda x: (x,),
    "bernoulli.p": lambda x: (x, 0.5),
    "normal.Tensor_float": lambda x: (x, 1.0),
    "fake_quantize_per_tensor_affine_cachemask": lambda x: (x, 0.1, 0, 0, 255),
    "rrelu_with_noise": lambda x: (x, torch.empty_like(x), 0.1, 0.3, False),
    "rrelu_with_noise, training": lambda x: (x, torch.empty_like(x), 0.1, 0.3, True),
    "rrelu_with_noise_backward": lambda x: (x, x, x, 0.1, 0.3, True, False),
    "put": lambda x: (x, _place(x), torch.ones(1)),
    "renorm": lambda x: (x, 2, 0, 1.0),
    "rot90": lambda x: (x, 1, [0, 1]),
    "rot90, three times": lambda x: (x, 3, [-1, 0]),
    "rot90, twice": lambda x: (x, 2, [0, 1]),
    "rot90, not at all": lambda x: (x, 4, [0, 1]),
    "narrow_copy": lambda x: (x, 0, 0, 1),
    "select_copy.int": lambda x: (x, -1, 0),
    "slice_copy.Tensor": lambda x: (x, 0, 0, 1),
    "permute_copy": lambda x: (x, list(range(x.dim()))[::-1]),
    "expand_copy": lambda x: (x, [2, *x.shape]),
    "view.dtype": lambda x: (x, torch.int32),
    "view.dtype, narrower": lambda x: (x, torch.bfloat16),
    "view.dtype, wider": lambda x: (x, torch.float64),
    "index_reduce": lambda x: (x, 0, _place(x), x[:1], "amax"),
    "scatter.reduce": lambda x: (x, 0, torch.zeros(x.shape, dtype=torch.int64), x, "multiply"),
    "index_fill.int_Tensor": lambda x: (x, 0, _place(x), torch.tensor(1.0)),
    "index_add": lambda x: (x, 0, _place(x), x[:1]),
    "median.dim": lambda x: (x.long(), 0),
    "cummax": lambda x: (x.int(), -1),
    "kthvalue": lambda x: (x.long(), 1),
    "clamp.Tensor": lambda x: (x.int(), x.int(), None),
    "clamp_.Tensor": lambda x: (x.clone(), x, x),
    "relu_": lambda x: (x.long(),),
    "put_": lambda x: (x.clone(), _place(x), torch.ones(1)),
    "copy_": lambda x: (_complex(x), _complex(x)),
    "new_zeros": lambda x: (_complex(x), [2, 3]),
    "_conj": lambda x: (_complex(x),),
    "_neg_view": lambda x: (x,),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_result_looks_as_pytorch_makes_it(case: str) -> None:
    name, answered = case.split(",")[0].split(" of ")[0], 0
    keywords = {"reduce": "multiply"} if name == "scatter.reduce" else {}
    for x in tensors():
        filled = torch.empty_strided(x.shape, x.stride()).fill_(0.5)
        try:
            args = CALLS[case](filled)
        except (IndexError, RuntimeError):
            continue  # not of so few dimensions
        args = args[: -len(keywords)] if keywords else args
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert mismatch(name, args, keywords) is None
        answered += answer_of(name, args, keywords) is not None
    assert answered >= 5


def test_an_outer_product_is_added_in_the_order_of_the_three() -> None:
    for x in (torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(3, 8)[:, ::2], torch.ones(3, 1).expand(3, 4)):
        for a, b in itertools.product((torch.ones(3), torch.ones(6)[::2]), (torch.ones(4), torch.ones(1).expand(4))):
            assert mismatch("addr", (x, a, b), {}) is None
            assert answer_of("addr", (x, a, b), {}) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int32, torch.bool])
@pytest.mark.parametrize("beta", [0, 1])
def test_an_outer_product_is_laid_out_as_the_matrix_even_where_nothing_is_read_of_it(
    dtype: torch.dtype, beta: int, sky1: str
) -> None:
    def added(device: str) -> Iterator[torch.Tensor]:
        rows = torch.arange(4, device=device).to(dtype)
        for column_dtype in (dtype, torch.uint8):
            column = torch.arange(6, device=device)[::2].to(column_dtype)
            for x in (torch.ones(4, 3).t(), torch.ones(3, 8)[:, ::2], torch.ones(3, 1), torch.ones(4), torch.ones(())):
                yield torch.addr(x.to(device).to(dtype), column, rows, beta=beta)

    for found, expected in zip(added(sky1), added("cpu"), strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_products_of_three_and_distances_look_as_pytorch_makes_them(order: tuple[int, int]) -> None:
    def turned(*size: int) -> torch.Tensor:
        x = torch.ones(size)
        return x if order == (0, 1) else x.transpose(0, -1).contiguous().transpose(0, -1)

    places = [1, 3], [0], [1, 2]
    for args in (
        (turned(3, 4), turned(2, 4, 5), turned(3, 5), *places, [2, 3]),
        (turned(1, 4), turned(2, 4, 1), turned(3, 1), *places, [2, 3]),
        (turned(3, 4), turned(3, 4), turned(3, 4), [], [], [], [0]),
    ):
        assert answer_of("_trilinear", args, {}) is not None
        assert mismatch("_trilinear", args, {}) is None
    assert mismatch("_pdist_forward", (turned(4, 3), 2.0), {}) is None
    assert mismatch("_pdist_backward", (turned(6), turned(4, 3), 2.0, torch.ones(6)), {}) is None


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("name", ["_embedding_bag", "_embedding_bag_forward_only"])
def test_bags_note_what_the_cpu_notes(name: str, mode: int) -> None:
    indices, offsets = torch.tensor([0, 1, 0, 1, 2]), torch.tensor([0, 2])
    scales = (None, torch.ones(5)) if mode == 0 else (None,)
    for weight in (torch.ones(3, 7), torch.ones(7, 3).t(), torch.ones(3, 14)[:, ::2], torch.ones(1, 7).expand(3, 7)):
        for factor, padding in itertools.product(scales, (-1, 0)):
            args = (weight, indices, offsets, False, mode, False, factor, False, padding)
            assert answer_of(name, args, {}) is not None
            assert mismatch(name, args, {}) is None


@pytest.mark.parametrize("stride", [(1, 0), (1, 2), (0, 1)], ids=str)
def test_bags_of_rows_that_share_memory_are_those_that_the_worker_copied(sky: str, stride: tuple[int, int]) -> None:
    indices, offsets = torch.tensor([0, 1, 0, 1, 2], device=sky), torch.tensor([0, 2], device=sky)
    sent = torch.ones(20, device=sky).as_strided((3, 7), stride)
    for _ in range(3):
        result = torch.nn.functional.embedding_bag(indices, sent, offsets, mode="sum")
        assert result.tolist() == [[2.0] * 7, [3.0] * 7]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float32, "half"])
def test_statistics_of_halves_have_the_dtype_of_the_weights(half: torch.dtype, dtype: Any) -> None:
    weight = None if dtype is None else torch.ones(4, dtype=half if dtype == "half" else dtype)
    x = torch.ones(2, 4, 3, 3, dtype=half)
    for image in (x, x.contiguous(memory_format=torch.channels_last), x[:1]):
        group = (image, weight, weight, len(image), 4, 9, 2, 1e-5)
        assert answer_of("native_group_norm", group, {}) is not None
        assert mismatch("native_group_norm", group, {}) is None
        _, mean, deviation = torch.ops.aten.native_group_norm(*group)
        backward = (image, image, mean, deviation, weight, len(image), 4, 9, 2, [True, *[weight is not None] * 2])
        assert mismatch("native_group_norm_backward", backward, {}) is None
        batch = (image, weight, weight, None, None, True, 0.1, 1e-5)
        assert answer_of("native_batch_norm", batch, {}) is not None
        assert mismatch("native_batch_norm", batch, {}) is None
        _, mean, deviation = torch.ops.aten.native_batch_norm(*batch)
        backward = (image, image, weight, None, None, mean, deviation, True, 1e-5, [True] * 3)
        assert answer_of("native_batch_norm_backward", backward, {}) is not None
        assert mismatch("native_batch_norm_backward", backward, {}) is None


@pytest.mark.parametrize("offset", range(-6, 7))
def test_triangles_have_as_many_elements_as_they_have(offset: int) -> None:
    for rows, columns in itertools.product(range(1, 6), repeat=2):
        for name in ("tril_indices", "triu_indices"):
            assert answer_of(name, (rows, columns, offset), {}) is not None
            assert mismatch(name, (rows, columns, offset), {}) is None


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_of_margins_have_the_size_of_the_targets(reduction: int) -> None:
    sizes = [((), ()), ((), (1,)), ((5,), ()), ((5,), (1,)), ((1, 5), ()), ((1, 5), (1,)), ((3, 5), (3,))]
    for (size, targets), weighted in itertools.product(sizes, (False, True)):
        weight = torch.ones(size[-1:] or 1) if weighted else None
        args = (torch.ones(size), torch.zeros(targets, dtype=torch.int64), 1, 1, weight, reduction)
        assert mismatch("multi_margin_loss", args, {}) is None
        assert answer_of("multi_margin_loss", args, {}) is not None
