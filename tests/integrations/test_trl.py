"""TRL's trainers on a remote device: losses, rewards and weights of a local run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import datasets
import trl
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyproxy.integrations import huggingface
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from tests.integrations.language_models import VOCABULARY, make_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.timeout(300)]
STEPS = 3


@pytest.fixture(autouse=True)
def _undecided() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token: "w3" is token 3."""
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def texts(seed: int, words: int) -> list[str]:
    numbers = torch.randint(3, VOCABULARY, (8, words), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]


def make_trainer(kind: str, folder: Path, use_cpu: bool) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": [],
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "disable_tqdm": True,
        "seed": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": use_cpu,
    }
    model, common = make_model("Llama", pad_token_id=0), {"processing_class": tokenizer()}
    if kind == "SFT":
        rows = {"text": texts(0, 8)}
        arguments = trl.SFTConfig(max_length=16, **options)
        return trl.SFTTrainer(model, args=arguments, train_dataset=datasets.Dataset.from_dict(rows), **common)
    if kind == "DPO":
        rows = {"prompt": texts(0, 4), "chosen": texts(1, 4), "rejected": texts(2, 4)}
        return trl.DPOTrainer(
            model,
            ref_model=make_model("Llama", pad_token_id=0),
            args=trl.DPOConfig(max_length=16, **options),
            train_dataset=datasets.Dataset.from_dict(rows),
            **common,
        )
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **columns: [float(len(set(text.split()))) for text in completions],
        args=trl.GRPOConfig(num_generations=4, max_completion_length=6, beta=0.0, **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(0, 4)}),
        **common,
    )


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged at each step, but for what a clock says."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_trainer_repeats_the_local_run(kind: str, tmp_path: Path, sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tokens are drawn here: on the worker they would come from its own random numbers, which the local run shares with
    # its data loader.
    generator, multinomial = torch.Generator(), torch.multinomial

    def draw(input: torch.Tensor, num_samples: int, **options: Any) -> torch.Tensor:
        return multinomial(input.cpu(), num_samples, generator=generator).to(input.device)

    monkeypatch.setattr(torch, "multinomial", draw)
    generator.manual_seed(5)
    local = make_trainer(kind, tmp_path, use_cpu=True)
    local.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    generator.manual_seed(5)
    with huggingface.use(sky):
        remote = make_trainer(kind, tmp_path, use_cpu=False)
        remote.train()
    assert len(history(local)) == STEPS
    assert history(remote) == history(local)
    for (name, ours), theirs in zip(remote.model.named_parameters(), local.model.parameters(), strict=True):
        assert type(ours.data) is RemoteTensor, name
        assert torch.equal(ours.detach().cpu(), theirs.detach()), name
