"""What cannot work with remote tensors fails in words, whoever says them; docs/reference/compatibility.md lists it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import accelerate
import transformers

from skyproxy.errors import UnsupportedOpError
from tests.integrations.language_models import make_model


def test_maps_that_accelerate_makes_of_this_machine(sky1: str) -> None:
    with pytest.raises(ValueError, match=f"Device {sky1} is not recognized"):
        accelerate.infer_auto_device_map(make_model("Llama"), max_memory={sky1: 10**9})


@pytest.mark.skipif(torch.cuda.is_available(), reason="then it finds a GPU of this machine")
def test_an_automatic_map_stays_on_this_machine(tmp_path: Path, sky1: str) -> None:
    make_model("Llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert model.device.type in ("cpu", "mps")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_weights_of_quantized_modules(sky1: str) -> None:
    module: Any = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(2, 2)), {torch.nn.Linear})
    with pytest.raises(UnsupportedOpError, match="ScriptObject cannot be sent"):
        module.to(sky1)(torch.ones(1, 2, device=sky1))


def test_operators_with_kernels_for_certain_devices_only(sky1: str) -> None:
    library = torch.library.Library("sky_refusals", "DEF")
    library.define("only_cuda(Tensor x) -> Tensor")
    library.impl("only_cuda", lambda x: x + 1, "CUDA")
    with pytest.raises(UnsupportedOpError, match="workers do not have it"):
        torch.ops.sky_refusals.only_cuda(torch.ones(2, device=sky1))
