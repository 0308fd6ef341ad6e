"""Layers of transformers that record their operations in one go, where nothing is differentiated.

transformers marks the layers that a kernel of the device may take the place of: they are functions of their tensors.
What they record is noted once, see `skyproxy.tensor.dispatch.memoized_calls`; the worker computes the very same.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from skyproxy.tensor.dispatch.memoized_calls import function_by_recipe, method_by_recipe

_NORMS = frozenset({"RMSNorm", "RMSNormGated", "RMSNormZeroCentered"})
_ROTARY = "rotary_pos_emb"
_ROTARY_FUNCTION = "apply_rotary_pos_emb"
_MODELS = "transformers.models."


def _complete(name: str, layer: Any) -> Any:
    """The layer that transformers knows by this name, recording by recipe if it is one of ours."""
    if name == _ROTARY and not isinstance(layer, type):
        return function_by_recipe(layer)
    if name in _NORMS and "forward" in vars(layer):
        layer.forward = method_by_recipe(layer.forward)
    return layer


def install(module: Any) -> None:
    """Completes `transformers.integrations.hub_kernels`, and the models that were imported before.

    Where the package `kernels` is installed, the layers are its to replace, and stay as they are.
    """
    decorate = getattr(module, "use_kernel_forward_from_hub", None)
    if decorate is None or hasattr(decorate, "_sky") or importlib.util.find_spec("kernels") is not None:
        return

    def use_kernel_forward_from_hub(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        plain = decorate(name, *args, **kwargs)
        return lambda layer: _complete(name, plain(layer))

    use_kernel_forward_from_hub._sky = True  # type: ignore[attr-defined]
    module.use_kernel_forward_from_hub = use_kernel_forward_from_hub
    package = sys.modules.get("transformers.integrations")
    if package is not None and "use_kernel_forward_from_hub" in vars(package):
        package.use_kernel_forward_from_hub = use_kernel_forward_from_hub  # type: ignore[attr-defined]
    for name, model in list(sys.modules.items()):
        if name.startswith(_MODELS) and ".modeling_" in name:
            _complete_model(model)


def _complete_model(model: Any) -> None:
    for name, item in list(vars(model).items()):
        if getattr(item, "__module__", None) != model.__name__:
            continue
        if name == _ROTARY_FUNCTION:
            setattr(model, name, _complete(_ROTARY, item))
        elif isinstance(item, type) and name.endswith("RMSNorm"):
            _complete("RMSNorm", item)


__all__ = ["install"]
