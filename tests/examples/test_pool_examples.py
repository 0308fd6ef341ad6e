"""The examples that need a pool do what they say, each as a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def printed(example: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    path = [str(ROOT / "tests/site"), str(ROOT), *(item for item in sys.path if item)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment | {"PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def percentages(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+)%", text)]


def test_ddp_learns_and_both_ranks_agree() -> None:
    out = printed("ddp.py", "--epochs", "4")
    first, *_, rank0, rank1 = percentages(out)
    assert rank0 == rank1 > max(80, first)


def test_a_model_goes_and_comes_back_trained() -> None:
    before, after = percentages(printed("model_round_trip.py", "--epochs", "5"))
    assert before < 35
    assert after > 85


def test_a_grid_search_finds_something() -> None:
    (score,) = percentages(printed("joblib_grid_search.py"))
    assert score > 90


@pytest.mark.skipif(not (find_spec("jax") and find_spec("keras")), reason="jax or keras is not installed")
def test_keras_trains_one_model_on_two_ranks() -> None:
    out = printed("keras_jax.py", "--epochs", "4")
    assert "2 processes" in out
    *_, rank0, rank1 = percentages(out)
    assert rank0 == rank1 > 70


@pytest.mark.skipif(not (find_spec("transformers") and find_spec("datasets")), reason="transformers is not installed")
def test_the_trainer_trains_on_two_ranks() -> None:
    out = printed("huggingface_finetune.py", "--epochs", "8")
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.e-]+)'", out)]
    assert losses[-1] < losses[0] / 2
    assert "rank 1 of 2: loss" in out
