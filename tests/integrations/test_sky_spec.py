"""The file by which the test suites of transformers and diffusers take a sky device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from skyproxy.integrations import sky_spec
from tests.integration.programs import ROOT

TRANSFORMERS = """
from transformers import testing_utils
import torch
assert testing_utils.torch_device == "sky"
assert torch.ones(1, device=testing_utils.torch_device).device == torch.device(testing_utils.torch_device, 0)
testing_utils.backend_manual_seed(testing_utils.torch_device, 3)
first = torch.randn(2, device=testing_utils.torch_device).tolist()
torch.manual_seed(3)
assert torch.randn(2, device="sky:0").tolist() == first
testing_utils.backend_empty_cache(testing_utils.torch_device)
assert torch.device(f"{testing_utils.torch_device}:0").index == 0  # as its tests of loading and offloading write it
assert testing_utils.backend_device_count(testing_utils.torch_device) == 1
"""
DIFFUSERS = """
from diffusers.utils import testing_utils
import torch
assert testing_utils.torch_device == "sky"
testing_utils.backend_manual_seed(testing_utils.torch_device, 3)
testing_utils.backend_reset_peak_memory_stats(testing_utils.torch_device)
x = torch.ones(1000, device="sky:0")
torch.sky.synchronize()
assert testing_utils.backend_max_memory_allocated(testing_utils.torch_device) >= 4000
assert testing_utils.backend_supports_training(testing_utils.torch_device)
"""


@pytest.mark.parametrize(("library", "program"), [("transformers", TRANSFORMERS), ("diffusers", DIFFUSERS)])
def test_a_test_suite_takes_the_device(library: str, program: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    shutil.copy(sky_spec.__file__, tmp_path)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    variables |= {f"{library.upper()}_TEST_DEVICE_SPEC": "sky_spec.py", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=variables | {"SKYPROXY_CONTEXT": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
