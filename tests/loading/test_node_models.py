"""Models and files on the worker's side: pretrained models, safetensors, saving, generation."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, RemoteTraceback


def moved() -> int:
    stats = torch.sky.stats()
    return stats["bytes_sent"] + stats["bytes_received"]


def test_what_was_saved_there_is_loaded_there(node: skyproxy.Node, sky: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(600_000, device=sky), "b": [torch.ones(2, device=sky), 5]}
    before = moved()
    written = node.save(state, tmp_path / "deep" / "state.pt")
    again = node.load(written)
    assert moved() - before < 20_000
    assert written == str(tmp_path / "deep" / "state.pt")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["state.pt"]
    assert again["a"].device == torch.device(sky)
    assert torch.equal(again["a"], state["a"])
    assert again["b"][1] == 5
    assert torch.equal(torch.load(written)["a"], state["a"].cpu())  # an ordinary file


def test_a_state_dict_that_a_function_returned_is_an_ordinary_one_in_a_file(
    node: skyproxy.Node, tmp_path: Path
) -> None:
    state = node.run(lambda: torch.nn.Linear(3, 2).state_dict())
    assert type(state) is type(copy.copy(state)) is type(copy.deepcopy(state)) is skyproxy.RemoteStateDict
    assert copy.deepcopy(state)["weight"] is not state["weight"]
    again = node.load(node.save(state, tmp_path / "state.pt"))
    assert torch.equal(again["weight"], state["weight"])
    torch.save(state, tmp_path / "here.pt")
    here = torch.load(tmp_path / "here.pt", map_location="cpu", weights_only=True)
    assert list(here) == ["weight", "bias"]
    assert torch.equal(here["weight"], state["weight"].cpu())


def test_files_with_code_in_them_are_refused(node: skyproxy.Node, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only") as caught:
        node.load(tmp_path / "module.pt")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert isinstance(node.load(tmp_path / "module.pt", weights_only=False), torch.nn.Linear)


def test_modules_are_not_saved_whole(node: skyproxy.Node, sky: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="state_dict"):
        node.save(torch.nn.Linear(2, 2).to(sky), tmp_path / "m.pt")


def test_a_missing_file_is_a_missing_file(node: skyproxy.Node, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt"):
        node.load(tmp_path / "nowhere.pt")


def test_safetensors_files_and_folders(node: skyproxy.Node, sky: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    node.save({"weight": torch.ones(2, 2, device=sky)}, tmp_path / "one.safetensors")
    node.save({"bias": torch.zeros(2, device=sky)}, tmp_path / "two.safetensors")
    assert list(node.load(tmp_path / "one.safetensors")) == ["weight"]
    state = node.load_safetensors(tmp_path)
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    state.load_into(model)
    assert model(torch.ones(1, 2, device=sky)).tolist() == [[2, 2]]


transformers = pytest.importorskip("transformers")

from tests.integrations.language_models import FAMILIES, make_model, prompts  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model on disk."""
    path = tmp_path_factory.mktemp("pretrained")
    make_model("Qwen2", tie_word_embeddings=True).save_pretrained(path)
    return path


def test_a_pretrained_model_leaves_its_weights_there(node: skyproxy.Node, sky: str, folder: Path) -> None:
    local = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = node.from_pretrained(transformers.AutoModelForCausalLM, folder, attn_implementation="eager")
    assert type(model) is type(local)
    assert not model.training
    assert model.config._attn_implementation == "eager"
    assert model.device == torch.device(sky)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq.cpu(), local.model.rotary_emb.inv_freq)
    remote = {name: value.to(sky) for name, value in prompts().items()}
    options = {"max_new_tokens": 8, "do_sample": False}
    tokens = model.generate(**remote, **options)
    assert tokens.tolist() == local.generate(**prompts(), **options).tolist()
    assert tokens[0, 6:].tolist() == tokens.tolist()[0][6:]


def test_a_state_dict_fills_a_transformers_skeleton(node: skyproxy.Node, sky: str, folder: Path) -> None:
    local = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state = node.load_safetensors(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(local.config).eval()
    state.load_into(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq.cpu(), local.model.rotary_emb.inv_freq)
    remote = {name: value.to(sky) for name, value in prompts().items()}
    assert torch.equal(model(**remote).logits.cpu(), local(**prompts()).logits)


def test_a_model_made_from_a_configuration(node: skyproxy.Node, sky: str, folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = node.from_config(transformers.AutoModelForCausalLM, config, dtype=torch.bfloat16)
    assert {(p.dtype, p.device) for p in model.parameters()} == {(torch.bfloat16, torch.device(sky))}


def test_only_the_ids_that_are_decoded_come_here(node: skyproxy.Node, sky: str, folder: Path) -> None:
    model = node.from_pretrained(transformers.AutoModelForCausalLM, folder)
    tokens = node.generate(model, prompts(), max_new_tokens=100, min_new_tokens=100, do_sample=False)
    new = tokens[0, 6:]
    torch.sky.synchronize()
    received, waits = torch.sky.stats()["bytes_received"], torch.sky.stats()["round_trips"]
    ids = new.tolist()  # what a tokenizer's decode does first
    assert len(ids) == 100
    assert torch.sky.stats()["bytes_received"] - received < 100 * 8 + 500
    assert torch.sky.stats()["round_trips"] - waits == 1


class Recording:
    """A streamer."""

    def __init__(self) -> None:
        self.tokens: list[object] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_there_gives_the_same_tokens(node: skyproxy.Node, sky: str, family: str) -> None:
    local = make_model(family)
    remote = make_model(family).to(sky)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3, "do_sample": False}):
        torch.manual_seed(0)
        expected = local.generate(**prompts(), max_new_tokens=8, **options)
        torch.manual_seed(0)
        tokens = node.generate(remote, prompts(), max_new_tokens=8, **options)
        assert tokens.device == torch.device(sky)
        assert tokens.tolist() == expected.tolist()


def test_tokens_stream_and_the_loop_costs_three_waits(node: skyproxy.Node, sky: str) -> None:
    local, remote = make_model("Qwen2"), make_model("Qwen2").to(sky)
    inputs = {name: value[:1] for name, value in prompts().items()}
    expected, streamer = Recording(), Recording()
    local.generate(**inputs, max_new_tokens=64, min_new_tokens=64, do_sample=False, streamer=expected)
    on_device = {name: value.to(sky) for name, value in inputs.items()}
    before = torch.sky.stats()["round_trips"]
    node.generate(remote, on_device, max_new_tokens=64, min_new_tokens=64, do_sample=False, streamer=streamer)
    assert torch.sky.stats()["round_trips"] - before <= 3
    assert streamer.ended
    assert streamer.tokens == expected.tokens
    assert len(streamer.tokens) == 65  # the prompt, then each token as it came


def test_a_streamer_that_fails_ends_the_generation(node: skyproxy.Node, sky: str) -> None:
    class Failing(Recording):
        def put(self, value: torch.Tensor) -> None:
            raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"):
        node.generate(make_model("Qwen2").to(sky), prompts(1), max_new_tokens=10**6, streamer=Failing())
    assert node.run(lambda: 1) == 1
