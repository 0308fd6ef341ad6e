"""The one table of what the device is allowed to do otherwise than the local CPU, each row with its reason.

An entry that passes although it stands here fails the sweep, so no row outlives its reason.
"""

from __future__ import annotations

OPERATORS: dict[tuple[str, str], str] = {}
"""By entry and dtype."""

OF_CUDA_ONLY: dict[str, str] = {
    "jiterator_": "compiles a kernel from C++ on the machine that calls it, for its own GPU",
    "torch.ops.aten._flash_attention_forward": "workers take attention by the operators that check their arguments",
    "torch.ops.aten._efficient_attention_forward": "workers take attention by the operators that check their arguments",
}
"""By the beginning of an entry's name: what runs on local CUDA and is not for workers."""

MODULES: dict[str, str] = {}
"""By entry."""

OPTIMIZERS: dict[str, str] = {}
"""By entry."""
