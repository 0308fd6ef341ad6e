"""Modules on the move: the identity of parameters, ties, gradients, buffers, and an optimizer made before."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from skyproxy.tensor.core.remote_tensor import RemoteTensor


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> float:
    optimizer.zero_grad()
    torch.manual_seed(0)
    loss: torch.Tensor = module(torch.randn(5, 3).to(device)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


JOURNEY: list[tuple[str, Callable[[nn.Module], nn.Module], str, torch.dtype]] = [
    ("there", lambda m: m.to("sky:1"), "sky:1", torch.float32),
    ("half", lambda m: m.half(), "sky:1", torch.float16),
    ("double", lambda m: m.double(), "sky:1", torch.float64),
    ("elsewhere", lambda m: m.to("sky:0", torch.float32), "sky:0", torch.float32),
    ("back", lambda m: m.cpu(), "cpu", torch.float32),
    ("there again, as bfloat16", lambda m: m.to(device="sky:1", dtype=torch.bfloat16), "sky:1", torch.bfloat16),
    ("on the spot", lambda m: m.to("sky:1"), "sky:1", torch.bfloat16),
    ("emptied", lambda m: m.to_empty(device="sky:0"), "sky:0", torch.bfloat16),
]


def test_parameters_stay_the_same_objects_on_any_journey(sky1: str) -> None:
    module = model()
    parameters = dict(module.named_parameters())
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    for name, move, device, dtype in JOURNEY:
        assert move(module) is module
        for key, parameter in module.named_parameters():
            assert parameter is parameters[key], name
            assert isinstance(parameter, nn.Parameter)
            assert (parameter.device, parameter.dtype) == (torch.device(device), dtype)
            assert (type(parameter) is RemoteTensor) is (device != "cpu")
            if name != "emptied":
                assert torch.allclose(parameter.detach().cpu().float(), expected[key], atol=1e-2)
        for buffer in module.buffers():
            assert buffer.device == torch.device(device)


def test_an_optimizer_made_before_the_move_trains_on(sky1: str) -> None:
    torch.manual_seed(3)
    local, remote = model(), model()
    remote.load_state_dict(local.state_dict())
    one = torch.optim.SGD(local.parameters(), lr=0.1)
    two = torch.optim.SGD(remote.parameters(), lr=0.1)
    remote.to(sky1)
    for _ in range(3):
        assert train(local, one, "cpu") == pytest.approx(train(remote, two, sky1), rel=1e-5)
    remote.cpu()
    assert train(local, one, "cpu") == pytest.approx(train(remote, two, "cpu"), rel=1e-5)


def test_gradients_move_with_their_parameters(sky1: str) -> None:
    module = nn.Linear(3, 3)
    module(torch.ones(1, 3)).sum().backward()
    for place, dtype in (
        (sky1, torch.float32),
        (sky1, torch.float16),
        ("sky:0", torch.float16),
        ("cpu", torch.float16),
    ):
        module.to(place, dtype)
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert (parameter.grad.device, parameter.grad.dtype) == (torch.device(place), dtype)
            assert parameter.grad.tolist() == torch.ones_like(parameter.grad).tolist()


def test_frozen_parameters_and_their_attributes_survive(sky1: str) -> None:
    module = nn.Linear(3, 3)
    module.weight.requires_grad_(False)
    module.weight.note = "kept"  # type: ignore[assignment]
    for place in (sky1, "cpu"):
        module.to(place)
        assert (module.weight.requires_grad, module.bias.requires_grad) == (False, True)
        assert module.weight.note == "kept"  # type: ignore[comparison-overlap]


def test_tied_weights_stay_tied(sky1: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    for move in (lambda: module.to(sky1), module.half, module.cpu):
        move()
        assert module[0].weight is module[1].weight


def test_a_weak_reference_does_not_hinder_the_move(sky1: str) -> None:
    module = nn.Linear(3, 3)
    weight = module.weight
    watcher = weakref.ref(weight)
    for place in (sky1, "cpu", "sky:0"):
        module.to(place)
        assert module.weight is weight is watcher()


def test_hooks_move_with_their_parameter(sky1: str) -> None:
    module, seen = nn.Linear(3, 3), []
    handle = module.weight.register_hook(lambda grad: seen.append(("hook", grad.device.type)))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("late", p.device.type)))
    for place in (sky1, "cpu"):
        module.to(place)
        module(torch.ones(1, 3, device=place)).sum().backward()
    assert seen == [("hook", "sky"), ("late", "sky"), ("hook", "cpu"), ("late", "cpu")]
    handle.remove()
    module(torch.ones(1, 3)).sum().backward()
    assert seen[4:] == [("late", "cpu")]


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_a_graph_from_before_the_move_does_not_hinder_it(kind: type[nn.Module], sky1: str) -> None:
    module = kind(3, 3)
    weight = next(module.parameters())
    x = torch.ones(1, 1, 3, requires_grad=True)
    before = module(x)
    module.to(sky1)
    assert next(module.parameters()) is weight
    assert weight.device == torch.device(sky1)
    with pytest.raises(RuntimeError, match="made before its parameter moved"):
        (before[0] if kind is nn.LSTM else before).sum().backward()
    after = module(x.detach().to(sky1))
    (after[0] if kind is nn.LSTM else after).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_keep_their_parameters(kind: type[nn.RNNBase], sky1: str) -> None:
    torch.manual_seed(0)
    module = kind(3, 4, num_layers=2)
    expected, _ = module(torch.ones(2, 1, 3))
    weight = module.weight_ih_l0
    module.to(sky1)
    assert module.weight_ih_l0 is weight
    result, _ = module(torch.ones(2, 1, 3, device=sky1))
    result.sum().backward()
    assert torch.allclose(result.cpu(), expected, atol=1e-6)
    assert weight.grad is not None


def test_a_module_from_meta_gets_memory(sky1: str) -> None:
    with torch.device("meta"):
        module = nn.BatchNorm1d(4)
    weight = module.weight
    module.to_empty(device=sky1)
    assert module.weight is weight
    module.reset_parameters()
    assert module.weight.tolist() == [1, 1, 1, 1]
    assert module.running_mean is not None
    assert module.running_mean.device == torch.device(sky1)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: nn.LazyLinear(2).to(d),
        lambda d: nn.LazyLinear(2, device=d),
        lambda d: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2)).to(d),
        lambda d: nn.LazyLinear(2).to(d).double().float(),
        lambda d: nn.LazyLinear(2, device=d).to(torch.float64).to("cpu").to(d, torch.float32),
    ],
    ids=["moved", "born", "several", "moved, then of other dtypes", "there and back"],
)
def test_lazy_modules_take_shape_on_the_worker(make: Callable[[str], nn.Module], sky1: str) -> None:
    module = make(sky1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    result = module(torch.ones(3, 5, device=sky1))
    assert result.device == torch.device(sky1)
    assert all(p.device == torch.device(sky1) and isinstance(p, nn.Parameter) for p in module.parameters())
    before = [p.detach().clone() for p in module.parameters()]
    result.square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(a.cpu(), b.detach().cpu()) for a, b in zip(before, module.parameters(), strict=True))


def test_modules_can_be_made_on_the_worker(sky1: str) -> None:
    with torch.device(sky1):
        module = nn.Linear(2, 2)
    assert type(module.weight) is RemoteTensor
    assert type(nn.Linear(2, 2, device=sky1).weight) is RemoteTensor
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_pytorchs_flags_for_conversion_still_hold(sky1: str) -> None:
    module = nn.Linear(2, 2).to(sky1)
    weight = module.weight
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        module.half()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert module.weight is not weight


def test_swap_tensors_exchanges_a_remote_and_a_local_tensor(sky1: str) -> None:
    a, b = torch.ones(2), torch.zeros(3, device=sky1)
    torch.utils.swap_tensors(a, b)
    assert (type(a), type(b)) == (RemoteTensor, torch.Tensor)
    assert (a.tolist(), b.tolist()) == ([0, 0, 0], [1, 1])


def test_the_class_of_a_parameter_makes_parameters(sky1: str) -> None:
    """Code that moves a parameter by hand writes `type(p)(values, requires_grad=...)`."""
    weight = nn.Linear(2, 3).to(sky1).weight
    for place in ("cpu", "meta", sky1):
        made = type(weight)(torch.zeros(3, 2, device=place), requires_grad=False)
        assert isinstance(made, nn.Parameter)
        assert (made.device, made.requires_grad) == (torch.device(place), False)
    tensor = type(weight.detach())(torch.ones(2))
    assert type(tensor) is torch.Tensor
    assert not isinstance(type(weight.detach())(torch.ones(2, device=sky1)), nn.Parameter)


def test_a_parameter_is_made_anew_with_all_that_its_dict_has(sky1: str) -> None:
    """accelerate and peft write so; the `__dict__` of PyTorch's own parameter is empty."""
    weight = nn.Linear(2, 3).to(sky1).weight
    for place in ("cpu", sky1):
        given = weight.__dict__
        given["requires_grad"] = weight.requires_grad
        made = type(weight)(torch.zeros(3, 2, device=place), **given)
        assert isinstance(made, nn.Parameter)
        assert (made.device, made.tolist()) == (torch.device(place), [[0, 0], [0, 0], [0, 0]])
    with pytest.raises(TypeError, match="unexpected keyword argument 'another'"):
        type(weight)(torch.zeros(1), requires_grad=False, another=1)


def test_a_scripted_module_moves_there_trains_and_comes_back(sky1: str) -> None:
    """Its parameters are held by C++."""
    torch.manual_seed(0)
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    module.to(sky1)
    assert {t.device for t in (*module.parameters(), *module.buffers())} == {torch.device(sky1)}
    x = torch.randn(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x.to(sky1)).square().sum().backward()
    optimizer.step()
    expected = module.eval()(x.to(sky1)).cpu()
    module.cpu()
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"cpu"}
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("came_by", ["loading", "copying"])
def test_a_script_module_whose_parameters_are_plain_tensors_moves(
    came_by: str, sky1: str, recwarn: pytest.WarningsRecorder
) -> None:
    """C++ makes parameters of no class of their own when it loads or copies."""
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval())
    if came_by == "loading":
        file = io.BytesIO()
        torch.jit.save(module, file)
        file.seek(0)
        module = torch.jit.load(file)
    else:
        module = copy.deepcopy(module)
    before = list(module.parameters())
    assert not any(isinstance(p, nn.Parameter) for p in before)
    x = torch.randn(4, 3)
    expected = module(x)
    module.to(sky1)
    assert not [told for told in recwarn if "not a leaf" in str(told.message)]  # a copy's parameters are none
    assert {t.device for t in (*module.parameters(), *module.buffers())} == {torch.device(sky1)}
    assert all(p is q and q.requires_grad for p, q in zip(before, module.parameters(), strict=True))
    result = module(x.to(sky1))
    assert torch.equal(result.cpu(), expected)
    result.sum().backward()
    assert {p.grad.device for p in module.parameters() if p.grad is not None} == {torch.device(sky1)}
    module.cpu()
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"cpu"}
    assert torch.equal(module(x), expected)


def test_a_module_that_moves_in_inference_mode_stays_trainable(sky: str, sky1: str) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.inference_mode():
        for device in (sky, sky1, "cpu", sky1):
            module.to(device)
            assert {t.device for t in (*module.parameters(), *module.buffers())} == {torch.device(device)}
    assert not any(t.is_inference() for t in (*module.parameters(), *module.buffers()))
    before = module[0].weight.detach().cpu()
    train(module, optimizer, sky1)
    assert not torch.equal(module[0].weight.detach().cpu(), before)


def test_a_module_made_in_inference_mode_moves(sky1: str) -> None:
    with torch.inference_mode():
        module = model().eval()
        expected = module(torch.ones(2, 3))
        module.to(sky1)
        torch.testing.assert_close(module(torch.ones(2, 3, device=sky1)).cpu(), expected)


def test_a_module_that_moves_records_its_values_and_nothing_else(sky: str) -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    expected = [p.detach().clone() for p in module.parameters()]
    before = torch.sky.stats()["ops"]
    module.to(sky)
    assert torch.sky.stats()["ops"] == before
    for parameter, values in zip(module.parameters(), expected, strict=True):
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter.detach().cpu(), values)
    module(torch.ones(2, 3, device=sky)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_moved_tensor_that_somebody_keeps_is_not_made_the_parameter(sky: str) -> None:
    module, kept = nn.Linear(3, 3), []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.to(sky))
        return kept[-1]

    module._apply(move)
    for parameter, moved in zip(module.parameters(), kept, strict=True):
        assert moved is not parameter
        assert moved.device == parameter.device
        assert not moved.requires_grad
        assert parameter.requires_grad
        moved.zero_()  # they share their values, as `Parameter(moved)` does
        assert not parameter.detach().cpu().any()


def test_data_of_a_tensor_put_into_itself_changes_nothing(sky: str) -> None:
    x = torch.ones(3, device=sky, requires_grad=True)
    before = torch.sky.stats()["ops"]
    x.data = x
    assert torch.sky.stats()["ops"] == before
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.cpu().tolist() == [1.0] * 3


@pytest.mark.parametrize("there_and_back", [False, True])
def test_a_graph_that_waits_for_a_gradient_keeps_its_parameter_from_moving_unseen(
    there_and_back: bool, sky: str
) -> None:
    module = nn.Linear(3, 3).to(sky if there_and_back else "cpu")
    loss = module(torch.ones(2, 3, device=module.weight.device)).sum()
    module.to("cpu" if there_and_back else sky)
    with pytest.raises(RuntimeError, match="nowhere to go"):
        loss.backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_a_transformed_function_may_make_parameters(
    transform: Callable[..., Callable[..., torch.Tensor]], sky1: str
) -> None:
    def compute(device: str) -> tuple[torch.Tensor, bool]:
        weight, made = torch.arange(3.0, device=device), list[nn.Parameter]()

        def function(x: torch.Tensor) -> torch.Tensor:
            made.append(nn.Parameter(weight))
            scale = nn.LayerNorm(3, device=device).weight
            return (made[0] * nn.Parameter(x, requires_grad=False) * scale).sum()

        result = transform(function)(torch.ones(3, device=device)).detach().cpu()
        return result, made[0].requires_grad and made[0].is_leaf and isinstance(made[0], nn.Parameter)

    remote, local = compute(sky1), compute("cpu")
    assert torch.equal(remote[0], local[0])
    assert remote[1]
    assert local[1]
