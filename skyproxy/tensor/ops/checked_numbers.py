"""Operations whose kernels refuse some numbers, as a deviation below zero: refused here, at their line.

The numbers are no part of what the hot path knows of a call. So each that comes for the first time is given to
PyTorch's own kernel, with a tensor of one element.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.tensor.core.torch_private import DisableTorchFunction, OpOverload, disable_current_modes
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, plain_op

_MOST_NUMBERS = 4096
_taken: set[tuple[object, ...]] = set()
_plain: dict[OpInfo, OpOverload] = {}


@implements(
    "aten::bernoulli_.float",
    "aten::cauchy_",
    "aten::exponential_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::normal.Tensor_float",
    "aten::normal_",
    "aten::softshrink",
    "aten::uniform_",
)
def _check_numbers(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    key = (info, args[0].dtype, not args[0].numel(), args[1:])
    if key not in _taken:
        _try_numbers(func, args)
        if len(_taken) >= _MOST_NUMBERS:
            _taken.clear()
        _taken.add(key)
        _plain.setdefault(info, plain_op(func))
    return dispatch_remote(None, _plain[info], (), args, kwargs)


def _try_numbers(func: OpOverload, args: tuple[Any, ...]) -> None:
    """Run the kernel of the CPU on one element, or on none where the tensor has none.

    Raises:
        RuntimeError: it refuses the numbers, in its words.
    """
    element = torch.ones(min(1, args[0].numel()), dtype=args[0].dtype, device="cpu")
    # The program's own random numbers go on as if nothing had been drawn.
    named = {"generator": torch.Generator()} if any(a.name == "generator" for a in func._schema.arguments) else {}
    try:
        with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            func(element, *args[1:], **named)
    except NotImplementedError:
        return  # a dtype that the kernels of another device may have


__all__: list[str] = []
