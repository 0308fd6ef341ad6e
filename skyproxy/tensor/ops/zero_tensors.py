"""Zeros that stay zeros whatever they are multiplied by: PyTorch's ZeroTensors, its tangents where there are none.

PyTorch's C++ has a dispatch key for them, and with it answers sums, products and their like before any tensor class is
asked, refuses to change them, and hands all other ops clones. What is left for Python: views of zeros are zeros, too.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from skyproxy import patching
from skyproxy.tensor.core.remote_tensor import RemoteTensor, RemoteZeros, adopt, make_view, make_zeros
from skyproxy.tensor.core.torch_private import DispatchKey, OpOverload, pytree
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, info_of

_OF_TENSORS = frozenset({torch.ops.aten.add.Scalar, torch.ops.aten.mul.Scalar})
"""Ops that C++ lets pass because their kernels for all devices call forms that it answers."""
_PRODUCTS = frozenset({torch.ops.aten.dot.default, torch.ops.aten.vdot.default})
"""Ops that C++ lets pass because their kernels look for zeros themselves, and then give zeros."""
_VIEWS_OF_MEMORY = ("view", "as_strided", "_reshape_alias")
"""Ops that C++ has kernels for which make views of zeros as of any other memory, and forget the tensor's class."""
_IMMUTABLE = (
    "ZeroTensors are immutable. Please materialize the tensor using `.clone()`, if you want a mutable zero tensor."
)


@implements("aten::_efficientzerotensor")
def _efficient_zeros(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Zeros with a memory, which the worker's kernels and transfers rely on, that PyTorch takes for its own."""
    plain = torch.zeros(*args, **kwargs)
    return _as_zeros(plain) if type(plain) is RemoteTensor else plain


def _as_zeros(plain: RemoteTensor) -> RemoteZeros:
    """The same value, and what it is in inference mode, as zeros."""
    with torch.inference_mode(plain.is_inference()):
        return make_zeros(plain._sky.meta, plain._sky)


def _as_ordinary(a: Any) -> Any:
    """The same value as an ordinary tensor."""
    if type(a) is not RemoteZeros:
        return a
    a._sky.is_shared = True
    return make_view(a._sky.meta, a._sky, a)


def dispatch_zeros(
    cls: object, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> object:
    """`__torch_dispatch__` of zeros: gets views, copies, and what makes a tensor like another.

    Raises:
        RuntimeError: they would be changed; in PyTorch's words.
    """
    kwargs = kwargs or {}
    if func in _OF_TENSORS:
        return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    if func in _PRODUCTS:
        product: Any = dispatch_remote(cls, func, types, tuple(map(_as_ordinary, args)))
        return torch.ops.aten._efficientzerotensor.default(product.shape, dtype=product.dtype, device=product.device)
    zeros = args[0] if type(args[0]) is RemoteZeros else None
    if zeros is not None and func is torch.ops.aten.copy_.default:
        raise RuntimeError(_IMMUTABLE)
    plain, options = pytree.tree_map(_as_ordinary, (args, kwargs))
    result = dispatch_remote(cls, func, types, plain, options)
    if zeros is None:
        return result
    if result is plain[0]:
        # Turned in place, which C++ allows. What `resize_` adds is zeros, too.
        adopt(zeros, result.zero_()._sky)
        return zeros
    if info_of(func).is_view:
        return pytree.tree_map_only(RemoteTensor, _as_zeros, result)
    return result


def install() -> None:
    """Makes zeros dispatch through here."""
    RemoteZeros.__torch_dispatch__ = classmethod(dispatch_zeros)  # type: ignore[method-assign,assignment]
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's kernels are replaced on purpose
        for name in _VIEWS_OF_MEMORY:
            library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor", allow_override=True)
    patching.registered(
        "kernels of `aten::view`, `aten::as_strided` and `aten::_reshape_alias` for `ZeroTensor`",
        library._destroy,
        why="zeros of other devices come to the same kernels by their devices; ours would become views without a class",
        test="tests/tensor/ops/test_zero_tensors.py::test_an_operation_gives_what_it_gives_on_the_cpu",
    )
