"""Eager attention of transformers, whose operations are recorded in one go where nothing is differentiated.

transformers gets attention from a table, in which libraries put functions of their own. Where a model's own
`eager_attention_forward` is asked for and nobody has put another in its place, its operations are noted once for each
look of its tensors, see `skyproxy.tensor.dispatch.memoized_calls`; the worker computes the very same.
"""

from __future__ import annotations

from collections.abc import Callable

from skyproxy import patching
from skyproxy.patching import When
from skyproxy.tensor.dispatch.memoized_calls import memoized_choice

_NAME = "eager_attention_forward"
_PACKAGE = "transformers"
_WHY = "attention records its ops in one go where nothing is differentiated"
_TEST = "tests/integrations/test_generate_ahead.py::test_eager_attention_is_noted_and_follows_what_a_program_replaces"


def install(module: object) -> None:
    """Complete `transformers.modeling_utils`, if this version gets attention from a table."""
    owner = getattr(module, "AttentionInterface", None)
    if "get_interface" in vars(owner or object):
        patching.wrap(owner, "get_interface", _memoize, why=_WHY, test=_TEST, when=When.TRANSFORMERS)


def _memoize(get_interface: Callable[..., object]) -> Callable[..., object]:
    return memoized_choice(get_interface, _is_own, _PACKAGE)


def _is_own(function: object) -> bool:
    """Return whether a function is a model's own: one that a program has wrapped has the program's globals."""
    own_globals = getattr(function, "__globals__", None)
    return (
        own_globals is not None
        and getattr(function, "__name__", None) == _NAME
        and own_globals.get("__name__", "").startswith(f"{_PACKAGE}.models.")
    )


__all__ = ["install"]
