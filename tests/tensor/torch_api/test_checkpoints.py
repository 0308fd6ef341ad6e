"""`torch.distributed.checkpoint` of remote tensors, in one process, as programs without a process group use it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from skyproxy.errors import RemoteError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which `async_save` wants."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/group")
    yield
    dist.destroy_process_group()


def training(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(device: str, *, filled: bool) -> dict[str, Any]:
    fill = torch.ones if filled else torch.zeros
    return {
        "view": fill(4, device=device).cumsum(0)[1:],
        "half": fill(3, dtype=torch.bfloat16, device=device),
        "transposed": fill(2, 3, device=device).cumsum(1).t(),
        "here": fill(2),
        "step": int(filled),
    }


def assert_loaded(path: Path, device: str) -> None:
    found = state_of(device, filled=False)
    dcp.load(found, checkpoint_id=path)
    for name, expected in state_of("cpu", filled=True).items():
        if isinstance(expected, torch.Tensor):
            assert found[name].device == torch.device("cpu" if name == "here" else device)
            assert torch.equal(found[name].cpu(), expected), name
        else:
            assert found[name] == expected


def test_what_was_saved_is_loaded_in_place(sky1: str, tmp_path: Path) -> None:
    dcp.save(state_of(sky1, filled=True), checkpoint_id=tmp_path)
    assert_loaded(tmp_path, sky1)
    assert_loaded(tmp_path, "cpu")


def test_a_checkpoint_of_the_cpu_loads_on_a_worker(sky1: str, tmp_path: Path) -> None:
    dcp.save(state_of("cpu", filled=True), checkpoint_id=tmp_path)
    assert_loaded(tmp_path, sky1)


@pytest.mark.usefixtures("group")
def test_an_asynchronous_save_holds_what_was_there_when_it_began(sky1: str, tmp_path: Path) -> None:
    state = state_of(sky1, filled=True)
    saving = dcp.async_save(state, checkpoint_id=tmp_path / "checkpoint")
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    saving.result()
    assert_loaded(tmp_path / "checkpoint", sky1)


@pytest.mark.usefixtures("group")
def test_tensors_are_their_own_after_an_asynchronous_save(sky1: str, tmp_path: Path) -> None:
    """The copy that is staged must not give the slots back a second time."""
    dcp.async_save(state_of(sky1, filled=True), checkpoint_id=tmp_path / "checkpoint").result()
    made = [torch.full((2,), float(n), device=sky1) for n in range(40)]
    assert [t.tolist() for t in made] == [[float(n)] * 2 for n in range(40)]


def test_a_model_and_its_optimizer_continue_from_a_checkpoint(sky1: str, tmp_path: Path) -> None:
    model, optimizer = training(sky1)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    other, fresh = training(sky1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    weights, state = get_state_dict(other, fresh)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    for name, value in other.state_dict().items():
        assert torch.equal(value.cpu(), expected[name])
    for trained, steps in ((model, optimizer), (other, fresh)):
        trained(torch.full((2, 4), 0.5, device=sky1)).sum().backward()
        steps.step()
        steps.zero_grad()
    other(torch.ones(2, 4, device=sky1)).sum().backward()


@pytest.mark.parametrize(
    "fails",
    [
        lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        lambda d: torch.nested.nested_tensor([torch.ones(2, device=d), torch.ones(3, 2, device=d)]),
        lambda d: torch.ones(3, device=d)[torch.tensor([9], device=d)].cpu(),
    ],
)
def test_a_failure_that_was_raised_harms_no_later_checkpoint(fails: Any, sky1: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fails(sky1)
    dcp.save(state_of(sky1, filled=True), checkpoint_id=tmp_path)
    assert_loaded(tmp_path, sky1)


def test_copies_of_a_tensors_attributes_share_its_slot(sky1: str) -> None:
    x = torch.arange(3.0, device=sky1)
    for copied in (copy.deepcopy(vars(x)), copy.copy(vars(x)["_sky"])):
        del copied
    others = [torch.full((3,), float(n), device=sky1) for n in range(5)]
    assert x.tolist() == [0, 1, 2]
    assert [t.tolist() for t in others] == [[float(n)] * 3 for n in range(5)]
    with pytest.raises(TypeError, match="Pickle the tensor itself"):
        pickle.dumps(vars(x)["_sky"])


def test_an_error_of_a_worker_can_be_pickled(sky1: str) -> None:
    """Process groups send them to the other ranks."""
    with pytest.raises(IndexError) as caught:
        torch.ones(3, device=sky1)[torch.tensor([9], device=sky1)].cpu()
    found = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(found, RemoteError)
    assert type(found) is type(caught.value)
    assert (str(found), found.op) == (str(caught.value), caught.value.op)  # type: ignore[attr-defined]
