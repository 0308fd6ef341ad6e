"""Checks of operations that are no gradients, beside the kernels behind them; hostile calls are in `security`."""

from __future__ import annotations

import pytest
import torch

from skyproxy_server.forward_checks import FORWARD_CHECKS


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_mask_of_as_many_dimensions_is_of_all_elements(kind: int) -> None:
    mask = torch.zeros(2, 3, 5, dtype=torch.bool)
    FORWARD_CHECKS["_masked_softmax"]({"self": torch.zeros(2, 3, 5), "mask": mask, "mask_type": kind})
    torch._masked_softmax(torch.zeros(2, 3, 5), mask, -1, kind)
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, 5, 5)):
        with pytest.raises(RuntimeError, match="mask"):
            FORWARD_CHECKS["_masked_softmax"]({"self": wrong, "mask": mask, "mask_type": kind})
