"""torch.compile on remote tensors: graphs are shipped once, and give the very results of local CPU eager."""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from skyproxy.errors import ConfigurationError, RemoteError

EAGER = {"worker": "eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **kwargs: Any) -> Any:
    return torch.compile(function, backend="sky", options=EAGER, **kwargs)


def commands_of(function: Callable[[], Any]) -> int:
    """How many ops a call sends."""
    before = torch.sky.stats()["ops"]
    function()
    return torch.sky.stats()["ops"] - before


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.out(F.relu(self.conv2(x)).flatten(1))


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, 32))
        return x + self.mlp(self.norm2(x))


def twins(make: Callable[[], nn.Module], device: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    local = make()
    torch.manual_seed(0)
    return make().to(device), local


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (5, 6)),
    "cnn": (Cnn, (4, 1, 8, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)), (5, 6)),
    "block": (Block, (2, 7, 32)),
    "lstm": (lambda: nn.LSTM(6, 8, batch_first=True), (2, 3, 6)),
    "embedding": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.Softmax(-1)), (5, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_bit_equal_to_local_cpu(sky1: str, name: str) -> None:
    make, size = NETWORKS[name]
    remote, local = twins(make, sky1)
    fast = compiled(remote)
    results = []
    for model, device in ((fast, sky1), (local, "cpu")):
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(2)
        losses = []
        for _ in range(3):
            x = torch.randn(size, generator=generator).to(device)
            optimizer.zero_grad()
            y = model(x)
            loss = (y[0] if isinstance(y, tuple) else y).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        results.append(losses)
    # PyTorch's compiler divides an LSTM into other operations than eager CPU uses, whatever the device.
    same = functools.partial(torch.allclose, rtol=1e-4, atol=1e-6) if name == "lstm" else torch.equal
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    for got, want in zip(remote.state_dict().values(), local.state_dict().values(), strict=True):
        assert same(got.cpu(), want)


@pytest.mark.parametrize("name", ["cnn", "block"])
def test_a_training_step_is_one_graph_and_few_commands(sky: str, name: str) -> None:
    make, size = NETWORKS[name]
    model, _ = twins(make, sky)
    x = torch.randn(size).to(sky)
    torch._dynamo.utils.counters.clear()

    @compiled
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss_of(x).backward()

    step()
    # The forward graph, the gradient of the loss, the backward graph.
    assert commands_of(step) <= 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_plain_torch_compile_comes_to_us(sky: str) -> None:
    model, local = twins(NETWORKS["mlp"][0], sky)
    x = torch.randn(5, 6)
    with torch.no_grad():
        fast = torch.compile(model)
        result = fast(x.to(sky))
        assert torch.allclose(result.cpu(), local(x), atol=1e-6)
        assert commands_of(lambda: fast(x.to(sky))) == 1
        assert torch.sky.compile_report(sky)["graphs"] >= 1


def test_local_tensors_are_compiled_as_ever(sky: str) -> None:
    function = torch.compile(lambda x: x.sin() + 1, backend="sky")
    assert torch.equal(function(torch.ones(3)), torch.ones(3).sin() + 1)


@pytest.mark.parametrize("dynamic", [None, True])
def test_batch_sizes_may_change(sky: str, dynamic: bool | None) -> None:
    model, local = twins(NETWORKS["mlp"][0], sky)
    fast = compiled(model, dynamic=dynamic)
    for n in (5, 2, 9, 1, 7):
        x = torch.randn(n, 6)
        a, b = x.to(sky).requires_grad_(), x.clone().requires_grad_()
        y = fast(a)
        y.sum().backward()
        z = local(b)
        z.sum().backward()
        assert torch.equal(y.detach().cpu(), z.detach())
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad.cpu(), b.grad)


def test_sizes_reach_the_results(sky: str) -> None:
    @torch.compile(backend="sky", options=EAGER, dynamic=True)
    def function(x: torch.Tensor, k: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(x.shape[0] * 2 + k, device=x.device) + x.shape[1], x.shape[0] // 2

    for n in (4, 6, 9):
        result, half = function(torch.ones(n, 3, device=sky), 2)
        assert result.tolist() == [3.0] * (2 * n + 2)
        assert half == n // 2


def test_graph_breaks_are_bridged(sky: str) -> None:
    @compiled
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum().item() > 0:
            return y.sin()
        return y.cos()

    for value in (1.0, -1.0):
        x = torch.full((3,), value)
        expected = (x * 2).sin() if value > 0 else (x * 2).cos()
        assert torch.equal(function(x.to(sky)).cpu(), expected)


def test_nested_functions_and_closures(sky: str) -> None:
    scale = torch.full((3,), 3.0, device=sky)

    def inner(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = x * scale
        return x

    @compiled
    def outer(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": inner(x, 2), "b": inner(x, 1) + torch.tensor(1.0, device=x.device)}

    result = outer(torch.ones(3, device=sky))
    assert (result["a"].tolist(), result["b"].tolist()) == ([9, 9, 9], [4, 4, 4])


def test_an_optimizer_step_is_compiled(sky: str) -> None:
    remote, local = twins(NETWORKS["mlp"][0], sky)
    x = torch.randn(5, 6)
    parameters, local_parameters = list(remote.parameters()), list(local.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.01, device=sky), capturable=True)
    reference = torch.optim.AdamW(local_parameters, lr=0.01, foreach=True)

    @torch.compile(backend="sky", options=EAGER)
    def update() -> None:
        optimizer.step()

    for _ in range(4):
        for model, d in ((remote, sky), (local, "cpu")):
            for p in model.parameters():
                p.grad = None
            model(x.to(d)).square().sum().backward()
        count = commands_of(update)
        reference.step()
    assert count <= 2
    for got, want in zip(parameters, local_parameters, strict=True):
        assert torch.allclose(got.detach().cpu(), want.detach(), atol=1e-6)


def test_a_whole_training_step_is_one_graph(sky: str) -> None:
    remote, local = twins(NETWORKS["mlp"][0], sky)
    x = torch.randn(5, 6)
    optimizer = torch.optim.SGD(remote.parameters(), lr=torch.tensor(0.1, device=sky))
    reference = torch.optim.SGD(local.parameters(), lr=0.1)
    fast = compiled(remote)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = fast(x).square().sum()
        loss.backward()
        return loss

    update = torch.compile(optimizer.step, backend="sky", options=EAGER)
    for _ in range(4):
        optimizer.zero_grad()
        a = forward_backward(x.to(sky))
        update()
        reference.zero_grad()
        b = local(x).square().sum()
        b.backward()
        reference.step()
        assert torch.allclose(a.detach().cpu(), b.detach(), rtol=1e-5)


def test_views_and_changed_inputs_come_back_as_they_should(sky: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        return x, x.view(-1), x[0], x + 1

    fast = compiled(function)
    remote, local = torch.ones(2, 3, device=sky), torch.ones(2, 3)
    got, want = fast(remote), function(local)
    got[1][0] = 9
    want[1][0] = 9
    assert got[0] is remote
    for a, b in zip((*got, remote), (*want, local), strict=True):
        assert torch.equal(a.cpu(), b)


def test_random_numbers_are_those_of_local_eager(sky: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4, device=x.device)

    fast = compiled(function)
    fast(torch.ones(4, device=sky))
    torch.manual_seed(7)
    got = [fast(torch.ones(4, device=sky)).cpu() for _ in range(3)]
    torch.manual_seed(7)
    for row in got:
        assert torch.equal(row, function(torch.ones(4)))


def test_tensors_of_the_cpu_travel_with_the_call(sky: str) -> None:
    @compiled
    def function(x: torch.Tensor, scale: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * scale + row.to(x.device)
        return y, y.sum().cpu() + 1

    for factor in (2.0, 3.0):
        y, total = function(torch.ones(3, device=sky), torch.tensor(factor), torch.arange(3.0))
        assert y.tolist() == [factor, factor + 1, factor + 2]
        assert total.device.type == "cpu"
        assert total.item() == 3 * factor + 4


def test_what_no_worker_takes_is_run_op_by_op(sky: str, caplog: pytest.LogCaptureFixture) -> None:
    counter = torch.zeros(())

    @compiled
    def function(x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x * counter

    with caplog.at_level(logging.WARNING, "skyproxy"):
        assert function(torch.ones(2, device=sky)).tolist() == [1, 1]
    assert "op by op" in caplog.text
    assert function(torch.ones(2, device=sky)).tolist() == [2, 2]
    assert counter.item() == 2


def test_conditions_on_values_are_run_op_by_op(sky: str) -> None:
    @compiled
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    assert function(torch.ones(2, device=sky)).tolist() == [2, 2]
    assert function(-torch.ones(2, device=sky)).tolist() == [-2, -2]


def test_custom_ops_and_functions_of_the_users_own(sky: str) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * ctx.saved_tensors[0] * 2

    @torch.library.custom_op("skyproxy_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    x = torch.zeros(2, device=sky, requires_grad=True)
    compiled(lambda t: Exp.apply(t).sum())(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert compiled(lambda t: twice(t) + 1)(torch.ones(2, device=sky)).tolist() == [3, 3]


def test_checkpointed_activations(sky: str) -> None:
    from torch.utils.checkpoint import checkpoint

    remote, local = twins(NETWORKS["mlp"][0], sky)
    gradients = []
    for model, device in ((compiled(lambda x: checkpoint(remote, x, use_reentrant=False)), sky), (local, "cpu")):
        x = torch.ones(5, 6, device=device, requires_grad=True)
        model(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0].cpu(), gradients[1])


def run_apart(program: str, **environment: str) -> tuple[list[str], str]:
    """The words that a program prints in a process of its own, and its warnings."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


@pytest.mark.slow
def test_without_a_compiler_the_worker_runs_graphs_op_by_op_and_a_warning_says_so() -> None:
    program = """
import torch, skyproxy
for _ in range(2):
    print(torch.compile(lambda x: x + 1)(torch.ones(2, device="sky:0")).tolist())
print(torch.sky.compile_report()["eager"] >= 1)
try:
    torch.compile(lambda x: x - 1, backend="sky", options={"worker": "inductor"})(torch.ones(2, device="sky:0"))
except Exception as error:
    print("refused", "cannot compile" in str(error))
"""
    words, warnings = run_apart(program, CXX="no-such-compiler")
    assert words == ["[2.0,", "2.0]", "[2.0,", "2.0]", "True", "refused", "True"]
    assert warnings.count("cannot compile") == 1


@pytest.mark.slow
def test_a_graph_outlives_a_reset_of_its_workers() -> None:
    program = """
import torch, skyproxy
f = torch.compile(lambda x: x * torch.tensor([1.0, 2.0], device=x.device), backend="sky", options={"worker": "eager"})
for _ in range(2):
    print(f(torch.ones(2, device="sky:0")).tolist())
    skyproxy.reset()
"""
    assert run_apart(program)[0] == ["[1.0,", "2.0]", "[1.0,", "2.0]"]


def test_devices_of_two_workers_in_one_function(sky: str, sky1: str) -> None:
    @compiled
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).to(sky1) * 2

    result = function(torch.ones(2, device=sky))
    assert str(result.device) == sky1
    assert result.tolist() == [4, 4]


def test_a_failing_graph_raises_at_the_value_and_names_the_line(sky: str) -> None:
    @compiled
    def pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, index) + 1

    table = torch.arange(4.0, device=sky)
    assert pick(table, torch.full((1,), 1, device=sky)).tolist() == [2]
    result = pick(table, torch.full((1,), 9, device=sky))
    with pytest.raises(RemoteError) as caught:
        result.cpu()
    assert isinstance(caught.value, IndexError)
    assert "test_compile.py" in caught.value.user_line
    assert pick(table, torch.full((1,), 2, device=sky)).tolist() == [3]


def test_a_compiled_step_can_be_captured(sky: str) -> None:
    model, local = twins(NETWORKS["cnn"][0], sky)
    fast, x = compiled(model), torch.randn(4, 1, 8, 8)
    static = x.to(sky)
    for _ in range(2):
        fast(static).sum().backward()
        local(x).sum().backward()
    for p in (*model.parameters(), *local.parameters()):
        p.grad = None
    g = torch.sky.SkyGraph()
    with torch.sky.graph(g):
        loss = fast(static).sum()
        loss.backward()
    g.replay()
    expected = local(x).sum()
    expected.backward()
    assert torch.equal(loss.detach().cpu(), expected.detach())
    for got, want in zip(model.parameters(), local.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert torch.equal(got.grad.cpu(), want.grad)


def test_a_graph_that_is_no_longer_needed_is_forgotten(sky: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    before = torch.sky.compile_report(sky)["graphs"]
    fast = compiled(function)
    fast(torch.ones(3, device=sky))
    assert torch.sky.compile_report(sky)["graphs"] == before + 1
    del fast
    torch._dynamo.reset()
    gc.collect()
    assert torch.sky.compile_report(sky)["graphs"] <= before


def test_wrong_options_are_refused(sky: str) -> None:
    x = torch.ones(3, device=sky)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Use options") as caught:
        torch.compile(lambda x: x + 1, backend="sky", options={"worker": "fast"})(x)
    assert isinstance(caught.value.inner_exception, ConfigurationError)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="'speed'"):
        torch.compile(lambda x: x + 2, backend="sky", options={"speed": 1})(x)


def test_autocast_inside_and_outside(sky: str) -> None:
    model, _ = twins(NETWORKS["mlp"][0], sky)
    x = torch.randn(5, 6).to(sky)
    fast = compiled(model)
    with torch.autocast("sky", dtype=torch.bfloat16):
        got, want = fast(x), model(x)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.slow
def test_the_worker_compiles_with_inductor(sky: str) -> None:
    remote, local = twins(Cnn, sky)
    x = torch.randn(4, 1, 8, 8)
    trouble = __import__("skyproxy_server.compiled", fromlist=["compiler_problem"]).compiler_problem("cpu")
    if trouble:
        pytest.skip(trouble)
    fast = torch.compile(remote, backend="sky", options={"worker": "inductor"})
    fast(x.to(sky)).square().sum().backward()
    local(x).square().sum().backward()
    assert torch.sky.compile_report(sky)["inductor"] == 2
    for got, want in zip(remote.parameters(), local.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert torch.allclose(got.grad.cpu(), want.grad, atol=1e-4)
