"""Rules for ops on lists: each held against PyTorch, and an optimizer's cost does not hang on how many parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skyproxy.tensor.dispatch import fake_tensors, inference
from skyproxy.tensor.shapes.lists import RULES
from tests.tensor.rule_checking import Case, answer_of, look, mismatch, overload, tensors

_LIST_OPS = sorted(name.removeprefix("aten::") for name in RULES if name.startswith("aten::_foreach_"))


def _layouts() -> list[torch.Tensor]:
    found = {look(t): t for t in tensors()}
    found |= {look(t): t for t in [t.clone() for t in found.values()]}
    return list(found.values())


def _companions(argument: Any, items: list[torch.Tensor]) -> Iterator[Any]:
    """Values for an argument after the first."""
    kind = str(argument.type)
    if kind == "List[Tensor]":
        yield [torch.ones_like(t) for t in items]
        yield [torch.ones(t.shape) for t in items]
        yield [t.double() for t in items]
        yield [torch.ones(()) for _ in items]
        yield items[:-1]
    elif kind == "List[number]":
        yield [0.5] * len(items)
        yield [2] * len(items)
        yield [1j] * len(items)
    elif kind == "Tensor":
        yield torch.ones(())
        yield torch.ones((), dtype=torch.float64)
        yield torch.ones(1)
    elif kind == "number":
        yield from (0.5, 2, True)
    else:
        yield argument.default_value


def _cases(name: str) -> Iterator[Case]:
    schema = overload(name)._schema
    rest = [argument for argument in schema.arguments[1:] if not argument.kwarg_only]
    if str(schema.arguments[0].type) != "List[Tensor]":
        return
    every = _layouts()
    lists = [every, *([t, t] for t in every[::3]), [every[0], every[1].bfloat16()], [t.long() for t in every[:3]], []]
    writes = name.partition(".")[0].endswith("_")
    for items in lists:
        for companions in itertools.product(*(list(_companions(argument, items)) for argument in rest)):
            fresh = [t.clone() if writes and 0 not in t.stride() else t for t in items]
            yield name, (fresh, *companions), {}


@pytest.mark.parametrize("name", _LIST_OPS)
def test_rule_for_lists_says_what_pytorch_does(name: str) -> None:
    answered, wrong = 0, []
    for _, args, kwargs in _cases(name):
        answered += answer_of(name, args, kwargs) is not None
        problem = mismatch(name, args, kwargs)
        if problem is not None:
            wrong.append(f"{name} {[[(tuple(t.shape), t.stride()) for t in args[0]]]}, {args[1:]}: {problem}"[:400])
    assert answered, "it answers no case"
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:5])


class _Fakes:
    """Counts the tensors that are made to infer a shape by PyTorch's fake tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        plain = fake_tensors.fake_tensor

        def counted(meta: Any) -> torch.Tensor:
            self.count += 1
            return plain(meta)

        monkeypatch.setattr(inference, "fake_tensor", counted)


_OPTIMIZERS = [
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"capturable": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"fused": True, "momentum": 0.9}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {}),
]


def _parameters(count: int, device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(2 + i % 3, 3).to(device)) for i in range(count)]


def _steps(name: str, options: dict[str, Any], parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    options = options if "fused" in options else {"foreach": True, **options}
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.5
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


@pytest.mark.parametrize(("name", "options"), _OPTIMIZERS, ids=lambda value: str(value))
def test_an_optimizer_infers_no_more_for_many_parameters_than_for_few(
    sky: str, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    fakes = _Fakes(monkeypatch)
    counts = []
    for number in (31, 187):
        before = fakes.count
        stepped = _steps(name, options, _parameters(number, sky))
        counts.append(fakes.count - before)
        if not options.get("capturable"):
            local = _steps(name, options, _parameters(number, "cpu"))
            assert all(map(torch.equal, stepped, local))
    assert counts[1] <= counts[0] <= 30


def test_ops_on_lists_of_unlike_tensors_infer_each_look_once(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = _Fakes(monkeypatch)
    local = [torch.full((2, 3), i, dtype=(torch.int32, torch.float64)[i % 2]) for i in range(50)]
    halves = torch._foreach_div([t.to(sky) for t in local], 2)
    assert fakes.count <= 2
    assert all(torch.equal(a.cpu(), b) for a, b in zip(halves, torch._foreach_div(local, 2), strict=True))


@pytest.mark.parametrize("exponent", [True, 2, [True, True, True], [2, 3, 2], [True, 1, 2.0], [3.0, True, 2]])
def test_powers_of_truth_values_have_the_dtypes_that_pytorch_gives_them(exponent: Any, sky: str) -> None:
    local = [torch.tensor([True, False])] * 3
    found = torch._foreach_pow([t.to(sky) for t in local], exponent)
    for power, expected in zip(found, torch._foreach_pow(local, exponent), strict=True):
        assert power.dtype is expected.dtype
        assert torch.equal(power.cpu(), expected)


def test_lists_of_different_lengths_are_refused_as_locally(sky: str) -> None:
    many = [torch.ones(2, device=sky) for _ in range(20)]
    with pytest.raises(RuntimeError, match="same number of tensors"):
        torch._foreach_add(many, many[:-1])
    with pytest.raises(RuntimeError, match="same number of tensors"):
        torch._foreach_add_(many, many[:-1])


def test_a_list_that_holds_one_tensor_of_another_size_is_refused_as_locally(sky: str) -> None:
    many = [torch.ones(2, device=sky) for _ in range(20)]
    others = [*many[:-1], torch.ones(3, device=sky)]
    with pytest.raises(RuntimeError, match="size"):
        torch._foreach_add_(many, others)


def test_gradients_flow_through_ops_on_long_lists(sky: str) -> None:
    local = [torch.full((2,), float(i), requires_grad=True) for i in range(20)]
    remote = [t.detach().to(sky).requires_grad_() for t in local]
    for items in (local, remote):
        torch.stack(torch._foreach_norm(torch._foreach_mul(items, 2.0))).sum().backward()
    for a, b in zip(remote, local, strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad.cpu(), b.grad)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x, out: torch.split_with_sizes_copy(x, [2, 2], out=out),
        lambda x, out: torch.split_copy(x, 2, out=out),
        lambda x, out: torch.unbind_copy(x.view(2, 2), out=out),
        lambda x, out: torch.ops.aten._foreach_add.Scalar_out([x[:2], x[2:]], 1.0, out=out),
    ],
)
def test_lists_that_are_filled_are_counted_as_changed(fill: Callable[..., object], sky1: str) -> None:
    for times in (1, 2):
        x, out = torch.arange(4.0, device=sky1), [torch.ones(2, device=sky1), torch.ones(2, device=sky1)]
        factor = torch.ones(2, device=sky1, requires_grad=True)
        product = factor * out[0]
        fill(x, out)
        assert [item._version for item in out] == [1, 1], times
        assert x._version == 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_maxima_of_a_list_have_a_rule(sky: str) -> None:
    items = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(2, 2).t()]
    found = RULES["aten::_foreach_max"]([look(a) for a in items])
    expected = torch._foreach_max(items)
    assert found == [[(look(a), None) for a in expected]]
    assert RULES["aten::_foreach_max"]([look(torch.ones(0))]) is None
    for a, b in zip(torch._foreach_max([a.to(sky) for a in items]), expected, strict=True):
        assert torch.equal(a.cpu(), b)
