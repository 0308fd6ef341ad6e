"""`torch.utils.tensorboard` with remote tensors: what is written are their values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def test_scalars_histograms_and_images_are_those_of_the_values(tmp_path: Path, sky1: str) -> None:
    values, picture = torch.randn(100), torch.rand(3, 4, 5)
    layer = torch.nn.Linear(2, 2)
    for name, device in (("local", "cpu"), ("remote", sky1)):
        with SummaryWriter(str(tmp_path / name)) as writer:
            x = values.to(device)
            writer.add_scalar("mean", x.mean(), 1)
            writer.add_scalars("two", {"low": x.min(), "high": x.max()}, 1)
            writer.add_histogram("all", x, 1)
            writer.add_histogram("weight", layer.to(device).weight, 1)
            writer.add_image("picture", picture.to(device), 1)
            writer.add_embedding(x.view(20, 5), metadata=list(range(20)), global_step=1)
            writer.add_hparams({"rate": 0.1}, {"score": x.sum()}, run_name="here")
    read = {name: EventAccumulator(str(tmp_path / name)).Reload() for name in ("local", "remote")}
    for kind in ("scalars", "histograms", "images"):
        assert read["remote"].Tags()[kind] == read["local"].Tags()[kind]
    assert [e.value for e in read["remote"].Scalars("mean")] == [e.value for e in read["local"].Scalars("mean")]
    for tag in ("all", "weight"):
        ours, theirs = (read[name].Histograms(tag)[0].histogram_value for name in ("remote", "local"))
        assert ours == theirs
    ours, theirs = (read[name].Images("picture")[0].encoded_image_string for name in ("remote", "local"))
    assert ours == theirs
    tables = [np.loadtxt(path) for path in sorted(tmp_path.glob("*/00001/default/tensors.tsv"))]
    assert len(tables) == 2
    assert np.array_equal(*tables)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_is_traced_on_the_device(tmp_path: Path, sky1: str) -> None:
    layer = torch.nn.Linear(2, 2).to(sky1)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_graph(layer, torch.ones(1, 2, device=sky1))
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["graph"]
