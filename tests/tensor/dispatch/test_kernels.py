"""Kernels run on wrappers of remote tensors, too: compiled programs change the sizes and strides of one in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

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


class Wrapper(torch.Tensor):
    """A tensor that holds another one, and whose views share its storage, as PyTorch's own test of composites does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        """Wrap `inner`, and look like it."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            dtype=inner.dtype,
            device=inner.device,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on what is wrapped, and see what it makes of the wrappers where it makes views."""
        kwargs = kwargs or {}
        bare = tree_map(lambda a: a.inner if isinstance(a, Wrapper) else a, (args, kwargs))
        results = tree_map(lambda r: Wrapper(r) if isinstance(r, torch.Tensor) else r, func(*bare[0], **bare[1]))
        if func.is_view:
            with no_dispatch():
                for result, alias in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                    result.set_(alias)
        return results


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(6, 4),
    "t": torch.Tensor.t,
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1), 2),
    "chunk": lambda x: x.chunk(2)[1],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[2],
    "diagonal": torch.Tensor.diagonal,
    "unfold": lambda x: x.unfold(1, 2, 2),
    "another dtype": lambda x: x.view(torch.int32),
    "unbind": lambda x: x.unbind(1)[3],
    "expand": lambda x: x[:, :1].expand(4, 7),
    "detach": torch.Tensor.detach,
}


@pytest.mark.parametrize("view", _VIEWS.values(), ids=_VIEWS)
def test_a_view_of_a_wrapper_whose_dispatch_is_off_has_its_storage(
    sky: str, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.arange(24.0).view(4, 6)
    got_of, want_of = Wrapper(x.to(sky)), Wrapper(x)
    got, want = view(got_of), view(want_of)
    assert isinstance(got, Wrapper)
    assert isinstance(want, Wrapper)
    assert got.device.type == "sky"
    assert (got.shape, got.stride(), got.storage_offset()) == (want.shape, want.stride(), want.storage_offset())
    assert got.untyped_storage()._cdata == got_of.untyped_storage()._cdata
    assert torch.equal(got.inner.cpu(), want.inner)


def test_what_computes_on_a_wrapper_whose_dispatch_is_off_is_refused(sky: str) -> None:
    x = Wrapper(torch.ones(2, device=sky))
    with no_dispatch(), pytest.raises(NotImplementedError, match="Wrapper on the device sky"):
        x.mul(2)


@pytest.mark.parametrize("wrapped", [0, 1, 2])
def test_the_dispatch_of_a_class_is_asked_where_one_operation_has_a_handler(wrapped: int, sky: str) -> None:
    """As where an operation is recorded as it stands: whether it has a handler of ours is nothing a class knows."""
    torch.manual_seed(0)
    values = [torch.randn(3, 4), torch.randn(3, 5), torch.randn(2, 4, 5)]
    there = [v.to(sky) for v in values]
    there[wrapped] = Wrapper(there[wrapped])
    result = torch.nn.functional.bilinear(*there)
    assert type(result) is Wrapper
    assert torch.equal(result.inner.cpu(), torch.nn.functional.bilinear(*values))


@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_a_gradient_of_another_class_is_written_into_nothing(name: str, sky: str) -> None:
    x = torch.tensor([1.0, 3.0, 3.0, 2.0], device=sky, requires_grad=True)
    (gradient,) = torch.autograd.grad(getattr(x, name)(), x, Wrapper(torch.tensor(6.0, device=sky)))
    assert type(gradient) is Wrapper
    places = x.detach() == getattr(x.detach(), name)()
    assert torch.equal(gradient.inner, places * 6.0 / places.sum())
