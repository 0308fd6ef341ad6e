"""Fourier transforms of float16 on CUDA workers: PyTorch's functions take it for devices that C++ knows to be CUDA.

Their parts take it everywhere, so numbers are made complex before PyTorch divides a function that would do so, and the
functions that transform real numbers are written out (ATen/native/SpectralOps.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.torch_private import DispatchKey, OpOverload
from skyproxy.tensor.dispatch.op_info import OpInfo, implements

Tensor = torch.Tensor
aten = torch.ops.aten
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_AS_COMPLEX = "fft2 fftn ifft2 ifftn irfft irfft2 irfftn hfft hfft2 hfftn"
_NORMS = {None: (0, 2), "backward": (0, 2), "ortho": (1, 1), "forward": (2, 0)}
"""PyTorch's numbers for a norm: of a transform, and of one that goes back."""


def _is_half_on_cuda(x: Tensor) -> bool:
    halves = torch.float16 in (x.dtype, None if x.is_floating_point() else torch.get_default_dtype())
    return halves and not x.is_complex() and x.device.type == "sky" and DEVICES.of(x.device).row["type"] == "cuda"


def _complex_kernel(op: OpOverload) -> Callable[..., object]:
    def transform(x: Tensor, *options: object) -> object:
        return op._op_dk(_COMPOSITE, x.to(torch.complex32) if _is_half_on_cuda(x) else x, *options)

    return transform


def _line_kernel(op: OpOverload, *, back: bool, onesided: bool) -> Callable[..., object]:
    """Make the kernel of a transform along one dimension."""

    def transform(x: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> object:
        if not _is_half_on_cuda(x) or norm not in _NORMS or (n is not None and n < 1) or x.dim() == 0 or x.numel() == 0:
            return op._op_dk(_COMPOSITE, x, n, dim, norm)
        dim = range(x.dim())[dim]
        x = _fit(x.to(torch.float16), [dim], [x.size(dim) if n is None else n])
        found = aten._fft_r2c.default(x, [dim], _NORMS[norm][back], onesided)
        return found.conj() if back else found

    return transform


def _block_kernel(op: OpOverload, usual_dims: Sequence[int] | None, *, back: bool) -> Callable[..., object]:
    """Make the kernel of a transform along several dimensions, one-sided along the last one."""

    def transform(
        x: Tensor,
        s: Sequence[int] | None = None,
        dim: Sequence[int] | None = usual_dims,
        norm: str | None = None,
    ) -> object:
        given = dim if dim is not None else range(x.dim()) if s is None else range(x.dim() - len(s), x.dim())
        fits = norm in _NORMS and len(given) > 0 and x.numel() > 0 and all(-x.dim() <= d < x.dim() for d in given)
        dims = [d % x.dim() for d in given] if fits else []
        sizes = [x.size(d) for d in dims] if s is None else [x.size(d) if n == -1 else n for d, n in zip(dims, s)]
        wrong = not fits or len(set(dims)) < len(dims) or min(sizes, default=0) < 1 or len(sizes) != len(dims)
        if wrong or (s is not None and len(s) != len(dims)) or not _is_half_on_cuda(x):
            return op._op_dk(_COMPOSITE, x, s, dim, norm)
        x = _fit(x.to(torch.float16), dims, sizes)
        if not back:
            return aten._fft_r2c.default(x, dims, _NORMS[norm][0], True)
        found = aten._fft_r2c.default(x, dims[-1:], _NORMS[norm][1], True)
        if len(dims) == 1:
            return found.conj()
        return aten._fft_c2c.default(found.conj_physical(), dims[:-1], _NORMS[norm][1], False)

    return transform


def _fit(x: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the beginning of a tensor along some dimensions, with zeros behind it where there is too little."""
    missing = [0] * (2 * x.dim())
    for dim, size in zip(dims, sizes, strict=True):
        missing[2 * (x.dim() - dim) - 1] = max(size - x.size(dim), 0)
        x = x.narrow(dim, 0, size) if size < x.size(dim) else x
    return pad(x, missing) if any(missing) else x


def _overload(name: str) -> OpOverload:
    found: OpOverload = getattr(aten, f"fft_{name}").default
    return found


_KERNELS = {f"fft_{name}": _complex_kernel(_overload(name)) for name in _AS_COMPLEX.split()}
_KERNELS |= {
    "fft_fft": _line_kernel(_overload("fft"), back=False, onesided=False),
    "fft_ifft": _line_kernel(_overload("ifft"), back=True, onesided=False),
    "fft_rfft": _line_kernel(_overload("rfft"), back=False, onesided=True),
    "fft_ihfft": _line_kernel(_overload("ihfft"), back=True, onesided=True),
    "fft_rfftn": _block_kernel(_overload("rfftn"), None, back=False),
    "fft_rfft2": _block_kernel(_overload("rfft2"), (-2, -1), back=False),
    "fft_ihfftn": _block_kernel(_overload("ihfftn"), None, back=True),
    "fft_ihfft2": _block_kernel(_overload("ihfft2"), (-2, -1), back=True),
}


@implements(*("aten::" + name for name in _KERNELS))
def _undivided_transform(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """In inference mode the op arrives here undecomposed."""
    return _KERNELS[info.name.removeprefix("aten::")](*args, **kwargs)


def install(library: torch.library.Library) -> None:
    """Put our kernels before PyTorch's division."""
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "AutogradPrivateUse1")


__all__ = ["install"]
