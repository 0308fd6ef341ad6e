"""The question of transformers' models whether tokens look padded, which costs no wait of its own.

A model with a padding token asks it before every forward without a mask, to warn once. Tokens that were uploaded answer
by themselves. Where `generate` runs ahead, a token's answer comes with the news whether to stop after it, and the
warning that many tokens late; of steps that were too many, nobody hears.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from skyproxy import patching
from skyproxy.integrations.generation import ask_with_step
from skyproxy.patching import When
from skyproxy.tensor.core.host_copies import values_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import has_modes_or_transforms
from skyproxy.tensor.torch_api import dynamo

_NAME = "warn_if_padding_and_no_attention_mask"
_PARAMETERS = ["self", "input_ids", "attention_mask"]
_WHY = "whether tokens look padded is answered where they were uploaded, or with the news of a token of `generate`"
_TEST = "tests/integrations/test_padding.py::test_generate_asks_with_the_news_of_each_token"
dynamo.trace_through(__file__)


def _answer(plain: Callable[..., object]) -> Callable[..., object]:
    @wraps(plain)
    def warn(self: Any, input_ids: torch.Tensor, attention_mask: object) -> object:
        if torch.compiler.is_compiling() or type(input_ids) is not RemoteTensor or attention_mask is not None:
            return plain(self, input_ids, attention_mask)
        padding = getattr(self.config, "pad_token_id", None)
        if type(padding) is not int or input_ids.dim() != 2 or not input_ids.shape[1] or has_modes_or_transforms():
            return plain(self, input_ids, attention_mask)
        tokens = values_of(input_ids._sky)
        if tokens is not None:
            return plain(self, tokens, attention_mask)

        def ask() -> torch.Tensor:
            ends = (input_ids == padding)[:, :: max(1, input_ids.shape[1] - 1)]
            return ends.any()

        def tell() -> None:
            plain(self, torch.full((1, 1), padding, device="cpu"), None)

        return None if ask_with_step(_NAME, ask, tell) else plain(self, input_ids, attention_mask)

    return warn


def install(module: object) -> None:
    """Complete `transformers.modeling_utils`, if its models ask so."""
    owner = getattr(module, "PreTrainedModel", None)
    function = vars(owner or object).get(_NAME)
    if function is not None and list(inspect.signature(function).parameters) == _PARAMETERS:
        patching.wrap(owner, _NAME, _answer, why=_WHY, test=_TEST, when=When.TRANSFORMERS)


__all__ = ["install"]
