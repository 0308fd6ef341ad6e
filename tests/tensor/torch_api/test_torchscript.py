"""TorchScript, exported programs and packages: files that are written and read where the parameters are."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.package import PackageExporter, PackageImporter


class Model(nn.Module):
    """Everything that a script module can hold tensors in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.part = nn.Parameter(torch.randn(4, 3).t()[1:, 2])
        self.register_buffer("low", torch.randn(3).to(torch.bfloat16))
        self.plain = torch.randn(3)
        self.listed = [torch.randn(3), torch.arange(3)]
        self.named = {"a": torch.randn(1), "b": torch.randn(0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(self.first(x))) * self.part.sum() + self.low.float()
        return x * self.plain + self.listed[0] * self.listed[1] + self.named["a"]


def remote_model(device: str) -> Model:
    model = Model().to(device)
    model.plain, model.listed = model.plain.to(device), [item.to(device) for item in model.listed]
    model.named = {name: item.to(device) for name, item in model.named.items()}
    return model


def compiled(model: nn.Module, way: str, device: str) -> Any:
    model.eval()
    return torch.jit.script(model) if way == "script" else torch.jit.trace(model, torch.ones(2, 3, device=device))


def written(module: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return file


X = torch.linspace(-2, 2, 12).view(4, 3)


@pytest.mark.parametrize("way", ["script", "trace"])
@pytest.mark.parametrize("map_location", [None, "cpu", "sky:0", "sky:1"])
def test_a_file_is_loaded_where_map_location_says(way: str, map_location: Any, sky1: str) -> None:
    expected = compiled(Model(), way, "cpu")(X)
    module = torch.jit.load(written(compiled(remote_model(sky1), way, sky1)), map_location=map_location)
    device = torch.device(map_location or sky1)
    assert {t.device for t in (*module.parameters(), *module.buffers())} == {device}
    assert torch.equal(module(X.to(device)).cpu(), expected)


@pytest.mark.parametrize("way", ["script", "trace"])
def test_a_file_of_the_cpu_is_loaded_on_a_worker(way: str, sky1: str) -> None:
    local = compiled(Model(), way, "cpu")
    module = torch.jit.load(written(local), map_location=sky1)
    for expected, loaded in zip(local.state_dict().items(), module.state_dict().items(), strict=True):
        assert expected[0] == loaded[0]
        assert (expected[1].shape, expected[1].dtype) == (loaded[1].shape, loaded[1].dtype)
        assert expected[1].stride() == loaded[1].stride()
        assert torch.equal(loaded[1].cpu(), expected[1])
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in local.parameters()]
    assert torch.equal(module(X.to(sky1)).cpu(), local(X))


def test_a_loaded_module_trains_as_a_local_one(sky1: str) -> None:
    file = written(torch.jit.script(Model()))
    results = []
    for device in ("cpu", sky1):
        file.seek(0)
        module = torch.jit.load(file, map_location=device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            module(X.to(device)).square().mean().backward()
            optimizer.step()
        results.append({name: value.cpu() for name, value in module.state_dict().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_tied_parameters_stay_tied_in_a_file(sky1: str) -> None:
    file = written(torch.jit.script(remote_model(sky1)))
    for place in (sky1, "cpu"):
        file.seek(0)
        module = torch.jit.load(file, map_location=place)
        with torch.no_grad():
            module.first.weight.fill_(7)
        assert module.second.weight.unique().tolist() == [7]


def test_a_function_with_a_remote_constant_is_written(sky1: str) -> None:
    constant = torch.arange(3.0, device=sky1)
    function = torch.jit.trace(lambda x: x * constant + 1, torch.ones(3, device=sky1))
    for place in (None, sky1):
        loaded = torch.jit.load(written(function), map_location=place)
        assert loaded(torch.ones(3, device=sky1)).tolist() == [1, 2, 3]
    file = io.BytesIO(function.save_to_buffer())
    assert torch.jit.load(file, map_location="cpu")(torch.ones(3)).tolist() == [1, 2, 3]


def test_a_file_by_its_name_is_written_and_read(tmp_path: Path, sky1: str) -> None:
    module = torch.jit.script(remote_model(sky1)).eval()
    path = tmp_path / "module.pt"
    module.save(str(path))
    assert torch.equal(torch.jit.load(path)(X.to(sky1)), module(X.to(sky1)))


def test_many_parameters_are_written_with_few_waits(sky1: str) -> None:
    module = torch.jit.script(nn.Sequential(*(nn.Linear(2, 2) for _ in range(50))).to(sky1))
    before = torch.sky.stats()["round_trips"]
    written(module)
    assert torch.sky.stats()["round_trips"] - before <= 8


@pytest.mark.parametrize("way", ["script", "trace"])
def test_a_copy_of_a_script_module_is_its_own(way: str, sky1: str) -> None:
    module = compiled(remote_model(sky1), way, sky1)
    expected = module(X.to(sky1)).cpu()
    copied = copy.deepcopy(module)
    with torch.no_grad():
        module.first.weight.zero_()
    assert {p.device for p in copied.parameters()} == {torch.device(sky1)}
    assert torch.equal(copied(X.to(sky1)).cpu(), expected)


def test_a_script_module_travels_in_a_package(sky1: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.package.package_exporter, "_gate_torchscript_serialization", False)
    module = torch.jit.script(remote_model(sky1)).eval()
    file = io.BytesIO()
    with PackageExporter(file) as exporter:
        exporter.save_pickle("models", "module.pkl", {"module": module, "tensor": module.plain})
    for place in (None, sky1, "cpu"):
        file.seek(0)
        loaded = PackageImporter(file).load_pickle("models", "module.pkl", map_location=place)
        device = place or sky1
        assert torch.equal(loaded["module"](X.to(device)).cpu(), module(X.to(sky1)).cpu())
        assert loaded["tensor"].device == torch.device(device)


def test_an_exported_program_is_saved_and_loaded(sky1: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GELU()).eval()
    expected = model(X)
    program = torch.export.export(model.to(sky1), (X.to(sky1),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert {t.device for t in loaded.state_dict.values()} == {torch.device(sky1)}
    assert torch.equal(loaded.module()(X.to(sky1)).cpu(), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_a_trace_has_convolutions(kind: Any, training: bool, sky1: str) -> None:
    rank = int(kind.__name__[-2])

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        part = nn.Sequential(kind(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).train(training)
        part(torch.zeros(1, 2, *[5] * rank))
        part.to(device)
        x = torch.linspace(-2, 2, 4 * 5**rank).view(2, 2, *[5] * rank).to(device)
        traced: Any = torch.jit.trace(part, x)  # type: ignore[no-untyped-call]
        assert [node.kind() for node in traced.inlined_graph.nodes()].count("aten::_convolution") == 1
        fixed = copy.deepcopy(part[0]).requires_grad_(False)
        function: Any = torch.jit.trace(lambda y: fixed(y).relu(), x)  # type: ignore[no-untyped-call]
        loaded = torch.jit.load(written(traced), map_location=device)
        traced(x + 1).square().sum().backward()
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        return [traced(x * 2), function(x * 3), loaded(x * 4), part(x), *gradients]

    for ours, theirs in zip(run(sky1), run("cpu"), strict=True):
        assert torch.equal(ours.cpu(), theirs)


FIRST_USE = """
import io, sys, torch, skyproxy
module = torch.jit.load(sys.argv[1], map_location="sky:0")
print(module(torch.ones(2, 3, device="sky:0")).sum().item())
"""


def test_a_file_may_be_the_first_that_a_program_does_with_a_worker(tmp_path: Path) -> None:
    local = nn.Linear(3, 2)
    path = tmp_path / "module.pt"
    torch.jit.save(torch.jit.script(local), path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_USE, str(path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == local(torch.ones(2, 3)).sum().item()
