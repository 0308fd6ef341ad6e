"""Jobs of a node: scripts and functions, from this very program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, LimitExceededError, UnknownJobError

SECONDS = 240.0


@pytest.fixture(scope="module")
def node() -> Iterator[skyproxy.Node]:
    with skyproxy.launch_local("cpu") as made:
        yield made


def scaled(x: torch.Tensor, factor: float = 2.0) -> dict[str, torch.Tensor]:
    print("scaling by", factor)
    return {"y": x * factor}


def test_a_function_runs_as_a_job_and_is_found_again(node: skyproxy.Node) -> None:
    job = node.submit_job(scaled, torch.ones(3), factor=3.0, name="scaling")
    assert torch.equal(job.result(SECONDS)["y"], torch.full((3,), 3.0))
    again = node.job("scaling")
    assert torch.equal(again.result()["y"], torch.full((3,), 3.0))
    assert list(again.logs()) == ["scaling by 3.0"]
    assert [status.name for status in node.jobs()] == ["scaling"]
    with pytest.raises(LimitExceededError, match="scaling"):
        node.submit_job(scaled, torch.ones(3), name="scaling")
    again.remove()
    with pytest.raises(UnknownJobError):
        node.job("scaling")
    assert node.jobs() == []


@skyproxy.function
async def counted(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


def test_what_a_generator_yields_is_a_list(node: skyproxy.Node) -> None:
    assert node.submit_job(counted, 3).result(SECONDS) == [0, 1, 2]


def test_what_a_function_raises_is_raised_here(node: skyproxy.Node) -> None:
    def fails() -> None:
        raise ValueError("of the job")

    with pytest.raises(ValueError, match="of the job"):
        node.submit_job(fails).result(SECONDS)


def test_a_script_brings_its_modules(node: skyproxy.Node, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WORD = 'from the module beside it'\n")
    (tmp_path / "train.py").write_text("import sys\nimport helper\nprint(helper.WORD, sys.argv[1:])\n")
    job = node.submit_job(tmp_path / "train.py", "--epochs", 3)
    assert job.name.startswith("train-")
    assert job.wait(SECONDS).exit_code == 0
    assert list(job.logs()) == ["from the module beside it ['--epochs', '3']"]


def test_a_checkpoint_folder_outlives_a_restart(node: skyproxy.Node, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import skyproxy
place = skyproxy.checkpoint_dir() / "state"
print("start", skyproxy.restart_count(), "from", place.read_text() if place.exists() else "nothing")
place.write_text("a checkpoint")
raise SystemExit(skyproxy.restart_count() == 0)
""")
    job = node.submit_job(tmp_path / "train.py", max_restarts=2)
    assert job.wait(SECONDS).state == "succeeded"
    starts = [line for line in job.logs() if line.startswith("start")]
    assert starts == ["start 0 from nothing", "start 1 from a checkpoint"]


def test_a_remote_tensor_is_refused(node: skyproxy.Node) -> None:
    with pytest.raises(ConfigurationError, match="remote tensors do not"):
        node.submit_job(scaled, torch.ones(3, device=node.devices[0]))


def test_options_of_scripts_are_not_for_functions(node: skyproxy.Node, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="are for scripts"):
        node.submit_job(scaled, nproc_per_node=2)
    (tmp_path / "a.py").write_text("")
    with pytest.raises(ConfigurationError, match="factor="):
        node.submit_job(tmp_path / "a.py", factor=2)
    with pytest.raises(ConfigurationError, match="no script"):
        node.submit_job("no-such-script.py")
