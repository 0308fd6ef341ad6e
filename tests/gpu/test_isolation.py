"""Functions in processes of their own on a GPU: memory by CUDA IPC, and a context that ends with the function."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from typing import Any

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


def test_an_error_that_is_told_late_is_the_functions(node: skyproxy.Node) -> None:
    def index_late(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.tensor([10**6], device=tensor.device)]

    given = torch.ones(4, device=node.device())
    with pytest.raises(RuntimeError, match="device-side assert"):
        node.submit(index_late, given, isolate=True).result()
    assert given.sum().item() == 4


def test_empty_and_resized_tensors_are_lent(node: skyproxy.Node) -> None:
    given = torch.zeros(10, device=node.device())
    for size in (10, 5000, 10):
        given.resize_(size).fill_(1)
        _, view, _ = node.submit(change, given, isolate=True).result()
        assert (given.sum().item(), view.shape) == (2 * size, (size - 1,))
    empty = torch.empty(0, 3, device=node.device())
    assert node.submit(lambda tensor: tensor.t(), empty, isolate=True).result().shape == (3, 0)


@pytest.mark.parametrize("isolate", [False, True])
def test_functions_have_a_current_context_for_cublas(node: skyproxy.Node, isolate: bool) -> None:
    def multiply(tensor: torch.Tensor) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tensor @ tensor
        return [str(warning.message) for warning in caught]

    assert node.submit(multiply, torch.ones(8, 8, device=node.device()), isolate=isolate).result() == []


@pytest.mark.parametrize("refuses", ["lender", "borrower"])
def test_where_memory_cannot_be_shared_copies_go_there_and_back(refuses: str) -> None:
    def play() -> None:
        from skyproxy_server.functions import lent_tensors

        lending: Any = lent_tensors
        handle_of = lending.handle_of

        def refuse(storage: torch.UntypedStorage) -> None:
            raise RuntimeError("CUDA error: operation not supported")

        def spoil(storage: torch.UntypedStorage) -> list[Any]:
            device, handle, *rest = handle_of(storage)
            return [device, handle[:1] + bytes(len(handle) - 1), *rest]

        lending.handle_of = refuse if refuses == "lender" else spoil

    with skyproxy.launch_local("cuda") as node:
        node.run(play)
        given = torch.arange(1000.0, device=node.device())
        same, view, fresh = node.submit(change, given, isolate=True).result()
        assert same is given
        assert (view[0].item(), fresh.tolist(), given.sum().item()) == (2.0, [7.0] * 3, 999_000)
