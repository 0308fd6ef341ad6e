"""Operations whose kernels refuse some numbers, as a deviation below zero: refused here, at their line.

The numbers are no part of what the hot path knows of a call. So each that comes for the first time is given to
PyTorch's own kernel, with tensors of one element. What reaches beyond a memory only the worker refuses, and is asked.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.tensor.core.memory import memory_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DisableTorchFunction, OpOverload, disable_current_modes
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, plain_op
from skyproxy.tensor.dispatch.recording import ask
from skyproxy.torch_codec import storage_extent

_MOST_NUMBERS = 4096
_taken: set[tuple[object, ...]] = set()
_plain: dict[OpInfo, OpOverload] = {}


@implements(
    "aten::_cdist_forward",
    "aten::_pdist_forward",
    "aten::bernoulli.p",
    "aten::bernoulli_.float",
    "aten::cauchy_",
    "aten::celu",
    "aten::celu_",
    "aten::elu_backward",
    "aten::exponential_",
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::geometric_",
    "aten::histc",
    "aten::huber_loss",
    "aten::leaky_relu_backward",
    "aten::log_normal_",
    "aten::multi_margin_loss",
    "aten::native_dropout",
    "aten::normal.Tensor_float",
    "aten::normal_",
    "aten::renorm",
    "aten::renorm_",
    "aten::rrelu_with_noise_backward",
    "aten::smooth_l1_loss",
    "aten::softshrink",
    "aten::uniform_",
)
def _check_numbers(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    numbers = [a for a in args[1:] if not isinstance(a, torch.Tensor)]
    _try_once((info, args[0].dtype, args[0].dim(), not args[0].numel(), *numbers), func, args)
    return _record(info, args, kwargs)


@implements("aten::normal.float_float")
def _check_deviation(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    numbers = args[:2]
    _try_once((info, *numbers), func, (*numbers, ()))
    return _record(info, args, kwargs)


def _try_once(key: tuple[object, ...], func: OpOverload, args: tuple[Any, ...]) -> None:
    """Try the numbers of a call, unless they were taken before.

    Raises:
        RuntimeError: the kernel refuses them, in its words.
    """
    if key not in _taken:
        _try_numbers(func, args)
        if len(_taken) >= _MOST_NUMBERS:
            _taken.clear()
        _taken.add(key)


def _record(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if info not in _plain:
        _plain[info] = plain_op(info.func)
    return dispatch_remote(None, _plain[info], (), args, kwargs)


def _try_numbers(func: OpOverload, args: tuple[Any, ...]) -> None:
    """Run the kernel of the CPU on one element of each tensor, or on none where it has none.

    Raises:
        RuntimeError: it refuses the numbers, in its words.
    """
    # The program's own random numbers go on as if nothing had been drawn.
    takes_generator = any(a.name == "generator" for a in func._schema.arguments)
    named = {"generator": torch.Generator()} if takes_generator else {}
    draws = torch.Tag.nondeterministic_seeded in func.tags and not takes_generator
    try:
        with disable_current_modes(), DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng((), enabled=draws):
            func(*[_element_of(a) if isinstance(a, torch.Tensor) else a for a in args], **named)
    except NotImplementedError:
        return  # a dtype that the kernels of another device may have


def _element_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros([min(1, n) for n in tensor.shape], dtype=tensor.dtype, device="cpu")


@implements("aten::as_strided_copy", "aten::as_strided_scatter")
def _stay_within(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    size, stride, *rest = args[info.names.index("size") :]
    tensor = args[0]
    if type(tensor) is RemoteTensor and tensor._sky.meta.layout is torch.strided and len(size) == len(stride):
        offset = rest[0] if rest and rest[0] is not None else tensor._sky.meta.offset
        if storage_extent(tuple(size), tuple(stride), offset) * tensor.itemsize > memory_of(tensor._sky).byte_count:
            return ask(BoundCall(info, args, kwargs))
    return _record(info, args, kwargs)


__all__: list[str] = []
