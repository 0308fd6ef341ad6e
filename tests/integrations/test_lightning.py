"""Lightning's Trainer and Fabric with `accelerator="sky"`: the losses of a run on the local CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from skyproxy.errors import ConfigurationError
from skyproxy.integrations.lightning import SkyAccelerator

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _first_device_is_current(sky: str) -> Iterator[None]:
    """A trainer makes its device the current one, as it does with CUDA."""
    torch.sky.set_device(sky)
    yield
    torch.sky.set_device(sky)


class Classifier(lightning.LightningModule):
    """Three classes of eight numbers; keeps the losses it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 3))
        self.losses: list[torch.Tensor] = []
        self.places: set[str] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        self.places.add(str(x.device))
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self.layers(x).argmax(1) == y).float().mean(), prog_bar=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch[0])
        return outputs

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def fit(folder: Path, accelerator: Any, **options: Any) -> tuple[lightning.Trainer, Classifier]:
    torch.manual_seed(0)
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator=accelerator,
        max_epochs=2,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        **{"logger": False, "enable_checkpointing": False, "gradient_clip_val": 1.0, **options},
    )
    trainer.fit(module, data(), data())
    return trainer, module


def losses(module: Classifier) -> list[float]:
    values: list[float] = torch.stack(module.losses).tolist()
    return values


def test_a_trainer_repeats_the_local_losses(tmp_path: Path, sky1: str) -> None:
    local, expected = fit(tmp_path, "cpu", devices=1)
    remote, module = fit(tmp_path, "sky", devices=[1])
    assert module.places == {sky1}
    assert remote.strategy.root_device == torch.device(sky1)
    assert losses(module) == losses(expected)
    assert torch.equal(remote.callback_metrics["val_accuracy"].cpu(), local.callback_metrics["val_accuracy"])
    for ours, theirs in zip(remote.predict(module, data()) or [], local.predict(expected, data()) or [], strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_an_accelerator_object_and_no_devices_mean_the_current_device(tmp_path: Path, sky: str) -> None:
    trainer, module = fit(tmp_path, SkyAccelerator())
    assert isinstance(trainer.accelerator, SkyAccelerator)
    assert module.places == {sky}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_mixed_precision_is_that_of_the_device(precision: str, tmp_path: Path, sky1: str) -> None:
    seen: set[torch.dtype] = set()

    class Watch(lightning.Callback):
        def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
            module.layers[-1].register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))

    _, module = fit(tmp_path, "sky", devices=[1], precision=precision, callbacks=[Watch()], gradient_clip_val=None)
    assert seen == {torch.float16 if precision == "16-mixed" else torch.bfloat16}
    exact = losses(fit(tmp_path, "cpu", devices=1, gradient_clip_val=None)[1])
    assert losses(module) == pytest.approx(exact, abs=0.1 if precision == "bf16-true" else 0.02)


def test_checkpoints_and_logs_hold_local_values(tmp_path: Path, sky1: str) -> None:
    keep = ModelCheckpoint(tmp_path / "kept", save_last=True)
    logger = CSVLogger(tmp_path)
    _, module = fit(
        tmp_path,
        "sky",
        devices=[1],
        callbacks=[keep, DeviceStatsMonitor()],
        logger=logger,
        enable_checkpointing=True,
    )
    saved = torch.load(keep.last_model_path, weights_only=True, map_location="cpu")
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value.cpu()), name
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "train_loss" in text
    assert "DeviceStatsMonitor" in text

    torch.manual_seed(0)
    resumed = Classifier()
    again = lightning.Trainer(
        accelerator="sky",
        devices=[1],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    again.fit(resumed, data(), data(), ckpt_path=keep.last_model_path, weights_only=True)
    assert len(resumed.losses) == 4  # the third epoch only


def test_fabric_repeats_the_local_losses(sky1: str) -> None:
    torch.manual_seed(0)
    weights, found = Classifier().state_dict(), []
    for accelerator, devices in (("cpu", 1), ("sky", [1])):
        fabric = lightning.Fabric(accelerator=accelerator, devices=devices)
        fabric.launch()
        with fabric.init_module():
            module = Classifier()
        assert {p.device for p in module.parameters()} == {fabric.device}
        module.load_state_dict(weights)
        model, optimizer = fabric.setup(module.layers, torch.optim.SGD(module.layers.parameters(), lr=0.1))
        values = []
        for x, y in fabric.setup_dataloaders(data()):
            assert x.device == fabric.device
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            values.append(loss.detach())
        found.append(torch.stack(values))
    assert found[1].device == torch.device(sky1)
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize("devices", [2, [0, 1], -1, "0,1"])
def test_several_devices_are_refused_with_the_way_to_do_it(devices: Any, sky1: str) -> None:
    with pytest.raises(ConfigurationError, match=r"skyproxy\.Compute"):
        lightning.Trainer(accelerator="sky", devices=devices, logger=False)
