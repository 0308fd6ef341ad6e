"""Reinforcement learning on two workers: one samples answers, the other trains, and weights go from one to the other.

    python examples/cluster_grpo.py --steps 20

Group relative policy optimization (Shao et al., DeepSeekMath, 2024) of a tiny language model with random weights,
which is rewarded for even tokens: a group of answers is sampled, each is judged against the group's mean, and the
policy is moved towards those above it. Both workers come up together or not at all. Where they run: SKYPROXY_PROVIDER
or the saved context says so; otherwise on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import skyproxy as sky

VOCABULARY, LENGTH, GROUP = 32, 8, 32


def make_model() -> Any:
    """A Qwen2 of forty thousand parameters."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of the answers in (GROUP, 1 + LENGTH) tokens: (GROUP, LENGTH)."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


async def train(steps: int, resources: dict[str, str]) -> list[float]:
    """The mean reward of each step's answers."""
    torch.manual_seed(0)
    rewards_seen = []
    trainer = sky.Compute(name="trainer", resources=resources)
    sampler = sky.Compute(name="sampler", resources=resources)
    async with sky.Cluster(trainer, sampler) as (training, sampling):
        here, there = training.devices[0], sampling.devices[0]
        policy = make_model().to(here)
        actor = copy.deepcopy(policy).to(there).eval()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
        prompts = torch.ones(GROUP, 1, dtype=torch.int64, device=there)
        for step in range(steps):
            with torch.no_grad():
                tokens = actor.generate(prompts, max_new_tokens=LENGTH, do_sample=True, top_k=0).to(here)
            rewards = (tokens[:, 1:] % 2 == 0).float().mean(1)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            ours = log_probabilities(policy, tokens)
            loss = -((ours - ours.detach()).exp() * advantages[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for target, source in zip(actor.parameters(), policy.parameters(), strict=True):
                    target.data.copy_(source.data)
            rewards_seen.append(await rewards.mean().item_async())
            print(f"step {step + 1}: mean reward {rewards_seen[-1]:.3f}")
    return rewards_seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs each worker asks for")
    options = parser.parse_args()
    gpus = {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}
    rewards = asyncio.run(train(options.steps, {"cpu": "1", "memory": "4Gi", **gpus}))
    print(f"mean reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last")


if __name__ == "__main__":
    main()
