"""A language model on a worker of its own: the weights are loaded there, and only prompts and answers travel.

    python examples/compute_llm.py
    python examples/compute_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --gpus 1

The model that is built here is a skeleton without memory (`torch.device("meta")`); `load_into` fills it with the remote
weights. Without a name, a tiny model with random weights, whose answers mean nothing. Where the worker runs:
SKYPROXY_PROVIDER or the saved context says so; otherwise on this machine. The volume keeps downloads for the next time.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import torch
from llm import make_config, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import skyproxy as sky

PROMPTS = ["What is machine learning, in one sentence?", "Name three rivers."]


def load(name: str | None, config: Any, device: str) -> torch.nn.Module:
    """Runs on the worker: the model, whose weights stay there."""
    if name is None:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)


async def chat(node: sky.Node, name: str | None = None, max_new_tokens: int = 40) -> list[str]:
    """The answers to some prompts."""
    device = node.devices[0]
    if name is None:
        tokenizer: Any = make_tokenizer()
        config = make_config(tokenizer)
        remote = await node.execute(load, None, config, node_device(node))
    else:
        config = await asyncio.to_thread(AutoConfig.from_pretrained, name)
        remote, tokenizer = await asyncio.gather(
            node.execute(load, name, None, node_device(node)), asyncio.to_thread(AutoTokenizer.from_pretrained, name)
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    remote.load_into(model)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.eval()
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        given = {key: value.to(device) for key, value in inputs.items() if key != "token_type_ids"}
        with torch.no_grad():
            generated = model.generate(**given, max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(tokenizer.decode(generated[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
        print(f"you: {prompt}\nmodel: {answers[-1]}")
    return answers


def node_device(node: sky.Node) -> str:
    """The first device of a node, as the worker itself calls it."""
    return sky.devices()[node.devices[0].index].type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the Hugging Face hub")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs the worker asks for")
    options = parser.parse_args()
    run = sky.compute(
        name="llm",
        resources={"cpu": "1", "memory": "8Gi", **({"nvidia.com/gpu": str(options.gpus)} if options.gpus else {})},
        volumes=[{"name": "cache", "storage": "10Gi", "path": "/cache"}] if options.model else [],
        env={"HF_HOME": "/cache"} if options.model else {},
    )(chat)
    asyncio.run(run(name=options.model, max_new_tokens=options.max_new_tokens))


if __name__ == "__main__":
    main()
