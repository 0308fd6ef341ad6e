"""A pool on an environment of its own: made from the package index, with another interpreter, and made once."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy as sky
from skyproxy.providers import Progress
from tests.providers.isolated_functions import describe

# Installing PyTorch takes half a minute on a machine that is not busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXTRA = "inflection"  # small, without dependencies, and needed by nothing of ours
TORCH = f"torch=={torch.__version__.split('+')[0]}"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # a gigabyte, which pytest would keep for three runs


def run(cache: Path, image: sky.Image, nodes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What the ranks of a pool say, and the pool's events."""
    told: list[str] = []

    def tell(progress: Progress) -> None:
        told.append(progress.message)

    provider = sky.Local(device="cpu", isolated=True, cache=cache)
    with sky.Compute(provider=provider, nodes=nodes, image=image, on_event=tell, timeout="10m") as pool:
        return describe("RemoteTensor") @ pool, told


def test_a_function_runs_in_an_isolated_environment_that_the_next_pool_finds_again(cache: Path) -> None:
    assert importlib.util.find_spec(EXTRA) is None
    (here,), told = run(cache, sky.Image(pip=[TORCH, EXTRA]), 1)
    (environment,) = [path for path in (cache / "environments").iterdir() if path.is_dir()]
    assert any("installing" in message and EXTRA in message for message in told)
    assert here["word"] == "remote_tensor"
    assert here["sum"].item() == 6
    assert Path(here["prefix"]) == environment != Path(sys.prefix)
    assert here["python"] != sys.executable
    version, file = here["torch"]
    assert version.split("+")[0] == torch.__version__.split("+")[0]
    for found in (here["extra"], file):
        assert Path(found).is_relative_to(environment)
    assert here["skyproxy"] == str(environment / "skyproxy-source" / "skyproxy" / "__init__.py")
    assert Path(here["skyproxy"]).resolve() == Path(sky.__file__).resolve()  # the client's own
    assert not here["pytest"]  # what only the client has is not there

    made = (environment / "finished").stat()
    both, told = run(cache, sky.Image(pip=[EXTRA, TORCH]), 2)
    assert not any("installing" in message for message in told)
    assert [place["prefix"] for place in both] == [here["prefix"]] * 2
    assert [place["rank"] for place in both] == [0, 1]
    assert (environment / "finished").stat().st_mtime_ns == made.st_mtime_ns
    assert [path for path in (cache / "environments").iterdir() if path.is_dir()] == [environment]
