"""`examples/llm.py`: a chat whose weights stay on the worker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, environment

pytest.importorskip("transformers")
EXAMPLE = ROOT / "examples" / "llm.py"
pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """No network, and no saved contexts."""
    folders = {name: str(tmp_path / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    return environment(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", **folders)


TWIN = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
example, folder, prompt = sys.argv[1:]
spec = importlib.util.spec_from_file_location("llm_example", example)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
tokenizer = module.make_tokenizer()
config = module.make_config(tokenizer)
config.hidden_size, config.intermediate_size = 128, 512
torch.manual_seed(3)
Qwen2ForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
twin = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
inputs.pop("token_type_ids", None)
ids = twin.generate(**inputs, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :].tolist(), skip_special_tokens=True))
"""
PROMPT = "where are my weights?"


def run(variables: dict[str, str], *arguments: str, lines: str = "") -> tuple[str, float, float]:
    """What the example printed, the MiB of weights that it names, and the MiB that moved."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        input=lines,
        capture_output=True,
        text=True,
        env=variables,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = re.search(r"([\d.]+) MiB of weights on sky:0, ([\d.]+) MiB moved", done.stderr)
    assert figures is not None, done.stderr
    return done.stdout, float(figures.group(1)), float(figures.group(2))


def test_a_model_in_a_folder_answers_as_it_does_locally(variables: dict[str, str], tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    twin = subprocess.run(
        [sys.executable, "-c", TWIN, str(EXAMPLE), folder, PROMPT],
        capture_output=True,
        text=True,
        env=variables,
        timeout=150,
        check=False,
    )
    assert twin.returncode == 0, twin.stderr
    printed, weights, moved = run(variables, "--model", folder, "--prompt", PROMPT, "--max-new-tokens", "24")
    assert printed.strip() == twin.stdout.strip()
    assert printed.strip()
    assert weights > 1
    assert moved < 0.1


def test_without_a_name_a_tiny_model_answers_line_after_line(variables: dict[str, str]) -> None:
    printed, weights, moved = run(variables, "--max-new-tokens", "8", lines="what is a worker?\n\nand a batch?\n")
    assert printed.strip()
    assert printed.count("\n") >= 2
    assert moved < weights / 4
