"""Linear layers in training: one node of the graph, whose gradients are PyTorch's to the last bit."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

LAYOUTS = {
    "plain": lambda t: t,
    "turned": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
}


def _put(t: torch.Tensor, device: str) -> torch.Tensor:
    if 0 in t.stride():
        return t[:1].contiguous().to(device).expand(t.shape)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def _layer(device: str, *shape: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    values = torch.randn(shape), torch.randn(7, shape[-1]), torch.randn(7)
    return [value.to(device).requires_grad_() for value in values]


def _equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        if expected is None:
            assert mine is None
            continue
        assert mine.stride() == expected.stride()
        assert torch.equal(mine.detach().cpu(), expected.detach()), (mine, expected)


@pytest.mark.parametrize("shape", [(6, 5), (1, 5), (2, 3, 5), (1, 1, 5), (2, 2, 3, 5), (3, 1)])
def test_results_and_gradients_are_the_cpus_in_every_layout(shape: tuple[int, ...], sky1: str) -> None:
    torch.manual_seed(0)
    for x_layout in LAYOUTS.values():
        for weight_layout in LAYOUTS.values():
            x, weight = (x_layout(torch.randn(shape)), weight_layout(torch.randn(4, shape[-1])))
            for bias in (torch.randn(4), None):
                found: list[list[torch.Tensor]] = []
                for device in ("cpu", sky1):
                    leaves = [_put(t, device).requires_grad_() for t in (x, weight)]
                    b = None if bias is None else bias.to(device).requires_grad_()
                    found.append([])
                    for layout in (LAYOUTS["plain"], *LAYOUTS.values(), lambda t: t[:1].expand(t.shape)):
                        y = F.linear(*leaves, b)
                        gradient = _put(layout(y.detach().cpu()), device)
                        found[-1] += [y, *torch.autograd.grad(y, leaves if b is None else [*leaves, b], gradient)]
                _equal(*reversed(found))


def test_a_layer_is_one_operation_and_one_node_where_input_and_weight_are_differentiated(sky1: str) -> None:
    x, weight, bias = _layer(sky1, 2, 3, 5)
    for _ in range(3):  # how gradients are made is known then
        F.linear(x, weight, bias).sum().backward()
    before = torch.sky.stats()["ops"]
    y = F.linear(x[0], weight, bias)
    assert torch.sky.stats()["ops"] == before + 2  # one is for what is taken of the batch
    assert type(y.grad_fn).__name__ == "LinearBackward0"
    is_view = F.linear(*_layer("cpu", 2, 3, 5))._is_view()  # where its last part is, which is so up to torch 2.14
    before = torch.sky.stats()["ops"]
    y = F.linear(x, weight, bias)
    assert torch.sky.stats()["ops"] == before + 1 + is_view
    assert y._is_view() == is_view
    if is_view:
        assert y._base is not None
        y = y._base
    assert y.grad_fn is not None
    assert [node and type(node).__name__ for node, _ in y.grad_fn.next_functions] == ["AccumulateGrad"] * 3
    # What keeps less for backward if divided is divided, as are those that keep a copy without gaps.
    for parts in ((x.detach(), weight, bias), (x, weight.detach(), bias), (x.transpose(0, 1), weight, bias)):
        assert type(F.linear(*parts).grad_fn).__name__ != "LinearBackward0"


def test_gradients_of_gradients_are_the_cpus(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        leaves = _layer(device, 2, 3, 5)
        first = torch.autograd.grad(F.linear(*leaves).pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
        found.append([*first, *second])
    for mine, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine.cpu(), expected)
    _equal(found[1][:3], found[0][:3])


def test_batches_of_gradients_are_taken_at_once_without_a_warning(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        leaves = _layer(device, 2, 3, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(torch.autograd.functional.jacobian(F.linear, tuple(leaves), vectorize=True))
    for mine, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine.cpu(), expected)


def test_tangents_flow_through_layers_and_their_gradients(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        x, weight, bias = _layer(device, 2, 3, 5)
        y = F.linear(x, weight, bias)
        with forward_ad.dual_level():
            forward = F.linear(forward_ad.make_dual(x, torch.ones_like(x)), weight, bias)
            gradient = forward_ad.make_dual(torch.ones_like(y), torch.full_like(y, 2.0))
            backward = torch.autograd.grad(y, (x, weight, bias), gradient)
            found.append([forward_ad.unpack_dual(t).tangent for t in (forward, *backward)])
    _equal(*reversed(found))


def test_modes_see_the_parts(sky1: str) -> None:
    counts = []
    for device in ("cpu", sky1):
        x, weight, bias = _layer(device, 2, 3, 5)
        with FlopCounterMode(display=False) as counter:
            F.linear(x, weight, bias).sum().backward()
        y = F.linear(x, weight, bias).sum()
        with FlopCounterMode(display=False) as backward:
            y.backward()
        counts.append((counter.get_total_flops(), backward.get_total_flops()))
    assert counts[0] == counts[1]


def test_autocast_around_backward_casts_its_products(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        x, weight, bias = _layer(device, 2, 3, 5)
        y = F.linear(x, weight, bias)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            found.append(torch.autograd.grad(y.sum(), (x, weight, bias)))
    _equal(*reversed(found))


def test_a_change_in_place_is_an_error_in_backward(sky1: str) -> None:
    for changed in (0, 1):
        leaves = _layer(sky1, 2, 3, 5)
        y = F.linear(*leaves)
        with torch.no_grad():
            leaves[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_graph_is_walked_once_unless_it_is_retained(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        leaves = _layer(device, 2, 3, 5)
        y = F.linear(*leaves).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        found.append([leaf.grad for leaf in leaves])
    _equal(*reversed(found))


def test_checkpoints_and_hooks_of_saved_tensors_give_the_same(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        leaves = _layer(device, 2, 3, 5)
        hooked: list[torch.Tensor] = []
        y = checkpoint(lambda *t: F.linear(*t).relu(), *leaves, use_reentrant=False)
        y.register_hook(hooked.append)
        with torch.autograd.graph.save_on_cpu():
            z = F.linear(y, torch.ones(2, 7, device=device, requires_grad=True))
        with torch.autograd.detect_anomaly(check_nan=True):
            z.square().sum().backward()
        found.append([*(t.grad for t in leaves), *hooked])
    _equal(*reversed(found))


def _train(leaves: list[torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        F.linear(*leaves).sum().backward()


def test_noted_gradients_are_recorded_with_the_line_of_each_call(sky1: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = _layer(sky1, 2, 3, 5)
    recorder, codes = leaves[0]._sky.device.recorder, []  # type: ignore[attr-defined]
    _train(leaves, 3)
    loss, record = F.linear(*leaves).sum(), recorder.emit_line

    def note(lines: Any) -> None:
        codes.extend(lines[::2])
        record(lines)

    monkeypatch.setattr(recorder, "emit_line", note)
    loss.backward()
    assert set(codes) == {test_noted_gradients_are_recorded_with_the_line_of_each_call.__code__}


class _Siamese(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=bias) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = (layer(x) for layer in self.layers)
        return x + torch.tanh(a) * b + torch.sigmoid(c)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight).tanh(), self.weight.t()).sigmoid()


class _Unrolled(nn.Module):
    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = cell(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(x, h)
        return h


REUSED: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "two layers": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), [(5, 6), (2, 4, 6)]),
    "one input": (lambda: _Siamese(bias=True), [(5, 6), (2, 4, 6)]),
    "one input, no bias": (lambda: _Siamese(bias=False), [(5, 6), (2, 4, 6)]),
    "tied": (_Tied, [(5, 6), (2, 4, 6)]),
    "a cell": (lambda: _Unrolled(nn.GRUCell), [(5, 6)]),
    "recurrent": (lambda: nn.RNN(6, 6, batch_first=True), [(2, 4, 6)]),
}


@pytest.mark.parametrize("name", REUSED)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_gradients_of_gradients_are_summed_in_the_cpus_order_where_a_layer_is_used_again(
    name: str, order: int, calls: int, sky: str
) -> None:
    make, shapes = REUSED[name]
    for shape in shapes:
        found = []
        for device in ("cpu", sky):
            torch.manual_seed(0)
            model = make().double().to(device)
            inputs = [torch.randn(shape, dtype=torch.float64).to(device).requires_grad_() for _ in range(calls)]
            loss = torch.zeros((), dtype=torch.float64, device=device)
            for i, x in enumerate(inputs):
                y = model(x)
                y = slope = y[0] if isinstance(y, tuple) else y
                # The last of several has no gradient in the loss, as the boundary conditions of an equation have none.
                if i + 1 < calls or calls == 1:
                    for _ in range(order):
                        (slope,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
                    loss = loss + slope.square().mean()
                loss = loss + y.square().mean()
            loss.backward()
            found.append([leaf.grad for leaf in (*inputs, *model.parameters())])
        _equal(*reversed(found))


class _Unmoved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


_unmoved: Any = _Unmoved.apply


def test_a_gradient_of_a_gradient_that_is_none_leaves_the_layers_own(sky: str) -> None:
    found = []
    for device in ("cpu", sky):
        x, weight, bias = _layer(device, 2, 3, 5)
        y = F.linear(x, weight, bias).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (_unmoved(slope).sum() + y.sum()).backward()
        found.append([x.grad, weight.grad, bias.grad])
    _equal(*reversed(found))


def test_a_layer_whose_gradients_have_gradients_leaves_nothing_behind(sky: str) -> None:
    x, weight, bias = _layer(sky, 2, 3, 5)
    gone = []
    gc.disable()
    try:
        for _ in range(2):
            y = F.linear(x, weight, bias).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            gone += [weakref.ref(y), weakref.ref(slope)]
            (slope.sum() + y.sum()).backward()
            before = torch.sky.memory_allocated()
            del y, slope
            assert torch.sky.memory_allocated() < before
    finally:
        gc.enable()
    assert [ref() for ref in gone] == [None] * 4
