"""Kernels run on wrappers of remote tensors, too: compiled programs change the sizes and strides of one in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo

_TURNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze_": lambda x: x.clone().squeeze_(),
    "squeeze_, a dimension": lambda x: x.clone().squeeze_(1),
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0),
    "transpose_": lambda x: x.clone().transpose_(0, 2),
    "t_": lambda x: x[:, 0].clone().t_(),
    "swapaxes_": lambda x: x.clone().swapaxes_(0, 2),
    "as_strided_": lambda x: x.clone().as_strided_((2, 3), (1, 2)),
    "a vector times a matrix": lambda x: x[:, 0, 0] @ x[:, 0],  # PyTorch squeezes the product in place
    "windows that are summed": lambda x: torch.istft(torch.complex(x, x).expand(2, 3, 3), 4, 1, window=x.new_ones(4)),
}


@pytest.mark.parametrize("backend", ["sky", "aot_eager"])
@pytest.mark.parametrize("turn", _TURNED.values(), ids=_TURNED)
def test_what_turns_a_tensor_in_place_is_compiled(
    sky: str, turn: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    x = torch.arange(6.0).view(2, 1, 3)
    torch._dynamo.reset()
    options = {"worker": "eager"} if backend == "sky" else None
    got, want = torch.compile(turn, backend=backend, options=options, fullgraph=True)(x.to(sky)), turn(x)
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu(), want)
