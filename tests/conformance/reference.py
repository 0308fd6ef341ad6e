"""What remote tensors are held against: the local CPU, or with SKYPROXY_SWEEP_DEVICE=cuda local CUDA."""

from __future__ import annotations

import os

REFERENCE = os.environ.get("SKYPROXY_SWEEP_DEVICE", "cpu")
"""The local device, "cpu" or "cuda". The workers of the tests offer the same one."""

if REFERENCE not in ("cpu", "cuda"):
    raise ValueError(f"SKYPROXY_SWEEP_DEVICE is {REFERENCE!r}; it names the local device, 'cpu' or 'cuda'")
