"""`generate` that runs ahead of the news: what it returns, and leaves behind, is what waiting for each token gives."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.generation import utils

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from tests.integrations.language_models import make_model, placed, prompts

if not hasattr(utils, "DeferredStopCheck"):
    pytest.skip("this transformers always reads its answer at once", allow_module_level=True)

LONG = 40
ROOT = Path(__file__).resolve().parents[2]


def round_trips() -> int:
    return int(torch.sky.stats()["round_trips"])


def ended_early(model: Any, **options: Any) -> int:
    """A token that greedy decoding gives in the middle, to be the one that ends a sequence."""
    tokens = model.generate(**prompts(1), do_sample=False, max_new_tokens=LONG, eos_token_id=None, **options)
    fresh = tokens[0, prompts(1)["input_ids"].shape[1] :].tolist()
    return next(token for place, token in enumerate(fresh) if place > 8 and token not in fresh[:place])


@pytest.mark.parametrize("family", ["Qwen2", "GPT2", "T5"])
def test_steps_that_were_too_many_leave_no_trace(family: str, far: str) -> None:
    local = make_model(family)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG}
    if family != "T5":
        options["eos_token_id"] = ended_early(local)
    expected = local.generate(**prompts(1), **options)
    remote = copy.deepcopy(local).to(far)
    inputs = placed(prompts(1), far)
    remote.generate(**inputs, **options)
    before = round_trips()
    found = remote.generate(**inputs, **options)
    if family == "Qwen2":  # the others ask for values of their own in every step
        # Questions before the first token, and one at the end; after a pause of this machine, a step or two waits, too.
        assert round_trips() - before <= LONG // 4
    assert found.tolist() == expected.tolist()
    if family != "T5":
        assert found.shape[1] < inputs["input_ids"].shape[1] + LONG


def test_a_batch_ends_with_its_last_sequence(far: str) -> None:
    local = make_model("Llama")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": ended_early(local)}
    expected = local.generate(**prompts(), **options)
    assert copy.deepcopy(local).to(far).generate(**placed(prompts(), far), **options).tolist() == expected.tolist()


@pytest.mark.parametrize("sequences", [1, 2])
def test_what_is_cut_has_the_memory_it_would_have(sequences: int, far: str) -> None:
    local = make_model("Llama")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": ended_early(local)}
    options["return_dict_in_generate"] = True
    inputs = {name: value[:1].repeat(sequences, 1) for name, value in prompts(1).items()}
    expected = local.generate(**inputs, **options)
    found = copy.deepcopy(local).to(far).generate(**placed(inputs, far), **options)
    for ours, theirs in [
        (found.sequences, expected.sequences),
        (found.past_key_values.layers[0].keys, expected.past_key_values.layers[0].keys),
        (found.past_key_values.layers[1].values, expected.past_key_values.layers[1].values),
    ]:
        assert ours.stride() == theirs.stride()
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        assert ours.cpu().equal(theirs)
        ours.view(-1)


def test_the_random_generator_is_left_where_it_would_be(far: str) -> None:
    local = make_model("Qwen2")
    remote = copy.deepcopy(local).to(far)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": LONG}
    torch.manual_seed(5)
    tokens = local.generate(**prompts(1), **options, eos_token_id=None)
    options["eos_token_id"] = tokens[0, -LONG + 10].item()
    torch.manual_seed(5)
    expected = [local.generate(**prompts(1), **options).tolist(), torch.rand(3).tolist()]
    torch.manual_seed(5)
    found = [remote.generate(**placed(prompts(1), far), **options).tolist(), torch.rand(3, device=far).tolist()]
    assert found == expected
    assert len(found[0][0]) < prompts(1)["input_ids"].shape[1] + LONG


class Listener(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_every_token_once_and_no_other(far: str) -> None:
    local = make_model("Qwen2")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": ended_early(local)}
    here, there = Listener(), Listener()
    local.generate(**prompts(1), **options, streamer=here)
    copy.deepcopy(local).to(far).generate(**placed(prompts(1), far), **options, streamer=there)
    assert there.heard == here.heard
    assert there.ended


def test_what_is_returned_with_the_tokens_is_cut_too(far: str) -> None:
    local = make_model("Llama", "eager")
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": LONG,
        "eos_token_id": ended_early(local),
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
    }
    expected = local.generate(**prompts(1), **options)
    found = copy.deepcopy(local).to(far).generate(**placed(prompts(1), far), **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert len(found.scores) == len(expected.scores) == len(found.hidden_states)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found.scores, expected.scores, strict=True))
    for mine, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(mine.keys.cpu(), other.keys)
        assert torch.equal(mine.values.cpu(), other.values)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_a_cache_of_the_user_is_as_if_every_token_was_waited_for(kind: str, far: str) -> None:
    local = make_model("Llama")
    remote = copy.deepcopy(local).to(far)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": ended_early(local)}
    seen = []
    for model, inputs in ((local, prompts(1)), (remote, placed(prompts(1), far))):
        more = {"max_cache_len": 80} if kind == "StaticCache" else {}
        cache = getattr(transformers, kind)(config=local.config, **more)
        tokens = model.generate(**inputs, **options, past_key_values=cache)
        seen.append((tokens.tolist(), [(layer.keys.cpu(), layer.values.cpu()) for layer in cache.layers]))
    (tokens, layers), (others, other_layers) = seen
    assert tokens == others
    for (keys, values), (other_keys, other_values) in zip(layers, other_layers, strict=True):
        assert torch.equal(keys, other_keys)
        assert torch.equal(values, other_values)


def test_steps_that_somebody_watches_are_not_too_many(far: str) -> None:
    local = make_model("Qwen2")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": ended_early(local)}
    counts = []
    for model, inputs in ((local, prompts(1)), (copy.deepcopy(local).to(far), placed(prompts(1), far))):
        calls: list[int] = []
        hook = model.model.layers[0].register_forward_hook(lambda *unused, calls=calls: calls.append(1))
        model.generate(**inputs, **options)
        hook.remove()
        counts.append(len(calls))

        class Criterion(transformers.StoppingCriteria):
            def __init__(self) -> None:
                self.calls = 0

            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return torch.full((input_ids.shape[0],), False, device=input_ids.device)

        criterion = Criterion()
        model.generate(**inputs, **options, stopping_criteria=transformers.StoppingCriteriaList([criterion]))
        counts.append(criterion.calls)
    assert counts[:2] == counts[2:]
    assert counts[0] < LONG


def test_no_step_is_taken_behind_the_last_position(far: str) -> None:
    """A step there would fail on the worker, and its error come up somewhere else."""
    local = make_model("GPT2")
    end = ended_early(local)
    tokens = local.generate(**prompts(1), do_sample=False, max_new_tokens=LONG, eos_token_id=end)
    positions = tokens.shape[1] - 1  # the last token is given back, and not computed with
    local.transformer.wpe = torch.nn.Embedding.from_pretrained(local.transformer.wpe.weight[:positions])
    local.config.n_positions = positions
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG, "eos_token_id": end}
    found = copy.deepcopy(local).to(far).generate(**placed(prompts(1), far), **options)
    torch.sky.synchronize(far)
    assert found.tolist() == tokens.tolist()


def test_a_failing_worker_is_heard_of(far: str) -> None:
    model = make_model("Qwen2").to(far)
    inputs = placed(prompts(1), far)
    inputs["input_ids"] = torch.full_like(inputs["input_ids"], 10**6)
    with pytest.raises(IndexError, match="index out of range"):
        model.generate(**inputs, do_sample=False, max_new_tokens=4)


def test_layers_follow_what_is_changed_in_them(sky1: str) -> None:
    """Norms and rotations are noted once; a changed constant or weight is another call."""
    local = make_model("Qwen2")
    remote = copy.deepcopy(local).to(sky1)
    for _ in range(2):
        expected = local.generate(**prompts(1), do_sample=False, max_new_tokens=12)
        assert remote.generate(**placed(prompts(1), sky1), do_sample=False, max_new_tokens=12).tolist() == (
            expected.tolist()
        )
        for model in (local, remote):
            model.model.norm.variance_epsilon = 3.0
            with torch.no_grad():
                model.model.layers[0].input_layernorm.weight.mul_(-1.5)


_IMPORT_ORDERS = {
    "first": "import skyproxy, transformers",
    "last": "import transformers; from transformers.models.qwen2 import modeling_qwen2; import skyproxy",
}


@pytest.mark.parametrize("order", _IMPORT_ORDERS)
def test_norms_and_rotations_are_noted_whoever_was_imported_first(order: str) -> None:
    program = f"""
import torch
{_IMPORT_ORDERS[order]}
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from tests.integrations.language_models import make_model, placed, prompts

model = make_model("Qwen2").to("sky:0")
inputs = placed(prompts(1), "sky:0")
from skyproxy.tensor.core.remote_tensor import RemoteTensor
plain, turns = RemoteTensor.__torch_dispatch__, []
def watched(func, *args):
    if func is torch.ops.aten.neg.default:
        turns.append(func)
    return plain(func, *args)
RemoteTensor.__torch_dispatch__ = staticmethod(watched)
for _ in range(3):
    turns.clear()
    model.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)
print("rotations that ran:", len(turns))
qwen2.rotate_half = lambda x: turns.append(1) or x
model.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)
print("rotations that a program has replaced:", len(turns))
"""
    path = os.pathsep.join([str(ROOT / "tests/site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    noted, replaced = (int(line.partition(":")[2]) for line in done.stdout.splitlines() if line.startswith("rotations"))
    assert noted < 20  # of 80
    assert replaced >= 80


def test_eager_attention_is_noted_and_follows_what_a_program_replaces(
    sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    local = make_model("Qwen2", attention="eager")
    remote = copy.deepcopy(local).to(sky1)
    runs: list[Any] = []

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            runs.append(args)
            return function(*args, **kwargs)

        return call

    def tokens(model: Any) -> list[list[int]]:
        runs.clear()
        inputs = placed(prompts(2), str(model.device))
        found: list[list[int]] = model.generate(
            **inputs, do_sample=False, max_new_tokens=12, eos_token_id=None
        ).tolist()
        return found

    expected = tokens(local)
    DEVICES.of(sky1).replays.clear()  # other tests may have noted the same shapes
    with monkeypatch.context() as patched:
        watched = counted(vars(RemoteTensor)["__torch_dispatch__"].__func__)
        patched.setattr(RemoteTensor, "__torch_dispatch__", classmethod(watched))
        softmaxes = []
        while not softmaxes or (softmaxes[-1] and len(softmaxes) < 8):  # batches that are cut in a call are in the way
            assert tokens(remote) == expected
            softmaxes.append(sum(args[1] is torch.ops.aten._softmax.default for args in runs))
    assert softmaxes[0] >= 12
    assert softmaxes[-1] == 0  # it was noted how they are recorded
    for owner, name in ((qwen2, "repeat_kv"), (torch.nn.functional, "softmax"), (torch, "matmul")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, counted(getattr(owner, name)))
            assert tokens(remote) == expected
            assert runs, name
    monkeypatch.setattr(qwen2, "eager_attention_forward", counted(qwen2.eager_attention_forward))
    for _ in range(2):
        assert tokens(remote) == expected
        assert len(runs) == 12 * remote.config.num_hidden_layers  # no more the model's own: it runs each time


def test_a_model_is_still_compiled_as_one_graph(sky1: str) -> None:
    local = make_model("Qwen2")
    remote = copy.deepcopy(local).to(sky1)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(remote, backend=backend, fullgraph=True)
    inputs = {**prompts(1), "use_cache": False}
    with torch.no_grad():
        expected = local(**inputs).logits
        for _ in range(6):
            found = compiled(**placed(prompts(1), sky1), use_cache=False).logits
            torch.testing.assert_close(found.cpu(), expected)
    assert len(graphs) == 1
