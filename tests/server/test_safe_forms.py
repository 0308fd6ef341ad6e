"""Forms of ops that look at what PyTorch's kernels believe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy_server.safe_forms import SAFE_FORMS


@pytest.mark.parametrize("name", ["gather_backward", "_gather_sparse_backward"])
def test_sparse_gradients_of_what_was_gathered_have_indices_inside_its_sizes(name: str) -> None:
    form = SAFE_FORMS[f"aten::{name}"]
    keywords: dict[str, Any] = {"sparse_grad": True} if name == "gather_backward" else {}
    index = torch.tensor([[0, 1 << 40, -7]])
    made = form(grad=torch.ones(1, 3), self=torch.ones(2, 3), dim=1, index=index, **keywords)
    assert made._indices().tolist() == [[0, 0, 0], [0, 2, 0]]
    right = {
        "grad": torch.rand(2, 2),
        "self": torch.rand(2, 3),
        "dim": -1,
        "index": torch.tensor([[0, 2], [1, 1]]),
        **keywords,
    }
    assert torch.equal(form(**right).to_dense(), getattr(torch.ops.aten, name)(**right).to_dense())
    with pytest.raises(RuntimeError, match="beyond the sizes"):
        form(grad=torch.ones(5, 3), self=torch.ones(2, 3), dim=1, index=index.expand(5, 3), **keywords)


@pytest.mark.parametrize(("given", "size"), [(5, 3), (9, 5), (3, 2), (6, 4)])
@pytest.mark.parametrize("dims", [[0], [1, 0]], ids=str)
def test_real_numbers_do_not_come_from_more_frequencies_than_their_kernel_has_room_for(
    dims: list[int], given: int, size: int
) -> None:
    frequencies = torch.ones(given, 3, 4, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match=f"{size} numbers come from"):
        SAFE_FORMS["aten::_fft_c2r"](frequencies, dims, 0, size)
    with pytest.raises(RuntimeError, match=f"{size} numbers come from"):
        SAFE_FORMS["aten::_fft_c2r.out"](frequencies, dims, 0, size, out=torch.empty(size, 3, 4))


@pytest.mark.parametrize("size", [8, 9])
def test_real_numbers_come_from_the_frequencies_of_an_fft(size: int) -> None:
    numbers = torch.rand(size, 3)
    frequencies = torch.ops.aten._fft_r2c(numbers, [0], 0, True)
    made = SAFE_FORMS["aten::_fft_c2r"](frequencies, [0], 2, size)
    torch.testing.assert_close(made, numbers)
