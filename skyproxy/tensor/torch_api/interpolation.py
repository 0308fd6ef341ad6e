"""`interpolate` under deterministic algorithms: with the kernel of a CPU worker, as on the CPU.

PyTorch computes linear interpolation in small steps then wherever a tensor is not the CPU's, for the sake of CUDA's
backward, and these steps round otherwise than the CPU's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch._decomp.decompositions

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES

_aten = torch.ops.aten
_KERNELS = {3: _aten.upsample_linear1d.vec, 4: _aten.upsample_bilinear2d.vec, 5: _aten.upsample_trilinear3d.vec}
"""By the dimensions of the input, batch and channels included."""


def _with_the_workers_kernel(decomposed: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(decomposed)
    def interpolate(input: torch.Tensor, *sizes: object, **named: object) -> torch.Tensor:
        device = input.device
        if device.type == "sky" and DEVICES.of(device).worker_device.type == "cpu":
            result: torch.Tensor = _KERNELS[input.dim()](input, *sizes, **named)
            return result
        return decomposed(input, *sizes, **named)

    return interpolate


def _install_for_devices() -> None:
    if not patching.is_replaced(torch._decomp.decompositions, "_upsample_linear_vec"):
        patching.wrap(
            torch._decomp.decompositions,
            "_upsample_linear_vec",
            _with_the_workers_kernel,
            why="deterministic interpolation on a CPU worker has the CPU's bits, which the decomposition has not",
            test="tests/tensor/torch_api/test_interpolation.py::test_deterministic_interpolation_has_the_bits_of_the_cpu",
            when=patching.When.FIRST_DEVICE,
        )


def install() -> None:
    """Have deterministic interpolation replaced before the first device is made.

    Raises:
        ConfigurationError: this torch's decomposition has another name.
    """
    patching.require(torch._decomp.decompositions, "_upsample_linear_vec")
    DEVICES.before_new[_install_for_devices] = None
