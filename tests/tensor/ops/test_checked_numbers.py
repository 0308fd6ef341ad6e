"""Numbers that kernels refuse are refused at their line, in PyTorch's words, also after others that they took."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Exponential

Operation = Callable[[torch.Tensor], object]
OPERATIONS: dict[str, tuple[Operation, Operation]] = {
    "a deviation below zero": (lambda x: x.normal_(0, 2), lambda x: x.normal_(0, -1)),
    "ends in the wrong order": (lambda x: x.uniform_(-1, 3), lambda x: x.uniform_(3, -1)),
    "a rate of zero": (lambda x: x.exponential_(2), lambda x: x.exponential_(0)),
    "a probability above one": (lambda x: x.geometric_(0.5), lambda x: x.geometric_(1.5)),
    "a width of zero": (lambda x: x.cauchy_(0, 1), lambda x: x.cauchy_(0, 0)),
    "a deviation of zero": (lambda x: x.log_normal_(0, 1), lambda x: x.log_normal_(0, 0)),
    "a deviation below zero around a tensor": (lambda x: torch.normal(x, 2.0), lambda x: torch.normal(x, -1.0)),
    "a deviation below zero around a number": (
        lambda x: torch.normal(0.0, 2.0, (3,), device=x.device),
        lambda x: torch.normal(0.0, -1.0, (3,), device=x.device),
    ),
    "a bend below zero": (lambda x: F.huber_loss(x, x, delta=0.5), lambda x: F.huber_loss(x, x, delta=-0.5)),
    "a width below zero": (
        lambda x: torch.ops.aten.smooth_l1_loss(x, x, 1, 0.5),
        lambda x: torch.ops.aten.smooth_l1_loss(x, x, 1, -0.5),
    ),
    "a zero point beyond the bounds": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 300, 0, 255),
    ),
    "bounds of a quantization in the wrong order": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 255, 0),
    ),
    "a scale of zero": (lambda x: F.celu(x, 0.5), lambda x: F.celu(x, 0.0)),
    "a distance below zero": (
        lambda x: torch.cdist(x.view(1, 3), x.view(1, 3), p=0.5),
        lambda x: torch.cdist(x.view(1, 3), x.view(1, 3), p=-0.5),
    ),
    "a distance between rows below zero": (
        lambda x: torch.pdist(x.view(3, 1), p=0.5),
        lambda x: torch.pdist(x.view(3, 1), p=-0.5),
    ),
    "a bound of norms below zero": (
        lambda x: x.view(1, 3).renorm(2, 0, 0.5),
        lambda x: x.view(1, 3).renorm(2, 0, -0.5),
    ),
    "a margin's power of three": (
        lambda x: torch.ops.aten.multi_margin_loss(x.view(1, 3), x[:1].long(), 2),
        lambda x: torch.ops.aten.multi_margin_loss(x.view(1, 3), x[:1].long(), 3),
    ),
    "a chance above one": (
        lambda x: torch.ops.aten.bernoulli.p(x, 0.5),
        lambda x: torch.ops.aten.bernoulli.p(x, 1.5),
    ),
    "a window behind the memory": (
        lambda x: torch.as_strided_scatter(x, x[:2], (2,), (1,), 1),
        lambda x: torch.as_strided_scatter(x, x[:2], (2,), (1,), 2),
    ),
    "a copy of what is behind the memory": (
        lambda x: torch.as_strided_copy(x, (2,), (1,), 1),
        lambda x: torch.as_strided_copy(x, (2,), (2,), 1),
    ),
    "a slope below zero, in place": (
        lambda x: torch.ops.aten.leaky_relu_backward(x, x, 0.5, True),
        lambda x: torch.ops.aten.leaky_relu_backward(x, x, -0.5, True),
    ),
    "a slope between bounds below zero, in place": (
        lambda x: torch.ops.aten.rrelu_with_noise_backward(x, x, x, 0.1, 0.5, False, True),
        lambda x: torch.ops.aten.rrelu_with_noise_backward(x, x, x, -0.5, 0.1, False, True),
    ),
    "a scale below zero, in place": (
        lambda x: torch.ops.aten.elu_backward(x, 0.5, 1, 1, True, x),
        lambda x: torch.ops.aten.elu_backward(x, -0.5, 1, 1, True, x),
    ),
    "a probability of elements above one": (
        lambda x: torch.native_dropout(x, 0.5, True),
        lambda x: torch.native_dropout(x, 1.5, True),
    ),
    "limits in the wrong order": (lambda x: x.histc(4, 0.5, 1.5), lambda x: x.histc(4, 1.5, 0.5)),
    "a limit that is no number": (lambda x: x.histc(4, 0, 1), lambda x: x.histc(4, 0, float("nan"))),
    "an order below zero of nothing": (
        lambda x: torch.linalg.vector_norm(x[:0], 2.5),
        lambda x: torch.linalg.vector_norm(x[:0], -2.5),
    ),
    "an order below zero of a line of nothing": (
        lambda x: torch.norm(x.view(3, 1)[:, :0], 2.5, 1),
        lambda x: torch.norm(x.view(3, 1)[:, :0], -2.5, 1),
    ),
    "an order below zero of several, one of them nothing": (
        lambda x: torch._foreach_norm([x, x[:0]], 2.5),
        lambda x: torch._foreach_norm([x, x[:0]], -2.5),
    ),
    "a threshold below zero": (lambda x: F.softshrink(x, 0.5), lambda x: F.softshrink(x, -0.5)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_that_a_kernel_refuses_is_refused_at_its_line(name: str, sky: str) -> None:
    right, wrong = OPERATIONS[name]
    with pytest.raises(RuntimeError) as expected:
        wrong(torch.zeros(3))
    there = torch.zeros(3, device=sky)
    right(there)
    for _ in range(2):
        with pytest.raises(RuntimeError) as found:
            wrong(there)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
        right(there)
    torch.sky.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("value", [True, 3, 300, -300, 0.5, 1e9, 1e50, float("inf"), float("nan"), 1j], ids=str)
def test_a_number_is_put_where_the_dtype_has_it_and_refused_at_its_line_elsewhere(
    dtype: torch.dtype, value: complex, sky: str, sky1: str
) -> None:
    # Each form on its own: on torch 2.15 the CPU's kernels of one form take or name what those of another do not.
    chosen = torch.tensor([False, True, False])
    for at in (0, slice(0, 1), chosen, chosen.nonzero()[0]):
        here, refused = torch.zeros(3, dtype=dtype), None
        try:
            here[at] = value
        except RuntimeError as error:
            refused = str(error)
        for device in (sky, sky1):
            there, place = torch.zeros(3, dtype=dtype, device=device), at
            if isinstance(at, torch.Tensor):
                place = at.to(device)
            if refused is None:
                there[place] = value
            else:
                with pytest.raises(RuntimeError) as found:
                    there[place] = value
                assert str(found.value).splitlines()[0] == refused.splitlines()[0]
            assert torch.allclose(there.cpu(), here, rtol=0, atol=0, equal_nan=True)


def test_checks_draw_no_random_numbers_of_the_program_and_wait_for_nothing(sky: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    there, halves = torch.ones(3, device=sky), torch.ones(3, device=sky, dtype=torch.bfloat16)
    before = torch.sky.stats()["round_trips"]
    (
        torch.native_dropout(there, 0.7, True),
        there.normal_(0, 7),
        halves.uniform_(0, 7),
        there.exponential_(7),
        Exponential(there, validate_args=False).rsample(),
    )
    assert torch.sky.stats()["round_trips"] == before
    assert torch.equal(torch.rand(2), expected)


def test_nothing_is_drawn_in_any_dtype(sky: str) -> None:
    with pytest.raises(RuntimeError, match="continuous"):
        torch.ones(2, dtype=torch.int64, device=sky).exponential_()
    assert torch.ones(0, dtype=torch.int64, device=sky).exponential_().tolist() == []
    torch.sky.synchronize()
