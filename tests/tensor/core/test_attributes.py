"""The attributes of remote tensors and parameters: handing them on hands no values on."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skyproxy.tensor.core.attributes import Attributes


def take_each(q: Any, p: Any) -> None:
    for name, value in vars(p).items():
        setattr(q, name, value)


def take_by_name(q: Any, p: Any) -> None:
    for name in p.__dict__:
        q.__dict__[name] = p.__dict__[name]


def take_copy(q: Any, p: Any) -> None:
    q.__dict__ = p.__dict__.copy()


def take_copied(q: Any, p: Any) -> None:
    q.__dict__ = copy.copy(vars(p))


def take_itself(q: Any, p: Any) -> None:
    q.__dict__ = p.__dict__


def take_union(q: Any, p: Any) -> None:
    q.__dict__ = q.__dict__ | p.__dict__


def take_state(q: Any, p: Any) -> None:
    q.__dict__.update(pickle.loads(pickle.dumps(vars(p))))


WAYS: list[Callable[[Any, Any], None]] = [
    lambda q, p: q.__dict__.update(p.__dict__),
    lambda q, p: vars(q).update(**vars(p)),
    lambda q, p: vars(q).update(dict(vars(p))),
    lambda q, p: operator.ior(q.__dict__, p.__dict__),
    take_each,
    take_by_name,
    take_copy,
    take_copied,
    take_itself,
    take_union,
    take_state,
]


@pytest.mark.parametrize("hand_on", WAYS)
@pytest.mark.parametrize("make", [torch.clone, nn.Parameter, lambda t: t.view(2, 2), lambda t: t.requires_grad_() * 1])
def test_code_that_copies_attributes_copies_no_values(
    hand_on: Callable[[Any, Any], None], make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    found = []
    for device in ("cpu", "sky:0"):
        p, q = make(torch.arange(4.0, device=device)), make(torch.arange(4.0, 8.0, device=device))
        p.label, q.own = "photo", 1  # type: ignore[attr-defined]
        hand_on(q, p)
        with torch.no_grad():
            q.mul_(2)
        doubled = (q * 2).flatten().tolist()
        found.append((p.flatten().tolist(), q.flatten().tolist(), doubled, isinstance(q, nn.Parameter), dict(vars(q))))
    assert found[0] == found[1]


def test_a_tensor_shows_no_attributes_of_ours() -> None:
    tensor, parameter = torch.ones(2, device="sky:0"), nn.Parameter(torch.ones(2, device="sky:0"))
    for t in (tensor, parameter, tensor[0], tensor.max(0).values, torch.zeros(2, device="sky:0")):
        assert vars(t) == {}
        assert "_sky" not in dir(t)
        assert not list(vars(t))
        assert (t + 1).sum().item() > 0  # a tensor whose attributes were read computes


def test_the_rest_of_a_dict_works() -> None:
    x: Any = torch.ones(2, device="sky:0")
    x.label = "photo"
    x.kind = "cat"
    shown = vars(x)
    assert isinstance(shown, Attributes)
    assert {"a": 1} | shown == {"a": 1, "label": "photo", "kind": "cat"}
    assert list(reversed(shown)) == ["kind", "label"]
    assert shown.popitem() == ("kind", "cat")
    assert shown.popitem() == ("label", "photo")
    with pytest.raises(KeyError):
        shown.popitem()
    assert x.tolist() == [1, 1]


def test_swapped_tensors_have_each_others_values_and_attributes() -> None:
    a: Any = nn.Parameter(torch.zeros(2, device="sky:0"))
    b: Any = torch.ones(3, device="sky:0")
    a.label = "a"
    torch.utils.swap_tensors(a, b)
    assert (a.tolist(), vars(a), isinstance(a, nn.Parameter)) == ([1, 1, 1], {}, False)
    assert (b.tolist(), vars(b), isinstance(b, nn.Parameter)) == ([0, 0], {"label": "a"}, True)
