"""Remote tensors of the user's own classes behave as those of the CPU do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import skyproxy  # noqa: F401  (registers the device)


class Counted(torch.Tensor):
    """A class with a `__torch_function__` that hands on an attribute, as those of fastai and torchvision do."""

    calls = 0
    label = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert cls is Counted
        assert all(issubclass(cls, kind) for kind in types)
        Counted.calls += 1
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Counted) and args and isinstance(args[0], Counted):
            result.label = args[0].label
        return result

    def shout(self) -> str:
        return self.label.upper()


class Bare(torch.Tensor):
    pass


def make(cls: type[Any], device: str) -> Any:
    return torch.arange(4.0).to(device).as_subclass(cls)


def described(value: Any) -> Any:
    """The class and the numbers of every tensor in a result."""
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    kind = next(c.__name__ for c in (Counted, Bare, torch.nn.Parameter, torch.Tensor) if isinstance(value, c))
    return kind, value.requires_grad, value.detach().cpu().tolist()


def trained(cls: type[Any], device: str) -> Any:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(3).as_subclass(cls))
    module.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (module.weight**2).sum().backward()
        optimizer.step()
    return module.weight, module.weight.grad is not None, module.state_dict()["weight"]


def loaded(cls: type[Any], device: str) -> Any:
    file = io.BytesIO()
    torch.save(make(cls, device), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASES: dict[str, Callable[[type[Any], str], Any]] = {
    "arithmetic": lambda cls, d: make(cls, d) * 2 + 1,
    "mixed with a plain tensor": lambda cls, d: torch.ones(4, device=d) + make(cls, d),
    "reduction": lambda cls, d: make(cls, d).sum(),
    "view": lambda cls, d: make(cls, d).view(2, 2)[1],
    "several results": lambda cls, d: tuple(make(cls, d).sort(descending=True)),
    "list": lambda cls, d: torch.cat([make(cls, d), torch.ones(1, device=d)]),
    "unbind": lambda cls, d: list(make(cls, d).unbind()),
    "foreach": lambda cls, d: list(torch._foreach_add([make(cls, d), make(cls, d)], 1.0)),
    "in place": lambda cls, d: make(cls, d).add_(1),
    "resize in place": lambda cls, d: make(cls, d).unsqueeze_(0),
    "out": lambda cls, d: torch.add(make(cls, d), 1, out=make(cls, d)),
    "index": lambda cls, d: make(cls, d)[make(cls, d) > 1],
    "value": lambda cls, d: make(cls, d)[2].item(),
    "numbers": lambda cls, d: make(cls, d).tolist(),
    "attention": lambda cls, d: functional.scaled_dot_product_attention(*[make(cls, d).view(1, 1, 2, 2)] * 3),
    "linear": lambda cls, d: functional.linear(make(cls, d).view(2, 2), torch.eye(2, device=d)),
    "softmax": lambda cls, d: functional.softmax(make(cls, d), 0),
    "make_subclass": lambda cls, d: torch.Tensor._make_subclass(cls, torch.ones(2, device=d), True),
    "parameter": lambda cls, d: torch.nn.Parameter(make(cls, d)),
    "new": lambda cls, d: make(cls, d).new_zeros(2),
    "to the device": lambda cls, d: torch.arange(3.0).as_subclass(cls).to(d),
    "to the CPU": lambda cls, d: make(cls, d).cpu(),
    "to another dtype": lambda cls, d: make(cls, d).half(),
    "clone and detach": lambda cls, d: make(cls, d).clone().detach(),
    "back to a tensor": lambda cls, d: make(cls, d).as_subclass(torch.Tensor),
    "pickle": lambda cls, d: pickle.loads(pickle.dumps(make(cls, d))),
    "save and load": loaded,
    "deepcopy of a parameter": lambda cls, d: copy.deepcopy(torch.nn.Parameter(make(cls, d).as_subclass(cls))),
    "training": trained,
    "inference mode": lambda cls, d: torch.inference_mode()(
        lambda: make(cls, d).view(2, 2) @ make(cls, d).view(2, 2)
    )(),
}


@pytest.mark.parametrize("cls", [Counted, Bare])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_what_it_gives_on_the_cpu(name: str, cls: type[Any], sky1: str) -> None:
    if name == "deepcopy of a parameter":  # PyTorch wants a `new_empty` of such classes; on sky it works without
        assert described(CASES[name](cls, sky1)) == (cls.__name__, True, [0, 1, 2, 3])
        return
    assert described(CASES[name](cls, sky1)) == described(CASES[name](cls, "cpu"))


def test_a_subclass_keeps_its_methods_and_attributes(sky1: str) -> None:
    x = make(Counted, sky1)
    x.label = "mask"
    before = Counted.calls
    assert (x + 1).shout() == x.view(2, 2).shout() == "MASK"
    assert Counted.calls > before
    assert copy.deepcopy(x).shout() == pickle.loads(pickle.dumps(x)).shout() == "MASK"
    assert repr(make(Bare, sky1)) == "Bare([0., 1., 2., 3.], device='sky:1')"


def test_a_subclass_shares_memory_and_history_with_its_tensor(sky1: str) -> None:
    x = torch.ones(3, device=sky1, requires_grad=True)
    y = x.as_subclass(Counted)
    assert y.data_ptr() == x.data_ptr()
    (y * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]
    with torch.no_grad():
        y.add_(1)
    assert x.tolist() == [2, 2, 2]


def test_what_make_subclass_gives_is_a_leaf_that_can_be_changed(sky1: str) -> None:
    x = torch.Tensor._make_subclass(Bare, torch.ones(3, device=sky1), True)
    assert not x._is_view()
    x.detach().add_(1)
    assert x.is_leaf
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4, 4]


def test_a_class_that_handles_operations_itself_is_refused(sky1: str) -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match="cannot be a Own, which has its own __torch_dispatch__"):
        torch.ones(1, device=sky1).as_subclass(Own)


def test_data_of_another_class_leaves_the_class(sky1: str) -> None:
    x, plain = torch.ones(3, device=sky1).as_subclass(Counted), torch.zeros(2, device=sky1)
    x.data, plain.data = plain, x.detach()
    assert isinstance(x, Counted)
    assert not isinstance(plain, Counted)
    assert x.as_subclass(torch.Tensor).tolist() == [0, 0]
    assert plain.tolist() == [1, 1, 1]
