"""transformers' `Trainer` on a remote device: losses, gradient norms and evaluations of a local run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("transformers")

import datasets
import transformers
from accelerate.state import AcceleratorState

from skyproxy.integrations import huggingface
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from tests.integrations.language_models import VOCABULARY, make_model

ROWS = torch.randint(3, VOCABULARY, (24, 10), generator=torch.Generator().manual_seed(0)).tolist()
OPTIONS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "checkpointed activations": {"gradient_checkpointing": True},
    "accumulated gradients, Adafactor": {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "optim": "adafactor",
    },
    "fused AdamW, smoothed labels": {"optim": "adamw_torch_fused", "label_smoothing_factor": 0.1},
    "SGD, workers that load": {"optim": "sgd", "dataloader_num_workers": 1, "torch_empty_cache_steps": 2},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _undecided() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make_trainer(folder: Path, model: Any = None, **options: Any) -> transformers.Trainer:
    """Without dropout: each device has random numbers of its own, and the CPU shares its own with the sampler."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        disable_tqdm=True,
        seed=1,
        **{"logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no", **options},
    )
    rows = datasets.Dataset.from_dict({"input_ids": ROWS, "labels": ROWS})
    model = model if model is not None else make_model("Llama", pad_token_id=None)
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows.select(range(8)))


def history(trainer: transformers.Trainer) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [tuple(row.get(name) for name in names) for row in trainer.state.log_history]


@pytest.mark.parametrize("options", sorted(OPTIONS))
def test_a_trainer_repeats_the_local_run(options: str, tmp_path: Path, sky1: str) -> None:
    local = make_trainer(tmp_path, use_cpu=True, **OPTIONS[options])
    local.train()
    with huggingface.use(sky1):
        remote = make_trainer(tmp_path, **OPTIONS[options])
        assert remote.args.device == torch.device(sky1)
        remote.train()
    # The last row sums the whole run up, seconds included.
    assert history(remote)[:-1] == history(local)[:-1]
    assert len(history(local)) > 8
    for (name, ours), theirs in zip(remote.model.named_parameters(), local.model.parameters(), strict=True):
        assert type(ours.data) is RemoteTensor, name
        assert torch.equal(ours.detach().cpu(), theirs.detach()), name


def test_a_step_waits_only_for_what_transformers_looks_at(tmp_path: Path, sky1: str) -> None:
    """By default twice at the loss; it logs each 500 steps only."""
    options = {"logging_steps": 500, "eval_strategy": "no"}

    def waits(steps: int, nan_filter: bool) -> int:
        trainer = make_trainer(tmp_path, max_steps=steps, logging_nan_inf_filter=nan_filter, **options)
        before: int = torch.sky.stats()["round_trips"]
        trainer.train()
        return torch.sky.stats()["round_trips"] - before

    with huggingface.use(sky1):
        waits(4, True)  # all shapes were seen
        assert waits(12, False) == waits(4, False)
        assert waits(12, True) - waits(4, True) == 2 * 8


def test_a_run_is_resumed_from_its_checkpoint(tmp_path: Path, sky1: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "no"}
    with huggingface.use(sky1):
        whole = make_trainer(tmp_path, **options)
        whole.train()
        resumed = make_trainer(tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert history(resumed)[:-1] == history(whole)[:-1]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    for (name, ours), theirs in zip(again.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().cpu()), name


def test_predictions_come_back_as_arrays(tmp_path: Path, sky1: str) -> None:
    local = make_trainer(tmp_path, use_cpu=True)
    expected = local.predict(local.eval_dataset)
    with huggingface.use(sky1):
        remote = make_trainer(tmp_path)
        found = remote.predict(remote.eval_dataset)
    logits, theirs = (
        result.predictions[0] if isinstance(result.predictions, tuple) else result.predictions
        for result in (found, expected)
    )
    assert logits.shape == (8, 10, VOCABULARY)
    assert (logits == theirs).all()
    assert found.metrics["test_loss"] == expected.metrics["test_loss"]


def test_bfloat16_is_what_the_worker_can_do(tmp_path: Path, sky1: str) -> None:
    with huggingface.use(sky1):
        trainer = make_trainer(tmp_path, bf16=True, bf16_full_eval=True)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    exact = make_trainer(tmp_path, use_cpu=True)
    exact.train()
    assert losses[:3] == pytest.approx([row["loss"] for row in exact.state.log_history[:3]], rel=0.02)


def test_an_accelerator_of_this_machine_is_not_preferred(
    tmp_path: Path, sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Mac, transformers prefers `mps` to the device that the environment names."""
    import transformers.training_args as arguments

    monkeypatch.setattr(arguments, "is_torch_mps_available", lambda *unused: True)
    with huggingface.use(sky1):
        made = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
        assert (made.device, made.n_gpu) == (torch.device(sky1), 1)
    assert transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[]).device.type == "mps"
    assert transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True).device.type == "cpu"
