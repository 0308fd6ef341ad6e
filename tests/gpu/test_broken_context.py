"""Kernels that break the CUDA context of a worker: the program is told, the process ends, and the rest goes on."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.errors import SessionLostError
from skyproxy.node import Node
from skyproxy_server.endings import LOST_STATUS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")

ENDS_WITHIN_SECONDS = 20.0


def ended(node: Node) -> int | None:
    """The status of an embedded worker's process, once it has ended."""
    assert node._worker is not None
    node._worker.explain_end(ENDS_WITHIN_SECONDS)
    return node._worker._process.poll()


def test_an_index_out_of_bounds_ends_its_worker_and_says_where(gpu_node: Node) -> None:
    kept = torch.ones(3, device=gpu_node.device("cuda"))
    with skyproxy.launch_local("cuda") as node:
        device = node.device("cuda")
        x, place = torch.arange(10.0, device=device), torch.arange(3, device=device) + 9
        assert x.sum().item() == 45
        with pytest.raises(SessionLostError, match="device-side assert triggered") as caught:
            x[place].sum().item()
        assert f"aten::index.Tensor, recorded at {__file__}:" in str(caught.value)
        assert "Assertion `" in str(caught.value)
        assert not node.alive
        began = time.monotonic()
        for use in (x.sum().item, lambda: torch.sky.synchronize(device), lambda: torch.ones(3, device=device).cpu()):
            with pytest.raises(SessionLostError, match="device-side assert triggered"):
                use()
        assert time.monotonic() - began < ENDS_WITHIN_SECONDS
        assert ended(node) == LOST_STATUS
    assert kept.sum().item() == 3, "of another worker on the same device"
    with skyproxy.launch_local("cuda") as fresh:
        assert torch.ones(3, device=fresh.device("cuda")).sum().item() == 3


def test_a_position_that_is_known_to_be_out_of_bounds_never_gets_there(gpu_node: Node) -> None:
    device = gpu_node.device("cuda")
    x = torch.arange(10.0, device=device)
    for call in (lambda i: x[i], lambda i: nn.functional.one_hot(i, 5), lambda i: x.index_select(0, i)):
        with pytest.raises(IndexError, match=r"^10 is out of bounds: aten::"):
            call(torch.tensor([3, 10]).to(device))
    with pytest.raises(IndexError, match=r"^7 is out of bounds: aten::"):
        nn.functional.cross_entropy(torch.randn(3, 5, device=device), torch.tensor([0, 7, 1]).to(device))
    assert x.sum().item() == 45


def test_a_function_that_does_so_ends_its_worker() -> None:
    def index() -> float:
        x = torch.arange(10.0, device="cuda")
        return x[torch.arange(3, device="cuda") + 9].sum().item()

    with skyproxy.launch_local("cuda") as node:
        with pytest.raises((RuntimeError, SessionLostError), match="device-side assert triggered"):
            node.run(index)
        with pytest.raises(SessionLostError, match="a kernel failed on the GPU"):
            torch.ones(3, device=node.device("cuda")).sum().item()
        assert ended(node) == LOST_STATUS
