"""Tiny language models of transformers, made from configurations with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 99
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_SIZES: dict[str, dict[str, Any]] = {
    "Qwen2": _SHAPE,
    "Llama": _SHAPE,
    "Mistral": {**_SHAPE, "sliding_window": 9},  # shorter than what is generated
    "Mixtral": {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        **_SHAPE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "T5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}
FAMILIES = tuple(_SIZES)


def make_model(family: str, attention: str = "sdpa", dtype: torch.dtype | None = None, **changes: Any) -> Any:
    """A model of this family on the CPU, in evaluation mode; the same weights at every call.

    Weights are larger than a fresh model's, so that logits differ, and so do tokens from one to the next.

    Args:
        family: one of FAMILIES.
        attention: "eager" or "sdpa".
        dtype: of the weights.
        changes: to the configuration.
    """
    tokens = {**_TOKENS, "decoder_start_token_id": 0} if family == "T5" else _TOKENS
    config = getattr(transformers, f"{family}Config")(**{**_SIZES[family], **tokens, **changes})
    auto = transformers.AutoModelForSeq2SeqLM if family == "T5" else transformers.AutoModelForCausalLM
    torch.manual_seed(3)
    model = auto.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    if family != "T5":
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(20)
    return model


def prompts(batch: int = 2) -> dict[str, torch.Tensor]:
    """Token ids and mask, (batch, 6) int64; the second row is shorter and padded on the left."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 11, 12, 13, 14]])[:batch]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def placed(inputs: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The same inputs on another device."""
    return {name: value.to(device) for name, value in inputs.items()}
