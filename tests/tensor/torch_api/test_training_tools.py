"""PyTorch's tools around training: checkpoints, profiler, `nn.utils`, functional calls, averages, `torch.func`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from skyproxy.tensor.core.remote_tensor import RemoteTensor


def same_on_both(build: Any, device: str) -> None:
    """Builds something on both sides from the same seed, and compares the tensors that come out."""
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        results.append([t.detach().cpu() for t in build(place)])
    for local, remote in zip(*results, strict=True):
        assert torch.allclose(local, remote, rtol=1e-4, atol=1e-6), (local, remote)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_dropout_again(reentrant: bool, sky1: str) -> None:
    weight = torch.randn(4, 4, device=sky1, requires_grad=True)

    def part(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(x @ weight), 0.5)

    gradients = []
    for run in (lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant), part):
        torch.manual_seed(0)
        x = torch.randn(8, 4, device=sky1, requires_grad=True)
        run(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


def test_a_checkpoint_of_a_sequence_equals_the_sequence(sky1: str) -> None:
    def build(device: str) -> list[torch.Tensor]:
        module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        x = torch.randn(2, 4)
        module.to(device)
        torch.utils.checkpoint.checkpoint_sequential(module, 2, x.to(device), use_reentrant=False).sum().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    same_on_both(build, sky1)


def test_the_profiler_sees_the_operations(sky1: str) -> None:
    from torch.profiler import profile, record_function

    x = torch.ones(3, device=sky1)
    with profile() as profiler:
        with record_function("mine"):
            (x * 2).sum()
    names = {event.key for event in profiler.key_averages()}
    assert {"mine", "aten::mul", "aten::sum"} <= names


def test_flops_are_counted(sky1: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = nn.Linear(4, 4, device=sky1)
    with FlopCounterMode(display=False) as counter:
        module(torch.ones(2, 4, device=sky1)).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 4 * 2


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, float("inf"), 1.0])
def test_gradients_are_clipped_as_here(norm: float, foreach: bool | None, sky1: str) -> None:
    def build(device: str) -> list[torch.Tensor]:
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        x = torch.randn(5, 3)
        module.to(device)
        module(x.to(device)).square().sum().backward()
        total = nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type=norm, foreach=foreach)
        assert total.device == torch.device(device)
        nn.utils.clip_grad_value_(module.parameters(), 0.1, foreach=foreach)
        return [total, *(p.grad for p in module.parameters() if p.grad is not None)]

    same_on_both(build, sky1)


def test_clipping_does_not_wait(sky1: str) -> None:
    module = nn.Linear(3, 3).to(sky1)
    module(torch.ones(1, 3, device=sky1)).sum().backward()
    before = torch.sky.stats()["round_trips"]  # type: ignore[attr-defined]
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    assert torch.sky.stats()["round_trips"] == before  # type: ignore[attr-defined]


def test_parameters_become_a_vector_and_back(sky1: str) -> None:
    module = nn.Linear(2, 2).to(sky1)
    vector = nn.utils.parameters_to_vector(module.parameters())
    assert vector.shape == (6,)
    nn.utils.vector_to_parameters(torch.arange(6.0, device=sky1), module.parameters())
    assert module.weight.tolist() == [[0, 1], [2, 3]]
    assert module.bias.tolist() == [4, 5]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ],
)
def test_parametrized_weights_train_as_here(wrap: Any, sky1: str) -> None:
    def build(device: str) -> list[torch.Tensor]:
        module, x = wrap(nn.Linear(4, 4)), torch.randn(3, 4)
        module.to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x.to(device)).square().sum().backward()
            optimizer.step()
        return [module.weight, module(x.to(device))]

    same_on_both(build, sky1)


@pytest.mark.parametrize("dim", [0, 2, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_normed_as_here(dtype: torch.dtype, dim: int | None, sky1: str) -> None:
    """The kernel keeps norms in float32 then; what PyTorch infers without values says so of bfloat16 only."""

    def build(device: str) -> list[Any]:
        module = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim).to(dtype)
        x = torch.randn(2, 4, 9).to(dtype)
        module.to(device)(x.to(device)).square().sum().backward()
        return [module.weight, *(parameter.grad for parameter in module.parameters())]

    same_on_both(build, sky1)


def test_a_parametrization_of_ones_own_works(sky1: str) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    module = nn.Linear(3, 3).to(sky1)
    parametrize.register_parametrization(module, "weight", Symmetric())
    module.to("sky:0").to(sky1)
    assert torch.equal(module.weight.cpu(), module.weight.t().cpu())
    parametrize.remove_parametrizations(module, "weight")
    assert isinstance(module.weight, nn.Parameter)


def test_pruning_works_as_here(sky1: str) -> None:
    def build(device: str) -> list[torch.Tensor]:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module.to(device)
        prune.l1_unstructured(module[0], "weight", amount=0.5)
        prune.ln_structured(module[1], "weight", amount=1, n=2, dim=0)
        prune.global_unstructured([(module[0], "bias"), (module[1], "bias")], prune.L1Unstructured, amount=3)
        for part in module:
            prune.remove(part, "weight")
        return [module[0].weight, module[1].weight, module[0].bias, module[1].bias]

    same_on_both(build, sky1)


def test_a_module_can_be_called_with_other_parameters(sky1: str) -> None:
    module = nn.Linear(2, 2, bias=False).to(sky1)
    x = torch.ones(1, 2, device=sky1)
    weight = torch.full((2, 2), 3.0, device=sky1, requires_grad=True)
    torch.func.functional_call(module, {"weight": weight}, (x,)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [1, 1]]
    assert module.weight.grad is None
    with pytest.warns(FutureWarning):
        result = nn.utils.stateless.functional_call(module, {"weight": weight}, (x,))
    assert result.tolist() == [[6, 6]]


def test_averages_of_a_model_follow_it(sky1: str) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

    for options in (
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True},
    ):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(sky1)
        with torch.no_grad():
            module[0].weight.fill_(0)
        average = AveragedModel(module, **options)
        average.update_parameters(module)
        with torch.no_grad():
            module[0].weight.fill_(4)
        average.update_parameters(module)
        assert (average.module[0].weight.cpu() == 2).all()
        assert average.module[0].weight.device == torch.device(sky1)
        update_bn([torch.randn(4, 2)], average, device=torch.device(sky1))


def test_data_parallel_hands_its_input_to_the_module(sky: str, sky1: str) -> None:
    module = nn.Linear(2, 2).to(sky1)
    with pytest.warns(UserWarning, match="does not split batches over sky devices"):
        parallel = nn.DataParallel(module)
    x = torch.ones(3, 2, device=sky1)
    parallel(x).sum().backward()
    assert isinstance(module.weight.grad, RemoteTensor)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]
    local = nn.DataParallel(nn.Linear(2, 2))
    assert local(torch.ones(1, 2)).device.type == "cpu"


def test_function_transforms_work(sky1: str) -> None:
    x = torch.randn(3, device=sky1)
    gradient = torch.func.grad(lambda t: (t**3).sum())(x)
    assert torch.allclose(gradient.cpu(), 3 * x.cpu() ** 2)
    weight = torch.randn(3, 3, device=sky1)
    batch = torch.randn(5, 3, device=sky1)
    mapped = torch.func.vmap(lambda row: (row @ weight).sin())(batch)
    assert torch.allclose(mapped.cpu(), (batch @ weight).sin().cpu(), atol=1e-6)
    hessian = torch.func.hessian(lambda t: (t**3).sum())(x)
    assert torch.allclose(hessian.cpu(), torch.diag(6 * x.cpu()), atol=1e-5)
    _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent.cpu(), x.cpu().cos(), atol=1e-6)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd])
def test_a_tensor_that_a_transform_did_not_make_is_printed_within(sky1: str, transform: Any) -> None:
    x, printed = torch.arange(3.0, device=sky1), []

    def noting(y: torch.Tensor) -> torch.Tensor:
        printed.append(repr(x))
        return (x * y).sum()

    transform(noting)(torch.ones(3, device=sky1))
    assert printed == [repr(x)] == [f"tensor([0., 1., 2.], device='{sky1}')"]


def test_gradients_per_sample_are_those_of_each_sample(sky1: str) -> None:
    module = nn.Linear(3, 1).to(sky1)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(5, 3, device=sky1)

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(module, parameters, (sample[None],)).sum()
        return result

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert torch.allclose(gradients["weight"].squeeze(1).cpu(), x.cpu())


def test_forward_mode_works(sky1: str) -> None:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        dual = forward.make_dual(torch.full((2,), 3.0, device=sky1), torch.ones(2, device=sky1))
        _, tangent = forward.unpack_dual(dual**2)
        assert tangent is not None
        assert tangent.tolist() == [6, 6]


def test_a_trace_runs_on_the_worker(sky1: str) -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):  # the latter from 2.15 on
        traced = torch.jit.trace(lambda x: x * 2 + 1, torch.ones(3))  # type: ignore[no-untyped-call]
    result = traced(torch.ones(3, device=sky1))
    assert result.device == torch.device(sky1)
    assert result.tolist() == [3, 3, 3]


@pytest.mark.parametrize("as_another", [False, True])
def test_what_grows_in_place_is_functionalized(as_another: bool, sky1: str) -> None:
    def program(x: torch.Tensor, larger: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        if as_another:
            y.resize_as_(larger)
        else:
            y.resize_(larger.shape)
        y[0] = 2
        return y.fill_(3) + larger

    for device in ("cpu", sky1):
        found = torch.func.functionalize(program)(torch.ones(3, device=device), torch.ones(2, 3, device=device))
        assert found.tolist() == [[4.0] * 3] * 2
