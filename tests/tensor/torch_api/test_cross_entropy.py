"""`linear_cross_entropy` in chunks: the precision and the chunks of the worker's device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from skyproxy.tensor.torch_api import cross_entropy as module_under_test

if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
    pytest.skip("this torch has no linear_cross_entropy in chunks", allow_module_level=True)

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_gives_the_bits_of_the_cpu(dtype: torch.dtype, reduction: str, sky1: str) -> None:
    results = []
    for device in ("cpu", sky1):
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (24, 96))
        target = torch.randint(0, 96, (24,), generator=generator).to(device)
        hidden, weight = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
        loss = F.linear_cross_entropy(
            hidden, weight, target, reduction=reduction, options=torch.nn.LinearCrossEntropyOptions()
        )
        loss.sum().backward()
        results.append([each.detach().cpu() for each in (loss, hidden.grad, weight.grad)])
    for ours, theirs in zip(results[1], results[0]):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "capability", "accumulated_in"),
    [
        (torch.bfloat16, (9, 0), torch.float32),
        (torch.bfloat16, (7, 5), torch.bfloat16),
        (torch.float16, (7, 5), torch.float32),
        (torch.float16, (6, 1), torch.float16),
        (torch.float32, (9, 0), torch.float32),
    ],
)
def test_a_worker_with_cuda_is_asked_for_its_own_capability(
    dtype: torch.dtype, capability: tuple[int, int], accumulated_in: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = SimpleNamespace(worker_device=torch.device("cuda", 0), row={"compute_capability": capability})
    monkeypatch.setattr(module_under_test, "DEVICES", SimpleNamespace(of=lambda device: behind))
    options: Any = torch.nn.LinearCrossEntropyOptions()
    chosen = options._adjust(8, 4, 32, dtype, torch.device("sky:0"))
    assert chosen.acc_dtype == accumulated_in
    assert chosen.acc_policy == options._adjust(8, 4, 32, dtype, torch.device("cuda", 0)).acc_policy


def test_what_the_program_chose_itself_is_kept(sky1: str) -> None:
    options: Any = torch.nn.LinearCrossEntropyOptions(acc_dtype=torch.float32, batch_chunk_size=3)
    chosen = options._adjust(8, 4, 32, torch.bfloat16, torch.device(sky1))
    assert (chosen.acc_dtype, chosen.batch_chunk_size) == (torch.float32, 3)
