"""Composites under function transforms, which divide them before a device is asked for a kernel of its own.

`torch.func.vmap` divides attention, and every transform dropout, as accelerators do: of a CPU worker's tensors neither
the last bits nor, where the batch is not the first dimension, the random numbers would be the CPU's. So the kernels of
the transforms ask here first. For tensors of other devices they are PyTorch's. And gradients of linear layers, of which
PyTorch would take one row of a batch of gradients after the other, are divided.
"""

from __future__ import annotations

import warnings

import torch

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.torch_private import DispatchKeySet
from skyproxy.tensor.ops.attention import attention
from skyproxy.tensor.ops.linear_gradients import divided_gradients

_VMAP = "FuncTorchVmapMode"
_BATCHED = "FuncTorchBatched"
_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_library: torch.library.Library | None = None
_TESTS = "tests/tensor/ops/test_transformed_composites.py"


def _put(library: torch.library.Library) -> None:
    """Put our kernels before PyTorch's, which have the rest."""
    attend = torch.library.get_kernel("aten::scaled_dot_product_attention", _VMAP).call_boxed
    drop = torch.library.get_kernel("aten::dropout", _TRANSFORMS).call_boxed

    def attended(
        keys: DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> object:
        named = {"scale": scale, "enable_gqa": enable_gqa}
        if query.device.type != "sky":
            return attend(keys, query, key, value, mask, dropout, causal, **named)
        return attention(query, key, value, mask, dropout, causal, **named)  # type: ignore[arg-type]

    def dropped(keys: DispatchKeySet, input: torch.Tensor, p: float, train: bool) -> object:
        is_usual = train and 0 < p < 1 and input.numel()
        if not is_usual or input.device.type != "sky" or DEVICES.of(input.device).place[0] != "cpu":
            return drop(keys, input, p, train)
        # As ATen does for CPUs: numbers of a batch are drawn in its own order, whatever that of the input is.
        noise = torch.empty((), dtype=input.dtype, device=input.device).expand(input.shape)
        return input * torch.bernoulli(noise, 1 - p).div_(1 - p)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's kernels are replaced on purpose
        library.impl("scaled_dot_product_attention", attended, _VMAP, with_keyset=True)
        library.impl("dropout", dropped, _TRANSFORMS, with_keyset=True)
        library.impl("linear_backward", divided_gradients, _BATCHED)


def _install() -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    _put(_library)
    patching.registered(
        "kernels of `aten::scaled_dot_product_attention`, `dropout` and `linear_backward` for function transforms",
        _destroy,
        why="transforms divide them as accelerators do, which rounds and draws otherwise than a worker's CPU",
        test=f"{_TESTS}::test_dropout_under_transforms_is_that_of_the_cpu",
        when=patching.When.FIRST_DEVICE,
    )


def _destroy() -> None:
    global _library
    if _library is not None:
        _library._destroy()
    _library = None


def install() -> None:
    """Put them there when the first sky device comes to exist."""
    DEVICES.before_new[_install] = None


__all__ = ["install"]
