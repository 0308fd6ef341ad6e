"""Saving, loading, pickling and copying: stock files, ties and views kept, every `map_location`."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from skyproxy.errors import SessionLostError
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.torch_api import serialization


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def tied_model(device: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    model[1].weight = model[0].weight
    return model


# --- torch.save and torch.load ---------------------------------------------------------------------------------------

PLACES: list[tuple[Any, str]] = [
    (None, "sky:1"),
    ("cpu", "cpu"),
    ("sky:0", "sky:0"),
    ("sky", "sky:0"),
    (torch.device("sky:0"), "sky:0"),
    ({"sky:1": "sky:0"}, "sky:0"),
    (lambda storage, location: storage, "cpu"),
    (lambda storage, location: None, "sky:1"),
]


@pytest.mark.parametrize(("map_location", "device"), PLACES)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_loads_where_map_location_says(map_location: Any, device: str, weights_only: bool, sky1: str) -> None:
    x = torch.randn(3, 4, device=sky1)
    loaded = torch.load(saved({"x": x}), map_location=map_location, weights_only=weights_only)["x"]
    assert loaded.device == torch.device(device)
    assert torch.equal(loaded.cpu(), x.cpu())


@pytest.mark.parametrize("target", ["sky:1", torch.device("sky:1"), {"cpu": "sky:1"}])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_the_cpu_loads_on_a_worker(target: Any, legacy: bool, sky1: str) -> None:
    x = torch.arange(6.0).view(2, 3).t()
    file = saved([x, x[1:], nn.Parameter(x)], _use_new_zipfile_serialization=not legacy)
    whole, view, parameter = torch.load(file, map_location=target, weights_only=False)
    assert type(whole) is RemoteTensor
    assert isinstance(parameter, nn.Parameter)
    assert whole.stride() == x.stride()
    whole.add_(1)
    assert torch.equal(view.cpu(), x[1:] + 1)
    assert torch.equal(parameter.cpu(), x + 1)


def test_each_storage_of_a_file_is_uploaded_once(sky1: str) -> None:
    base = torch.zeros(100_000)
    file = saved([base[i:] for i in range(20)])
    before = torch.sky.stats()["bytes_sent"]  # type: ignore[attr-defined]
    torch.load(file, map_location=sky1)
    assert torch.sky.stats()["bytes_sent"] - before < 2 * base.nbytes  # type: ignore[attr-defined]


def test_tied_weights_stay_tied_in_a_file(sky1: str) -> None:
    file = saved(tied_model(sky1).state_dict())
    for place in ("sky:0", "cpu"):
        file.seek(0)
        state = torch.load(file, map_location=place)
        first, second = state["0.weight"], state["1.weight"]
        assert first.data_ptr() == second.data_ptr()
        first.zero_()
        assert not second.cpu().any()


def test_a_file_is_readable_without_skyproxy(sky1: str, tmp_path: Path) -> None:
    model = tied_model(sky1)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    torch.save(model, tmp_path / "whole.pt")
    script = (
        "import sys, torch\n"
        f"state = torch.load({str(path)!r}, map_location='cpu', weights_only=True)\n"
        "assert state['0.weight'].device.type == 'cpu'\n"
        "assert state['0.weight'].data_ptr() == state['1.weight'].data_ptr()\n"
        f"model = torch.load({str(tmp_path / 'whole.pt')!r}, map_location='cpu', weights_only=False)\n"
        "assert type(model[0].weight) is torch.nn.Parameter and model[0].weight is model[1].weight\n"
        "assert 'skyproxy' not in sys.modules\n"
        "print(state['0.weight'].sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(model[0].weight.sum().item(), abs=1e-6)


def test_a_device_that_does_not_exist_is_named(sky1: str) -> None:
    with pytest.raises(RuntimeError, match=r"sky:97.*map_location"):
        torch.load(saved(torch.ones(2)), map_location="sky:97")


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.uint64, torch.bool, torch.int8],
)
def test_every_dtype_survives(dtype: torch.dtype, sky1: str) -> None:
    x = torch.arange(8).to(dtype)
    loaded = torch.load(saved(x.to(sky1)))
    assert (loaded.dtype, loaded.device) == (dtype, torch.device(sky1))
    assert torch.equal(loaded.cpu().view(torch.uint8), x.view(torch.uint8))


def test_the_conjugate_bit_of_a_file_reaches_the_worker(sky1: str) -> None:
    x = torch.tensor([1 + 2j, 3j]).conj()
    loaded = torch.load(saved(x), map_location=sky1)
    assert loaded.is_conj()
    assert torch.equal(loaded.cpu(), x)
    assert torch.equal((loaded * 1).cpu(), x)
    assert torch.equal(torch.load(saved(loaded)).cpu(), x)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_sparse_tensors_survive(make: Any, sky1: str) -> None:
    x = make(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).to(sky1)
    loaded = torch.load(saved(x))
    assert (loaded.layout, loaded.device) == (x.layout, torch.device(sky1))
    assert torch.equal(loaded.cpu().to_dense(), torch.tensor([[0.0, 2.0], [3.0, 0.0]]))
    assert torch.equal(copy.deepcopy(x).cpu().to_dense(), x.cpu().to_dense())


def test_a_storage_can_be_saved_by_itself(sky1: str) -> None:
    storage = torch.arange(4, dtype=torch.uint8, device=sky1).untyped_storage()
    loaded = torch.load(saved(storage), weights_only=False)
    assert str(loaded.device) == sky1
    assert loaded.tolist() == [0, 1, 2, 3]


def test_attributes_of_a_tensor_survive(sky1: str) -> None:
    x = torch.ones(2, device=sky1)
    x.note = "kept"  # type: ignore[attr-defined]
    p = nn.Parameter(x.clone())
    p.note = "kept too"  # type: ignore[attr-defined]
    for loaded in (torch.load(saved([x, p]), weights_only=False), pickle.loads(pickle.dumps([x, p]))):
        assert [item.note for item in loaded] == ["kept", "kept too"]
        assert type(loaded[0]) is RemoteTensor


def test_a_leaf_with_attributes_stays_one(sky1: str) -> None:
    x = torch.ones(2, device=sky1, requires_grad=True)
    x.note = "kept"  # type: ignore[attr-defined]
    makers = (
        lambda: torch.load(saved(x), weights_only=False),
        lambda: pickle.loads(pickle.dumps(x)),
        lambda: copy.copy(x),
    )
    for make in makers:
        made = make()
        (made * 2).sum().backward()
        assert (made.is_leaf, made.requires_grad, made._is_view(), made.note) == (True, True, False, "kept")
        assert made.grad.tolist() == [2, 2]
    assert x.as_subclass(torch.Tensor).grad_fn is not None


def test_a_model_and_its_optimizer_continue_from_a_checkpoint(sky1: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3, device=sky1)).sum().backward()
        optimizer.step()

    model = nn.Linear(3, 3).to(sky1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)
    state = torch.load(file, weights_only=True)
    again = nn.Linear(3, 3).to(sky1)
    again.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
    optimizer.load_state_dict(state["optimizer"])
    step(again, optimizer)
    assert torch.equal(again.weight.cpu(), model.weight.cpu())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["cpu", "sky:1"])
def test_load_state_dict_takes_tensors_of_both_sides(assign: bool, source: str, sky: str) -> None:
    model, other = nn.Linear(2, 2).to(sky), nn.Linear(2, 2).to(source)
    weight = model.weight
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(model.weight.cpu(), other.weight.cpu())
    assert model.weight.device == torch.device(source if assign else sky)
    assert isinstance(model.weight, nn.Parameter)
    assert (model.weight is weight) is not assign


# --- pickle and copy -------------------------------------------------------------------------------------------------


def test_pickle_keeps_values_flags_and_place(sky1: str) -> None:
    x = torch.arange(5.0, device=sky1, requires_grad=True)
    y, view = pickle.loads(pickle.dumps([x, x.detach()[2:]]))
    assert y.requires_grad
    assert y.device == view.device == torch.device(sky1)
    assert (y.tolist(), view.tolist()) == ([0, 1, 2, 3, 4], [2, 3, 4])
    assert view.storage_offset() == 2


def test_a_shallow_copy_shares_the_storage(sky1: str) -> None:
    x = torch.zeros(2, device=sky1)
    x.note = [1]  # type: ignore[attr-defined]
    y = copy.copy(x)
    y.add_(1)
    assert x.tolist() == [1, 1]
    assert y.note is x.note


def test_a_deep_copy_keeps_ties_views_and_parameters(sky1: str) -> None:
    model = tied_model(sky1)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.cpu().any()
    for order in (lambda a: [a, a[1:]], lambda a: [a[1:], a]):
        x = torch.zeros(4, device=sky1)
        first, second = copy.deepcopy(order(x))
        (first if first.numel() == 4 else second).add_(1)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert (first.cpu() == 1).all()
        assert (second.cpu() == 1).all()
        assert not x.cpu().any()


def test_a_deep_copy_of_a_model_is_one_op_a_tensor_and_no_wait(sky1: str) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]).to(sky1)
    copy.deepcopy(model)
    before = torch.sky.stats()  # type: ignore[attr-defined]
    copy.deepcopy(model)
    after = torch.sky.stats()  # type: ignore[attr-defined]
    assert after["round_trips"] == before["round_trips"]
    assert after["ops"] - before["ops"] <= 2 * 10  # a detach and a clone


def test_a_deep_copy_takes_the_gradient_and_the_attributes(sky1: str) -> None:
    x = torch.ones(2, device=sky1, requires_grad=True)
    (x * 3).sum().backward()
    x.note = [1]  # type: ignore[attr-defined]
    y = copy.deepcopy(x)
    assert y.requires_grad
    assert y.grad is not None
    assert y.grad is not x.grad
    assert y.grad.tolist() == [3, 3]
    assert y.note == [1]
    assert y.note is not x.note


def test_a_deep_copy_of_a_parameter_is_one_of_its_values_alone(sky1: str) -> None:
    """A copy that kept the gradient would add to it in its first backward pass."""

    def outcome(device: str) -> list[Any]:
        model = nn.Linear(2, 2, device=device)
        x = torch.ones(1, 2, device=device)
        model(x).sum().backward()
        model.weight.note = [1]  # type: ignore[assignment]
        model.bias.requires_grad_(False)
        twin = copy.deepcopy(model)
        found: list[Any] = [twin.weight.grad, twin.bias.grad, vars(twin.weight).keys() & {"note"}]
        twin(x).sum().backward()
        assert twin.weight.grad is not None
        return [*found, twin.weight.grad.tolist(), twin.bias.grad, twin.bias.requires_grad]

    assert outcome(sky1) == outcome("cpu") == [None, None, set(), [[1, 1], [1, 1]], None, False]


@pytest.mark.parametrize(
    "look", [torch.conj, lambda x: x.conj().imag, lambda x: x.real], ids=["conj", "neg", "neither"]
)
def test_bits_and_shared_memory_are_kept_and_copied_as_by_the_cpu(look: Any, sky1: str) -> None:
    """A file keeps the conjugate and negative bits; a deep copy has the values without them, in memory of its own."""

    def outcome(device: str) -> list[Any]:
        x = torch.tensor([1 + 2j, 3j], device=device)
        # What shares memory and differs in its dtype is not saved together, by PyTorch itself.
        together = saved([x, look(x)]) if look(x).is_complex() else saved([x, look(x.clone())])
        found: list[Any] = []
        for whole, part in (copy.deepcopy([x, look(x)]), torch.load(together), [x, look(x)]):
            found += [part.is_conj(), part.is_neg(), part.stride(), part.tolist()]
            whole.zero_()
            found += [part.tolist(), part.is_leaf]
        leaf = look(x).detach().requires_grad_()
        copied = copy.deepcopy(leaf)
        return [*found, copied.requires_grad, copied.is_leaf, copied.is_conj(), copied.is_neg()]

    assert outcome(sky1) == outcome("cpu")


def test_only_leaves_can_be_copied_deeply(sky1: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        copy.deepcopy(torch.ones(1, requires_grad=True) * 2)
    with pytest.raises(RuntimeError) as got:
        copy.deepcopy(torch.ones(1, device=sky1, requires_grad=True) * 2)
    assert str(got.value) == str(expected.value)


def test_a_fake_copy_of_a_module_shares_what_its_tensors_share(sky1: str) -> None:
    module, mode = nn.Linear(2, 2).to(sky1), FakeTensorMode()
    module.table = torch.ones(4, 2, device=sky1)
    module.same, module.row = module.table, module.table[1]
    with FakeCopyMode(mode):
        copied = copy.deepcopy(module)
    assert all(isinstance(value, FakeTensor) for value in (copied.weight, copied.table, copied.row))
    assert copied.table is copied.same
    assert copied.row.untyped_storage()._cdata == copied.table.untyped_storage()._cdata
    assert (copied.row.device, copied.row.storage_offset()) == (module.row.device, 2)


# --- multiprocessing -------------------------------------------------------------------------------------------------


def test_tensors_are_passed_to_other_processes(sky1: str) -> None:
    model, x = tied_model(sky1), torch.arange(6.0, device=sky1).view(2, 3).t()
    empty = torch.ones(0, 3, device=sky1)
    passed, y, view, nothing = ForkingPickler.loads(ForkingPickler.dumps([model, x, x[1:], empty]))
    assert passed[0].weight is passed[1].weight
    assert isinstance(passed[0].weight, nn.Parameter)
    assert torch.equal(passed[1].weight.cpu(), model[0].weight.cpu())
    assert (str(y.device), y.stride(), nothing.shape) == (sky1, x.stride(), empty.shape)
    y.add_(1)
    assert torch.equal(view.cpu(), x.cpu()[1:] + 1)  # they share memory there
    assert x.sum().item() == 15.0  # and not with what was passed


@pytest.mark.parametrize("part", ["_reduce_strided", "bytes_of"])
def test_what_cannot_be_sent_is_an_error_where_it_is_read(
    part: str, sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(value: object) -> None:
        raise SessionLostError("gone")

    x, queue = torch.ones(3, device=sky1), multiprocessing.Queue()
    monkeypatch.setattr(serialization, part, fail)
    with pytest.raises(SessionLostError, match="gone"):
        ForkingPickler.dumps(x)  # in the program's own thread, at its line
    queue.put([x])
    with pytest.raises(SessionLostError, match="gone") as error:
        queue.get(timeout=60)
    assert error.value.__notes__ == ["This was raised in the process that was to send a tensor."]
    queue.put([1])
    assert queue.get(timeout=60) == [1]


# --- safetensors -----------------------------------------------------------------------------------------------------


@pytest.fixture
def safetensors() -> Any:
    return pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize("device", ["sky:1", "sky", 1, "cpu"])
def test_safetensors_load_on_a_worker(device: Any, safetensors: Any, sky1: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3).to(sky1)
    safetensors.save_file(model.state_dict(), tmp_path / "m.safetensors")
    loaded = safetensors.load_file(tmp_path / "m.safetensors", device=device)["weight"]
    expected = {"sky": "sky:0", 1: "sky:1"}.get(device, device)
    assert str(loaded.device) == expected
    assert torch.equal(loaded.cpu(), model.weight.cpu())


def test_safetensors_open_lazily_on_a_worker(safetensors: Any, sky1: str, tmp_path: Path) -> None:
    safetensors.save_file({"x": torch.arange(6.0, device=sky1).view(3, 2)}, tmp_path / "x.safetensors")
    with sys.modules["safetensors"].safe_open(tmp_path / "x.safetensors", framework="pt", device=sky1) as file:
        part = file.get_slice("x")[1:2]
    assert str(part.device) == sky1
    assert part.tolist() == [[2, 3]]


def test_safetensors_see_tied_weights(safetensors: Any, sky1: str, tmp_path: Path) -> None:
    model = tied_model(sky1)
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(model.state_dict(), tmp_path / "m.safetensors")
    safetensors.save_model(model, tmp_path / "m.safetensors")
    twin = tied_model(sky1)
    safetensors.load_model(twin, tmp_path / "m.safetensors")
    assert torch.equal(twin[1].weight.cpu(), model[0].weight.cpu())
