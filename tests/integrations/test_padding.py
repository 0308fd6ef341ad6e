"""Models that ask whether tokens look padded: no wait, the same warning, and none for steps that were too many."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import PreTrainedModel
from transformers.generation import utils
from transformers.utils import logging as transformers_logging

from tests.integrations.language_models import make_model, placed, prompts

if not hasattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask") or not hasattr(utils, "DeferredStopCheck"):
    pytest.skip("this transformers asks in another way", allow_module_level=True)

LONG = 24


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "may be padded" in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.fixture
def warnings_of_padding() -> Iterator[_Warnings]:
    logger = transformers_logging.get_logger("transformers.modeling_utils")
    once, level, handler = type(logger).warning_once, logger.level, _Warnings()
    once.cache_clear()
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    once.cache_clear()


def trips() -> int:
    return int(torch.sky.stats()["round_trips"])


@pytest.mark.parametrize("use_cache", [False, True])
def test_tokens_that_were_uploaded_are_not_asked_for(
    use_cache: bool, sky1: str, warnings_of_padding: _Warnings
) -> None:
    model = make_model("GPT2").to(sky1).train()
    for batch in (prompts(1)["input_ids"], prompts(1)["input_ids"] + 1):
        tokens = batch.to(sky1)
        before = trips()
        model(tokens, labels=tokens, use_cache=use_cache).loss.backward()
        assert trips() == before
    assert not warnings_of_padding.messages
    model(prompts()["input_ids"].to(sky1))
    assert len(warnings_of_padding.messages) == 1


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_positions_that_were_counted_are_not_asked_for(family: str, sky1: str) -> None:
    local = make_model(family)
    model = copy.deepcopy(local).to(sky1)
    tokens = torch.randint(1, 90, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = local(tokens, use_cache=False).logits
        unknown = tokens.to(sky1) + torch.randint(0, 1, (), device=sky1)
        before = trips()
        found = model(unknown, use_cache=False).logits
        assert trips() == before
        torch.testing.assert_close(found.cpu(), expected)
        packed = torch.tensor([[*range(12), *range(8)]])
        expected = local(tokens[:1], position_ids=packed, use_cache=False).logits
        found = model(unknown[:1], position_ids=packed.to(sky1), use_cache=False).logits
        torch.testing.assert_close(found.cpu(), expected)


def test_generate_asks_with_the_news_of_each_token(far: str, warnings_of_padding: _Warnings) -> None:
    local = make_model("GPT2")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": None}
    expected = local.generate(**prompts(1), **options)
    remote, inputs = copy.deepcopy(local).to(far), placed(prompts(1), far)
    remote.generate(**inputs, **options)
    before = trips()
    assert remote.generate(**inputs, **options).tolist() == expected.tolist()
    assert trips() - before <= LONG // 2
    assert not warnings_of_padding.messages


@pytest.mark.parametrize("place", [3, LONG - 1])
def test_a_padding_token_that_is_generated_warns_as_it_does_here(
    place: int, sky1: str, warnings_of_padding: _Warnings
) -> None:
    local = make_model("GPT2")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": None}
    tokens = local.generate(**prompts(1), **options)[0, 6:].tolist()
    for model in (local, copy.deepcopy(local).to(sky1)):
        model.config.pad_token_id = tokens[place]
        expected = model is local
        model.generate(**placed(prompts(1), str(model.device)), **options)
        if expected:
            wanted = len(warnings_of_padding.messages)
            warnings_of_padding.messages.clear()
            type(transformers_logging.get_logger("transformers.modeling_utils")).warning_once.cache_clear()
    assert len(warnings_of_padding.messages) == wanted == int(tokens[place] in tokens[: LONG - 1])


def test_steps_that_were_too_many_do_not_warn(far: str, warnings_of_padding: _Warnings) -> None:
    local = make_model("GPT2")
    tokens = local.generate(**prompts(1), do_sample=False, max_new_tokens=LONG, eos_token_id=None)[0, 6:].tolist()
    end = next(token for place, token in enumerate(tokens) if place > 6 and token not in tokens[:place])
    remote = copy.deepcopy(local).to(far)
    found = remote.generate(
        **placed(prompts(1), far), do_sample=False, max_new_tokens=LONG, eos_token_id=end, pad_token_id=0
    )
    assert found[0, 6:].tolist() == tokens[: tokens.index(end) + 1]
    assert not warnings_of_padding.messages
