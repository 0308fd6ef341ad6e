"""Shape rules of sparse tensors, against what PyTorch makes; and what is left to be asked of the worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.tensor.core.metadata import meta_of
from skyproxy.tensor.shapes.rules import TARGET
from skyproxy.tensor.shapes.sparse import RULES

INDICES, VALUES = torch.tensor([[1, 2, 2]]), torch.randn(3, 4)
SPARSE = torch.sparse_coo_tensor(INDICES, VALUES, (10, 4))
PLANE = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 1]]), torch.randn(2).double(), (10, 4))
DENSE = torch.randn(10, 4)
_MADE: dict[str, Any] = {"layout": torch.sparse_coo, "device": torch.device("cpu"), "pin_memory": False}
_TO_FLOAT: dict[str, Any] = {"dtype": torch.float32, **_MADE}
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("_sparse_coo_tensor_with_dims_and_tensors", (1, 1, [10, 4], INDICES, VALUES), _TO_FLOAT),
    ("sparse_mask", (DENSE, SPARSE.coalesce()), {}),
    ("sparse_mask", (DENSE, PLANE.coalesce()), {}),
    ("clone", (SPARSE,), {}),
    ("clone", (PLANE,), {}),
    ("_coalesce", (SPARSE,), {}),
    ("_coalesce", (PLANE,), {}),
    ("_to_dense", (SPARSE,), {}),
    ("_to_dense", (PLANE.coalesce(), None, False), {}),
    ("neg", (PLANE,), {}),
    ("detach", (SPARSE,), {}),
]


def answer(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return RULES["aten::" + name](*[meta_of(a) if isinstance(a, torch.Tensor) else a for a in args], **options)


@pytest.mark.parametrize(("name", "args", "options"), CASES)
def test_rules_of_sparse_tensors_say_what_comes(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    expected = getattr(torch.ops.aten, name).default(*args, **options)
    assert answer(name, args, options) == ((meta_of(expected), None),)


def test_a_sparse_tensor_is_added_to_a_dense_one_of_its_size_and_dtype() -> None:
    assert answer("add_.Tensor", (DENSE, SPARSE, -0.5), {}) is TARGET
    assert answer("add_.Tensor", (DENSE, DENSE), {}) is TARGET  # as ever


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("add_.Tensor", (DENSE, PLANE), {}),
        ("add_.Tensor", (DENSE[:9], SPARSE), {}),
        ("add_.Tensor", (DENSE[:1].expand(10, 4), SPARSE), {}),
        ("add_.Tensor", (SPARSE, SPARSE), {}),
        ("sparse_mask", (DENSE[:9], SPARSE), {}),
        ("sparse_mask", (SPARSE, SPARSE), {}),
        ("_sparse_coo_tensor_with_dims_and_tensors", (1, 1, [10, 5], INDICES, VALUES), _TO_FLOAT),
        ("_sparse_coo_tensor_with_dims_and_tensors", (2, 0, [10, 4], INDICES, VALUES), _TO_FLOAT),
        ("_sparse_coo_tensor_with_dims_and_tensors", (1, 1, [10, 4], INDICES, VALUES[:2]), _TO_FLOAT),
        ("_sparse_coo_tensor_with_dims_and_tensors", (1, 1, [10, 4], INDICES, VALUES.double()), _TO_FLOAT),
        ("clone", (SPARSE,), {"memory_format": torch.preserve_format}),
        ("_to_dense", (SPARSE, torch.float32), {}),
        ("neg", (SPARSE.to(torch.int64),), {}),
    ],
)
def test_rules_of_sparse_tensors_leave_what_does_not_fit_to_the_worker(
    name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert answer(name, args, options) is None


def test_an_operation_that_does_not_fit_fails_on_its_line(sky: str) -> None:
    sparse, dense = SPARSE.to(sky), torch.zeros(9, 4, device=sky)
    with pytest.raises(RuntimeError):
        dense.add_(sparse)
    assert not dense.any()


@pytest.mark.parametrize("size", [(1 << 21, 1 << 21, 1 << 20), (1 << 40, 1 << 20, 4), (1 << 20, 1 << 42)])
def test_a_sparse_tensor_may_have_more_elements_than_any_memory(size: tuple[int, ...], sky: str) -> None:
    indices, values = torch.tensor([[0, 3]] * len(size)), torch.tensor([1.0, 2.0], dtype=torch.float64)
    remote = torch.sparse_coo_tensor(indices.to(sky), values.to(sky), size)
    local = torch.sparse_coo_tensor(indices, values, size)
    assert remote.shape == local.shape
    assert remote.numel() == local.numel()
    assert torch.equal((remote * 3).coalesce().values().cpu(), (local * 3).coalesce().values())
    assert torch.equal(torch.sparse.sum(remote).cpu(), torch.sparse.sum(local))


def test_a_sparse_tensor_of_more_elements_than_pytorch_counts_is_refused_in_its_words(sky: str) -> None:
    with pytest.raises(RuntimeError, match="numel: integer multiplication overflow"):
        torch.sparse_coo_tensor(INDICES[:1].to(sky).expand(3, -1), VALUES[:, 0].to(sky), (1 << 21,) * 3)
