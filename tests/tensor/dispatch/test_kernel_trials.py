"""Mistakes with dtypes raise at their line, with PyTorch's class, where a rule alone would let them pass."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from skyproxy.errors import RemoteError
from skyproxy.tensor.dispatch import kernel_trials
from skyproxy.tensor.dispatch.op_info import info_of

MISTAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a softmax of integers": lambda x, i: i.softmax(0),
    "a layer norm of integers": lambda x, i: F.layer_norm(i, (3,)),
    "a norm of integers": lambda x, i: torch.linalg.vector_norm(i),
    "gelu of integers": lambda x, i: F.gelu(i),
    "silu of integers": lambda x, i: F.silu(i),
    "elu of integers": lambda x, i: F.elu(i),
    "softplus of integers": lambda x, i: F.softplus(i),
    "a median of complex numbers": lambda x, i: x.to(torch.complex64).clamp(0, 1),
    "an order of complex numbers": lambda x, i: x.to(torch.complex64).sort(),
    "rows by floating point": lambda x, i: x.index_select(0, x),
    "rows added by floating point": lambda x, i: x.index_add(0, x, x),
    "rows filled by floating point": lambda x, i: x.index_fill(0, x, 1.0),
    "elements by floating point": lambda x, i: x.gather(0, x),
    "elements put by floating point": lambda x, i: x.scatter(0, x, x),
    "bits of floating point": lambda x, i: x & x,
    "bits turned of floating point": lambda x, i: ~x,
    "bits moved of floating point": lambda x, i: x << 1,
    "a divisor of floating point": lambda x, i: torch.gcd(x, x),
    "a large tensor": lambda x, i: F.gelu(torch.ones(300, 300, dtype=torch.int64, device=i.device)),
    "in place": lambda x, i: x.bitwise_not_(),
    "a sine of halves of complex numbers": lambda x, i: x.to(torch.complex32).sinc(),
    "a Bessel function of halves": lambda x, i: torch.special.bessel_j1(x.half()),
    "halves to be decomposed": lambda x, i: torch.linalg.qr(x.half().reshape(1, 3)),
    "random integers of a normal distribution": lambda x, i: torch.randn_like(x, dtype=torch.int64),
    "random integers between 0 and 1": lambda x, i: torch.rand(3, dtype=torch.int64, device=x.device),
    "decisions of integers": lambda x, i: i.bernoulli(),
    "samples of integers": lambda x, i: (i + 1).multinomial(2),
    "segments of integers": lambda x, i: torch.segment_reduce(i, "max", lengths=i + 1),
    "rows put by floating point": lambda x, i: x.put(x, x),
    "a mask of bytes": lambda x, i: x.masked_fill(i.to(torch.uint8), 1.0),
    "one element that is three, changed": lambda x, i: x[:1].expand(3).add_(1),
    "one element that is three, multiplied": lambda x, i: x[:1].expand(3).mul_(x),
    "pictures of integers": lambda x, i: F.interpolate(i.expand(1, 1, 3, 3), (2, 2), mode="bilinear", antialias=True),
    "a volume of truth values": lambda x, i: F.pad(i.bool().expand(1, 2, 2, 2, 3), (1,) * 6, mode="reflect"),
    "pools of truth values": lambda x, i: F.max_pool1d(i.bool().reshape(1, 1, 3), 2),
    "rates of integers": lambda x, i: torch.poisson(i),
    "a grid of another precision": lambda x, i: F.grid_sample(
        x.expand(1, 1, 3, 3), x[:2].double().expand(1, 1, 1, 2), align_corners=False
    ),
    "parts of several precisions": lambda x, i: torch.complex(x, x.double()),
    "a histogram of complex numbers": lambda x, i: torch.histc(x + 1j, 3),
    "a histogram of truth values": lambda x, i: torch.histc(i.bool(), 3),
    "a line of truth values": lambda x, i: torch.linspace(0, 1, 3, dtype=torch.bool, device=x.device),
    "an order of truth values": lambda x, i: torch.randperm(3, dtype=torch.bool, device=x.device),
    "a long order in bytes": lambda x, i: torch.randperm(300, dtype=torch.uint8, device=x.device),
    "random bytes up to 300": lambda x, i: torch.randint(0, 300, (3,), dtype=torch.uint8, device=x.device),
    "random bytes from -1": lambda x, i: torch.randint(-1, 3, (3,), dtype=torch.uint8, device=x.device),
    "random numbers of no interval": lambda x, i: x.random_(5, 2),
    "a probability of two": lambda x, i: x.bernoulli_(2.0),
    "a dimension that there is not": lambda x, i: torch.softmax(torch.ones(300, 300, device=x.device), 2),
    "a loss that bends at -1": lambda x, i: F.huber_loss(x, x, delta=-1.0),
    "a complex number among real ones": lambda x, i: x.fill_(1j),
    "a complex number added to real ones": lambda x, i: x.add_(1j),
    "a complex number where a mask is": lambda x, i: x.masked_fill_(i.bool(), 1j),
    "complex positions": lambda x, i: torch.arange(4, dtype=torch.complex64, device=x.device),
    "positions that are true": lambda x, i: torch.arange(1, 9, 2, dtype=torch.bool, device=x.device),
    "many positions of eight bits": lambda x, i: torch.arange(1 << 40, dtype=torch.float8_e5m2, device=x.device),
    "a unit matrix of 16 unsigned bits": lambda x, i: torch.eye(3, 2, dtype=torch.uint16, device=x.device),
    "a window of integers": lambda x, i: torch.hann_window(4, dtype=torch.int64, device=x.device),
    "a complex window": lambda x, i: torch.kaiser_window(4, dtype=torch.complex64, device=x.device),
    "complex frequencies": lambda x, i: torch.fft.rfftfreq(4, dtype=torch.complex128, device=x.device),
    "complex random integers": lambda x, i: torch.randint_like(x, 2, dtype=torch.complex64),
    "random integers of eight bits": lambda x, i: torch.randint_like(x, 2, dtype=torch.float8_e4m3fn),
    "real ones of a complex number": lambda x, i: torch.full((3,), 1j, dtype=torch.float32, device=x.device),
    "more samples than there are": lambda x, i: (x + 1).multinomial(5),
    "signs of truth values in a list": lambda x, i: torch._foreach_abs([x, i.bool()]),
    "truth values subtracted in a list": lambda x, i: torch._foreach_sub_([i, i.bool()], [i, i.bool()]),
    "bounds of complex numbers in a list": lambda x, i: torch._foreach_clamp_min_([x + 1j, x + 1j], [x + 1j, x + 1j]),
    "the largest of complex numbers in a list": lambda x, i: torch._foreach_max([x + 1j]),
    "a complex bound among others of a list": lambda x, i: torch._foreach_clamp_min([x, x, x], [1, 2.0, 1j]),
    "a norm of integers in a list": lambda x, i: torch._foreach_norm([x, i]),
    "integers on a way in a list": lambda x, i: torch._foreach_lerp([x, i], [x, i], [0.5, 0.5]),
    "a list of integers times a fraction": lambda x, i: torch._foreach_mul_([i], 1.5),
    "a list of integers times fractions": lambda x, i: torch._foreach_mul_([i, i], [1, 1.5]),
    "lists of integers and of fractions": lambda x, i: torch._foreach_mul_([x, i, i], [x, i, x]),
    "a list of integers times one fraction": lambda x, i: torch._foreach_mul_([i], x.sum()),
    "a list of integers and a factor": lambda x, i: torch._foreach_add_([i], [i], alpha=1.5),
    "a list of integers between others": lambda x, i: torch._foreach_lerp([i], [i], 0.5),
    "a list of integers that fractions change": lambda x, i: torch._foreach_addcmul_([i], [x], [x]),
    "the larger one of complex numbers in lists": lambda x, i: torch._foreach_maximum([x + 1j], [x + 1j]),
    "norms of a list of integers": lambda x, i: torch._foreach_norm([i, i]),
    "fractions of a list of integers": lambda x, i: torch._foreach_frac([i.new_ones(100, 100)]),
    "an expanded tensor in a list": lambda x, i: torch._foreach_add_([x[:1].expand(3)], 1),
    "steps of two precisions": lambda x, i: torch.heaviside(x, x.half()),
    "factors of halves": lambda x, i: torch.linalg.lu_solve(x.half().expand(3, 3), i.int() + 1, x.half().expand(3, 3)),
    "factors of symmetric halves": lambda x, i: torch.linalg.ldl_solve(
        x.half().expand(3, 3), i.int() + 1, x.half().expand(3, 3)
    ),
    "a mask of integers for attention": lambda x, i: F.scaled_dot_product_attention(
        *[x.expand(1, 2, 4, 3)] * 3, attn_mask=i.new_ones(4, 4)
    ),
    "a mask of bytes for attention in three dimensions": lambda x, i: F.scaled_dot_product_attention(
        *[x.expand(2, 4, 3)] * 3, attn_mask=i.new_ones(4, 4).to(torch.uint8)
    ),
    "a mask of halves for attention": lambda x, i: F.scaled_dot_product_attention(
        *[x.expand(1, 2, 4, 3)] * 3, attn_mask=x.new_ones(4, 4).half()
    ),
    "attention of two precisions": lambda x, i: F.scaled_dot_product_attention(
        x.expand(1, 2, 4, 3), x.half().expand(1, 2, 4, 3), x.expand(1, 2, 4, 3)
    ),
    "a truth value subtracted in a list": lambda x, i: torch._foreach_sub([x, x], [True, True]),
    "a truth value subtracted from a list": lambda x, i: torch._foreach_sub([x, x], True),
    "a truth value subtracted in place": lambda x, i: x.sub_(True),
    "signs of truth values in place": lambda x, i: i.bool().abs_(),
    "a comparison with a complex number": lambda x, i: x.lt(1j),
    "a complex slope": lambda x, i: F.leaky_relu(x, 1j),  # type: ignore[arg-type]
    "a complex factor of a product": lambda x, i: torch.addr(x.diag(), x, x, alpha=1j),
    "a comparison with a complex number in place": lambda x, i: x.lt_(1j),
    "a divisor of floating point in place": lambda x, i: x.gcd_(x),
    "a sample of more dimensions than a kernel has": lambda x, i: x.reshape([1] * 64 + [3]).amax(0),
    "too few factors in a tensor": lambda x, i: torch._foreach_addcmul_(
        [x[:0], x], [x[:0], x], [x[:0], x], torch.ones(1)
    ),
    "the largest of no elements": lambda x, i: torch.linalg.vector_norm(x[:0].reshape(0, 2), float("inf")),
    "the smallest of no elements": lambda x, i: torch.linalg.vector_norm(x.reshape(3, 1)[:, :0], float("-inf"), dim=1),
    "probabilities of many integers": lambda x, i: torch.softmax(i.new_ones(300, 300), 1),
    "many integers between others": lambda x, i: F.interpolate(i.new_ones(1, 3, 64, 64), (100, 100)),
    "pictures of many truth values": lambda x, i: F.avg_pool2d(i.new_ones(2, 3, 64, 64).bool(), 2),
    "a mean of many integers": lambda x, i: i.new_ones(300, 300).mean(1),
    "a row of no rows": lambda x, i: x[:0][i],
    "a column of no columns": lambda x, i: x.new_empty(2, 0)[:, [0, 1]],
    "a triangle that there is not": lambda x, i: torch.linalg.eigvalsh(x.diag(), UPLO="a"),
    "a complex tolerance": lambda x, i: torch.linalg.pinv(x.diag(), rtol=x.sum().to(torch.complex64)),
    "a mask of bytes of another length": lambda x, i: x.__setitem__(i.to(torch.uint8)[:2], 1),
    "a triangle of unsigned numbers": lambda x, i: i.expand(3, 3).to(torch.uint16).tril(),
    "random numbers of eight bits": lambda x, i: torch.rand(3, dtype=torch.float8_e5m2, device=x.device),
    "an approximation of no name": lambda x, i: F.gelu(x, approximate="x"),
    "an approximation of no name of many": lambda x, i: F.gelu(x.new_ones(100, 100), approximate="x"),
    "a derivative of no name": lambda x, i: torch.ops.aten.gelu_backward(x, x, approximate="x"),
    "a rounding of no name": lambda x, i: torch.div(x, x, rounding_mode="x"),
    "a rounding of no name in place": lambda x, i: x.div_(x, rounding_mode="x"),
    "a scattering of no name": lambda x, i: x.scatter(0, i, x, reduce="x"),
    "a scattering of no name of many": lambda x, i: x.new_ones(5000).scatter_(0, i, 2.0, reduce="x"),
    "a reduction of no name": lambda x, i: x.new_ones(5000).scatter_reduce(0, i, x, "x"),
    "a reduction of rows of no name": lambda x, i: x.index_reduce(0, i, x, "x"),
    "a reduction of segments of no name": lambda x, i: torch.segment_reduce(x, "x", lengths=i + 1),
    "truth values multiplied by a tensor of factors": lambda x, i: torch._foreach_addcmul_(
        [i.bool()] * 3, [i.bool()] * 3, [i.bool()] * 3, torch.ones(3)
    ),
    "integers divided by a tensor of factors": lambda x, i: torch._foreach_addcdiv([i], [i], [i], torch.ones(1)),
    "slopes of integers": lambda x, i: torch.ops.aten.rrelu_with_noise_functional(i, i, 0.1, 0.3, True),
    "a bound of complex numbers": lambda x, i: F.hardtanh(x + 1j),
    "a derivative of bounds of complex numbers": lambda x, i: torch.ops.aten.hardtanh_backward(x + 1j, x + 1j, -1, 1),
    "samples of other sizes": lambda x, i: F.fractional_max_pool3d(
        x.new_ones(2, 3, 16, 16, 16), 2, output_size=(2, 2, 2), _random_samples=x.new_ones(2, 2, 3)
    ),
    "pivots of 64 bits": lambda x, i: torch.linalg.lu_solve(x.diag(), i, x.view(3, 1)),
    "pivots of 64 bits to unpack": lambda x, i: torch.lu_unpack(x.diag(), i),
    "factors that are no matrix": lambda x, i: torch.linalg.lu_solve(x, i.int() + 1, x.view(3, 1)),
    "factors that are no matrix of an older name": lambda x, i: torch.lu_solve(x.view(3, 1), x, i.int() + 1),
    "factors that are no matrix to unpack": lambda x, i: torch.lu_unpack(x, i.int() + 1),
    "symmetric factors that are no matrix": lambda x, i: torch.linalg.ldl_solve(x, i.int() + 1, x.view(3, 1)),
    "a gamma function of no dimension": lambda x, i: torch.special.multigammaln(x.new_ones(300, 300), 0),
    "windows of integers": lambda x, i: F.unfold(i.reshape(1, 1, 1, 3), 1),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_mistake_with_dtypes_raises_at_its_line(name: str, sky: str) -> None:
    x, i = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(Exception) as expected:
        MISTAKES[name](x, i)
    there, positions = x.to(sky), i.to(sky)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as found:
            MISTAKES[name](there, positions)
        assert str(expected.value).splitlines()[0][:60] in str(found.value)
    torch.sky.synchronize()
    assert torch.equal((there + 1).cpu(), x + 1)


@pytest.mark.parametrize("size", [(2, 2), (4, 2, 2), (70, 70)], ids=str)
def test_a_product_of_truth_values_is_refused_at_its_line_in_inference_mode(sky: str, size: tuple[int, ...]) -> None:
    with torch.inference_mode():
        bits = torch.ones(size, dtype=torch.bool, device=sky)
        with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
            bits @ bits
        with pytest.raises((NotImplementedError, RuntimeError), match="not implemented for 'Bool'"):
            F.linear(bits, bits.flatten(0, -2))


def test_what_kernels_take_is_tried_once_and_waits_for_nothing(sky: str) -> None:
    i = torch.arange(1, 7).to(sky)
    before = torch.sky.stats()["round_trips"]
    for size in (2, 3, 4):
        part = i[:size]
        assert (part // part + part * 2 - part % 5).dtype is torch.int64
        (
            part.sum(),
            part.cumsum(0),
            part.sort(),
            part & 1,
            part << 2,
            ~part,
            part.float().mean(),
            torch.zeros(9, device=sky)[part],
        )
        torch.zeros(9, device=sky)[part]
        part.float().index_select(0, part - 1), torch.zeros(6, device=sky).gather(0, part), part.clamp(1, 2), part.max()
        torch.full_like(i, 3)
    assert torch.sky.stats()["round_trips"] == before


def test_of_a_long_list_one_place_of_each_dtype_is_tried(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(kernel_trials, "_runs", lambda info, args, *rest: tried.append(args) or True)
    parts = [*torch.ones(40, 2, dtype=torch.bfloat16, device=sky), *torch.ones(40, 3, dtype=torch.int16, device=sky)]
    before = torch.sky.stats()["round_trips"]
    torch._foreach_add(parts, [*range(80)])
    assert torch.sky.stats()["round_trips"] == before
    ((looks, numbers),) = tried
    assert [look.dtype for look in looks] == [torch.bfloat16, torch.bfloat16, torch.int16]  # a zero counts apart
    assert numbers == [0, 1, 40]


def test_numbers_of_a_tensor_of_factors_are_tried_one_for_each_kind(sky: str) -> None:
    parts = [torch.ones(2, dtype=torch.half, device=sky), *torch.ones(3, 2, device=sky)]
    before = torch.sky.stats()["round_trips"]
    for factors in (torch.full((4,), 2.0), torch.full((4,), 2.0, device=sky)):
        made = torch._foreach_addcmul(parts, parts, parts, factors)
        assert [one.tolist() for one in made] == [[3.0, 3.0]] * 4
        assert torch.sky.stats()["round_trips"] <= before + 9


def test_a_kernel_that_is_not_deterministic_is_refused_at_its_line(sky: str) -> None:
    target, places, values = torch.zeros(4).to(sky), torch.tensor([1, 2]).to(sky), torch.ones(2).to(sky)
    target.put_(places, values)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            target.put_(places, values)
        target.put_(places, values, accumulate=True)
    finally:
        torch.use_deterministic_algorithms(False)
    target.put_(places, values)
    torch.sky.synchronize()
    assert target.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.float32], ids=str)
def test_no_numbers_are_drawn_in_any_dtype(dtype: torch.dtype, sky: str) -> None:
    none, some = torch.ones(0, 2, dtype=dtype).to(sky), torch.ones(2, dtype=torch.int64).to(sky)
    for made in (torch.normal(0.0, none), torch.normal(none, 1.0), torch.normal(none, none)):
        assert (made.dtype, tuple(made.shape)) == (dtype, (0, 2))
    with pytest.raises(NotImplementedError):
        torch.normal(0.0, some)
    torch.sky.synchronize()


def test_a_trial_draws_no_random_numbers_of_the_program(sky: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    halves = torch.full((3,), 0.5, dtype=torch.bfloat16).to(sky)
    halves.bernoulli(), halves.multinomial(2), F.rrelu(halves, training=True), halves.normal_(0, 3), halves.cauchy_()
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.aten.lu_unpack.default,
        torch.ops.aten.max_unpool2d.default,
        torch.ops.aten._convert_indices_from_csr_to_coo.default,
        torch.ops.aten.native_dropout.default,
        torch.ops.aten.randn_like.default,
        torch.ops.aten._print.default,
    ],
    ids=str,
)
def test_kernels_that_follow_values_or_do_more_than_compute_are_not_tried(op: torch._ops.OpOverload) -> None:
    assert not info_of(op).is_tried


def test_a_kernel_that_is_tried_warns_once(sky: str) -> None:
    # In a form that no other test has: a worker tells what the first operation of each form warns of.
    target = torch.zeros(4, 4, 1, 1, 2, dtype=torch.float64).to(sky)
    chosen = torch.tensor([1, 0, 1, 0], dtype=torch.uint8).to(sky)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        values = torch.ones(2, 1, 1, 2, dtype=torch.float64, device=sky)
        target.index_put_((chosen, chosen), values, accumulate=True)
        torch.sky.synchronize()
    assert len(given) == 2  # one for each mask


def test_a_large_inverse_transform_is_not_tried_on_less_than_it_reads(
    sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(kernel_trials, "_taken", set())
    monkeypatch.setattr(kernel_trials, "_runs", lambda info, *args: asked.append(info.name) or True)
    spectrum = torch.ones(8, 1025, dtype=torch.complex64)
    assert torch.equal(torch.fft.irfft(spectrum.to(sky)).cpu(), torch.fft.irfft(spectrum))
    assert torch.fft.fft(spectrum.to(sky)).cpu().shape == (8, 1025)
    assert "aten::_fft_c2r" not in asked
    assert "aten::_fft_c2c" in asked


@pytest.mark.parametrize("function", [torch.Tensor.fill_, torch.Tensor.softmax])
def test_a_tensor_of_many_dimensions_is_not_made_here(
    function: Callable[..., torch.Tensor], sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(kernel_trials, "_runs", lambda info, *args: asked.append(info.name) or True)
    x = torch.ones((2,) * 18, dtype=torch.half)
    assert torch.equal(function(x.to(sky), -1).cpu(), function(x, -1))
    assert asked == []


def test_a_number_that_a_dtype_holds_is_tried_once(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([True, False])
    x = torch.ones(2, dtype=torch.half)
    lowest, beyond = torch.finfo(torch.half).min, -70_000.0
    assert torch.equal(torch.where(mask.to(sky), x.to(sky), lowest).cpu(), torch.where(mask, x, lowest))
    tried = []
    monkeypatch.setattr(kernel_trials, "disable_current_modes", lambda: tried.append(1) or contextlib.nullcontext())
    torch.where(mask.to(sky), x.to(sky), lowest)
    assert tried == []
    torch.where(mask.to(sky), x.float().to(sky), torch.finfo(torch.float32).min)  # float32 holds what it holds
    assert tried == []
    for attempt in (1, 2):
        with pytest.raises(RuntimeError, match="overflow"):
            torch.full((2,), beyond, dtype=torch.half, device=sky)
        assert len(tried) == attempt


@pytest.mark.parametrize("size", [(), (1,), (2,), (0,), (3, 5)])
@pytest.mark.parametrize("number", [-70_000.0, 1e39, 3.4028235677973366e38, float("inf"), 300, -1, 1 + 2j, 1e300 + 0j])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float32, torch.int8, torch.complex64])
def test_numbers_fill_what_they_fill_on_the_cpu(
    dtype: torch.dtype, number: complex, size: tuple[int, ...], sky: str
) -> None:
    try:
        expected = torch.full(size, number, dtype=dtype)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))) as raised:
            torch.full(size, number, dtype=dtype, device=sky)
        assert not isinstance(raised.value, RemoteError)  # it comes at its line
    else:
        assert torch.equal(torch.full(size, number, dtype=dtype, device=sky).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.half, torch.float32])
def test_a_size_below_zero_is_refused_as_on_the_cpu(dtype: torch.dtype, sky: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape("negative dimension -3: [2, -3]")):
        torch.full((2, -3), 1.0, dtype=dtype, device=sky).cpu()
