"""The one table of what the device is allowed to do otherwise than the local CPU, each row with its reason.

An entry that passes although it stands here fails the sweep, so no row outlives its reason.
"""

from __future__ import annotations

OPERATORS: dict[tuple[str, str], str] = {}
"""By entry and dtype."""

MODULES: dict[str, str] = {}
"""By entry."""

OPTIMIZERS: dict[str, str] = {}
"""By entry."""
