"""Composites that are sent whole where no gradient is wanted: one op instead of the five that `linear` consists of.

PyTorch divides them above autograd, for its derivatives are those of the parts. Where nothing is differentiated, as
in `torch.no_grad()`, the worker's own kernel does the same work, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.tensor.hot_path import dispatch_remote
from skyproxy.tensor.nested_batches import NestedBatch
from skyproxy.tensor.remote_tensor import RemoteTensor

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_wants_gradients = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_function_transforms = torch._C._functorch.maybe_current_level


def _kernel(op: torch._ops.OpOverload) -> Any:
    divide = op._op_dk

    def kernel(*args: Any) -> Any:
        # Every argument a plain remote tensor, and nobody to see the parts: modes, and transforms such as vmap, do.
        # Complex products are divided: which of the parts resolves a conjugate view decides about the last bit.
        if not (_wants_gradients() or _modes() or args[0].is_complex()) and _function_transforms() is None:
            if all(type(a) is RemoteTensor for a in args):
                return dispatch_remote(RemoteTensor, op, (), args)
            if args[-1] is None and all(type(a) is RemoteTensor for a in args[:-1]):
                return dispatch_remote(RemoteTensor, op, (), args[:-1])
        if type(args[0]) is NestedBatch:
            return NestedBatch.__torch_dispatch__(op, (), args)
        return divide(_COMPOSITE, *args)

    return kernel


def install(library: torch.library.Library) -> None:
    """Puts the choice before PyTorch's division."""
    for op in (aten.linear.default, aten.matmul.default):
        library.impl(op, _kernel(op), "AutogradPrivateUse1")
