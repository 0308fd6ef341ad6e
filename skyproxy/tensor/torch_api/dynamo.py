"""Presents remote tensors to PyTorch's compiler as tensors of an accelerator, and sends their graphs to us.

The only place that touches Dynamo. It sees a tensor subclass with a dispatcher of its own as something foreign; but a
remote tensor is to be compiled like a tensor of any device: guarded, made fake on `sky:k`, and an input of the graph.
Tried on torch 2.13, where it needs two functions of Dynamo replaced, and none of ours on the hot path changed.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch

from skyproxy.errors import ConfigurationError
from skyproxy.import_watcher import when_imported
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch import memoized_calls
from skyproxy.tensor.programs import compiler
from skyproxy.tensor.torch_api import sky_module


def _teach(dynamo: Any) -> None:
    """Patches Dynamo; called once, when it has been imported."""
    builder = importlib.import_module("torch._dynamo.variables.builder")
    if not hasattr(builder, "infer_subclass_type") or not hasattr(builder.VariableBuilder, "_wrap"):
        raise ConfigurationError(f"torch {torch.__version__} has another Dynamo than skyproxy knows")
    wrap, infer = builder.VariableBuilder._wrap, builder.infer_subclass_type

    def wrap_remote(self: Any, value: Any) -> Any:
        return self.wrap_tensor(value) if type(value) is RemoteTensor else wrap(self, value)

    def infer_remote(value: Any) -> Any:
        return None if type(value) is RemoteTensor else infer(value)

    builder.VariableBuilder._wrap = wrap_remote
    builder.infer_subclass_type = infer_remote
    # Else `torch.tensor(1.0, device="sky")` in traced code would make a tensor on the worker while it is traced. Asked
    # for nothing but this, and only on machines without an accelerator of their own.
    importlib.import_module("torch._subclasses.fake_tensor")._is_privateuse1_backend_available = lambda: False
    _run_higher_order_ops()
    dynamo.register_backend(compiler.sky_backend, name="sky")
    # Dynamo is called with each frame that Python begins, ours among them: what we do on the way is not to be compiled.
    rules = importlib.import_module("torch._dynamo.trace_rules")
    rules.add("skyproxy")
    # But for what we put around the user's functions: that is to be looked through.
    rules.get_mod_inlinelist().add(Path(memoized_calls.__file__).as_posix())


def _run_higher_order_ops() -> None:
    """Lets `torch.cond` and its like run on remote tensors, by their ordinary kernels: Python that calls ops."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    for op in list(torch._ops._higher_order_ops.values()):
        kernel = op.py_kernels.get(key)
        if kernel is not None and RemoteTensor not in op.python_key_table:
            op.py_impl(RemoteTensor)(kernel)


def _admit_to_flex_attention(module: Any) -> None:
    """Lets `flex_attention` take remote tensors, which are not on its list of devices. It is made of ordinary ops.

    Raises:
        ConfigurationError: this torch checks devices in another way.
    """
    check = getattr(module, "_validate_device", None)
    if check is None:
        raise ConfigurationError(f"torch {torch.__version__} has no _validate_device in {module.__name__}")

    @functools.wraps(check)
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "sky":
            check(query, key, value)

    module._validate_device = validate_device


def _compile_fx(self: Any, model_: Any, inputs_: Any, *, config_patches: Any = None) -> Any:
    """What plain `torch.compile` does with a graph: inductor here, unless its tensors are remote."""
    if compiler.touches_sky(model_, inputs_):
        return compiler.sky_backend(model_, inputs_)
    return _plain_compile_fx(self, model_, inputs_, config_patches=config_patches)


_plain_compile_fx: Any = None


def _coerce(self: RemoteTensor, expected_metadata: Any, expected_type: Any = None) -> RemoteTensor:
    """A gradient that comes into compiled code: as good as a plain tensor."""
    return self


def install() -> None:
    """Teaches Dynamo about remote tensors, now or when it is imported.

    Raises:
        ConfigurationError: this torch compiles in another way.
    """
    global _plain_compile_fx
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is None:
        raise ConfigurationError(f"torch {torch.__version__} has no torch._TorchCompileInductorWrapper")
    _plain_compile_fx = wrapper.__call__
    wrapper.__call__ = _compile_fx
    RemoteTensor.__coerce_same_metadata_as_tangent__ = _coerce
    sky_module.MODULE.__dict__.update(compile_report=compiler.compile_report)
    when_imported("torch._dynamo", _teach)
    when_imported("torch.nn.attention.flex_attention", _admit_to_flex_attention)
