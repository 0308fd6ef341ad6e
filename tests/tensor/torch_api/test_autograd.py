"""Everything that PyTorch builds on gradients works on the device as on the CPU, on an index that is not zero."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.twins import tree_differences

Function = Callable[[torch.Tensor], torch.Tensor]


def _input(device: str, *shape: int) -> torch.Tensor:
    return torch.linspace(-1.5, 2.0, steps=torch.Size(shape).numel()).reshape(shape).to(device)


def _same_on_both(compute: Callable[[str], Any], device: str) -> None:
    assert tree_differences(compute(device), compute("cpu"), memory=False) == []


def _wave(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).sum()


TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": lambda x: torch.func.grad(_wave)(x),
    "grad of grad": lambda x: torch.func.grad(lambda y: torch.func.grad(_wave)(y).square().sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda row: (row * row.sum()).tanh())(x),
    "vmap of matmul": lambda x: torch.func.vmap(lambda row: x @ row)(x),
    "vmap in two": lambda x: torch.func.vmap(torch.func.vmap(torch.sin))(x),
    "per-sample gradients": lambda x: torch.func.vmap(torch.func.grad(_wave))(x),
    "jvp": lambda x: torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: torch.func.vjp(torch.tanh, x)[1](torch.ones_like(x)),
    "jacrev": lambda x: torch.func.jacrev(lambda y: y.softmax(-1))(x[0]),
    "jacrev of a number": lambda x: torch.func.jacrev(lambda y: torch.cdist(y, y + 1).sum())(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda y: y.softmax(-1))(x[0]),
    "hessian": lambda x: torch.func.hessian(_wave)(x[0]),
    "hvp": lambda x: torch.func.jvp(torch.func.grad(_wave), (x,), (torch.ones_like(x),)),
    "linearize": lambda x: torch.func.linearize(torch.tanh, x)[1](torch.ones_like(x)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str, sky1: str) -> None:
    _same_on_both(lambda device: TRANSFORMS[name](_input(device, 3, 4)), sky1)


def test_vmap_with_randomness_differs_between_samples(sky1: str) -> None:
    x = _input(sky1, 3, 400)
    dropped = torch.func.vmap(lambda row: torch.nn.functional.dropout(row, 0.5), randomness="different")(x)
    zeros = (dropped == 0).cpu()
    assert not torch.equal(zeros[0], zeros[1])


def test_functional_call_and_stacked_modules(sky1: str) -> None:
    def compute(device: str) -> torch.Tensor:
        torch.manual_seed(3)
        models = [torch.nn.Linear(4, 2) for _ in range(3)]
        models = [model.to(device) for model in models]
        parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
        run = torch.func.vmap(lambda p, b, x: torch.func.functional_call(models[0], (p, b), (x,)), in_dims=(0, 0, None))
        result: torch.Tensor = run(parameters, buffers, _input(device, 5, 4)).detach()
        return result

    _same_on_both(compute, sky1)


def test_forward_mode(sky1: str) -> None:
    def compute(device: str) -> Any:
        x = _input(device, 3, 4)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            result = (dual.sin() @ dual.t()).softmax(0)
            return tuple(part.clone() for part in forward_ad.unpack_dual(result))

    _same_on_both(compute, sky1)


@pytest.mark.parametrize("places", [("cpu", "sky"), ("sky", "cpu"), ("sky", "sky")])
@pytest.mark.parametrize("has_tangent", [False, True])
def test_forward_mode_through_copies_between_devices(places: tuple[str, str], has_tangent: bool, sky1: str) -> None:
    target_place, source_place = (sky1 if place == "sky" else place for place in places)
    with forward_ad.dual_level():
        source = forward_ad.make_dual(
            torch.arange(3.0, device=source_place), torch.full((3,), 2.0, device=source_place)
        )
        target = torch.zeros(2, 3, device=target_place)
        if has_tangent:
            target = forward_ad.make_dual(target, torch.ones(2, 3, device=target_place))
        target[0] = source
        target[1].copy_(source * 2)
        value, tangent = forward_ad.unpack_dual(target * target)
        assert value.device == tangent.device == torch.device(target_place)
        assert value.tolist() == [[0.0, 1.0, 4.0], [0.0, 4.0, 16.0]]
        assert tangent.tolist() == [[0.0, 4.0, 8.0], [0.0, 16.0, 32.0]]


def test_a_tangent_that_lies_otherwise_than_its_tensor(sky1: str) -> None:
    def compute(device: str) -> Any:
        with forward_ad.dual_level():
            x = torch.arange(24.0, device=device).view(2, 3, 4)[:, 1:].transpose(0, 1)
            tangent = torch.ones(2, 2, 4, device=device) * torch.arange(4.0, device=device)
            dual = forward_ad.make_dual(x, tangent)
            dual[0] = dual[1] * 2
            return tuple(forward_ad.unpack_dual(dual * dual))

    _same_on_both(compute, sky1)
    _same_on_both(
        lambda d: torch.func.vmap(
            lambda t: torch.func.jvp(lambda x: x.t().clone().mul_(x.t()), (_input(d, 3, 4).t(),), (t.t(),))
        )(_input(d, 2, 3, 4)),
        sky1,
    )


_REPLACED: dict[str, Callable[[torch.nn.Parameter, str], Any]] = {
    "of the same size": lambda p, d: p.set_(torch.full((3,), 5.0, device=d)),
    "of another size": lambda p, d: p.set_(torch.full((2, 2), 5.0, device=d)),
    "a place in a storage": lambda p, d: p.set_(torch.arange(12.0, device=d).untyped_storage(), 6, (2, 3)),
    "without its graph": lambda p, d: p.detach().set_(torch.full((2,), 5.0, device=d)),
}


@pytest.mark.parametrize("replace", _REPLACED.values(), ids=_REPLACED)
@pytest.mark.parametrize("used_before", [False, True])
def test_a_parameter_on_another_storage_gets_its_gradient(
    replace: Callable[..., Any], used_before: bool, sky1: str
) -> None:
    def compute(device: str) -> Any:
        p, seen = torch.nn.Parameter(torch.ones(3, device=device)), []
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone()))
        if used_before:
            (p * 3).sum().backward()
            p.grad = None
        with torch.no_grad():
            replace(p, device)
        (p * p).sum().backward()
        return p.detach(), p.grad, seen, p._version

    _same_on_both(compute, sky1)


def test_a_parameter_on_another_storage_before_backward_is_noticed(sky1: str) -> None:
    p = torch.nn.Parameter(torch.ones(3, device=sky1))
    product = (p * p).sum()
    with torch.no_grad():
        p.set_(torch.full((3,), 5.0, device=sky1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_forward_over_reverse(sky1: str) -> None:
    def compute(device: str) -> torch.Tensor:
        x = _input(device, 3, 4).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            (slope,) = torch.autograd.grad(_wave(dual), dual, create_graph=True)
            return forward_ad.unpack_dual(slope).tangent.detach()

    _same_on_both(compute, sky1)


def test_double_backward(sky1: str) -> None:
    def compute(device: str) -> Any:
        x = _input(device, 3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(_wave(x), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach(), x.grad

    _same_on_both(compute, sky1)


def test_gradients_of_gradients_are_numerically_right(sky1: str) -> None:
    x = _input(sky1, 2, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: (y.sin() * y).cumsum(1), x)
    assert torch.autograd.gradgradcheck(lambda y: (y.sin() * y).cumsum(1), x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_computes_again_with_the_same_random_numbers(reentrant: bool, sky1: str) -> None:
    def compute(device: str) -> Any:
        torch.manual_seed(5)
        x = _input(device, 8, 8).requires_grad_()
        weight = _input(device, 8, 8).requires_grad_()

        def block(y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(y @ weight, 0.5).relu()

        result = checkpoint(block, x, use_reentrant=reentrant)
        result.sum().backward()
        return result.detach(), x.grad, weight.grad

    _same_on_both(compute, sky1)


def test_hooks_see_and_change_gradients(sky1: str) -> None:
    def compute(device: str) -> Any:
        seen = []
        x = _input(device, 4).requires_grad_()
        y = x * 3
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y.sum().backward()
        return x.grad, y.grad, seen

    _same_on_both(compute, sky1)


def test_module_hooks(sky1: str) -> None:
    def compute(device: str) -> Any:
        seen: list[torch.Tensor] = []
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 2).to(device)
        layer.register_forward_hook(lambda module, args, result: seen.append(result.detach()))
        layer.register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].detach()))
        layer(_input(device, 3, 4).requires_grad_()).sum().backward()
        return seen, layer.weight.grad

    _same_on_both(compute, sky1)


def test_a_graph_can_be_kept_and_otherwise_cannot(sky1: str) -> None:
    x = _input(sky1, 4).requires_grad_()
    y = (x * x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()  # type: ignore[union-attr]
    y.backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * first.cpu())  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_tensor_changed_after_it_was_saved_is_noticed(sky1: str) -> None:
    x = _input(sky1, 4).requires_grad_()
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_views_changed_in_place_pass_gradients(sky1: str) -> None:
    def compute(device: str) -> Any:
        x = _input(device, 4, 4).requires_grad_()
        y = x * 1
        y[1:3].mul_(5)
        y.diagonal().zero_()
        y.t()[0].exp_()
        y.sum().backward()
        return y.detach(), x.grad

    _same_on_both(compute, sky1)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert grad.device == x.device
        return grad * (x.abs() <= ctx.bound) * 2, None


def test_own_autograd_functions(sky1: str) -> None:
    def compute(device: str) -> Any:
        x = _input(device, 6).requires_grad_()
        result = _Clipped.apply(x, 1.0)
        result.sum().backward()
        return result.detach(), x.grad

    _same_on_both(compute, sky1)


def test_saved_tensor_hooks_can_keep_activations_on_the_cpu(sky1: str) -> None:
    def compute(device: str) -> Any:
        x = _input(device, 6).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y = x.exp().sin().sum()
        y.backward()
        return x.grad

    _same_on_both(compute, sky1)


def test_backward_across_devices(sky: str, sky1: str) -> None:
    x = _input("cpu", 4).requires_grad_()
    y = x.to(sky) * 2
    z = (y.to(sky1) * 3).sum()
    z.backward()
    assert x.grad is not None
    assert x.grad.device.type == "cpu"
    assert x.grad.tolist() == [6.0] * 4


def test_backward_from_another_thread(sky1: str) -> None:
    x = _input(sky1, 4).requires_grad_()
    thread = threading.Thread(target=lambda: _wave(x).backward())
    thread.start()
    thread.join()
    expected = _input("cpu", 4).requires_grad_()
    _wave(expected).backward()
    torch.testing.assert_close(x.grad.cpu(), expected.grad)  # type: ignore[union-attr]


def test_an_error_in_a_hook_arrives_as_itself(sky1: str) -> None:
    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("not today")

    x = _input(sky1, 4).requires_grad_()
    y = x * 2
    y.register_hook(refuse)
    with pytest.raises(ValueError, match="not today"):
        y.sum().backward()
    (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


def test_anomaly_mode_names_the_forward_line(sky1: str) -> None:
    x = torch.zeros(2, device=sky1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        y = (x.sqrt() * 0).sum()
        with (
            pytest.warns(UserWarning, match="Traceback of forward call"),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            y.backward()


def test_dispatch_modes_see_the_ops_of_the_device(sky1: str) -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def names(device: str) -> list[str]:
        x, mode = _input(device, 3, 3), Names()
        with mode:
            (x @ x).softmax(-1).sum()
        return mode.names

    assert names(sky1) == names("cpu")


def test_flops_are_counted(sky1: str) -> None:
    def flops(device: str) -> int:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5)).to(device)
        with FlopCounterMode(display=False) as counter:
            model(_input(device, 2, 1, 8, 8)).sum().backward()
        return int(counter.get_total_flops())

    assert flops(sky1) == flops("cpu") > 0


def test_own_ops_written_in_pytorch_are_taken_apart(sky1: str) -> None:
    @torch.library.custom_op("skyproxy_tests::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x.clone() / 2

    @halve.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    halve.register_autograd(lambda ctx, grad: grad / 2)
    x = _input(sky1, 4).requires_grad_()
    y = halve(x)
    y.sum().backward()
    assert y.device == x.device
    assert x.grad is not None
    assert x.grad.tolist() == [0.5] * 4


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[:, 1:],
    lambda x: x[0],
    lambda x: x[None],
    lambda x: x.view(-1),
    lambda x: x.t(),
    lambda x: x.split(2)[0],
    lambda x: x.unbind()[1],
    lambda x: x.detach(),
    lambda x: torch.ops.aten.alias(x),
    lambda x: x.narrow(1, 0, 2),
    lambda x: x.expand(2, 4, 4),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("parameter", [False, True])
def test_a_view_is_an_inference_tensor_if_its_base_is_one(
    view: Callable[[torch.Tensor], torch.Tensor], parameter: bool, sky1: str
) -> None:
    """Weights and buffers that were made before are sliced in inference mode, and results of it outside."""
    values = torch.arange(16.0).view(4, 4)
    plain = torch.nn.Parameter(values.to(sky1)) if parameter else values.to(sky1)
    for _ in range(2):  # the second time, the shape is known
        with torch.inference_mode():
            ours = view(plain)
            assert not ours.is_inference()
            assert ours.tolist() == view(values).tolist()
    with torch.inference_mode():
        inferred = plain.clone()
        assert view(inferred).is_inference()
    for _ in range(2):
        ours = view(inferred)
        assert ours.is_inference()
        assert ours.tolist() == view(values).tolist()


def test_inference_mode_makes_inference_tensors(sky1: str) -> None:
    x = _input(sky1, 3, 4)
    with torch.inference_mode():
        y = torch.nn.functional.linear(x, x).softmax(-1)
        z = y.cpu()
    assert y.is_inference()
    assert not y.requires_grad
    expected = _input("cpu", 3, 4)
    torch.testing.assert_close(z, torch.nn.functional.linear(expected, expected).softmax(-1))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (y * x.clone().requires_grad_()).sum()


_IN_PLACE: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "add a number": lambda items: torch._foreach_add_(items, 1.0),
    "add a list": lambda items: torch._foreach_add_(items, [torch.ones_like(item) for item in items]),
    "multiply by a list of numbers": lambda items: torch._foreach_mul_(items, [2.0] * len(items)),
    "copy": lambda items: torch._foreach_copy_(items, [torch.zeros_like(item) for item in items]),
    "zero": torch._foreach_zero_,
    "square root": torch._foreach_sqrt_,
    "lerp": lambda items: torch._foreach_lerp_(items, [torch.zeros_like(item) for item in items], 0.5),
    "optimizer": lambda items: _step(items),
}


def _step(items: list[torch.Tensor]) -> None:
    parameters = [item.detach() for item in items]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1, foreach=True).step()


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("change", _IN_PLACE)
def test_what_a_list_op_changes_in_place_is_not_taken_for_what_backward_saved(
    change: str, count: int, sky1: str
) -> None:
    for _ in range(2):  # the second time the op is known
        x = _input(sky1, 3).requires_grad_()
        saved = [x.exp() for _ in range(count)]
        with torch.no_grad():
            _IN_PLACE[change](saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved[-1].sum().backward()
