"""`model.generate` of transformers on remote inputs: the very tokens that local CPU gives, one wait a token at most."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch import inference
from tests.integrations.language_models import FAMILIES, VOCABULARY, make_model, placed, prompts

NEW_TOKENS = 12
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
    return tokens


def check_same_tokens(local: Any, device: str, batch: int = 2, **options: Any) -> torch.Tensor:
    """Generates on both sides from the same seed; the remote tokens, which equal the local ones."""
    expected = generate(local, prompts(batch), **options)
    remote = copy.deepcopy(local).to(device)
    tokens = generate(remote, placed(prompts(batch), device), **options)
    assert tokens.device == torch.device(device)
    assert tokens.tolist() == expected.tolist()
    return tokens


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "beams"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_gives_the_same_tokens(family: str, attention: str, strategy: str, sky1: str) -> None:
    check_same_tokens(make_model(family, attention), sky1, **STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"greedy", "sampling", "beams"}))
@pytest.mark.parametrize("family", ["Qwen2", "GPT2", "Mixtral", "T5"])
def test_every_strategy_gives_the_same_tokens(family: str, strategy: str, sky1: str) -> None:
    check_same_tokens(make_model(family), sky1, **STRATEGIES[strategy])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_prompt_gives_the_same_tokens(family: str, sky1: str) -> None:
    check_same_tokens(make_model(family), sky1, batch=1, do_sample=False)


@pytest.mark.parametrize("family", ["Llama", "T5"])
def test_bfloat16_gives_the_same_tokens(family: str, sky1: str) -> None:
    check_same_tokens(make_model(family, dtype=torch.bfloat16), sky1, do_sample=False)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_inference_mode_gives_the_same_tokens_and_logits(family: str, cache: str, sky1: str) -> None:
    """The weights are ordinary tensors; what is computed of them there is not."""
    local = make_model(family)
    with torch.inference_mode():
        check_same_tokens(local, sky1, do_sample=False, cache_implementation=cache)
        if family != "T5":
            remote = copy.deepcopy(local).to(sky1)
            assert torch.equal(remote(**placed(prompts(), sky1)).logits.cpu(), local(**prompts()).logits)


def test_the_tokens_of_a_speculating_decoder_are_the_same(sky1: str) -> None:
    check_same_tokens(make_model("Qwen2"), sky1, batch=1, do_sample=False, prompt_lookup_num_tokens=3)


def test_a_sampler_goes_on_with_new_numbers(sky1: str) -> None:
    model, inputs = make_model("Llama").to(sky1), placed(prompts(), sky1)
    torch.manual_seed(0)
    first, second = (model.generate(**inputs, do_sample=True, max_new_tokens=NEW_TOKENS) for _ in range(2))
    assert not torch.equal(first.cpu(), second.cpu())


def test_scores_and_hidden_states_come_back_remote_and_equal(sky1: str) -> None:
    local = make_model("Llama")
    options = {
        "do_sample": False,
        "max_new_tokens": 4,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    local.set_attn_implementation("eager")  # the only one that gives attentions
    expected = local.generate(**prompts(), **options)
    found = copy.deepcopy(local).to(sky1).generate(**placed(prompts(), sky1), **options)
    assert found.keys() == expected.keys()
    for name in ("scores", "hidden_states", "attentions"):
        pairs = zip(flat(found[name]), flat(expected[name]), strict=True)
        assert all(type(a) is RemoteTensor and torch.equal(a.cpu(), b) for a, b in pairs), name


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in value for tensor in flat(item)]


def test_a_cache_is_taken_up_again(sky1: str) -> None:
    """A chat: the second turn starts from the keys and values of the first."""

    def chat(model: Any, device: str) -> list[list[int]]:
        cache = transformers.DynamicCache(config=model.config)
        ids = prompts(1)["input_ids"].to(device)
        turns = []
        for _ in range(2):
            ids = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=3, eos_token_id=None)
            turns.append(ids.tolist())
            ids = torch.cat([ids, torch.tensor([[7, 8]], device=device)], dim=1)
        return turns

    local = make_model("Llama")
    assert chat(copy.deepcopy(local).to(sky1), sky1) == chat(local, "cpu")


class Collected(transformers.generation.streamers.BaseStreamer):
    """Keeps what it is given, as lists."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_sees_each_token_as_it_comes(sky1: str) -> None:
    local, seen = make_model("GPT2"), []
    for device in ("cpu", sky1):
        streamer = Collected()
        generate(copy.deepcopy(local).to(device), placed(prompts(1), device), do_sample=False, streamer=streamer)
        assert streamer.ended
        seen.append(streamer.parts)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 2


def make_tokenizer() -> Any:
    """Words "w0" to "w98" by their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", bos_token="w1", eos_token="w2", padding_side="left"
    )


def test_a_prompt_becomes_text_and_only_the_new_ids_travel(sky1: str) -> None:
    tokenizer, texts = make_tokenizer(), []
    for device in ("cpu", sky1):
        model = make_model("Qwen2").to(device)
        inputs = tokenizer(["w5 w6 w7 w8", "w11 w12"], return_tensors="pt", padding=True).to(device)
        inputs.pop("token_type_ids", None)
        length = inputs["input_ids"].shape[1]
        tokens = generate(model, inputs, do_sample=False, eos_token_id=None)
        received = torch.sky.stats()["bytes_received"]
        waits = torch.sky.stats()["round_trips"]
        texts.append(tokenizer.decode(tokens[0, length:]))
        if device != "cpu":
            assert torch.sky.stats()["round_trips"] - waits == 1
            # Twelve numbers of eight bytes, and the frame around them.
            assert torch.sky.stats()["bytes_received"] - received < NEW_TOKENS * 8 + 200
        texts.append(tokenizer.batch_decode(tokens))
    assert texts[:2] == texts[2:]
    assert len(texts[0].split()) == NEW_TOKENS


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["Qwen2", "Llama", "GPT2", "Mixtral"])
def test_greedy_decoding_waits_once_a_token_at_most(family: str, attention: str, sky1: str) -> None:
    """`generate` asks after every token whether all sequences have ended, and need not wait for the answer."""
    # A GPT-2 with a padding token, which the published ones lack, looks for it in every input of its own accord.
    model = make_model(family, attention, pad_token_id=None).to(sky1)
    inputs, options = placed(prompts(1), sky1), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def waits(tokens: int) -> int:
        before: int = torch.sky.stats()["round_trips"]
        model.generate(**inputs, **options, max_new_tokens=tokens)
        return torch.sky.stats()["round_trips"] - before

    waits(20)  # new shapes of a few operators are asked for once
    # Each by itself: how many answers come before they are needed, and are no waits, differs from run to run.
    assert waits(10) <= 10 + 6
    assert waits(20) <= 20 + 6


_ASSISTED = {"do_sample": False, "assistant": True}
_MOST_WAITS_A_TOKEN = {"beams": 1, "sampled beams": 1, "no cache": 1, "assisted": 6}
"""Beams and assistants decide by values after every step; without a cache, transformers reads each step's mask."""


@pytest.mark.parametrize("strategy", [*STRATEGIES, "assisted"])
def test_a_token_asks_no_fake_tensor_and_waits_for_what_transformers_reads(
    strategy: str, sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's shapes come for the first time: what all of them ask for, is asked for once a token."""
    faked: list[str] = []
    infer = inference._run_without_values
    monkeypatch.setattr(
        inference, "_run_without_values", lambda call, place: [faked.append(call.info.name), infer(call, place)][1]
    )
    options = {**STRATEGIES.get(strategy, _ASSISTED), "eos_token_id": None}
    model = make_model("Qwen2").to(sky1)
    if options.pop("assistant", False):
        options["assistant_model"] = make_model("Qwen2").to(sky1)
    inputs = placed(prompts(1), sky1)
    model.generate(**inputs, **options, max_new_tokens=4)
    faked.clear()
    before = torch.sky.stats()["round_trips"]
    model.generate(**inputs, **options, max_new_tokens=24)
    waits = torch.sky.stats()["round_trips"] - before
    assert len(faked) <= 2, faked
    assert waits <= 24 * _MOST_WAITS_A_TOKEN.get(strategy, 1) + 8


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_asks_no_fake_tensor_at_each_token(
    family: str, attention: str, sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked: list[str] = []
    infer = inference._run_without_values
    monkeypatch.setattr(
        inference, "_run_without_values", lambda call, place: [faked.append(call.info.name), infer(call, place)][1]
    )
    model = make_model(family, attention).to(sky1)
    inputs, options = placed(prompts(2), sky1), {"do_sample": False, "eos_token_id": None}
    model.generate(**inputs, **options, max_new_tokens=4)
    faked.clear()
    model.generate(**inputs, **options, max_new_tokens=16)
    assert len(faked) <= 2, faked


def test_a_stop_token_ends_the_loop_where_it_ends_locally(sky1: str) -> None:
    """A flag that turns true must be seen at once: no token more, none less."""
    local = make_model("Llama")
    free = generate(local, prompts(1), do_sample=False, eos_token_id=None)[0, 6:].tolist()
    tokens = check_same_tokens(local, sky1, batch=1, do_sample=False, eos_token_id=free[5])
    assert tokens.shape[1] == 6 + free.index(free[5]) + 1


def test_a_pipeline_runs_on_the_device(sky1: str) -> None:
    texts = []
    for device in ("cpu", sky1):
        pipeline = transformers.pipeline(
            "text-generation", model=make_model("Qwen2"), tokenizer=make_tokenizer(), device=device
        )
        assert pipeline.device == torch.device(device)
        pipeline.tokenizer.model_input_names = ["input_ids", "attention_mask"]
        texts.append(pipeline("w5 w6 w7", max_new_tokens=5, do_sample=False))
    assert texts[0] == texts[1]


def test_a_pretrained_model_is_loaded_onto_the_device(tmp_path: Any, sky1: str) -> None:
    """`from_pretrained` of a folder, with the arguments that people give it."""
    local = make_model("Llama", dtype=torch.bfloat16)
    local.generation_config.max_new_tokens = 5
    local.generation_config.do_sample = False
    local.save_pretrained(tmp_path)
    remote = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa", device_map=sky1
    ).eval()
    assert all(type(p.data) is RemoteTensor and p.dtype is torch.bfloat16 for p in remote.parameters())
    assert remote.generation_config.max_new_tokens == 5
    with torch.no_grad():
        tokens = remote.generate(**placed(prompts(), sky1))
    assert tokens.tolist() == local.generate(**prompts()).tolist()


def test_a_remote_model_is_saved_as_a_local_one(tmp_path: Any, sky1: str) -> None:
    local = make_model("Qwen2")
    copy.deepcopy(local).to(sky1).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, value), (other, expected) in zip(again.state_dict().items(), local.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(value, expected)
