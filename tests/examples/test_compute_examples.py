"""The examples that ask for workers of their own: `@compute` and `Cluster`, each as a program on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, environment

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests/site"), str(ROOT)])
    folders = {name: str(tmp_path / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    return environment(PYTHONPATH=path, SKYPROXY_PROVIDER="local", HF_HUB_OFFLINE="1", **folders)


def printed(variables: dict[str, str], example: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *arguments],
        capture_output=True,
        text=True,
        env=variables,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_decorated_function_trains_on_a_worker_of_its_own(variables: dict[str, str]) -> None:
    out = printed(variables, "compute_mnist.py", "--epochs", "5")
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", out)
    assert float(accuracy) > 90
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 4


def test_a_model_that_is_loaded_on_a_worker_answers_every_prompt(variables: dict[str, str]) -> None:
    out = printed(variables, "compute_llm.py", "--max-new-tokens", "12")
    assert out.count("you: ") == 2
    answers = re.findall(r"model: (.+)", out)
    assert len(answers) == 2
    assert printed(variables, "compute_llm.py", "--max-new-tokens", "12") == out  # the weights come from a seed


def test_two_workers_sample_and_train_together(variables: dict[str, str]) -> None:
    out = printed(variables, "cluster_grpo.py", "--steps", "20")
    rewards = [float(reward) for reward in re.findall(r"step \d+: mean reward ([\d.]+)", out)]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
