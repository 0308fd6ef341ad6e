"""What arrives undivided in inference mode, and tensors that were made there, behave as they do on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshape": lambda x: x.reshape(2, 2),
    "swapaxes": lambda x: x.view(2, 2).swapaxes(0, 1),
    "expand_as": lambda x: x.expand_as(x),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "ravel": lambda x: x.ravel(),
    "movedim": lambda x: x.view(2, 2).movedim(0, 1),
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "narrow": lambda x: x.narrow(0, 0, 2),
    "chunk": lambda x: x.chunk(2)[1],
    "matrix transpose": lambda x: x.view(2, 2).mT,
}
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_diagonal_": lambda x: x.view(2, 2).fill_diagonal_(1),
    "|=": lambda x: x.to(torch.bool).__ior__(x.to(torch.bool)),
    "swapdims_": lambda x: x.swapdims_(0, 0),
    "divide_": lambda x: x.divide_(2),
    "foreach": lambda x: torch._foreach_maximum_([torch.zeros_like(x), x], [2.0, 0.5]),
    "foreach of one": lambda x: torch._foreach_add_([x], 2),
    "foreach zero": lambda x: torch._foreach_zero_([x]),
    "fill_": lambda x: x.fill_(1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_is_taken_in_inference_mode_knows_its_base(name: str, sky1: str) -> None:
    """What is a leaf's view in that mode stays one of a tensor that requires gradients."""
    for requires_grad in (False, True):
        x = torch.arange(4.0, device=sky1).requires_grad_(requires_grad)
        with torch.inference_mode():
            view = VIEWS[name](x)
        assert view._base is x
        assert not view.is_inference()
        assert view.requires_grad is requires_grad
        view.detach().add_(1)
        assert view._version == x._version == 1


def test_changing_such_a_view_where_gradients_are_recorded_is_refused(sky1: str) -> None:
    weight = torch.ones(4, device=sky1, requires_grad=True)
    with torch.inference_mode():
        view = weight.reshape(2, 2)
    with pytest.raises(RuntimeError, match="inference_mode"):
        view.mul_(2)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_inference_mode_is_counted(name: str, sky1: str) -> None:
    counts = []
    for device in ("cpu", sky1):
        x = torch.ones(4, device=device)
        with torch.inference_mode():
            CHANGES[name](x)
        counts.append(x._version)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_of_inference_is_not_changed_elsewhere(name: str, sky1: str) -> None:
    with torch.inference_mode():
        x = torch.ones(4, device=sky1)
        flags = torch.ones(4, dtype=torch.bool, device=sky1)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        flags.__ior__(flags) if name == "|=" else CHANGES[name](x)
    assert x.tolist() == [1, 1, 1, 1] or name in ("fill_diagonal_", "divide_")


def test_lists_are_changed_in_inference_mode(sky1: str) -> None:
    with torch.inference_mode():
        x = torch.ones(2, device=sky1)
        torch._foreach_mul_([x], 3)
    assert x.tolist() == [3, 3]


@pytest.mark.parametrize("transform", ["jvp", "linearize", "jacfwd"])
def test_tangents_are_taken_in_inference_mode(transform: str, sky1: str) -> None:
    """Where autograd does not see the primal and its tangent, and PyTorch asks the device for what they share."""
    found = []
    for device in ("cpu", sky1):
        x = torch.arange(3.0, device=device)
        with torch.inference_mode():
            if transform == "jvp":
                results = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
            elif transform == "linearize":
                value, forward = torch.func.linearize(torch.sin, x)
                results = value, forward(torch.ones_like(x))
            else:
                try:
                    results = (torch.func.jacfwd(torch.sin)(x),)
                except RuntimeError as error:  # PyTorch 2.11 cannot, on any device
                    if device == "cpu":
                        pytest.skip(str(error))
                    raise
        found.append([r.cpu() for r in results])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
