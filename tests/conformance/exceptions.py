"""The one table of what the device is allowed to do otherwise than the local CPU, each row with its reason.

An entry that passes although it stands here fails the sweep, so no row outlives its reason.
"""

from __future__ import annotations

_POLICY_BY_DEVICE_TYPE = (
    "torch.nn.functional.linear_cross_entropy chooses in Python, by device.type, in which precision to accumulate half "
    "precision; for every device but cpu and cuda it takes another one, so the last bits differ"
)

OPERATORS: dict[tuple[str, str], str] = {
    ("nn.functional.linear_cross_entropy.chunked", "bfloat16"): _POLICY_BY_DEVICE_TYPE,
    ("nn.functional.linear_cross_entropy.chunked_none", "bfloat16"): _POLICY_BY_DEVICE_TYPE,
}
"""By entry and dtype."""

MODULES: dict[str, str] = {}
"""By entry."""

OPTIMIZERS: dict[str, str] = {}
"""By entry."""
