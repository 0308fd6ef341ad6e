"""safetensors with remote tensors: saved from and loaded onto a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import load_file, load_model, save, save_file, save_model

from skyproxy.tensor.core.remote_tensor import RemoteTensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


class Tied(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("counts", torch.arange(4))


def test_the_bytes_of_a_file_are_those_of_local_tensors(tmp_path: Path, sky1: str) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    assert save({name: t.to(sky1) for name, t in tensors.items()}) == save(tensors)
    save_file({name: t.to(sky1) for name, t in tensors.items()}, tmp_path / "remote")
    save_file(tensors, tmp_path / "local")
    assert (tmp_path / "remote").read_bytes() == (tmp_path / "local").read_bytes()


def test_a_file_is_loaded_onto_the_device(tmp_path: Path, sky1: str) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    save_file(tensors, tmp_path / "file")
    loaded = load_file(tmp_path / "file", device=sky1)
    for name, expected in tensors.items():
        assert type(loaded[name]) is RemoteTensor
        assert loaded[name].device == torch.device(sky1)
        assert torch.equal(loaded[name].cpu().view(torch.uint8), expected.view(torch.uint8))
    with safe_open(tmp_path / "file", framework="pt", device=sky1) as file:
        part = file.get_slice("torch.float32")[:, 1:]
        assert part.device == torch.device(sky1)
        assert part.tolist() == [[1, 2], [4, 5]]


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path, sky1: str) -> None:
    module = Tied().to(sky1)
    save_model(module, str(tmp_path / "model"))
    assert set(load_file(tmp_path / "model")) == {"counts", "first.bias", "first.weight", "second.bias"}
    other = Tied().to(sky1)
    load_model(other, str(tmp_path / "model"), device=sky1)
    assert other.second.weight is other.first.weight
    for (name, ours), theirs in zip(other.state_dict().items(), module.state_dict().values(), strict=True):
        assert ours.device == torch.device(sky1)
        assert torch.equal(ours.cpu(), theirs.cpu()), name
