"""Tensors made of sizes and options alone look as PyTorch makes them, the first time and every time after it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.dispatch import factories
from tests.tensor.rule_checking import mismatch

Make = Callable[..., torch.Tensor]
_MAKERS: dict[str, Make] = {
    "zeros": lambda **o: torch.zeros(2, 3, **o),
    "ones": lambda **o: torch.ones(3, **o),
    "ones of no dimension": lambda **o: torch.ones((), **o),
    "ones of nothing": lambda **o: torch.ones(0, 3, **o),
    "full": lambda **o: torch.full((2, 2), 1.5, **o),
    "full of integers": lambda **o: torch.full((2,), 7, **o),
    "full of truth": lambda **o: torch.full((2,), True, **o),
    "eye": lambda **o: torch.eye(3, **o),
    "wide eye": lambda **o: torch.eye(2, 4, **o),
    "arange": lambda **o: torch.arange(7, **o),
    "arange of fractions": lambda **o: torch.arange(0.0, 1.0, 0.3, **o),
    "arange downwards": lambda **o: torch.arange(9, 1, -3, **o),
    "linspace": lambda **o: torch.linspace(0, 1, 5, **o),
    "logspace": lambda **o: torch.logspace(0, 1, 5, **o),
    "randn": lambda **o: torch.randn(3, 2, **o),
    "rand": lambda **o: torch.rand(4, **o),
    "randint": lambda **o: torch.randint(3, 9, (5,), **o),
    "randperm": lambda **o: torch.randperm(6, **o),
    "tril_indices": lambda **o: torch.tril_indices(3, 3, **o),
    "tensor": lambda **o: torch.tensor([[1.5, 2.0]], **o),
    "tensor of integers": lambda **o: torch.tensor([1, 2], **o),
    "scalar": lambda **o: torch.tensor(3.0, **o),
    "scalar_tensor": lambda **o: torch.scalar_tensor(2, **o),
    "full of a complex number": lambda **o: torch.full((2,), 1.5 - 2j, **o),
    "scalar_tensor of a complex number": lambda **o: torch.scalar_tensor(2j, **o),
    "normal": lambda **o: torch.normal(0.0, 1.0, (3,), **o),
    "empty in channels-last order": lambda **o: torch.empty(2, 3, 4, 4, memory_format=torch.channels_last, **o).zero_(),
}
_DTYPES = (None, torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.complex128)


def _attempt(make: Make, **options: Any) -> Any:
    try:
        torch.manual_seed(5)
        made = make(**options)
        made.cpu()
        return made
    except (RuntimeError, NotImplementedError) as error:
        return type(error)


@pytest.mark.parametrize("name", _MAKERS)
def test_a_factory_makes_what_it_makes_locally(sky: str, name: str) -> None:
    for dtype in _DTYPES:
        expected = _attempt(_MAKERS[name], dtype=dtype)
        for _ in range(2):
            made = _attempt(_MAKERS[name], dtype=dtype, device=sky)
            if not isinstance(expected, torch.Tensor):
                assert not isinstance(made, torch.Tensor)
                continue
            assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("name", _MAKERS)
def test_a_factory_that_was_called_before_infers_nothing(sky: str, name: str) -> None:
    options = {"dtype": torch.complex64} if name == "scalar_tensor of a complex number" else {}
    _MAKERS[name](device=sky, **options)
    device = DEVICES.of(sky)
    misses = device.misses
    _MAKERS[name](device=sky, **options)
    assert device.misses == misses


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: torch.zeros(3, dtype=torch.complex64, **o),
        lambda **o: torch.eye(3, dtype=torch.complex128, **o),
        lambda **o: torch.randn(3, dtype=torch.complex64, **o),
        lambda **o: torch.linspace(0, 1, 3, dtype=torch.complex64, **o),
        lambda **o: torch.full((3,), 2j, **o),
        lambda **o: torch.full((3,), 1.0, dtype=torch.complex64, **o),
        lambda **o: torch.empty(1, 3, 2, 2, memory_format=torch.channels_last, **o),
        lambda **o: torch.empty(3, memory_format=torch.contiguous_format, **o),
    ],
)
def test_complex_numbers_and_orders_of_memory_take_the_short_way(
    make: Make, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(info: object, *rest: object) -> None:
        pytest.fail(f"{info} took the long way")

    monkeypatch.setattr(factories, "record", record)
    for _ in range(2):
        make(device=sky)


def test_a_complex_number_that_becomes_a_real_one_is_refused_without_the_worker(sky: str) -> None:
    for make in (torch.scalar_tensor, lambda value, **o: torch.full((2,), value, dtype=torch.float32, **o)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot be converted") as caught:
                make(2j, device=sky)
            assert caught.type is RuntimeError


def test_a_number_is_no_part_of_what_is_remembered(sky: str) -> None:
    made = [torch.full((2,), number, device=sky).tolist() for number in (0.5, 1.5, -0.0, 1, True)]
    assert made == [[0.5, 0.5], [1.5, 1.5], [-0.0, -0.0], [1, 1], [True, True]]
    assert [type(row[0]) for row in made] == [float, float, float, int, bool]


def test_the_default_dtype_is_that_of_the_moment(sky: str) -> None:
    assert torch.zeros(2, device=sky).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.zeros(2, device=sky).dtype is torch.float64
        assert torch.zeros(2, device=sky).cpu().dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.zeros(2, device=sky).cpu().dtype is torch.float32


def test_each_device_gets_its_own(sky: str, sky1: str) -> None:
    for device in (sky, sky1, sky):
        assert str((torch.ones(2, device=device) + 1).device) == device


def test_what_is_made_in_inference_mode_is_an_inference_tensor(sky: str) -> None:
    torch.zeros(3, device=sky)
    with torch.inference_mode():
        assert torch.zeros(3, device=sky).is_inference()
    assert not torch.zeros(3, device=sky).is_inference()


def test_a_generator_draws_from_its_own_numbers(sky: str) -> None:
    draws = []
    for _ in range(2):
        generator = torch.Generator(device=sky).manual_seed(3)
        draws.append(torch.randn(3, device=sky, generator=generator).tolist())
    assert draws[0] == draws[1]


def test_wrong_sizes_raise_at_the_call(sky: str) -> None:
    with pytest.raises(RuntimeError, match="negative"):
        torch.zeros(-1, device=sky)
    with pytest.raises(RuntimeError, match=r"step|bound|inconsistent"):
        torch.arange(3, 1, device=sky)


@pytest.mark.parametrize(
    "numbers",
    [(5,), (0,), (2, 7), (7, 2), (0, 10, 3), (10, 0, -3), (0, 1.0, 0.1), (0.5, 3), (1, 1), (0, 5, -1), (2.5,), (-3,)],
)
@pytest.mark.parametrize("dtype", [None, torch.int64, torch.float32, torch.float16])
def test_arange_counts_as_pytorch_does(numbers: tuple[Any, ...], dtype: torch.dtype | None) -> None:
    name = ("arange", "arange.start", "arange.start_step")[len(numbers) - 1]
    assert mismatch(name, numbers, {"dtype": dtype}) is None


_UPLOADS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.arange(6.0).view(2, 3)[:, 1:],
    torch.zeros(0, 3),
    torch.tensor(2.5),
    torch.arange(12.0).as_strided((1, 4), (99, 1)),
    torch.tensor([1 + 2j]).conj(),
    torch.arange(4.0).bfloat16()[2:],
    torch.zeros(1, 3, 1, 1).contiguous(memory_format=torch.channels_last),
    torch.nn.Parameter(torch.ones(3)),
]


@pytest.mark.parametrize("local", _UPLOADS, ids=lambda t: f"{tuple(t.shape)} {t.stride()} {t.dtype}")
def test_a_small_tensor_arrives_as_it_was(sky: str, local: torch.Tensor) -> None:
    remote = local.to(sky)
    assert remote.stride() == local.clone().stride()
    assert remote.requires_grad == local.requires_grad
    assert torch.equal(remote.detach().cpu(), local.detach())


def test_the_bytes_of_an_upload_are_read_at_the_call(sky: str) -> None:
    local = torch.ones(4)
    remote = local.to(sky)
    ctypes.memset(local.data_ptr(), 0, local.nbytes)
    assert remote.tolist() == [1.0] * 4


PINNED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: torch.empty(2, device=x.device, pin_memory=True),
    lambda x: torch.zeros(2, device=x.device, pin_memory=True),
    lambda x: torch.rand(2, device=x.device, pin_memory=True),
    lambda x: torch.arange(2, device=x.device, pin_memory=True),
    lambda x: torch.empty_strided((2,), (1,), device=x.device, pin_memory=True),
    lambda x: torch.empty_like(x, pin_memory=True),
    lambda x: torch.ones_like(x, pin_memory=True),
    lambda x: x.new_zeros(2, pin_memory=True),
    lambda x: x.new_full((2,), 1, pin_memory=True),
]


@pytest.mark.parametrize("make", PINNED)
def test_only_tensors_of_the_cpu_can_be_pinned(make: Callable[[torch.Tensor], torch.Tensor], sky1: str) -> None:
    """In CUDA's words, and at once."""
    x = torch.ones(2, device=sky1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^Only dense CPU tensors can be pinned$"):
            make(x)


@pytest.mark.parametrize(("size", "stride"), [((2, 2), (2**62, 2**62)), ((3,), (2**62,)), ((2, 3), (1, -1))])
@pytest.mark.parametrize("like", [False, True])
def test_strides_that_no_memory_has_are_refused_at_the_call(
    size: tuple[int, ...], stride: tuple[int, ...], like: bool, sky1: str
) -> None:
    messages = []
    for device in ("cpu", sky1):
        make = torch.ones(1, device=device).new_empty_strided if like else torch.empty_strided
        with pytest.raises(RuntimeError, match="Storage size calculation overflowed") as caught:
            make(size, stride, device=device)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(("size", "stride"), [((0, 3), (2**62, -1)), ((1,), (-1,)), ((1, 2), (2**62, 1))])
def test_strides_of_what_has_no_second_element_may_be_any(
    size: tuple[int, ...], stride: tuple[int, ...], sky1: str
) -> None:
    local, remote = (torch.empty_strided(size, stride, device=device) for device in ("cpu", sky1))
    assert remote.stride() == local.stride()


@pytest.mark.parametrize("factory", [torch.linspace, torch.logspace])
def test_ends_that_are_tensors_choose_the_dtype(factory: Callable[..., torch.Tensor], sky1: str) -> None:
    for end in (torch.tensor(2.0), torch.tensor(2), torch.tensor(1 + 2j)):
        expected = factory(0, end, 4)
        assert factory(0, end.to(sky1), 4, device=sky1).dtype is expected.dtype
        assert torch.equal(factory(0, end.to(sky1), 4, device=sky1).cpu(), expected)
