"""The device that the test suites of transformers and diffusers are to run on, in the form that both ask for.

Both import this file by its name from the current folder, so copy it there:

    cp "$(python -c 'from skyproxy.integrations import sky_spec; print(sky_spec.__file__)')" .
    TRANSFORMERS_TEST_DEVICE_SPEC=sky_spec.py python -m pytest tests/models/qwen2
    DIFFUSERS_TEST_DEVICE_SPEC=sky_spec.py python -m pytest tests/schedulers

`SKYPROXY_TEST_DEVICE` names another device than `sky`, which is `sky:0`. The name has no number by default, for tests
of transformers add one to it themselves (`torch.device(name, 0)`, `f"{name}:0"`); with `sky:1` they fail.
"""

from __future__ import annotations

import os

import torch

from skyproxy.tensor.torch_api import sky_module as _sky

DEVICE_NAME = os.environ.get("SKYPROXY_TEST_DEVICE", "sky")
SUPPORTS_TRAINING = True
"""diffusers leaves out its tests of training where this is false."""

MANUAL_SEED_FN = torch.manual_seed
"""Not the device's alone: PyTorch's seeds this process and every device."""
EMPTY_CACHE_FN = _sky.empty_cache
RESET_PEAK_MEMORY_STATS_FN = _sky.reset_peak_memory_stats
RESET_MAX_MEMORY_ALLOCATED_FN = _sky.reset_peak_memory_stats
MAX_MEMORY_ALLOCATED_FN = _sky.max_memory_allocated


def DEVICE_COUNT_FN() -> int:
    """Return 1: the device that the tests run on, however many there are."""
    return 1
