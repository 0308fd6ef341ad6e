"""PyTorch's operator database, for tests that are functions of pytest.

Its samples look for the `unittest.TestCase` that asks for them, in the source of each function on the stack, and seed
the generators of all devices before each sample. In pytest's stack that takes longer than most samples; and there is no
such class, and nothing is drawn elsewhere than on the CPU.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core


def _no_test_class() -> None:
    return None


def _seed_here(seed: int | None = None) -> None:
    seed = common_utils.SEED if seed is None else seed
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


for _module in (common_utils, core):
    assert callable(_module.extract_test_fn)
    _module.extract_test_fn = _no_test_class
assert callable(common_utils.set_rng_seed)
common_utils.set_rng_seed = _seed_here

__all__ = ["op_db"]
