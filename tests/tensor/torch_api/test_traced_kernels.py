"""Fake tensors of traced code, which look as the worker makes real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from skyproxy.tensor.torch_api import traced_kernels

Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Function = Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]


def images(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.linspace(-1, 1, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6)
    return values.to(dtype=dtype, memory_format=torch.channels_last).to(device)


def weights(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * 4 * 3 * 3, device=x.device).reshape(8, 4, 3, 3).to(x.dtype)


def statistics(x: torch.Tensor, *, training: bool) -> tuple[torch.Tensor, ...]:
    mean, variance = (make(4, device=x.device, dtype=x.dtype) for make in (torch.zeros, torch.ones))
    return torch.native_batch_norm(x, None, None, mean, variance, training, 0.1, 1e-5)


FUNCTIONS: dict[str, Function] = {
    "convolution": lambda x: F.conv2d(x, weights(x)),
    "convolution of lines": lambda x: F.conv1d(x[:, :, 0], weights(x)[:, :, 0]),
    "convolution of volumes": lambda x: F.conv3d(
        x[:, :, None].contiguous(memory_format=torch.channels_last_3d), weights(x)[:, :, None]
    ),
    "transposed convolution": lambda x: F.conv_transpose2d(x, weights(x).transpose(0, 1)),
    "weights in channels-last": lambda x: F.conv2d(
        x.contiguous(), weights(x).contiguous(memory_format=torch.channels_last)
    ),
    "gradients of a convolution": lambda x: torch.ops.aten.convolution_backward(
        F.conv2d(x, weights(x)), x, weights(x), None, [1], [0], [1], False, [0], 1, [True, True, False]
    )[:2],
    "statistics of a batch": lambda x: statistics(x, training=True),
    "no statistics of a batch": lambda x: statistics(x, training=False),
    "statistics of layers": lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=3),
}


def looks(function: Function, device: str, dtype: torch.dtype) -> list[Look]:
    real = images("cpu", dtype)
    with FakeTensorMode():
        x = torch.empty_strided(real.size(), real.stride(), dtype=dtype, device=device)
        found = function(x)
        results = list(found) if isinstance(found, tuple) else [found]
        assert {result.device for result in results} == {torch.device(device)}
        return [(tuple(result.size()), result.stride(), result.dtype) for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fakes_look_as_those_of_the_cpu(name: str, dtype: torch.dtype, sky1: str) -> None:
    assert looks(FUNCTIONS[name], sky1, dtype) == looks(FUNCTIONS[name], "cpu", dtype)


COMPILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "convolution": lambda x: F.conv2d(x, weights(x)).flatten(1),
    "convolution of lines": lambda x: F.conv1d(x[:, :, 0], weights(x)[:, :, 0]).flatten(1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).flatten(1),
    "layer norm": lambda x: F.layer_norm(x, (6,)).flatten(1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2).flatten(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_works_as_on_the_cpu(name: str, dtype: torch.dtype, sky1: str) -> None:
    function = COMPILED[name]
    compiled = torch.compile(function, backend="sky", options={"worker": "eager"})
    found, expected = images(sky1, dtype).requires_grad_(), images("cpu", dtype).requires_grad_()
    results = compiled(found), function(expected)
    for result in results:
        result.square().sum().backward()
    assert torch.equal(results[0].cpu(), results[1])
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad.cpu(), expected.grad)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w, training=True),
    "layer norm": lambda x, w: F.layer_norm(x, (4,), w),
    "group norm": lambda x, w: F.group_norm(x, 2, w),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", MIXED)
def test_norms_of_half_precision_with_whole_weights_are_trained(name: str, backend: str, sky1: str) -> None:
    compiled = torch.compile(MIXED[name], backend="sky", options={"worker": backend})
    found: list[list[torch.Tensor]] = []
    for device, function in ((sky1, compiled), ("cpu", MIXED[name])):
        x = torch.linspace(-1, 1, 2 * 4 * 5 * 4).reshape(2, 4, 5, 4).bfloat16().to(device).requires_grad_()
        w = torch.linspace(1, 2, 4).to(device).requires_grad_()
        (function(x, w).float() * torch.arange(4.0, device=device)).square().sum().backward()
        found.append([a.grad.float().cpu() for a in (x, w)])  # type: ignore[union-attr]
    tolerance = {"rtol": 0.05, "atol": 0.05} if backend == "inductor" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*found, **tolerance)


@pytest.fixture
def on_cuda(sky1: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device whose worker says that it has CUDA, of which PyTorch remembers no fake results."""
    FakeTensorMode.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(traced_kernels, "_kind", lambda device: "cuda")
        yield sky1
    FakeTensorMode.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["convolution", "convolution of volumes", "transposed convolution", "weights in channels-last"]
)
def test_convolutions_of_cuda_are_ordered_by_cudnn(name: str, dtype: torch.dtype, on_cuda: str) -> None:
    ((size, stride, _),) = looks(FUNCTIONS[name], on_cuda, dtype)
    order = torch.channels_last_3d if len(size) == 5 else torch.channels_last
    order = torch.contiguous_format if dtype is torch.float64 else order
    assert stride == torch.empty(size, memory_format=order).stride()


def test_statistics_on_cuda_keep_their_precision(on_cuda: str) -> None:
    _, *found = looks(FUNCTIONS["statistics of layers"], on_cuda, torch.bfloat16)
    assert [dtype for *_, dtype in found] == [torch.float32] * 2


@pytest.mark.parametrize("name", ["layer norm", "convolution"])
def test_a_mode_that_allows_real_tensors_makes_those_of_kernels_fake(name: str, sky1: str) -> None:
    layer = {"layer norm": torch.nn.LayerNorm(3), "convolution": torch.nn.Conv1d(2, 4, 1)}[name]
    layer.to(sky1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        result = layer(torch.empty(2, 3, device=sky1))
        assert type(result) is FakeTensor
        assert result.device == torch.device(sky1)
    with FakeTensorMode(), pytest.raises(AssertionError, match="Please convert all Tensors to FakeTensors"):
        layer(torch.empty(2, 3, device=sky1))


def test_fakes_of_other_devices_are_as_they_were(sky1: str) -> None:
    assert looks(FUNCTIONS["convolution"], "meta", torch.float32)
    stride = looks(FUNCTIONS["convolution"], "cpu", torch.float32)[0][1]
    assert stride == torch.empty(2, 8, 4, 4, memory_format=torch.channels_last).stride()


def test_factors_on_cuda_are_row_major(on_cuda: str) -> None:
    def factors(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x[0, 0, :4]).Vh

    assert looks(factors, on_cuda, torch.float32) == [((6, 6), (6, 1), torch.float32)]
    assert looks(factors, "cpu", torch.float32) == [((6, 6), (1, 6), torch.float32)]


def test_integers_are_counted_in_traced_code(sky1: str) -> None:
    with FakeTensorMode():
        counts = torch.histc(torch.ones(5, device=sky1, dtype=torch.int32), bins=4, min=0, max=3)
    assert counts.shape == (4,)


def test_nothing_is_remembered_of_a_device_whose_worker_may_be_another_now(on_cuda: str) -> None:
    before = looks(FUNCTIONS["statistics of layers"], on_cuda, torch.bfloat16)
    traced_kernels._install_for_devices()
    assert FakeTensorMode.cache_info().size == 0
    assert looks(FUNCTIONS["statistics of layers"], on_cuda, torch.bfloat16) == before
