"""Looks of the parts of sparse tensors are asked for at most once, and again where something may have changed them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy  # noqa: F401  (registers the device)

Pair = tuple[torch.Tensor, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def trips() -> int:
    return int(torch.sky.stats()["round_trips"])


def sparse(indices: torch.Tensor, values: torch.Tensor, size: tuple[int, ...], **options: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, **options)


TRAINED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "SGD, maximizing": (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), 1),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p, lr=0.1), 2),
    "SparseAdam, maximizing": (lambda p: torch.optim.SparseAdam(p, lr=0.1, maximize=True), 2),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), 2),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("bag", [False, True], ids=["rows", "bags"])
@pytest.mark.parametrize("name", TRAINED)
def test_steps_with_sparse_gradients_ask_once_for_each_parameter(
    name: str, bag: bool, number: int, sky_devices: tuple[str, str]
) -> None:
    make, most = TRAINED[name]
    torch.manual_seed(0)
    batches = [torch.randint(10, (n, 2)) for n in (4, 1, 7, 3, 3, 9, 1, 5)]
    batches[2].fill_(3)  # the same row each time
    found = []
    for device in ("cpu", sky_devices[number]):
        torch.manual_seed(1)
        modules = [(nn.EmbeddingBag(10, 3, mode="sum", sparse=True) if bag else nn.Embedding(10, 3, sparse=True))]
        modules.append(nn.Embedding(10, 2, sparse=True))
        for module in modules:
            module.to(device)
        optimizer = make([module.weight for module in modules])
        placed = [batch.to(device) for batch in batches]
        waits = []
        for batch in placed:
            before = trips()
            optimizer.zero_grad()
            sum((module(batch).square() * 0.5).sum() for module in modules).backward()  # type: ignore[union-attr]
            optimizer.step()
            waits.append(trips() - before)
        found.append([module.weight.detach().cpu() for module in modules])
        assert max(waits[2:]) <= most + bag  # of a bag's gradient, how many elements it has
    assert all(map(torch.equal, *found))


def test_weight_decay_of_sparse_gradients_is_refused_as_locally(sky: str) -> None:
    for device in ("cpu", sky):
        module = nn.Embedding(4, 2, sparse=True, device=device)
        module(torch.tensor([1], device=device)).sum().backward()
        with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse gradients"):
            torch.optim.Adagrad(module.parameters(), weight_decay=0.1).step()


def test_all_is_asked_at_once(sky: str) -> None:
    tensor = sparse(torch.tensor([[1, 1, 0]], device=sky), torch.ones(3, 2, device=sky), (4, 2)).coalesce()
    before = trips()
    assert (tensor.is_coalesced(), tensor._nnz()) == (True, 2)
    parts = [tensor.indices(), tensor.values(), tensor._indices(), tensor._values()]
    assert trips() - before == 1
    assert [tuple(part.shape) for part in parts] == [(1, 2), (2, 2)] * 2
    assert [(tensor.sparse_dim(), tensor.dense_dim()) for _ in range(2)] == [(1, 1)] * 2
    assert trips() - before == 3
    assert parts[1].tolist() == [[1, 1], [2, 2]]


def test_parts_of_compressed_tensors_are_asked_for_at_once(sky: str) -> None:
    tensor = torch.eye(4).to_sparse_csr().to(sky)
    twin = tensor.detach()
    before = trips()
    tensor.crow_indices(), tensor.col_indices(), tensor.values()
    assert trips() - before == 1
    tensor.values(), twin.values()
    tensor.zero_()
    local = torch.eye(4).to_sparse_csr()
    other = local.detach()
    local.zero_()
    assert (tensor.values().shape, twin.values().shape) == (local.values().shape, other.values().shape)


_COMPRESSED: dict[torch.layout, tuple[str, str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices", "ccol_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "row_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "crow_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "col_indices"),
}
"""Of each layout the names of its outer and inner indices, and one that it has not."""


def compressed(layout: torch.layout) -> torch.Tensor:
    blocksize = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return torch.eye(4, dtype=torch.bool).to_sparse(layout=layout, blocksize=blocksize)


@pytest.mark.parametrize("layout", _COMPRESSED, ids=str)
def test_a_mask_in_a_compressed_layout_whose_parts_are_known_gives_what_has_parts_like_it(
    layout: torch.layout, sky: str
) -> None:
    local = compressed(layout)
    mask, taken = local.to(sky), torch.arange(16.0).view(4, 4)
    mask.values()
    got, want = taken.to(sky).sparse_mask(mask), taken.sparse_mask(local)
    for name in (*_COMPRESSED[layout][:2], "values"):
        assert torch.equal(getattr(got, name)().cpu(), getattr(want, name)())
    assert torch.equal(got.to_dense().cpu(), want.to_dense())


@pytest.mark.parametrize("layout", _COMPRESSED, ids=str)
def test_parts_that_a_layout_has_not_are_refused_at_their_line(layout: torch.layout, sky: str) -> None:
    local = compressed(layout)
    for tensor in (local, local.to(sky)):
        for name in (_COMPRESSED[layout][2], "indices", "_indices", "_values"):
            with pytest.raises(RuntimeError, match="Sparse"):
                getattr(tensor, name)()


@pytest.mark.parametrize("layout", _COMPRESSED, ids=str)
def test_how_many_elements_a_compressed_tensor_has_is_known_with_its_parts(layout: torch.layout, sky: str) -> None:
    local = compressed(layout)
    ours = local.to(sky)
    ours.values()
    before = trips()
    assert ours._nnz() == local._nnz()
    assert trips() == before


def looks(tensor: torch.Tensor, what: int) -> Any:
    if what < 3:
        return (tensor.is_coalesced, tensor._nnz, lambda: (tensor.sparse_dim(), tensor.dense_dim()))[what]()
    part = tensor._indices() if what == 3 else tensor._values()
    return part.shape, part.stride() if part.numel() else None, part.storage_offset(), part.tolist()


def made(generator: random.Random, device: str) -> Pair:
    count, dense = generator.choice([0, 1, 2, 3, 5]), (3,) * generator.randint(0, 1)
    indices, values = torch.randint(4, (2, count)), torch.randn(count, *dense)
    if generator.random() < 0.3:
        indices = torch.randint(4, (count, 2)).t()
    if dense and generator.random() < 0.3:
        values = torch.randn(3, count).t()
    told = generator.choice([None, None, False, True if count < 2 else None])
    size = (4, 4, *dense)
    ours = sparse(indices.to(device), values.to(device), size, is_coalesced=told)
    return sparse(indices, values, size, is_coalesced=told), ours


def _set_data(a: torch.Tensor, b: torch.Tensor) -> None:
    a.data = b


ONE: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = [
    lambda a, b, dense: a.clone(),
    lambda a, b, dense: a.detach(),
    lambda a, b, dense: a.data,
    lambda a, b, dense: -a,
    lambda a, b, dense: a * 2,
    lambda a, b, dense: a + a,
    lambda a, b, dense: a.double().float(),
    lambda a, b, dense: a.coalesce(),
    lambda a, b, dense: dense.sparse_mask(a),
    lambda a, b, dense: a.mul_(2),
    lambda a, b, dense: torch._foreach_mul_([a], 2.0),
    lambda a, b, dense: a._values().mul_(3),
    lambda a, b, dense: a.zero_(),
    lambda a, b, dense: a._coalesced_(False),
    lambda a, b, dense: a.add_(b),
    lambda a, b, dense: a.copy_(b),
    lambda a, b, dense: torch.add(a, a, out=b),
    lambda a, b, dense: torch.neg(a, out=b.clone()),
    lambda a, b, dense: a.resize_as_sparse_(b),
    lambda a, b, dense: a.sparse_resize_((6, 6, *a.shape[2:]), 2, a.dim() - 2),
    lambda a, b, dense: a.sparse_resize_and_clear_((4, 4, *a.shape[2:]), 2, a.dim() - 2),
    lambda a, b, dense: _set_data(a, b),
    lambda a, b, dense: sparse(a._indices(), a._values(), a.shape),
]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_known_follows_every_change(seed: int, sky: str) -> None:
    """Local tensors and remote ones are treated alike, at random, and asked at random."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    pool = [made(generator, sky) for _ in range(2)]
    for _ in range(30):
        if generator.random() < 0.15:
            pool.append(made(generator, sky))
        first = generator.choice(pool)
        second = generator.choice([pair for pair in pool if pair[0].shape == first[0].shape])
        dense = torch.randn(first[0].shape)
        change = generator.choice(ONE)
        results: list[Any] = []
        for a, b, c in zip(first, second, (dense, dense.to(sky)), strict=True):
            try:
                results.append(change(a, b, c))
            except RuntimeError as error:
                results.append(str(error).partition("\n")[0])
        if isinstance(results[0], torch.Tensor) and results[0].layout is torch.sparse_coo:
            pool.append((results[0], results[1]))
        for theirs, ours in pool:
            if generator.random() < 0.4:
                what = generator.randrange(5)
                assert looks(ours, what) == looks(theirs, what)


@pytest.mark.parametrize("get", ["_indices", "_values"])
@pytest.mark.parametrize("count", [2, 5])
def test_a_part_that_is_resized_is_known_by_its_new_size(get: str, count: int, sky: str) -> None:
    found = []
    for device in ("cpu", sky):
        tensor = sparse(torch.tensor([[1, 1, 0]], device=device), torch.ones(3, device=device), (4,))
        twin, copy = tensor.detach(), tensor.clone()
        [each._nnz() for each in (tensor, twin, copy)]
        part = getattr(tensor, get)()
        part.resize_((1, count) if get == "_indices" else (count,))
        found.append([getattr(each, get)().shape for each in (tensor, twin, copy)])
    assert found[0] == found[1]


Given = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def test_what_is_added_to_an_empty_tensor_is_seen_by_what_shares_its_parts(sky: str) -> None:
    found = []
    for device in ("cpu", sky):
        full = sparse(torch.tensor([[1, 2]], device=device), torch.ones(2, device=device), (4,)).coalesce()
        empty = sparse(torch.zeros(1, 0, dtype=torch.int64, device=device), torch.zeros(0, device=device), (4,))
        twin = empty.detach()
        assert (twin._nnz(), twin._values().shape) == (0, (0,))
        empty.add_(full)
        found.append((empty._nnz(), twin._nnz(), twin._values().tolist()))
    assert found[0] == found[1]


_INDICES: dict[str, Given] = {
    "rows": (torch.arange(3)[None], lambda x: x[:]),
    "columns": (torch.arange(3)[:, None], lambda x: x.t()),
    "every second": (torch.arange(6).view(3, 2) % 5, lambda x: x.t()[1:]),
    "one": (torch.arange(1)[None], lambda x: x[:]),
    "part": (torch.arange(3)[None], lambda x: x[:, 1:]),
    "one of each": (torch.zeros(1, 1).long(), lambda x: x.expand(1, 3)),
}
_VALUES: dict[str, Given] = {
    "numbers": (torch.randn(3), lambda x: x[:]),
    "every second": (torch.randn(6), lambda x: x[::2]),
    "one number": (torch.randn(1), lambda x: x.expand(3)),
    "rows": (torch.randn(3, 4), lambda x: x[:]),
    "columns": (torch.randn(4, 3), lambda x: x.t()),
    "turned": (torch.randn(3, 4, 1), lambda x: x.transpose(1, 2)),
    "images": (torch.randn(3, 2, 2, 2), lambda x: x.transpose(1, 3)),
    "of one": (torch.randn(1, 3), lambda x: x.t()),
}


@pytest.mark.parametrize("values", _VALUES)
@pytest.mark.parametrize("indices", _INDICES)
def test_parts_are_known_as_pytorch_makes_them(indices: str, values: str, sky: str) -> None:
    for told in (None, True, False):
        found: list[Any] = []
        for device in ("cpu", sky):
            i, v = (view(given.to(device)) for given, view in (_INDICES[indices], _VALUES[values]))
            v = v[: i.shape[1]]
            tensor = sparse(i, v, (5, *v.shape[1:]), is_coalesced=told)
            dense = torch.zeros(tensor.shape, device=device)
            before = trips()
            found.append([])
            for made in (tensor, tensor.clone(), -tensor, tensor.detach(), dense.sparse_mask(tensor)):
                parts = [
                    (part.shape, part.stride(), part.storage_offset()) for part in (made._indices(), made._values())
                ]
                found[-1].append((parts, made.is_coalesced(), made._nnz()))
            assert trips() == before
        assert found[0] == found[1]
