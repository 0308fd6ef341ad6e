"""Private names of PyTorch that the rooms below `torch_api` stand on: each is looked up here, once, and nowhere else.

Others bind what they need when they are imported: a look-up in a module on each operation would cost time. What
replaces a behaviour of PyTorch names the private parts that it replaces itself, in `torch_api`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import torch_versions
from skyproxy.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils._sympy.printers import PythonPrinter


@contextlib.contextmanager
def explain_missing_names() -> Iterator[None]:
    """Tell whoever imports a part of PyTorch inside that this version of it does not fit.

    Raises:
        ConfigurationError: a name is missing.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"torch {torch.__version__} lacks a part that skyproxy relies on: {error}. skyproxy was tested with torch "
            f"{torch_versions.TRIED}."
        ) from error


with explain_missing_names():
    from torch._library import simple_registry as rule_registry
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._prims_common.wrappers import _maybe_resize_out as maybe_resize_out
    from torch._prims_common.wrappers import _safe_copy_out as safe_copy_out
    from torch._subclasses import fake_tensor as fake_tensors
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

    # Tensors and storages
    TensorBase = torch._C.TensorBase
    StorageBase = torch._C.StorageBase
    PlainGenerator = torch._C.Generator
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    disabled_torch_function = torch._C._disabled_torch_function_impl
    construct_storage = torch._C._construct_storage_from_data_pointer
    set_conjugate = torch._C._set_conj
    set_negative = torch._C._set_neg
    broadcast_two = torch._C._infer_size

    # The dispatcher
    DispatchKey = torch._C.DispatchKey
    DispatchKeySet = torch._C.DispatchKeySet
    BelowAutograd = torch._C._AutoDispatchBelowAutograd
    ExcludedKeys = torch._C._ExcludeDispatchKeyGuard
    SetExcludedKey = torch._C._SetExcludeDispatchKeyGuard
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    all_op_names = torch._C._dispatch_get_all_op_names
    op_names_with_kernel = torch._C._dispatch_get_registrations_for_dispatch_key

    # Modes and transforms
    DelayedError = torch._C._functions.DelayedError
    DisableTorchFunction = torch._C.DisableTorchFunction
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    count_dispatch_modes = torch._C._len_torch_dispatch_stack
    count_function_modes = torch._C._len_torch_function_stack
    function_modes: Callable[[], list[object]] = torch.overrides._get_current_function_mode_stack
    function_transform_level = torch._C._functorch.maybe_current_level
    is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
    is_gradient_wrapper = torch._C._functorch.is_gradtrackingtensor
    unwrapped = torch._C._functorch.get_unwrapped
    _forward_ad = torch.autograd.forward_ad
    _forward_ad._current_level  # noqa: B018

    # Choices of kernels. PyTorch's own setters, where `torch_api.global_modes` replaces them by ones that tell workers.
    checks_sparse_invariants = torch._C._check_sparse_tensor_invariants
    set_sparse_invariant_checks = torch._C._set_check_sparse_tensor_invariants
    flash_attention_enabled = torch._C._get_flash_sdp_enabled
    math_attention_enabled = torch._C._get_math_sdp_enabled
    mkldnn_enabled = torch._C._get_mkldnn_enabled
    choose_attention = torch._fused_sdp_choice


def has_modes_or_transforms() -> bool:
    """Return whether a dispatch mode, or a function transform such as `vmap`, sees or changes what operations do."""
    return count_dispatch_modes() > 0 or function_transform_level() is not None


def is_forward_ad_active() -> bool:
    """Return whether a level of forward-mode AD is entered; tangents do not care about `no_grad`."""
    return _forward_ad._current_level >= 0


def load_aot_autograd() -> Callable[..., Callable[..., Any]]:
    """Return `aot_autograd` of PyTorch's compiler, which takes long to load."""
    with explain_missing_names():
        from torch._dynamo.backends.common import aot_autograd
    return aot_autograd


def load_expression_printer() -> type[PythonPrinter]:
    """Return the class that prints expressions of sizes as Python; it loads sympy."""
    with explain_missing_names():
        from torch.utils._sympy.printers import PythonPrinter
    return PythonPrinter


def unwrap_gradients(value: Any) -> tuple[Any, int]:
    """Return the tensor that transforms for gradients (`torch.func.grad`, `vjp`, `jvp`) have wrapped, and how often."""
    count = 0
    while is_gradient_wrapper(value):
        value, count = unwrapped(value), count + 1
    return value, count


def name_gradients(function: type[torch.autograd.Function], name: str) -> None:
    """Call the nodes that a function puts into graphs as PyTorch calls its own; programs and graph printers see it."""
    function._backward_cls.__name__ = name


def is_plain_convolution(*arguments: object) -> bool:
    """Return True if PyTorch's own kernel for images computes a convolution, and no library that it has for them."""
    plain = (torch._C._ConvBackend.Slow2d, torch._C._ConvBackend.SlowTranspose2d)  # type: ignore[attr-defined]
    return torch._C._select_conv_backend(*arguments) in plain


node_that_runs: Callable[[], Any] = torch._C._current_autograd_node
engine_task: Callable[[], int] = torch._C._current_graph_task_id
will_run: Callable[..., bool] = torch._C._will_engine_execute_node

__all__ = [
    "BelowAutograd",
    "DelayedError",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "DispatchKeySet",
    "ExcludedKeys",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "HigherOrderOperator",
    "OpOverload",
    "PlainGenerator",
    "StorageBase",
    "TensorBase",
    "TorchDispatchMode",
    "all_op_names",
    "broadcast_two",
    "checks_sparse_invariants",
    "choose_attention",
    "construct_storage",
    "count_dispatch_modes",
    "count_function_modes",
    "disable_current_modes",
    "disabled_torch_function",
    "engine_task",
    "explain_missing_names",
    "fake_tensors",
    "flash_attention_enabled",
    "function_modes",
    "function_transform_level",
    "has_kernel",
    "has_modes_or_transforms",
    "is_forward_ad_active",
    "is_plain_convolution",
    "is_transformed",
    "load_aot_autograd",
    "load_expression_printer",
    "make_wrapper_subclass",
    "math_attention_enabled",
    "maybe_resize_out",
    "mkldnn_enabled",
    "name_gradients",
    "node_that_runs",
    "op_names_with_kernel",
    "pytree",
    "rule_registry",
    "safe_copy_out",
    "set_conjugate",
    "set_negative",
    "set_sparse_invariant_checks",
    "unset_fake_temporarily",
    "unwrap_gradients",
    "unwrapped",
    "will_run",
]
