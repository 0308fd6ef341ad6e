"""accelerate on remote devices: its `Accelerator`, and its hooks that move models and what flows through them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import accelerate
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from skyproxy.errors import ConfigurationError
from skyproxy.integrations import huggingface
from tests.integration.programs import succeed
from tests.integrations.language_models import make_model, placed, prompts


@pytest.fixture(autouse=True)
def _undecided() -> Iterator[None]:
    """accelerate chooses its device once a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator: Accelerator, epochs: int = 2) -> tuple[list[float], nn.Module, Any]:
    """The loop of accelerate's documentation; losses, model and optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for _ in range(epochs):
        for batch, labels in data:
            assert batch.device == accelerator.device
            with accelerator.accumulate(model), accelerator.autocast():
                loss = nn.functional.cross_entropy(model(batch), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    values: list[float] = accelerator.gather_for_metrics(torch.stack(losses)).tolist()
    return values, model, optimizer


def test_a_prepared_loop_repeats_the_local_losses(sky1: str) -> None:
    expected, *_ = train(Accelerator(cpu=True, gradient_accumulation_steps=2))
    AcceleratorState._reset_state(reset_partial_state=True)
    with huggingface.use(sky1):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        found, model, _ = train(accelerator)
    assert accelerator.device == torch.device(sky1)
    assert {p.device for p in model.parameters()} == {torch.device(sky1)}
    assert found == expected


def test_the_environment_alone_chooses_the_device(sky1: str) -> None:
    program = """
        import skyproxy
        skyproxy.launch_local("cpu"); skyproxy.launch_local("cpu")
        from accelerate import Accelerator
        print(Accelerator().device)
    """
    assert succeed(program, ACCELERATE_TORCH_DEVICE=sky1, timeout=100) == sky1


def test_mixed_precision_is_autocast_of_the_device(sky1: str) -> None:
    with huggingface.use(sky1):
        accelerator = Accelerator(mixed_precision="bf16")
        layer = accelerator.prepare(nn.Linear(2, 2))
        with accelerator.autocast():
            assert torch.mm(layer.weight, layer.weight).dtype is torch.bfloat16
        values, *_ = train(accelerator)
    assert values[-1] < values[0]


def test_fp16_is_refused_by_accelerate_itself(sky1: str) -> None:
    with huggingface.use(sky1), pytest.raises(ValueError, match="fp16 mixed precision requires a device in"):
        Accelerator(mixed_precision="fp16")


def test_models_stay_where_they_are_without_device_placement(sky1: str) -> None:
    with huggingface.use(sky1):
        accelerator = Accelerator(device_placement=False)
        assert accelerator.prepare(nn.Linear(2, 2)).weight.device.type == "cpu"
        assert accelerator.prepare(nn.Linear(2, 2).to("sky:0")).weight.device == torch.device("sky:0")


def test_a_state_is_saved_and_loaded_with_random_numbers(tmp_path: Path, sky1: str) -> None:
    with huggingface.use(sky1):
        accelerator = Accelerator()
        _, model, optimizer = train(accelerator, epochs=1)
        accelerator.save_state(str(tmp_path))
        expected = [p.detach().cpu() for p in model.parameters()]
        moments = [state["exp_avg"].cpu() for state in optimizer.state.values()]
        drawn = torch.rand(3)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())):
                tensor.zero_()
        accelerator.load_state(str(tmp_path))
    assert all(torch.equal(p.detach().cpu(), e) for p, e in zip(model.parameters(), expected, strict=True))
    assert all(
        torch.equal(state["exp_avg"].cpu(), e) for state, e in zip(optimizer.state.values(), moments, strict=True)
    )
    assert torch.equal(torch.rand(3), drawn)


# --- hooks -----------------------------------------------------------------------------------------------------------


def split_over(model: Any, first: str, second: str) -> dict[str, str]:
    return {
        "model.embed_tokens": first,
        "model.rotary_emb": first,
        "model.layers.0": first,
        "model.layers.1": second,
        "model.norm": second,
        "lm_head": second,
    }


def test_a_model_is_split_over_two_workers(sky: str, sky1: str) -> None:
    local = make_model("Llama")
    split = accelerate.dispatch_model(copy.deepcopy(local), split_over(local, sky, sky1))
    assert {p.device for p in split.parameters()} == {torch.device(sky), torch.device(sky1)}
    assert torch.equal(split(**placed(prompts(), sky)).logits.cpu(), local(**prompts()).logits)
    tokens = split.generate(**placed(prompts(), sky), do_sample=False, max_new_tokens=8)
    assert tokens.tolist() == local.generate(**prompts(), do_sample=False, max_new_tokens=8).tolist()


def test_weights_are_offloaded_to_the_cpu_and_to_disk(tmp_path: Path, sky1: str) -> None:
    local = make_model("Llama")
    expected = local(**prompts()).logits
    for offload in (
        lambda model: accelerate.cpu_offload(model, execution_device=torch.device(sky1)),
        lambda model: accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device(sky1)),
    ):
        handles = torch.sky.stats()["handles"]
        model = offload(copy.deepcopy(local))
        with torch.no_grad():
            logits = model(**placed(prompts(), sky1)).logits
        assert torch.equal(logits.cpu(), expected)
        assert {p.device.type for p in model.parameters()} == {"meta"}  # on the worker while they are used only
        assert torch.sky.stats()["handles"] - handles < 10


def test_a_hook_brings_the_model_there_and_back(sky1: str) -> None:
    local = make_model("Llama")
    model, hook = accelerate.cpu_offload_with_hook(copy.deepcopy(local), execution_device=torch.device(sky1))
    assert torch.equal(model(**prompts()).logits.cpu(), local(**prompts()).logits)
    assert {p.device for p in model.parameters()} == {torch.device(sky1)}
    hook.offload()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_an_empty_model_is_filled_from_a_checkpoint(tmp_path: Path, sky1: str) -> None:
    local = make_model("Llama")
    local.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = type(local)(local.config)
    model = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": sky1}).eval()
    assert torch.equal(model(**placed(prompts(), sky1)).logits.cpu(), local(**prompts()).logits)


def test_modules_are_born_on_the_device(sky1: str) -> None:
    with accelerate.init_on_device(torch.device(sky1)):
        assert nn.Linear(2, 2).weight.device == torch.device(sky1)
    moved = accelerate.utils.send_to_device({"a": [torch.ones(2)]}, sky1)
    assert moved["a"][0].device == torch.device(sky1)


# --- use -------------------------------------------------------------------------------------------------------------


def test_a_device_chosen_before_is_not_silently_kept(sky1: str) -> None:
    assert Accelerator().device.type == "cpu"
    with huggingface.use(sky1):
        assert Accelerator().device == torch.device(sky1)


def test_only_sky_devices_can_be_used() -> None:
    with pytest.raises(ConfigurationError, match="is not a sky device"):
        huggingface.use("cuda:0")


def test_the_end_of_a_block_gives_the_choice_back(sky1: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    with huggingface.use(sky1):
        accelerator = Accelerator()
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"
    assert accelerator.device == torch.device(sky1)  # accelerate chooses once
