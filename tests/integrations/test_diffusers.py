"""Pipelines of diffusers, tiny and made from configurations: from equal generators, the images of the local CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("DISABLE_TELEMETRY", "YES")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

STEPS = 4
SIZE = 16


def _unet(channels: int = 3) -> Any:
    return diffusers.UNet2DModel(
        sample_size=SIZE,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _conditioned_unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=SIZE // 2,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    )


def _autoencoder() -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )


def _quantizing_autoencoder() -> Any:
    return diffusers.VQModel(block_out_channels=(32,), latent_channels=3, num_vq_embeddings=16, norm_num_groups=8)


def _text_encoder() -> Any:
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    )


def _stable_diffusion(scheduler: Any = None) -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=_autoencoder(),
        text_encoder=_text_encoder(),
        tokenizer=None,
        unet=_conditioned_unet(),
        scheduler=scheduler if scheduler is not None else diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _transformer() -> Any:
    return diffusers.DiTTransformer2DModel(
        sample_size=SIZE // 2,
        num_layers=2,
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        num_embeds_ada_norm=1000,
        norm_elementwise_affine=False,
    )


def _both(make: Callable[[], Any], device: str) -> tuple[Any, Any]:
    """A local pipeline or model, and its twin on the device."""
    torch.manual_seed(0)
    local = make()
    if isinstance(local, diffusers.DiffusionPipeline):
        local.set_progress_bar_config(disable=True)
        for part in local.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()  # as `from_pretrained` does
    return local, copy.deepcopy(local).to(device)


def _images(pipeline: Any, **kwargs: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    result = pipeline(generator=generator, num_inference_steps=STEPS, output_type="np", **kwargs).images
    return torch.as_tensor(result)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["DDPM", "DDIM"])
def test_an_unconditional_pipeline_makes_the_images_of_the_cpu(name: str, batch: int, sky1: str) -> None:
    def make() -> Any:
        scheduler = getattr(diffusers, f"{name}Scheduler")()
        pipeline = diffusers.DDIMPipeline if name == "DDIM" else diffusers.DDPMPipeline
        return pipeline(unet=_unet(), scheduler=scheduler)

    local, remote = _both(make, sky1)
    assert torch.equal(_images(remote, batch_size=batch), _images(local, batch_size=batch))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_diffusion_transformer_makes_the_images_of_the_cpu(guidance: float, sky1: str) -> None:
    local, remote = _both(
        lambda: diffusers.DiTPipeline(
            transformer=_transformer(), vae=_autoencoder(), scheduler=diffusers.DDIMScheduler()
        ),
        sky1,
    )
    for labels in ([3], [1, 7]):
        kwargs: dict[str, Any] = {"class_labels": labels, "guidance_scale": guidance}
        assert torch.equal(_images(remote, **kwargs), _images(local, **kwargs))


SCHEDULERS: list[Any] = [
    "DDIMScheduler",
    "DDPMScheduler",
    "PNDMScheduler",
    "LMSDiscreteScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    pytest.param("KDPM2DiscreteScheduler", marks=pytest.mark.slow),
    "DPMSolverMultistepScheduler",
    pytest.param("DPMSolverSinglestepScheduler", marks=pytest.mark.slow),
    "DEISMultistepScheduler",
    "UniPCMultistepScheduler",
]


def _prompted(pipeline: Any, batch: int = 1, **kwargs: Any) -> torch.Tensor:
    """Images for a prompt that is given as token ids: a tokenizer would need a vocabulary."""
    words = torch.arange(3, 3 + 10 * batch).view(batch, 10)
    nothing = torch.full((batch, 10), 2)
    device = pipeline.unet.device
    embeddings = [pipeline.text_encoder(ids.to(device))[0] for ids in (words, nothing)]
    with torch.no_grad():
        return _images(
            pipeline,
            prompt_embeds=embeddings[0],
            negative_prompt_embeds=embeddings[1],
            height=SIZE,
            width=SIZE,
            **kwargs,
        )


@pytest.mark.parametrize("name", SCHEDULERS)
def test_stable_diffusion_makes_the_images_of_the_cpu(name: str, sky1: str) -> None:
    local, remote = _both(lambda: _stable_diffusion(getattr(diffusers, name)()), sky1)
    assert torch.equal(_prompted(remote), _prompted(local))


@pytest.mark.slow
def test_stable_diffusion_with_options_makes_the_images_of_the_cpu(sky1: str) -> None:
    local, remote = _both(_stable_diffusion, sky1)
    for kwargs in ({"batch": 2}, {"eta": 1.0}, {"guidance_scale": 1.0}, {"num_images_per_prompt": 2}):
        assert torch.equal(_prompted(remote, **kwargs), _prompted(local, **kwargs)), kwargs
    for pipeline in (local, remote):
        pipeline.vae.enable_slicing()
        pipeline.vae.enable_tiling()
        pipeline.unet.to(memory_format=torch.channels_last)
    assert torch.equal(_prompted(remote), _prompted(local))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_autoencoders_encode_and_decode_as_on_the_cpu(batch: int, channels_last: bool, sky1: str) -> None:
    images = torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    for make in (_autoencoder, _quantizing_autoencoder):
        local, remote = _both(make, sky1)
        with torch.no_grad():
            results = []
            for model, x in ((local, images), (remote, images.to(sky1))):
                latents = model.encode(x)
                if make is _autoencoder:
                    latents = latents.latent_dist.sample(torch.Generator().manual_seed(2))
                else:
                    latents = latents.latents
                results.append((latents.cpu(), model.decode(latents).sample.cpu()))
        for expected, found in zip(*results, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_unet_trains_as_on_the_cpu(batch: int, sky1: str) -> None:
    results = []
    for model in _both(_unet, sky1):
        device = model.device
        scheduler = diffusers.DDPMScheduler()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(3)
        losses = []
        for _ in range(2):
            clean = torch.randn(batch, 3, SIZE, SIZE, generator=generator)
            noise = torch.randn(clean.shape, generator=generator)
            times = torch.randint(0, 1000, (batch,), generator=generator)
            clean, noise, times = clean.to(device), noise.to(device), times.to(device)
            predicted = model(scheduler.add_noise(clean, noise, times), times).sample
            loss = F.mse_loss(predicted, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, {name: value.cpu() for name, value in model.state_dict().items()}))
    assert results[0][0] == results[1][0]
    for name, expected in results[0][1].items():
        assert torch.equal(results[1][1][name], expected), name


WITHOUT_WAITS = (
    "DDPM",
    "DDIM",
    "DDIMInverse",
    "PNDM",
    "EulerDiscrete",
    "HeunDiscrete",
    "LCM",
    "LMSDiscrete",
    "DEISMultistep",
)
WITHOUT_WAITS += ("DPMSolverMultistep", "DPMSolverSinglestep", "EulerAncestralDiscrete")


@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_schedulers_wait_for_no_time_step(name: str, sky: str) -> None:
    scheduler = getattr(diffusers, f"{name}Scheduler")()
    scheduler.set_timesteps(10, device=sky)
    x = torch.ones(1, 3, 4, 4, device=sky)
    before = torch.sky.stats()["round_trips"]
    for t in scheduler.timesteps:
        output = scheduler.scale_model_input(x, t) * 0.1 + t.expand(1, 1, 1, 1) * 0
        x = scheduler.step(output, t, x).prev_sample
    assert torch.sky.stats()["round_trips"] == before
