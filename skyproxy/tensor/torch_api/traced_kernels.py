"""Has fake tensors on `sky:k` look as the kernels of its worker make real ones.

Code that is traced (`torch.compile`, `torch.export`, `make_fx`) has fake tensors on the program's own devices, and some
of PyTorch's fake kernels ask for the device: the CPU and CUDA have other kernels, and so other orders of memory, sizes
and dtypes. For a device that they do not know they say what no worker gives, and a view that the trace takes for
possible fails there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import _meta_registrations
from torch._prims_common import suggest_memory_format

from skyproxy import patching
from skyproxy.fake_guard import keep_guard
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import FakeTensor, FakeTensorMode, OpOverload, fake_tensors, pytree
from skyproxy.tensor.shapes.layers import NORMS

_Values = TypeVar("_Values")


def _overloads(*names: str) -> frozenset[OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_CONVOLUTIONS = _overloads("convolution", "_convolution", "convolution_backward")
_NORMS = _overloads(*NORMS)
_ASKING = _CONVOLUTIONS | _NORMS | _overloads("pixel_shuffle", "nonzero_static")
"""Ops whose fake kernels ask a tensor for its device, or look for the CPU."""
_TESTS = "tests/tensor/torch_api/test_traced_kernels.py"
_IN_CHANNELS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _kind(device: torch.device) -> str:
    """Return the type of the device behind one of ours."""
    return str(DEVICES.of(device).row["type"])


def _hinting_cuda(hint: Callable[[object], str]) -> Callable[[object], str]:
    """Have fake kernels know CUDA's devices. The CPU's they need not: they say that it has not what workers do have."""

    @functools.wraps(hint)
    def device_hint(tensor: object) -> str:
        found = hint(tensor)
        if found == "sky" and isinstance(tensor, FakeTensor) and _kind(tensor.fake_device) != "cpu":
            return "cuda"
        return found

    return device_hint


def _move(mode: FakeTensorMode, values: _Values, source: torch.device, target: torch.device) -> _Values:
    """Return the same arguments or results with fakes that look alike on `target` for the tensors on `source`."""

    def move_one(value: object) -> object:
        if not isinstance(value, FakeTensor | RemoteTensor) or value.device != source:
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=target)

    with mode:
        moved: _Values = pytree.tree_map(move_one, values)
    return moved


def _asking_worker(dispatch: Callable[..., object]) -> Callable[..., object]:
    """Have the fake kernels that ask for the device find that of the worker.

    Some ask in C++, which looks at the keys of a tensor: so they get fakes of the CPU. There are none of CUDA on a
    machine without it.
    """

    @functools.wraps(dispatch)
    def dispatch_as_worker(
        mode: FakeTensorMode, op: object, types: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if op not in _ASKING:
            return dispatch(mode, op, types, args, kwargs)
        values = (*args, *kwargs.values())
        fakes: list[torch.Tensor] = [a for a in values if isinstance(a, FakeTensor | RemoteTensor)]
        if any(isinstance(a, RemoteTensor) for a in fakes) and not _takes_real_tensors(mode):
            return dispatch(mode, op, types, args, kwargs)  # which refuses them
        device = next((fake.device for fake in fakes if fake.device.type == "sky"), None)
        on_cuda = device is not None and _kind(device) != "cpu"
        if device is None or (on_cuda and op not in _CONVOLUTIONS):
            return dispatch(mode, op, types, args, kwargs)
        host = torch.device("cpu")
        args, kwargs = _move(mode, (args, kwargs), device, host)
        results = dispatch(mode, op, types, args, kwargs)
        if op in _NORMS and any(fake.is_floating_point() and fake.dtype is not fakes[0].dtype for fake in fakes):
            results = _in_whole_precision(mode, results)
        if on_cuda:
            results = _ordered_by_cudnn(mode, results, [fake for fake in fakes if fake.dim() > 1][-2:])
        return _move(mode, results, host, device)

    return dispatch_as_worker


def _takes_real_tensors(mode: FakeTensorMode) -> bool:
    """Return whether a mode makes real inputs of an op fake, in place of refusing them."""
    override = fake_tensors.fake_tensor_tls.allow_non_fake_inputs_override
    return mode.allow_non_fake_inputs if override is None else override


def _in_whole_precision(mode: FakeTensorMode, results: object) -> object:
    """Return results of a norm with the statistics that kernels note beside weights of another dtype: float32."""
    assert isinstance(results, tuple)
    with mode:
        return results[0], *(noted.to(torch.float32) for noted in results[1:3]), *results[3:]


def _ordered_by_cudnn(mode: FakeTensorMode, results: object, images_and_weight: list[torch.Tensor]) -> object:
    """Return results of a convolution in the order of `cudnn_conv_suggest_memory_format` (ATen/native/ConvUtils.h)."""
    dimensions = images_and_weight[-1].dim()
    wanted = _IN_CHANNELS.get(dimensions)
    in_channels = all(fake.dtype is not torch.float64 for fake in images_and_weight) and any(
        suggest_memory_format(fake) is wanted for fake in images_and_weight
    )
    order = wanted if in_channels and wanted is not None else torch.contiguous_format

    def put(value: object) -> object:
        fits = isinstance(value, FakeTensor) and value.dim() == dimensions
        return value.contiguous(memory_format=order) if fits else value  # type: ignore[attr-defined]

    with mode:
        ordered: object = pytree.tree_map(put, results)
    return ordered


def _install_for_devices() -> None:
    keep_guard()
    FakeTensorMode.cache_clear()  # a worker of another kind may come in the place of a lost one
    if patching.is_replaced(_meta_registrations, "device_hint"):
        return
    patching.wrap(
        _meta_registrations,
        "device_hint",
        _hinting_cuda,
        why="fake kernels of a CUDA worker would promise the CPU's orders of memory",
        test=f"{_TESTS}::test_factors_on_cuda_are_row_major",
        when=patching.When.FIRST_DEVICE,
    )
    patching.wrap(
        FakeTensorMode,
        "_dispatch_impl",
        _asking_worker,
        why="traced convolutions would be row-major where workers give channels-last, and statistics of another dtype",
        test=f"{_TESTS}::test_what_is_compiled_works_as_on_the_cpu",
        when=patching.When.FIRST_DEVICE,
    )


def install() -> None:
    """Have traced code know the workers' kernels, once there is a device.

    Raises:
        ConfigurationError: this torch's fake kernels choose in another way.
    """
    patching.require(_meta_registrations, "device_hint")
    patching.require(FakeTensorMode, "_dispatch_impl")
    DEVICES.before_new[_install_for_devices] = None
