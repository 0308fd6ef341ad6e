"""Attention masks whose values are asked for once: what transformers does with them is what it does locally."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils
from transformers.generation import utils

from tests.integrations.language_models import make_model, placed, prompts

if not hasattr(masking_utils, "_preprocess_mask_arguments") or not hasattr(utils, "DeferredStopCheck"):
    pytest.skip("this transformers asks in another way", allow_module_level=True)

LONG = 24


@pytest.mark.parametrize("family", ["Qwen2", "T5"])
def test_a_mask_is_asked_for_once(family: str, far: str) -> None:
    local = make_model(family)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": None}
    expected = local.generate(**prompts(), **options)
    remote, inputs = copy.deepcopy(local).to(far), placed(prompts(), far)
    remote.generate(**inputs, **options)
    before = torch.sky.stats()["round_trips"]
    found = remote.generate(**inputs, **options)
    # Questions before the first token, and one at the end; after a pause of this machine, a step or two waits, too.
    assert torch.sky.stats()["round_trips"] - before <= LONG // 2
    assert found.tolist() == expected.tolist()


def test_a_mask_that_was_written_to_is_asked_for_again(sky1: str) -> None:
    local = make_model("Llama")
    remote = copy.deepcopy(local).to(sky1)
    mask = torch.ones(2, 8, dtype=torch.long)
    there, tokens = mask.to(sky1), torch.arange(16).view(2, 8)
    for row in (None, 0, 1):
        if row is not None:
            mask[row, :2] = 0
            there[row, :2] = 0
        expected = local(tokens, attention_mask=mask).logits[:, -1]
        found = remote(tokens.to(sky1), attention_mask=there).logits[:, -1]
        torch.testing.assert_close(found.cpu(), expected)


def test_masks_that_were_uploaded_are_not_asked_for(sky1: str) -> None:
    model, inputs = make_model("Qwen2").to(sky1).train(), prompts()
    assert not inputs["attention_mask"].all()
    for _ in range(2):
        batch = placed(inputs, sky1)
        before = torch.sky.stats()["round_trips"]
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert torch.sky.stats()["round_trips"] == before


MASKS = [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("values", MASKS)
def test_answers_are_those_that_values_give(values: list[int], sky1: str) -> None:
    mask = torch.tensor([values], dtype=torch.bool)
    for q_length, kv_length, q_offset, window in itertools.product((1, 2, 4), (2, 4, 6), (0, 3), (None, 3, 5)):
        call = q_length, kv_length, q_offset, 0, window
        expected = bool(masking_utils._ignore_causal_mask_sdpa(mask, *call))
        fresh = mask.to(sky1)
        known = mask.to(sky1)
        masking_utils._ignore_causal_mask_sdpa(known, 4, 4, 0, 0, None)
        for each in (fresh, fresh, known):
            assert bool(masking_utils._ignore_causal_mask_sdpa(each, *call)) is expected, (call, each is known)
        if kv_length <= 4:
            both = masking_utils._ignore_bidirectional_mask_sdpa
            assert [bool(both(each, kv_length, window)) for each in (fresh, mask.to(sky1), mask)] == [
                bool(both(mask, kv_length, window))
            ] * 3


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", [masking_utils.sdpa_mask, masking_utils.eager_mask])
def test_masks_are_those_that_comparisons_make(make: Any, batch: int, sky1: str) -> None:
    for q_length, kv_length, q_offset, kv_offset in [
        (1, 6, 5, 0),
        (1, 6, 4, 0),
        (1, 3, 9, 7),
        (2, 6, 5, 0),
        (1, 1, 0, 0),
    ]:
        call = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        for mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
            options = {**call, "mask_function": mask_function, "allow_is_causal_skip": False}
            expected = make(batch, **options, device=torch.device("cpu"))
            found = make(batch, **options, device=torch.device(sky1))
            assert found.tolist() == expected.tolist(), options
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_the_mask_of_one_token_takes_few_operations(sky1: str) -> None:
    before = torch.sky.stats()["ops"]
    masking_utils.eager_mask(2, 1, 6, q_offset=5, device=torch.device(sky1))
    assert torch.sky.stats()["ops"] - before <= 6
