"""Nested tensors, strided and jagged: values, layouts and gradients to the last bit of local PyTorch's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import skyproxy  # noqa: F401  (registers the device)
from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.core.devices import DEVICES

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::UserWarning")
LAYOUTS = [torch.strided, torch.jagged]
Compute = Callable[[torch.Tensor, str], Any]


def make(layout: torch.layout, place: str, *, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 8, generator=generator).to(place) for n in (2, 5, 3)]
    return torch.nested.nested_tensor(rows, layout=layout, device=place, requires_grad=requires_grad)


def weight(place: str, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(place)


def heads(x: torch.Tensor) -> torch.Tensor:
    """(N, *, 8) to two heads: (N, 2, *, 4)."""
    parts = x.view(x.size(0), -1, 2, 4) if x.layout is torch.strided else x.unflatten(-1, (2, 4))
    return parts.transpose(1, 2)


def attended(x: torch.Tensor) -> torch.Tensor:
    if x.layout is torch.strided:
        contiguous = heads(x).contiguous()
        return F.scaled_dot_product_attention(contiguous, contiguous, contiguous)
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x))


def module(made: torch.nn.Module, x: torch.Tensor, place: str) -> torch.Tensor:
    """A module whose weights are those of no generator."""
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    result: torch.Tensor = made.to(place)(x)
    return result


def saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=False)
    return loaded


CASES: dict[str, Compute] = {
    "made": lambda x, p: x,
    "unbind": lambda x, p: list(x.unbind()),
    "padded": lambda x, p: x.to_padded_tensor(0.0),
    "padded further": lambda x, p: torch.nested.to_padded_tensor(x, 1.0, (3, 6, 8)),
    "one component": lambda x, p: x[1],
    "linear": lambda x, p: F.linear(x, weight(p, 6, 8), weight(p, 6)),
    "linear without bias": lambda x, p: F.linear(x, weight(p, 6, 8)),
    "nn.Linear": lambda x, p: module(torch.nn.Linear(8, 4), x, p),
    "nn.LayerNorm": lambda x, p: module(torch.nn.LayerNorm(8), x, p),
    "matmul": lambda x, p: x @ x.transpose(-1, -2) if x.layout is torch.strided else x @ weight(p, 8, 4),
    "transposed and back": lambda x, p: x.transpose(1, 2).transpose(1, 2),
    "transposed and contiguous": lambda x, p: x.transpose(1, 2).contiguous().transpose(1, 2),
    "softmax": lambda x, p: x.softmax(-1),
    "relu": lambda x, p: x.relu(),
    "gelu": lambda x, p: F.gelu(x),
    "silu": lambda x, p: F.silu(x),
    "tanh": lambda x, p: x.tanh(),
    "neg": lambda x, p: -x,
    "twice the same": lambda x, p: x + x,
    "product with itself": lambda x, p: x * x,
    "numbers": lambda x, p: (x * 2.5 - 1) / 3,
    "dropout in evaluation": lambda x, p: F.dropout(x, 0.5, training=False),
    "heads": lambda x, p: heads(x),
    "attention": lambda x, p: attended(x),
    "attention and back": lambda x, p: attended(x).transpose(1, 2).contiguous(),
    "sum": lambda x, p: x.sum(-1, keepdim=True),
    "clone": lambda x, p: x.clone(),
    "detach": lambda x, p: x.detach() * 2,
    "values": lambda x, p: x.values(),
    "masked_fill": lambda x, p: x.masked_fill(x > 0, 0.0) if x.layout is torch.strided else x.relu(),
    "in place": lambda x, p: x.detach().clone().mul_(2).add_(1).relu_(),
    "copy_": lambda x, p: (x.detach() * 0).copy_(x.detach()),
    "another dtype": lambda x, p: x.double(),
    "there and back": lambda x, p: x.cpu().to(p),
    "to the CPU": lambda x, p: x.cpu(),
    "made again": lambda x, p: torch.nested.as_nested_tensor(list(x.unbind()), layout=x.layout),
    "of the other layout": lambda x, p: torch.nested.as_nested_tensor(
        list(x.unbind()), layout=torch.jagged if x.layout is torch.strided else torch.strided
    ),
    "of tensors of the CPU": lambda x, p: torch.nested.nested_tensor(
        [torch.tensor([1, 2]), torch.tensor([3])], device=p, layout=x.layout
    ),
    "of numbers": lambda x, p: torch.nested.nested_tensor([[1.0, 2.0], [3.0]], device=p, layout=x.layout),
    "saved and loaded": lambda x, p: saved(x),
    "in inference mode": lambda x, p: torch.inference_mode()(lambda: F.linear(make(x.layout, p), weight(p, 6, 8)))(),
    "what it is": lambda x, p: [x.is_nested, x.layout, x.dim(), x.numel(), x.size(0), x.size(-1), x.is_contiguous()],
    "whether it is pinned": lambda x, p: [x.is_pinned()],
    "what a view is": lambda x, p: [x.transpose(1, 2).is_contiguous(), x.transpose(1, 2).size(1)],
}


WITHOUT_DERIVATIVE = {("tanh", torch.strided), ("sum", torch.jagged)}
"""What PyTorch has no derivative for, on any device."""


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [(value.dtype, value.layout, value.requires_grad), *flat(list(value.unbind()))]
    return [value]


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            assert torch.equal(a.detach().cpu(), b.detach())
        else:
            assert a == b


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_what_it_gives_on_the_cpu(name: str, layout: torch.layout, sky1: str) -> None:
    with torch.no_grad():
        assert_same(CASES[name](make(layout, sky1), sky1), CASES[name](make(layout, "cpu"), "cpu"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_cpu(name: str, layout: torch.layout, sky1: str) -> None:
    def run(place: str) -> list[Any]:
        x = make(layout, place, requires_grad=True)
        leaves = [leaf for leaf in flat([CASES[name](x, place)]) if isinstance(leaf, torch.Tensor)]
        roots = [leaf for leaf in leaves if leaf.requires_grad]
        if roots:
            torch.stack([root.square().sum().to(place) for root in roots]).sum().backward()
        return [x.grad, *roots]

    if (name, layout) in WITHOUT_DERIVATIVE:
        for place in ("cpu", sky1):
            with pytest.raises(NotImplementedError, match=r"tanh_backward|_nested_sum_backward"):
                run(place)
        return
    assert_same(run(sky1), run("cpu"))


CONVERSIONS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "cpu": lambda x, p: x.cpu(),
    "to the CPU": lambda x, p: x.to("cpu"),
    "to the CPU in another dtype": lambda x, p: x.to("cpu", torch.float64, non_blocking=True),
    "as a tensor of the CPU": lambda x, p: x.to(torch.ones(1, dtype=torch.float64)),
    "type_as": lambda x, p: x.type_as(torch.ones(1, dtype=torch.float16)),
    "from the CPU": lambda x, p: x.cpu().to(p),
    "to where it is": lambda x, p: x.to(p),
    "a copy": lambda x, p: x.to(p, copy=True),
    "another dtype": lambda x, p: x.to(torch.float64),
    "zeros_like": lambda x, p: torch.zeros_like(x, device="cpu"),
    "ones_like": lambda x, p: torch.ones_like(x, device="cpu", dtype=torch.float64),
    "randn_like": lambda x, p: torch.randn_like(x, device="cpu"),
    "detach_": lambda x, p: x.clone().detach_(),
}


@pytest.mark.parametrize("differentiated", [True, False])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_where_and_what_it_was_asked_to_be(name: str, differentiated: bool, sky1: str) -> None:
    stays = name in ("from the CPU", "to where it is", "a copy", "another dtype", "detach_")

    def compute(place: str) -> tuple[torch.Tensor, list[Any]]:
        torch.manual_seed(0)
        x = make(torch.strided, place, requires_grad=differentiated)
        made = CONVERSIONS[name](x, place)
        if made.requires_grad:
            torch.nested.to_padded_tensor(made * made, 0.0).sum().backward()
        return made, [stays and made is x, made.dtype, made.requires_grad, torch.numel(made), x.grad]

    (ours, told), (theirs, expected) = compute(sky1), compute("cpu")
    assert ours.device == torch.device(sky1 if stays else "cpu")
    if name != "from the CPU":
        assert_same([ours, *told[:-1]], [theirs, *expected[:-1]])
    if expected[-1] is not None:
        assert told[-1].device == torch.device(sky1)
        assert_same(told[-1], expected[-1])


def test_weights_of_layers_get_the_gradients_of_the_cpu(sky1: str) -> None:
    def step(place: str) -> list[Any]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).to(place)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            layers(make(torch.strided, place)).to_padded_tensor(0.0).square().sum().backward()
            optimizer.step()
        return [*layers.parameters(), *(parameter.grad for parameter in layers.parameters())]

    assert_same(step(sky1), step("cpu"))


def test_a_graph_is_differentiated_again_where_it_is_kept(sky1: str) -> None:
    x = make(torch.strided, sky1, requires_grad=True)
    loss = (x * x).to_padded_tensor(0.0).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert_same(list(first.unbind()), [t.cpu() for t in second.unbind()])
    loss.backward()
    (x * 1).to_padded_tensor(0.0).sum().backward()  # adds to what is there
    assert x.grad is not None
    assert_same(list(x.grad.unbind()), [2 * t.cpu() + 1 for t in x.detach().unbind()])


def test_components_share_the_memory_of_the_whole(sky1: str) -> None:
    x = make(torch.strided, sky1)
    x.unbind()[1].fill_(7)
    assert x.to_padded_tensor(0.0)[1].cpu().eq(7).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.shape,
        lambda x: x.size(1),
        lambda x: x.size(7),
        lambda x: x + make(torch.strided, x.device).transpose(1, 2),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: x == x,
        lambda x: x @ weight(str(x.device), 8, 8),
    ],
)
def test_what_the_cpu_refuses_is_refused_in_its_words(wrong: Callable[[Any], Any], sky1: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as theirs:
        wrong(make(torch.strided, "cpu"))
    with pytest.raises(type(theirs.value)) as ours:
        wrong(make(torch.strided, sky1))
    assert str(ours.value).startswith(str(theirs.value).splitlines()[0])
    assert (torch.ones(2, device=sky1) + 1).tolist() == [2, 2]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu_": lambda x: x.relu_(),
    "gelu_": lambda x: torch.ops.aten.gelu_(x),
    "silu_": lambda x: F.silu(x, inplace=True),
    "neg_": lambda x: x.neg_(),
    "abs_": lambda x: x.abs_(),
    "mul_": lambda x: x.mul_(2.5),
    "add_ of a number": lambda x: x.add_(1.0),
    "add_": lambda x: x.add_(x.detach() * 0.5),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(2.0),
    "copy_": lambda x: x.copy_(x.detach() * 3),
    "copy_ of what requires gradients": lambda x: x.detach().clone().requires_grad_().mul(1).copy_(x * 3),
    "one after the other": lambda x: x.mul_(3).add_(1.0).neg_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_has_the_gradients_of_the_cpu(name: str, sky1: str) -> None:
    def run(place: str) -> list[Any]:
        x = make(torch.strided, place, requires_grad=True)
        y = x * 1.5
        changed = CHANGES[name](y)
        assert changed is y or "copy_ of" in name
        (changed * 2).to_padded_tensor(0.0).square().sum().backward()
        assert x.grad is not None
        return [changed.requires_grad, list(changed.detach().unbind()), list(x.grad.unbind())]

    assert_same(run(sky1), run("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: (x.transpose(1, 2), x.relu_()), "shares its memory with a part"),
        (lambda x: x.transpose(1, 2).relu_(), "shares its memory with a part"),
        (lambda x: F.dropout(x, 0.5, inplace=True), "not changed in place by this operation"),
        (lambda x: x.copy_(x.detach().double()), "of its own dtype"),
    ],
)
def test_changing_what_requires_gradients_names_the_way_out(
    change: Callable[[Any], Any], message: str, sky1: str
) -> None:
    with pytest.raises(UnsupportedOpError, match=message):
        change(make(torch.strided, sky1, requires_grad=True) * 2)


def test_a_leaf_that_requires_gradients_is_not_changed(sky1: str) -> None:
    x = make(torch.strided, sky1, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.relu_()


def test_a_copy_and_a_text_of_a_nested_tensor(sky1: str) -> None:
    x = make(torch.strided, sky1, requires_grad=True)
    copied = copy.deepcopy(x)
    assert copied.requires_grad
    with torch.no_grad():
        assert_same(copied.unbind()[0], x.unbind()[0].cpu())
        copied.mul_(0)
    assert x.to_padded_tensor(0.0).any()
    assert repr(x).startswith("nested_tensor([\n  tensor([[")
    assert repr(x).endswith(f"], device='{sky1}', requires_grad=True)")


def test_a_graph_that_nobody_needs_is_released(sky1: str) -> None:
    session = DEVICES.at(1).session

    def held() -> int:
        torch.sky.synchronize(sky1)
        return int(session.call("stats")["handles"])

    x = make(torch.strided, sky1, requires_grad=True)
    held()
    before = held()
    for _ in range(3):
        (x * 2).to_padded_tensor(0.0).sum().backward()
        x.grad = None
    assert held() <= before + 1
