"""Layers of transformers that record their operations in one go, where nothing is differentiated.

transformers marks the layers that a kernel of the device may take the place of: they are functions of their tensors.
What they record is noted once, see `skyproxy.tensor.dispatch.memoized_calls`; the worker computes the very same.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from skyproxy import patching
from skyproxy.patching import When
from skyproxy.tensor.dispatch.memoized_calls import memoized

_NORMS = frozenset({"RMSNorm", "RMSNormGated", "RMSNormZeroCentered"})
_ROTARY = "rotary_pos_emb"
_ROTARY_FUNCTION = "apply_rotary_pos_emb"
_MODELS = "transformers.models."
_WHY = "norms and rotary embeddings record their ops in one go where nothing is differentiated"
_TEST = "tests/integrations/test_generate_ahead.py::test_norms_and_rotations_are_noted_whoever_was_imported_first"


def _memoized_function(function: Any) -> Any:
    return memoized(function, function.__module__.partition(".")[0], takes_module=False)


def _memoized_method(method: Any) -> Any:
    return memoized(method, method.__module__.partition(".")[0], takes_module=True)


def _complete(name: str, layer: Any) -> Any:
    """The layer that transformers knows by this name, with its calls memoized if it is one of ours."""
    if name == _ROTARY and not isinstance(layer, type):
        return _memoized_function(layer)
    if name in _NORMS and "forward" in vars(layer):
        patching.wrap(layer, "forward", _memoized_method, why=_WHY, test=_TEST, when=When.TRANSFORMERS)
    return layer


def install(module: object) -> None:
    """Completes `transformers.integrations.hub_kernels`, and the models that were imported before.

    Where the package `kernels` is installed, the layers are its to replace, and stay as they are.
    """
    decorate = getattr(module, "use_kernel_forward_from_hub", None)
    if decorate is None or hasattr(decorate, "_sky") or importlib.util.find_spec("kernels") is not None:
        return

    def use_kernel_forward_from_hub(name: str, *args: object, **kwargs: object) -> Callable[[Any], Any]:
        plain = decorate(name, *args, **kwargs)
        return lambda layer: _complete(name, plain(layer))

    use_kernel_forward_from_hub._sky = True  # type: ignore[attr-defined]
    for owner in (module, sys.modules.get("transformers.integrations")):
        if owner is not None and "use_kernel_forward_from_hub" in vars(owner):
            patching.replace(
                owner,
                "use_kernel_forward_from_hub",
                use_kernel_forward_from_hub,
                why=_WHY,
                test=_TEST,
                when=When.TRANSFORMERS,
            )
    for name, model in list(sys.modules.items()):
        if name.startswith(_MODELS) and ".modeling_" in name:
            _complete_model(model)


def _complete_model(model: Any) -> None:
    for name, item in list(vars(model).items()):
        if getattr(item, "__module__", None) != model.__name__:
            continue
        if name == _ROTARY_FUNCTION:
            ours = _memoized_function(item)
            patching.replace(model, name, ours, why=_WHY, test=_TEST, when=When.TRANSFORMERS)
        elif isinstance(item, type) and name.endswith("RMSNorm"):
            _complete("RMSNorm", item)


__all__ = ["install"]
