"""Every shape rule against real CPU tensors: same sizes, strides, offsets, dtypes, and the same sharing of storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from skyproxy.tensor.shapes.rules import TARGET
from tests.tensor.rule_checking import Case, answer_of, mismatch
from tests.tensor.rule_checking import tensors as _tensors

_IN_PLACE = "copy_ add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor fill_.Scalar fill_.Tensor zero_ masked_fill_.Scalar"


def _binary(name: str) -> Iterator[Case]:
    for a, b in itertools.product(_tensors(), _tensors()):
        yield name, (a, b), {}
    numbers = (2, 2.5) if name in ("add.Tensor", "mul.Tensor", "div.Tensor") else ()
    for a, number in itertools.product(_tensors(), numbers):
        yield name, (a, number), {}
    for a in _tensors(torch.int64):
        yield name, (a, a), {}
        for number in numbers:
            yield name, (a, number), {}
        yield name, (a, torch.zeros(a.shape)), {}


def _cases() -> Iterator[Case]:
    for name in ("add.Tensor", "mul.Tensor", "div.Tensor", "maximum", "lt.Tensor", "bitwise_and.Tensor", "atan2"):
        yield from _binary(name)
    for a in _tensors():
        for name in ("exp", "neg", "relu", "silu", "gelu", "rsqrt", "detach", "alias", "t", "clone", "elu", "softplus"):
            yield name, (a,), {}
        for scalar in (2, 2.5, True):
            for name in ("pow.Tensor_Scalar", "clamp", "mul.Scalar", "rsub.Scalar", "eq.Scalar"):
                yield name, (a, scalar), {}
        yield "histc", (a, 4, 0, 3), {}
        yield "sum", (a,), {}
        yield "mean", (a,), {}
        yield "add.Tensor", (a, a), {"alpha": 2}
        yield "clone", (a,), {"memory_format": torch.contiguous_format}
        for dtype in (torch.float16, torch.int64):
            yield "_to_copy", (a,), {"dtype": dtype}
        yield "where.self", (a > 0, a, a), {}
        yield "masked_fill.Scalar", (a, a > 0, 1.0), {}
        for dim in range(-4, 4):
            for name in ("_softmax", "_log_softmax"):
                yield name, (a, dim, False), {}
            for keep in (False, True):
                for name in ("sum.dim_IntList", "mean.dim", "amax", "amin"):
                    yield name, (a, [dim], keep), {}
                    yield name, (a, [dim, 0], keep), {}
            yield "unsqueeze", (a, dim), {}
            yield "squeeze.dim", (a, dim), {}
            for index in (-3, -1, 0, 2, 9):
                yield "select.int", (a, dim, index), {}
            for start, end, step in itertools.product((None, -2, 0, 1, 9), (None, -1, 0, 2, 99), (1, 2)):
                yield "slice.Tensor", (a, dim, start, end, step), {}
            for other in (-1, 0, 2):
                yield "transpose.int", (a, dim, other), {}
            yield "cat", ([a, a], dim), {}
            yield "cat", ([a, torch.zeros(3, 4)], dim), {}
        for order in itertools.permutations(range(a.dim())):
            yield "permute", (a, list(order)), {}
        for size in ([-1], [a.numel()], [2, -1], [3, 4], [4, 3], [1, *a.shape], [*a.shape, 1], [0, -1], [5, 5]):
            yield "view", (a, size), {}
        for size in (
            [-1] * a.dim(),
            [2, *a.shape],
            [1, 1, *a.shape],
            [7, *[-1] * a.dim()],
            [3, 4],
            [1, 3, 4],
            [2, 3, 4],
        ):
            yield "expand", (a, size), {}
    for a, b in itertools.product(_tensors(), _tensors()):
        yield "mm", (a, b), {}
        yield "bmm", (a, b), {}
        yield "addmm", (torch.zeros(4), a, b), {}
        yield "addmm", (torch.zeros(1), a, b), {}
    for indices in _tensors(torch.int64):
        yield "embedding", (torch.zeros(7, 6), indices), {}
    for a in _tensors():
        for axis in range(-a.dim(), a.dim()) if a.numel() else ():
            for name, numbers in (("lengths", [1, a.shape[axis] - 1]), ("offsets", [0, a.shape[axis]])):
                bounds = torch.tensor(numbers).expand(*a.shape[: axis % a.dim()], 2)
                yield "segment_reduce", (a, "mean"), {name: bounds, "axis": axis}
                yield "segment_reduce", (a, "max"), {name: bounds}
    for start, end in ((0, 5), (2, 7), (5, 5), (0, 2.5), (3, 1)):
        yield "arange.start", (start, end), {}
        yield "arange", (end,), {}
        yield "arange.start", (start, end), {"dtype": torch.float32}
        yield "arange.start", (start, end), {"dtype": torch.int64}
    for dtype in (torch.float32, torch.bfloat16):
        for keys in (5, 9):
            query, key = torch.zeros(2, 4, 5, 8, dtype=dtype), torch.zeros(2, 4, keys, 8, dtype=dtype)
            yield "_scaled_dot_product_flash_attention_for_cpu", (query, key, key), {}
            yield (
                "_scaled_dot_product_flash_attention_for_cpu",
                (query.transpose(1, 2), query.transpose(1, 2), query.transpose(1, 2)),
                {},
            )


def _layer_cases() -> Iterator[Case]:
    for a, b in itertools.product(_tensors(), _tensors()):
        yield "matmul", (a, b), {}
        yield "linear", (a, b), {}
        yield "linear", (a, b, torch.zeros(b.shape[:1])), {}
        yield "linear", (a, b, torch.zeros(3)), {}
        yield "stack", ([a, b],), {}
    for a in _tensors():
        for count in (1, 2):
            shape = list(a.shape[-count:])
            for weight in (None, torch.zeros(shape), torch.zeros(7)):
                yield "native_layer_norm", (a, shape, weight, weight, 1e-5), {}
                yield "native_layer_norm", (a.bfloat16(), shape, None, None, 1e-5), {}
        yield "native_layer_norm", (a, [], None, None, 1e-5), {}
        for train, p in itertools.product((True, False, None), (0.0, 0.5, 1.0)):
            yield "native_dropout", (a, p, train), {}
        for dim in range(-4, 4):
            for index in (
                torch.zeros(2, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int32),
                torch.zeros((), dtype=int),
            ):
                yield "index_select", (a, dim, index), {}
            yield "stack", ([a, a], dim), {}
            for keep in (False, True):
                yield "argmax", (a, dim, keep), {}
                yield "argmin", (a, dim, keep), {}
            yield "argmax", (a,), {}
            yield "cumsum", (a, dim), {}
            yield "cumprod", (a, dim), {}
            yield "cumprod", (a, dim), {"dtype": torch.float64}
            yield "cumsum", (a.bool(), dim), {}
        for name, x in itertools.product(("tril", "triu"), (a, a.bool(), a.long())):
            yield name, (x,), {}
            yield name, (x, 1), {}
        for name, x in itertools.product(("bitwise_not", "logical_not"), (a.bool(), a.long())):
            yield name, (x,), {}
        for name in ("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"):
            yield name, (a,), {}
            yield name, (a,), {"dtype": torch.float64}
            yield name, (a,), {"memory_format": torch.contiguous_format}
        yield "full_like", (a, 2), {}
        yield "full_like", (a, 2.5), {"dtype": torch.int64}
    for size in ([], [3], [2, 0], [2, 3]):
        for name in ("empty.memory_format", "zeros", "ones", "rand", "randn"):
            for dtype in (None, torch.float64, torch.bfloat16):
                yield name, (size,), {"dtype": dtype, "pin_memory": False}
            yield name, (size,), {"layout": torch.strided}
        for value, dtype in itertools.product((2, 2.5, True), (None, torch.int64, torch.float16)):
            yield "full", (size, value), {"dtype": dtype}


def _kinds() -> Iterator[torch.Tensor]:
    """Tensors of several dtypes, sizes and layouts, with values that all functions are defined for."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool):
        for a in _tensors():
            yield torch.ones_like(a, memory_format=torch.preserve_format).to(dtype)
            yield a.to(dtype)


def _stranger_cases() -> Iterator[Case]:
    """What somebody else's program asks, whatever its tensors look like."""
    for a in _kinds():
        for name in (
            "sin",
            "log1p",
            "erfinv",
            "lgamma",
            "trunc",
            "sign",
            "nan_to_num",
            "hardtanh",
            "mish",
            "frac",
            "isinf",
            "abs",
        ):
            yield name, (a,), {}
        for number in (2, 2.5, True):
            for name in ("bitwise_and.Scalar", "__lshift__.Scalar", "fmod.Scalar", "xlogy.Scalar_Other"):
                yield name, (a, number), {}
            yield "pow.Scalar", (number, a), {}
            yield "div.Tensor_mode", (a, number), {"rounding_mode": "floor"}
        yield "add.Tensor", (a, 1j), {}
        yield "mul.Tensor", (a, a.bool()), {}
        for b in (a, a.mT if a.dim() > 1 else a, a[:1] if a.dim() else a, torch.ones(())):
            for name in ("hypot", "logaddexp", "pow.Tensor_Tensor", "copysign.Tensor", "heaviside", "clamp.Tensor"):
                yield name, (a, b), {}
            yield "_prelu_kernel", (a, b), {}
            yield "complex", (a, b), {}
            yield "cat", ([a, b],), {}
            yield "cat", ([a, b.double()], -1), {}
        for name in ("sum", "any", "count_nonzero", "argmax", "aminmax", "squeeze", "logical_not", "bernoulli"):
            yield name, (a,), {}
        for dtype in (torch.float64, torch.float16):
            yield "sum", (a,), {"dtype": dtype}
            yield "mean.dim", (a, [0]), {"dtype": dtype}
        for dim, keep in itertools.product(range(-3, 3), (False, True)):
            for name in ("sum.dim_IntList", "var.correction", "var_mean.correction", "nansum", "any.dims"):
                yield name, (a, [dim]), {"keepdim": keep}
            for name in ("max.dim", "median.dim", "all.dim", "prod.dim_int", "argmin"):
                yield name, (a, dim, keep), {}
            yield "kthvalue", (a, 1, dim, keep), {}
            yield "aminmax", (a,), {"dim": dim, "keepdim": keep}
        yield "squeeze.dims", (a, []), {}
        for dim in range(-3, 3):
            for name in ("cummax", "logcumsumexp"):
                yield name, (a, dim), {}
            yield "count_nonzero.dim_IntList", (a, [dim]), {}
            yield "squeeze.dims", (a, [dim, 0]), {}
            for length, step in ((1, 1), (2, 1), (2, 2), (9, 1)):
                yield "unfold", (a, dim, length, step), {}
            for offset in (-2, -1, 0, 1, 3):
                yield "diagonal", (a, offset, dim, 0), {}
            index = torch.zeros(a.shape, dtype=torch.int64)
            for places in (index, index.mT.contiguous().mT if a.dim() > 1 else index, index[:1] if a.dim() else index):
                yield "gather", (a, dim, places), {}
                yield "scatter_add", (a, dim, places, a), {}
        for indices in (
            [torch.tensor([0, 0])],
            [None, torch.tensor([0])],
            [torch.tensor([[0]]), torch.tensor([0, 0])],
            [torch.tensor([0]), None, torch.tensor([0])],
        ):
            yield "index.Tensor", (a, indices), {}
        for value in (torch.zeros((), dtype=a.dtype), torch.zeros(1, dtype=a.dtype)):
            for mask in (torch.ones(a.shape) > 0, torch.zeros(a.shape[:1]) > 0, torch.zeros(7) > 0):
                yield "index_put_", (a.clone(memory_format=torch.preserve_format), [mask], value), {}
        for pad in ([1, 0], [-1, 2], [-9, 1], [0, 1, -1, 0], [0, 0, -1, 0], [-1, 0]):
            yield "constant_pad_nd", (a, pad), {}
        for size, stride, offset in (([2], [1], None), ([2, 2], [1, 0], 1), ([], [], 2), ([9], [2], 0)):
            yield "as_strided", (a, size, stride, offset), {}
        yield "_to_copy", (a,), {"dtype": torch.float64, "layout": torch.strided}
        for training in (True, False):
            parts = [torch.ones(a.shape[1:2]).to(a.dtype) for _ in range(4)]
            yield "native_batch_norm", (a, *parts, training, 0.1, 1e-5), {}
            yield "native_batch_norm", (a, None, None, None, None, training, 0.1, 1e-5), {}
        yield "take", (a, torch.tensor([0, 0])), {}
        yield "multinomial", (torch.ones_like(a), 1), {}
        yield "bucketize.Tensor", (a, a.flatten()[:2].contiguous()), {}
        yield "binary_cross_entropy_with_logits", (a, a), {}
        yield "clamp_min_.Tensor", (a.clone(), a), {}
    for a, b in itertools.product(_tensors(), _tensors()):
        if a.dim() == b.dim() == 3:
            yield "baddbmm", (torch.zeros(a.shape[0], 1, b.shape[2]), a, b), {}
            yield "baddbmm", (torch.zeros(7, 7, 7), a, b), {}
        if a.dim() == b.dim() in (3, 4):
            rank = a.dim() - 2
            yield "convolution", (a, b, None, [1] * rank, [1] * rank, [1] * rank, False, [0] * rank, 1), {}


_BY_NAME: dict[str, list[Case]] = {}
for _case in itertools.chain(_cases(), _layer_cases(), _stranger_cases()):
    _BY_NAME.setdefault(_case[0], []).append(_case)


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_rule_says_what_pytorch_does(name: str) -> None:
    wrong = []
    for _, args, kwargs in _BY_NAME[name]:
        problem = mismatch(name, args, kwargs)
        if problem is not None:
            shown = [(tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
            wrong.append(f"{name}{shown} {kwargs}: {problem}")
    assert not wrong, f"{len(wrong)} of {len(_BY_NAME[name])}:\n" + "\n".join(wrong[:8])


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_rule_says_nothing_wrong_of_tensors_with_a_negative_bit(name: str) -> None:
    wrong = []
    for _, args, kwargs in _BY_NAME[name]:
        if not isinstance(args[0], torch.Tensor) or args[0].dtype is torch.bool:
            continue  # has no negative
        if mismatch(name, (torch._neg_view(args[0]), *args[1:]), kwargs) is not None:
            wrong.append(f"{name}{[getattr(a, 'shape', a) for a in args]} {kwargs}")
    assert not wrong, f"{len(wrong)} of {len(_BY_NAME[name])}:\n" + "\n".join(wrong[:8])


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_rule_answers_the_ordinary_case(name: str) -> None:
    answered = [answer_of(name, args, kwargs) for _, args, kwargs in _BY_NAME[name]]
    assert any(answer is not None for answer in answered)


def _in_place(name: str) -> Iterator[Case]:
    for a in _tensors():
        targets = [a] if 0 in a.shape else [a, a[:1].expand(3, *a.shape[1:])] if a.dim() else [a]
        for target in targets:
            if name in ("zero_", "fill_.Scalar", "masked_fill_.Scalar"):
                for value in (1, 2.5, True, 1j):
                    if name == "masked_fill_.Scalar":
                        yield name, (target, target > 0, value), {}
                        yield name, (target, torch.ones(3, 4) > 0, value), {}
                    elif name == "fill_.Scalar":
                        yield name, (target, value), {}
                yield from [(name, (target,), {})] if name == "zero_" else []
                continue
            for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64):
                yield name, (target, torch.zeros((), dtype=dtype)), {}
                for other in _tensors(dtype) if name != "fill_.Tensor" else ():
                    yield name, (target, other), {}
            if name in ("add_.Tensor", "mul_.Tensor"):
                yield from ((name, (target, value), {}) for value in (2, 2.5, 1j))
    if name not in ("zero_", "masked_fill_.Scalar"):
        yield name, (torch.zeros(3, dtype=torch.int64), 2.5), {}


@pytest.mark.parametrize("name", _IN_PLACE.split())
def test_an_in_place_op_that_plainly_works_does_so(name: str) -> None:
    answered = 0
    wrong = []
    for _, args, kwargs in _in_place(name):
        answer = answer_of(name, args, kwargs)
        if answer is None:
            continue
        assert answer is TARGET
        answered += 1
        target = args[0].clone(memory_format=torch.preserve_format) if 0 not in args[0].stride() else args[0]
        problem = mismatch(name, (target, *args[1:]), kwargs)
        if problem is not None:
            wrong.append(f"{name}{[getattr(a, 'shape', a) for a in args]}: {problem}")
    assert answered
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:8])
