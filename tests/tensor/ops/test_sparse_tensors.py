"""Sparse tensors of every layout: there and back, in place, gradients and products."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from skyproxy.tensor.dispatch import inference
from tests.conformance.twins import tree_differences

LAYOUTS = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sparse_layouts_go_there_and_back(name: str, sky1: str) -> None:
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 3, 0], [0, 0, 0, 0], [4, 0, 0, 5]])
    local = LAYOUTS[name](dense)
    for remote in (local.to(sky1), LAYOUTS[name](dense.to(sky1))):
        assert remote.layout is local.layout
        assert remote.device == torch.device(sky1)
        assert remote._nnz() == local._nnz()
        back = remote.cpu()
        assert back.layout is local.layout
        assert torch.equal(back.to_dense(), dense)
        assert torch.equal(remote.to_dense().cpu(), dense)
        assert torch.equal((remote * 2).to_dense().cpu(), dense * 2)


def test_a_change_of_a_sparse_tensor_that_fails_is_raised_where_it_is_read(sky1: str) -> None:
    for read in (lambda a: a.to_dense(), lambda a: a._values(), lambda a: a * 2):
        sparse = torch.eye(3).to_sparse().to(sky1)
        with pytest.raises(RuntimeError, match="not supported"):
            read(sparse.add_(torch.ones(3, 3, device=sky1))).cpu()
        assert torch.equal(sparse.to_dense().cpu(), torch.eye(3))  # it was told, and nothing has changed


@pytest.mark.parametrize("name", ["coo", "csr", "csc"])
def test_sparse_leaves_get_gradients_of_the_cpu_s_layout(name: str, sky1: str) -> None:
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 3, 0]])

    def compute(device: str) -> Any:
        leaf = LAYOUTS[name](dense.to(device)).requires_grad_()
        for _ in range(2):  # the second gradient is added to the first
            (leaf @ torch.arange(8.0).view(4, 2).to(device)).square().sum().backward()
        return leaf.grad.layout, leaf.grad.to_dense()

    (ours, found), (theirs, expected) = compute(sky1), compute("cpu")
    assert ours is theirs
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("shape", [(1, 1), (5, 0), (0, 3), (1, 0)])
@pytest.mark.parametrize("name", ["csr", "csc"])
def test_sparse_leaves_with_one_element_or_none_get_gradients(name: str, shape: tuple[int, int], sky1: str) -> None:
    def compute(device: str) -> Any:
        leaf = LAYOUTS[name](torch.ones(shape).to(device)).requires_grad_()
        for _ in range(2):
            ones = torch.ones(shape[0], 2, device=device)
            torch.addmm(ones, leaf, torch.ones(shape[1], 2, device=device)).backward(ones)
        return leaf.grad

    ours, theirs = compute(sky1), compute("cpu")
    assert (ours.layout, ours.stride()) == (theirs.layout, theirs.stride())
    assert torch.equal(ours.cpu(), theirs)


_ANY = [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.sparse_coo, torch.strided]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("multiply", [torch.matmul, torch.sparse.mm])
@pytest.mark.parametrize("right", _ANY, ids=str)
@pytest.mark.parametrize("left", _ANY[:-1], ids=str)
def test_products_of_any_two_layouts_pass_gradients(
    left: torch.layout, right: torch.layout, multiply: Any, sky1: str
) -> None:
    torch.manual_seed(0)
    dense = torch.randn(4, 4).relu(), torch.randn(4, 4)

    def laid_out(x: torch.Tensor, layout: torch.layout) -> torch.Tensor:
        blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
        return (x if layout is torch.strided else x.to_sparse(layout=layout, **blocks)).detach().requires_grad_()

    def compute(device: str) -> Any:
        a, b = (laid_out(x.to(device), layout) for x, layout in zip(dense, (left, right), strict=True))
        try:
            result = multiply(a, b).to_dense()
            result.sum().backward()
        except RuntimeError as error:
            return str(error).partition("\n")[0].replace(device, "cpu")
        return result.detach(), *(None if x.grad is None else (x.grad.layout, x.grad.to_dense()) for x in (a, b))

    assert tree_differences(compute(sky1), compute("cpu"), memory=False) == []


def compressed(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    parts = [torch.tensor(part, device=device) for part in ([0, 1, 3], [1, 0, 2], [1.0, 2.0, 3.0])]
    return parts, torch.sparse_csr_tensor(*parts, (2, 3))


def test_a_constructor_checks_indices_where_it_is_asked_to(sky: str) -> None:
    for device in ("cpu", sky):
        outer, inner = torch.tensor([0, 2, 2], device=device), torch.tensor([2, 0], device=device)
        values = torch.tensor([1.0, 2.0], device=device)
        plain = torch.sparse_csr_tensor(outer, inner, values, (2, 3), check_invariants=False)
        assert plain.to_dense().tolist() == [[2, 0, 1], [0, 0, 0]]
        with pytest.raises(RuntimeError, match="sorted and distinct"):
            torch.sparse_csr_tensor(outer, inner, values, (2, 3), check_invariants=True)


def test_indices_outside_of_the_sizes_are_refused_without_being_asked(sky: str) -> None:
    where, values = torch.tensor([[0, 1 << 30]], device=sky), torch.ones(2, device=sky)
    rows = torch.tensor([0, 1, 2], device=sky)
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        torch.sparse_coo_tensor(where, values, (3,), check_invariants=False).to_dense().cpu()
    with pytest.raises(RuntimeError, match="0 <= col_indices < ncols"):
        torch.sparse_csr_tensor(rows, where[0], values, (2, 3), check_invariants=False).to_dense().cpu()


@pytest.mark.parametrize("through", ["the tensor", "what it was made of"])
def test_indices_that_are_changed_in_place_are_those_of_the_tensor(through: str, sky: str) -> None:
    for device in ("cpu", sky):
        where, values = torch.tensor([[0, 2]], device=device), torch.tensor([1.0, 2.0], device=device)
        sparse = torch.sparse_coo_tensor(where, values, (3,))
        assert sparse.to_dense().tolist() == [1, 0, 2]
        indices = sparse._indices() if through == "the tensor" else where
        indices += -1 + 2 * (indices == 0)
        assert sparse.to_dense().tolist() == [0, 3, 0]


def test_ones_that_are_outside_then_are_refused(sky: str) -> None:
    where, values = torch.tensor([[0, 2]], device=sky), torch.tensor([1.0, 2.0], device=sky)
    sparse = torch.sparse_coo_tensor(where, values, (3,))
    sparse._indices().fill_(1 << 40)
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        sparse.to_dense().cpu()
    assert torch.ones(3, device=sky).tolist() == [1, 1, 1]


@pytest.mark.parametrize("wanted", [0, 4])
def test_what_a_compressed_tensor_was_made_of_keeps_its_size(wanted: int, sky: str) -> None:
    """PyTorch keeps the very arguments, and shortens them with the tensor."""
    parts, sparse = compressed(sky)
    if wanted:
        sparse.resize_as_sparse_(torch.eye(wanted).to_sparse_csr().to(sky))
    else:
        sparse.zero_()
    assert sparse._nnz() == wanted
    assert [part.cpu().shape for part in parts] == [(3,), (3,), (3,)]
    assert parts[2].add_(1).tolist() == [2, 3, 4]


def test_a_compressed_tensor_shares_the_memory_of_its_values(sky: str) -> None:
    (*_, values), sparse = compressed(sky)
    values.mul_(2)
    assert sparse.to_dense().tolist() == [[0, 2, 0], [4, 0, 6]]
    sparse.neg_()
    assert values.tolist() == [-2, -4, -6]


@pytest.mark.parametrize("name", ["csr", "csc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_compressed_matrices_wait_for_nothing(name: str, dtype: torch.dtype, sky: str) -> None:
    torch.manual_seed(0)
    here, dense, bias = (
        torch.randn(4, 5, dtype=dtype).relu(),
        torch.randn(5, 3, dtype=dtype),
        torch.ones(4, 3, dtype=dtype),
    )
    local = LAYOUTS[name](here)
    there, factor, more = LAYOUTS[name](here.to(sky)), dense.to(sky), bias.to(sky)
    for columns in (dense, dense.t().contiguous().t()):
        factor = columns.to(sky)
        before = torch.sky.stats()["round_trips"]
        found = [there @ factor, torch.addmm(more, there, factor), there.to_dense()]
        assert torch.sky.stats()["round_trips"] == before
        for a, b in zip(found, [local @ columns, torch.addmm(bias, local, columns), local.to_dense()], strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a.cpu(), b)


def test_making_a_compressed_tensor_runs_no_fake_kernel(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.eye(3).to(sky)
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: pytest.fail(call.info.name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(x.to_sparse_csr().values().cpu(), torch.ones(3))


def _transforms_beside_compressed(name: str, device: str) -> list[object]:
    """What function transforms say that meet or make a compressed tensor, which PyTorch refuses."""
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 3, 0], [0, 0, 0, 0], [4, 0, 0, 5]]).to(device)
    sparse = LAYOUTS[name](dense)
    attempts = (
        lambda: torch.func.vjp(lambda x: x * 2, sparse),
        lambda: torch.func.vjp(LAYOUTS[name], dense),
        lambda: torch.func.grad(lambda w: (sparse @ w).sum())(dense),
        lambda: torch.func.jvp(lambda x: x * 2, (sparse,), (sparse,)),
        lambda: sparse.stride(),
        lambda: sparse.is_contiguous(),
        lambda: sparse.is_contiguous(memory_format=torch.channels_last),
    )
    said: list[object] = []
    for attempt in attempts:
        try:
            said.append(str(attempt()))
        except (RuntimeError, NotImplementedError) as error:
            said.append((type(error).__name__, str(error)))
    return said


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "coo"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_compressed_tensors_have_no_strides_so_transforms_refuse_them(name: str, sky1: str) -> None:
    """PyTorch's C++ wraps them with their strides, and ended the process where it asked the wrapper for its layout."""
    assert _transforms_beside_compressed(name, sky1) == _transforms_beside_compressed(name, "cpu")


@pytest.mark.parametrize(
    ("size", "larger"), [((3, 1, 0), (3, 4, 0)), ((3, 1, 0), (2, 3, 1, 0)), ((0, 1), (0, 3))], ids=str
)
def test_a_sparse_tensor_of_nothing_is_repeated_along_its_other_dimensions(
    size: tuple[int, ...], larger: tuple[int, ...], sky: str
) -> None:
    entries = torch.zeros(2, 2 if size[0] else 0, dtype=torch.int64)
    values = torch.ones(entries.shape[1], *size[2:])
    local = torch.sparse_coo_tensor(entries, values, size, check_invariants=True)
    found, expected = (torch._sparse_broadcast_to(x, larger) for x in (local.to(sky), local))
    assert (found.shape, found.sparse_dim(), found._nnz()) == (expected.shape, expected.sparse_dim(), expected._nnz())
    assert torch.equal(found.to_dense().cpu(), expected.to_dense())
