"""Models on several workers: a frozen reference beside the one that trains, and weights that go between them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from tests.integrations.language_models import VOCABULARY, make_model, placed, prompts


def places(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def same_weights(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x.cpu(), y.cpu()) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "T5"])
def test_a_copy_of_a_model_moves_to_another_worker(family: str, sky: str, sky1: str) -> None:
    model = make_model(family).to(sky)
    reference = copy.deepcopy(model).to(sky1)
    assert places(model) == {torch.device(sky)}
    assert places(reference) == {torch.device(sky1)}
    assert same_weights(reference, model)
    assert all(type(p.data) is RemoteTensor for p in reference.parameters())
    # GPT-2 and T5 tie their output to their input.
    tied = [{name for name, p in m.named_parameters(remove_duplicate=False)} for m in (model, reference)]
    once = [{name for name, p in m.named_parameters()} for m in (model, reference)]
    assert tied[0] == tied[1]
    assert once[0] == once[1]
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert not same_weights(reference, model)


def test_a_copy_goes_straight_into_the_weights_of_another_worker(sky: str, sky1: str) -> None:
    """What synchronizes a reference model: `ref_p.data.copy_(p.data)`."""
    model, reference = make_model("Qwen2").to(sky), make_model("Llama").to(sky1)
    names = dict(model.named_parameters())
    kept = {name: id(p) for name, p in reference.named_parameters()}
    copied = 0
    for name, parameter in reference.named_parameters():
        if name in names and names[name].shape == parameter.shape:
            parameter.data.copy_(names[name].data)
            assert torch.equal(parameter.detach().cpu(), names[name].detach().cpu())
            copied += 1
    assert copied > 10
    assert places(reference) == {torch.device(sky1)}
    assert {name: id(p) for name, p in reference.named_parameters()} == kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_copy_between_workers_takes_the_dtype_and_the_shape_of_its_target(
    dtype: torch.dtype, sky: str, sky1: str
) -> None:
    source, target = torch.arange(6.0, device=sky), torch.zeros(2, 6, dtype=dtype, device=sky1)
    target.copy_(source)
    assert target.dtype is dtype
    assert target.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    target[:, ::2].copy_(source[3:])
    assert target.tolist() == [[3, 1, 4, 3, 5, 5]] * 2
    target.t().copy_(torch.ones(6, 2, device=sky), non_blocking=True)
    assert target.sum().item() == 12


def test_what_was_recorded_before_a_copy_is_in_it(sky: str, sky1: str) -> None:
    """No `synchronize` is needed on either side."""
    source, target = torch.zeros(64, 64, device=sky), torch.zeros(64, 64, device=sky1)
    for _ in range(50):
        source += 1
    target.copy_(source)
    source += 1
    target += 1
    assert target.unique().tolist() == [51]
    assert source.unique().tolist() == [51]


def test_operands_of_two_workers_are_an_error_with_both_names(sky: str, sky1: str) -> None:
    with pytest.raises(RuntimeError, match=r"at least two devices, sky:0 and sky:1"):
        torch.ones(2, device=sky) + torch.ones(2, device=sky1)


def grpo(trained: str, frozen: str) -> list[float]:
    """Three steps of policy optimization against a frozen reference, whose weights follow each second step."""

    def log_probabilities(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        logits = model(input_ids=tokens).logits[:, prompt - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)

    policy = make_model("Llama", pad_token_id=None).to(trained)
    reference = copy.deepcopy(policy).to(frozen).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    inputs = placed(prompts(1), trained)
    group, length = 4, inputs["input_ids"].shape[1]
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(4):
        # Drawn here, so that one worker and two see the same samples.
        answers = torch.randint(3, VOCABULARY, (group, 5), generator=generator).to(trained)
        tokens = torch.cat([inputs["input_ids"].expand(group, -1), answers], 1)
        rewards = (answers < VOCABULARY // 2).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        ours = log_probabilities(policy, tokens, length)
        with torch.no_grad():
            theirs = log_probabilities(reference, tokens.to(frozen), length).to(trained)
        distance = (theirs - ours).exp() - (theirs - ours) - 1
        loss = -((ours - ours.detach()).exp() * advantages[:, None] - 0.04 * distance).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2:
            with torch.no_grad():
                for ref_p, p in zip(reference.parameters(), policy.parameters(), strict=True):
                    ref_p.data.copy_(p.data)
    return losses


def test_policy_optimization_over_two_workers_equals_one_local_process(sky: str, sky1: str) -> None:
    assert grpo(sky, sky1) == grpo("cpu", "cpu")
