"""How often training steps of models of transformers wait, of those that read values of the device themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

Step = Callable[[], object]


def _train(model: Any, give: Callable[[str], dict[str, Any]], device: str) -> Step:
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(**give(device)).loss.backward()
        optimizer.step()

    return step


def _i_bert(device: str) -> Step:
    config = transformers.IBertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=37,
        max_position_embeddings=40,
        quant_mode=True,
    )

    def give(device: str) -> dict[str, Any]:
        return {"input_ids": torch.randint(2, 50, (2, 7)).to(device), "labels": torch.tensor([0, 1]).to(device)}

    return _train(transformers.IBertForSequenceClassification(config), give, device)


def _d_fine(device: str) -> Step:
    backbone = transformers.HGNetV2Config(
        stage_in_channels=[16, 16, 32, 64],
        stage_mid_channels=[8, 8, 16, 16],
        stage_out_channels=[16, 32, 64, 128],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        embeddings_size=10,
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        stem_channels=[3, 8, 16],
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.DFineConfig(
        backbone_config=backbone,
        encoder_hidden_dim=32,
        encoder_in_channels=[32, 64, 128],
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        d_model=32,
        num_queries=20,
        decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=8,
        decoder_n_points=[3, 6, 3],
        decoder_layers=2,
        decoder_attention_heads=2,
        num_denoising=0,
        num_labels=3,
    )

    def give(device: str) -> dict[str, Any]:
        labels = {"class_labels": torch.tensor([1, 2]).to(device), "boxes": (torch.rand(2, 4) * 0.4 + 0.2).to(device)}
        return {"pixel_values": torch.randn(1, 3, 64, 64).to(device), "labels": [labels]}

    return _train(transformers.DFineForObjectDetection(config), give, device)


def _encodec(device: str) -> Step:
    config = transformers.EncodecConfig(
        num_filters=4,
        num_residual_layers=1,
        upsampling_ratios=[8, 4],
        codebook_size=16,
        hidden_size=16,
        codebook_dim=16,
        num_lstm_layers=1,
        use_conv_shortcut=False,
    )
    model = transformers.EncodecModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        sound = torch.randn(1, 1, 256).to(device)
        optimizer.zero_grad()
        model(sound, torch.ones_like(sound)).audio_values.square().mean().backward()
        optimizer.step()

    return step


MODELS: dict[str, tuple[Callable[[str], Step], int]] = {
    "I-BERT": (_i_bert, 91),  # as many numbers it reads, most of them whether there is NaN
    "D-FINE": (_d_fine, 28),  # for its matcher and its loss
    "EnCodec": (_encodec, 0),  # of the 84 numbers that it reads none is computed on the device
}


@pytest.mark.parametrize("name", MODELS)
def test_a_settled_step_waits_no_more_often_than_the_model_reads(name: str, sky: str) -> None:
    prepare, most = MODELS[name]
    torch.manual_seed(0)
    step = prepare(sky)
    for _ in range(2):
        step()
    for _ in range(3):
        before = torch.sky.stats()["round_trips"]
        step()
        assert torch.sky.stats()["round_trips"] - before <= most
