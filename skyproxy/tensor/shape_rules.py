"""Shape rules of our own, for ops that are hot and whose shapes change from call to call.

A rule takes what the op takes, with a `Meta` in place of each tensor, and gives `(meta, shares)` for each result,
`shares` being the number of the argument whose storage it shares, or None. It gives None where it does not apply, and
PyTorch's fake tensors are asked instead. It must be exactly right where it answers: conformance tests hold every rule
against PyTorch, and the worker checks each result once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RuleResult = list[tuple[Any, int | None]] | None
RULES: dict[str, Callable[..., RuleResult]] = {}
