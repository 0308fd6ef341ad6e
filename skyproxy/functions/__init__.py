"""Functions that run on a worker: sending them, their calls, their results. What a `Node` offers as `submit`."""

from __future__ import annotations

# First: torch's import makes the device, which needs all of this package.
import torch  # noqa: F401

from skyproxy.functions.call import Call
from skyproxy.functions.payload import Payload

__all__ = ["Call", "Payload"]
