"""Fourier transforms of float16 on a CUDA worker, whose kernels are played by functions on a worker with a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.tensor.core.devices import DEVICES

ONE = ("fft", "ifft", "rfft", "ihfft", "irfft", "hfft")
SEVERAL = ("fftn", "ifftn", "rfftn", "ihfftn", "irfftn", "hfftn")
TWO = ("fft2", "ifft2", "rfft2", "ihfft2", "irfft2", "hfft2")
ONE_CALLS: tuple[tuple[Any, ...], ...] = ((8,), (4,), (16, 0, "ortho"), (8, -1, "forward"))
BLOCK_CALLS: tuple[tuple[Any, ...], ...] = (((2, 8),), ((-1, 8),), ((4, 16), (2, 0), "ortho"), ((16,), (0,)))
PLANE_CALLS: tuple[tuple[Any, ...], ...] = (((2, 8),), ((4, 16), (-1, 0), "forward"))


def play_cuda() -> None:
    """On the worker: transforms of half precision, which only CUDA has, computed in single precision."""
    import torch

    if hasattr(torch._C, "_skyproxy_transforms"):
        return
    library = torch.library.Library("aten", "IMPL")
    wide = {torch.float16: torch.float32, torch.complex32: torch.complex64}

    def play(name: str, half: torch.dtype) -> None:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def transform(keys: Any, x: torch.Tensor, *rest: Any) -> Any:
            if x.dtype not in wide:
                return kernel.call_boxed(keys, x, *rest)
            sizes = [x.shape[d] for d in rest[0]]
            if half is torch.float16:
                sizes[-1] = rest[2]
            assert all(n & (n - 1) == 0 for n in sizes)  # cuFFT takes no others
            return kernel.call_boxed(keys, x.to(wide[x.dtype]), *rest).to(half)

        library.impl(name, transform, "CPU", with_keyset=True)

    for name, half in (("_fft_r2c", torch.complex32), ("_fft_c2c", torch.complex32), ("_fft_c2r", torch.float16)):
        play(name, half)
    torch._C._skyproxy_transforms = library  # type: ignore[attr-defined]  # a place that outlives this call


@pytest.fixture(scope="module")
def cuda(sky_devices: tuple[str, str]) -> Iterator[torch.device]:
    """A device that plays CUDA."""
    with skyproxy.launch_local("cpu") as node, pytest.MonkeyPatch.context() as patch:
        node.run(play_cuda)
        # Only the choice of kernels looks at this; tensors are placed where the worker has a device.
        patch.setitem(DEVICES.of(node.devices[0]).row, "type", "cuda")
        yield node.devices[0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", [*ONE, *SEVERAL, *TWO])
@pytest.mark.parametrize("inference", [False, True])
def test_a_transform_of_half_precision_is_what_cuda_makes_of_it(name: str, inference: bool, cuda: torch.device) -> None:
    values = torch.randn(16, 2, 8).half()
    function = getattr(torch.fft, name)
    for options in ONE_CALLS if name in ONE else BLOCK_CALLS if name in SEVERAL else PLANE_CALLS:
        with torch.inference_mode(inference):
            found = function(values.to(cuda), *options)
        wanted = function(values.float(), *options)
        half = torch.complex32 if wanted.is_complex() else torch.float16
        assert (found.dtype, found.shape) == (half, wanted.shape)
        torch.testing.assert_close(found.cpu().to(wanted.dtype), wanted, rtol=1e-2, atol=2e-1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["fft", "rfftn", "ihfft2"])
def test_gradients_flow_through_it(name: str, cuda: torch.device) -> None:
    values = torch.randn(4, 4, 8).half()
    here, there = values.float().requires_grad_(), values.to(cuda).requires_grad_()
    for x in (here, there):
        torch.view_as_real(getattr(torch.fft, name)(x).to(torch.complex64)).sum().backward()
    assert there.grad is not None
    assert here.grad is not None
    assert there.grad.dtype is torch.float16
    torch.testing.assert_close(there.grad.cpu().float(), here.grad, rtol=1e-2, atol=5e-2)


def test_what_cuda_refuses_is_refused(cuda: torch.device) -> None:
    for wrong in (
        lambda: torch.fft.fft(torch.ones(4, device=cuda, dtype=torch.bfloat16)),
        lambda: torch.fft.fft(torch.ones(4, device=cuda, dtype=torch.float16), 0),
        lambda: torch.fft.rfftn(torch.ones(4, 4, device=cuda, dtype=torch.float16), (4, 4, 4)),
        lambda: torch.fft.rfftn(torch.ones(4, 4, device=cuda, dtype=torch.float16), dim=(0, 0)),
        lambda: torch.fft.fft(torch.ones(4, device=cuda, dtype=torch.float16), norm="none"),
    ):
        with pytest.raises(RuntimeError):
            wrong()
