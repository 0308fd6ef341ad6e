"""Chat with a language model whose weights never pass through this machine.

The worker downloads the weights, or makes them; here are the tokenizer, the prompt and the answer as it comes. Without
a name, a tiny model with random weights and a tokenizer made on the spot: it babbles, and needs no network.

    python examples/llm.py
    python examples/llm.py --model Qwen/Qwen2.5-0.5B-Instruct --prompt "What is a tensor?"

Which worker: see SKYPROXY_URL, `skyproxy up`; with neither, one on this machine. It needs transformers too.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, TextStreamer

import skyproxy

LINES = [
    "you: what is a worker? model: the process that holds the tensors and runs the operations.",
    "you: where are my weights? model: on the worker, they never came here.",
    "you: what came here? model: the names, the shapes, and this answer as it was made.",
]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}model:{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of a few hundred tokens, trained on a few lines: any text can be written with it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(LINES, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    made.chat_template = TEMPLATE
    return made


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """A Qwen2 of a hundred thousand parameters that never ends its answer by itself."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def load(node: skyproxy.Node, name: str | None, dtype: str) -> tuple[Any, Any]:
    """The tokenizer, here, and the model, whose weights are on the worker."""
    if name is None:
        tokenizer = make_tokenizer()
        return tokenizer, node.from_config(AutoModelForCausalLM, make_config(tokenizer))
    return AutoTokenizer.from_pretrained(name), node.from_pretrained(AutoModelForCausalLM, name, dtype=dtype)


def answer(node: skyproxy.Node, model: Any, tokenizer: Any, history: list[dict[str, str]], options: Any) -> str:
    """Prints the model's answer to the last message while it is made, and gives it."""
    if tokenizer.chat_template is None:
        inputs = tokenizer(history[-1]["content"], return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs.pop("token_type_ids", None)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    # The loop over the tokens runs on the worker: a slow link delays the first one, and no other.
    ids = node.generate(
        model,
        inputs,
        streamer=streamer,
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        **({"temperature": options.temperature} if options.temperature > 0 else {}),
    )
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :].tolist(), skip_special_tokens=True)


def main() -> None:
    """Loads, then answers one prompt, or one line of standard input after another."""
    parser = argparse.ArgumentParser(description="Chat with a language model on a worker.")
    parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder on the worker")
    parser.add_argument("--prompt", help="ask this, and end; otherwise lines of standard input are asked")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, bfloat16, float16, float32")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token every time")
    options = parser.parse_args()
    torch.sky.init()
    node = skyproxy.list_nodes()[0]
    before = torch.sky.stats()
    tokenizer, model = load(node, options.model, options.dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    moved = sum(torch.sky.stats()[way] - before[way] for way in ("bytes_sent", "bytes_received"))
    print(f"{weights / 2**20:,.1f} MiB of weights on {node.devices[0]}, {moved / 2**20:.2f} MiB moved", file=sys.stderr)
    history: list[dict[str, str]] = []
    for line in [options.prompt] if options.prompt is not None else iter_lines():
        history.append({"role": "user", "content": line})
        history.append({"role": "assistant", "content": answer(node, model, tokenizer, history, options)})


def iter_lines() -> Any:
    """The lines of standard input, with a sign that one is awaited."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    main()
