"""What Dynamo is told of our own code."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from skyproxy.session import recorder
from skyproxy.tensor.core import remote_tensor
from skyproxy.tensor.dispatch import hot_path, memoized_calls
from skyproxy.tensor.torch_api import distributions
from tests.integration.programs import succeed


@pytest.mark.parametrize("module", [hot_path, remote_tensor, recorder])
def test_our_own_frames_are_not_compiled(module: ModuleType, sky: str) -> None:
    from torch._dynamo import trace_rules

    assert trace_rules.check_file(str(module.__file__)).skipped


@pytest.mark.parametrize("module", [memoized_calls, distributions])
def test_what_is_put_around_functions_is_looked_through(module: ModuleType, sky: str) -> None:
    from torch._dynamo import trace_rules

    assert not trace_rules.check_file(str(module.__file__), is_inlined_call=True).skipped
    trace_rules.clear_lru_cache()  # as `init_process_group` does
    assert not trace_rules.check_file(str(module.__file__), is_inlined_call=True).skipped


def test_a_distribution_is_part_of_a_graph(sky: str) -> None:
    def density(x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, x.exp()).log_prob(x + 1)

    x = torch.linspace(-1, 1, 4, device=sky)
    assert torch.equal(torch.compile(density, backend="eager", fullgraph=True)(x), density(x))


@pytest.mark.parametrize("backend", ["sky", "aot_eager"])
def test_a_checkpoint_draws_again_what_it_drew(backend: str, sky: str) -> None:
    x = torch.linspace(0, 1, 32, device=sky, requires_grad=True)

    def loss(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).square(), x, use_reentrant=False).sum()  # type: ignore[no-untyped-call]

    values = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        values.append(torch.cat(torch.autograd.grad(function(x), x)).tolist())
        values.append(torch.rand(2, device=sky).tolist())
    assert values[:2] == values[2:]


METHODS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda x: sum(x.tolist()),
    "new_tensor": lambda x: x.new_tensor([1, 2]).sum(),
    "untyped_storage": lambda x: x.untyped_storage(),
}


@pytest.mark.parametrize(("method", "found"), [("tolist", 3), ("new_tensor", 3), ("untyped_storage", None)])
def test_methods_of_ours_are_those_of_a_tensor(method: str, found: int | None, sky: str) -> None:
    x = torch.arange(3, device=sky)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        result = torch.compile(METHODS[method], backend="eager", fullgraph=True)(x)
    assert found is None or int(result) == found


@pytest.mark.parametrize("device", ["cpu", "sky"])
def test_a_plain_gradient_of_a_wrapper_is_refused(device: str, sky: str) -> None:
    x = TwoTensor(torch.ones(2, device=device), torch.ones(2, device=device)).requires_grad_()  # type: ignore[no-untyped-call]
    y = torch.compile(lambda x: x.clone(), backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(RuntimeError, match="metadata incorrectly"):
        y.backward(gradient=torch.ones(2, device=device))


def test_graphs_that_check_sizes_run(sky: str) -> None:
    def found(x: torch.Tensor) -> torch.Tensor:
        places = torch.argwhere(x[:, None] == x)
        return torch.zeros_like(x).index_put((places[:, 1],), places[:, 0])

    x = torch.tensor([3, 1, 2], device=sky)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.compile(found, backend="sky", fullgraph=True)(x).tolist() == found(x.cpu()).tolist()


@pytest.mark.usefixtures("sky")
def test_plain_torch_compile_of_local_tensors_goes_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    asked: list[object] = []

    def without_compiler(graph: Any, inputs: Any, **options: object) -> Any:
        asked.append(options["config_patches"])
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", without_compiler)
    function = torch.compile(lambda x: x.cos() + 1, options={"max_autotune": True})
    assert torch.equal(function(torch.ones(3)), torch.ones(3).cos() + 1)
    assert asked == [{"max_autotune": True}]


COMPILER_FIRST = """
import torch, torch._dynamo
import torch._functorch._aot_autograd.runtime_wrappers
import skyproxy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

x = torch.linspace(0, 1, 32, device="sky:0", requires_grad=True)
loss = lambda x: checkpoint(lambda x: F.dropout(x.sin(), 0.5).square(), x, use_reentrant=False).sum()
values = []
for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
    torch.manual_seed(0)
    values.append(torch.cat(torch.autograd.grad(function(x), x)).tolist())
assert values[0] == values[1]
"""


def test_the_compiler_may_be_imported_first() -> None:
    succeed(COMPILER_FIRST)


def drawing_twice(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.rand(3, generator=generator, device=x.device)
    return x.sin() + noise * torch.bernoulli(x.detach(), generator=generator)


def seeding(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    generator.manual_seed(7)
    return x * 2 + torch.empty_like(x).normal_(generator=generator)


def going_back(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    state = generator.get_state()
    first = torch.randn(3, generator=generator, device=x.device)
    generator.set_state(state)
    return first - x * torch.randn(3, generator=generator, device=x.device)


def making_its_own(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    own = torch.Generator(device=x.device).manual_seed(generator.initial_seed())
    return x + torch.randint(9, (3,), generator=own, device=x.device)


@pytest.mark.parametrize("function", [drawing_twice, seeding, going_back, making_its_own])
def test_compiled_code_draws_from_generators(function: Callable[..., torch.Tensor], sky: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    results = []
    for device, compute in (("cpu", function), (sky, compiled)):
        generator = torch.Generator(device=device).manual_seed(3)
        x = torch.tensor([0.0, 0.5, 1.0], device=device)
        drawn = [compute(x, generator) for _ in range(3)]
        results.append([t.cpu() for t in (*drawn, torch.rand(2, generator=generator, device=device))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in another shape": lambda x: x.view(-1, 2, 4),
    "a part": lambda x: x.view(-1, 2, 4)[1:-1],
    "transposed": lambda x: x.view(2, -1, 4).transpose(0, 1),
}


@pytest.mark.parametrize("function", ["flatten", "sin", "transpose"])
@pytest.mark.parametrize("view", VIEWS)
def test_jagged_rows_of_a_view_are_compiled_once(view: str, function: str, sky: str) -> None:
    """Inputs of compiled code are made fake with what they are views of."""

    def compute(rows: torch.Tensor) -> torch.Tensor:
        if function == "transpose":
            rows = rows.transpose(1, 2) * 2
        return (rows.flatten(-2) if function == "flatten" else rows.sin()).values()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    for count in (7, 9, 12):
        results = []
        for device in ("cpu", sky):
            values = VIEWS[view](torch.linspace(0, 1, count * 8).to(device)).requires_grad_()
            offsets = torch.tensor([0, 2, values.size(0)], device=device)
            result = (compiled if device == sky else compute)(torch.nested.nested_tensor_from_jagged(values, offsets))
            result.square().sum().backward()
            results.append((result.detach().cpu(), values.grad.cpu()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
