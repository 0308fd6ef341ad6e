"""Functions in processes of their own on a GPU: memory by CUDA IPC, and a context that ends with the function."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

import skyproxy
from skyproxy.errors import FunctionCrashedError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def node() -> Iterator[skyproxy.Node]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    with skyproxy.launch_local("cuda") as node:
        yield node


def change(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensor.mul_(2)
    return tensor, tensor[1:], torch.full((3,), 7.0, device=tensor.device)


def test_arguments_are_changed_in_place_and_results_stay_there(node: skyproxy.Node) -> None:
    given = torch.arange(1000.0, device=node.device())
    given.add_(1)  # on the session's stream, just before
    for _ in range(20):
        same, view, fresh = node.submit(change, given, isolate=True).result()
        assert same is given
        given.div_(2)
        assert view[0].item() == 2.0
        assert fresh.tolist() == [7.0] * 3
    assert given.sum().item() == sum(range(1, 1001))


def test_the_sessions_tensors_survive_a_crash_and_an_illegal_access(node: skyproxy.Node) -> None:
    def crash(tensor: torch.Tensor) -> None:
        tensor.add_(1)
        torch.cuda.synchronize()
        ctypes.string_at(0)

    def assert_on_the_device(tensor: torch.Tensor) -> None:
        tensor[torch.tensor([10**6], device=tensor.device)].sum().item()

    given = torch.zeros(4, device=node.device())
    with pytest.raises(FunctionCrashedError, match="SIGSEGV"):
        node.submit(crash, given, isolate=True).result()
    with pytest.raises(Exception, match=r"assert|Cuda|CUDA"):
        node.submit(assert_on_the_device, given, isolate=True).result()
    assert given.tolist() == [1, 1, 1, 1]
    assert (given + 1).sum().item() == 8


def test_memory_that_was_lent_is_free_when_its_tensor_goes(node: skyproxy.Node) -> None:
    def used() -> int:
        return torch.cuda.memory_allocated()

    before = node.run(used)
    for _ in range(5):
        given = torch.zeros(64 << 20, dtype=torch.uint8, device=node.device())
        with pytest.raises(FunctionCrashedError):
            node.submit(lambda tensor: ctypes.string_at(0), given, isolate=True).result()
        del given
    assert node.run(used) - before < 64 << 20
