"""Fine-tuning with peft: adapters beside remote weights, and the losses of a local run to the last bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft

from tests.integrations.language_models import VOCABULARY, make_model, placed, prompts

STEPS = 6
ADAPTERS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    "LoRA of all layers": lambda: peft.LoraConfig(r=2, target_modules="all-linear", use_rslora=True),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4),
}


def adapted(kind: str, base: Any, device: str) -> Any:
    torch.manual_seed(1)
    config = ADAPTERS[kind]()
    config.task_type = "CAUSAL_LM"
    # The adapter is drawn on the CPU, as the base model was: each device has random numbers of its own.
    return peft.get_peft_model(copy.deepcopy(base), config).to(device)


def fine_tune(model: Any, device: str, steps: int = STEPS) -> list[float]:
    """The losses of a few steps on random text."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    text = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        ids = torch.randint(3, VOCABULARY, (4, 10), generator=text).to(device)
        torch.manual_seed(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values: list[float] = torch.stack(losses).tolist()
    return values


@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_fine_tuning_repeats_the_local_losses_to_the_last_bit(kind: str, sky1: str) -> None:
    base = make_model("Llama", pad_token_id=None)
    local, remote = (adapted(kind, base, device) for device in ("cpu", sky1))
    expected, found = fine_tune(local, "cpu"), fine_tune(remote, sky1)
    assert found == expected
    assert len(set(expected)) == STEPS
    for (name, ours), theirs in zip(remote.named_parameters(), local.parameters(), strict=True):
        assert ours.device == torch.device(sky1), name
        assert torch.equal(ours.detach().cpu(), theirs.detach()), name


@pytest.mark.parametrize("family", ["GPT2", "Mixtral"])
def test_other_families_repeat_them_too(family: str, sky1: str) -> None:
    base = make_model(family, pad_token_id=None)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"] if family == "GPT2" else ["q_proj"])
    losses = []
    for device in ("cpu", sky1):
        torch.manual_seed(1)
        losses.append(fine_tune(peft.get_peft_model(copy.deepcopy(base), config).to(device), device))
    assert losses[0] == losses[1]


def test_training_waits_for_nothing_but_the_losses(sky1: str) -> None:
    model = adapted("LoRA", make_model("Llama", pad_token_id=None), sky1)
    fine_tune(model, sky1)
    before = torch.sky.stats()["round_trips"]
    fine_tune(model, sky1)
    assert torch.sky.stats()["round_trips"] == before + 1


def test_an_adapter_made_beside_remote_weights_is_remote(sky1: str) -> None:
    model = peft.get_peft_model(make_model("Llama").to(sky1), ADAPTERS["LoRA"]())
    assert {p.device for p in model.parameters()} == {torch.device(sky1)}


def test_a_trained_adapter_is_merged_saved_and_loaded(tmp_path: Path, sky1: str) -> None:
    base = make_model("Llama", pad_token_id=None)
    model = adapted("LoRA", base, sky1)
    fine_tune(model, sky1, steps=2)
    model.eval()
    inputs = placed(prompts(), sky1)
    logits = model(**inputs).logits
    with model.disable_adapter():
        assert not torch.allclose(model(**inputs).logits.cpu(), logits.cpu())
    model.save_pretrained(tmp_path)

    local = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(local(**prompts()).logits, logits.cpu())
    remote = peft.PeftModel.from_pretrained(copy.deepcopy(base).to(sky1), tmp_path).eval()
    assert torch.equal(remote(**inputs).logits.cpu(), logits.cpu())

    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits.cpu(), logits.cpu(), rtol=1e-3, atol=1e-3)
    tokens = merged.generate(**inputs, do_sample=False, max_new_tokens=6)
    assert tokens.tolist() == local.generate(**prompts(), do_sample=False, max_new_tokens=6).tolist()
