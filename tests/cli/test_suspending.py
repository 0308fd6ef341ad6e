"""`suspend`, `resume` and `down` of a worker on this machine, while a program holds tensors there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import Result

from skyproxy.providers.detached import find

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.name != "posix", reason="a home of its own is chosen by HOME"),
]

Run = Callable[..., Result]
Read = Callable[..., Any]

NOTEBOOK = """
import sys, torch, skyproxy
torch.manual_seed(1)
model = torch.nn.Linear(32, 4).to("sky")
optimizer = torch.optim.Adam(model.parameters())
data = torch.Generator().manual_seed(2)

def step():
    loss = model(torch.randn(8, 32, generator=data).to("sky")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

print(f"{step().item():.9f}", flush=True)
for line in sys.stdin:
    print(f"{step().item():.9f}", flush=True)
"""


class Notebook:
    """A program with a cell that is run again and again."""

    def __init__(self, folder: Path) -> None:
        self.said = folder / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", textwrap.dedent(NOTEBOOK)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)},
            )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def step(self) -> str:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def dev(run: Run) -> str:
    result = run("up", "dev", "--provider", "local", "--gpus", "0")
    assert result.exit_code == 0, result.output
    return "dev"


@pytest.fixture
def notebook(dev: str, tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    yield made
    made.close()


def test_a_suspended_worker_comes_back_with_the_next_operation(
    run: Run, read: Read, notebook: Notebook, tmp_path: Path
) -> None:
    losses = [notebook.read(), notebook.step()]
    before = find("dev")
    assert before is not None
    result = run("suspend", "dev")
    assert result.exit_code == 0, result.output
    assert "dev is suspended: 1 session is suspended" in result.stdout
    (row,) = read("list")
    assert (row["phase"], row["ready"]) == ("Suspended", False)
    assert not before.alive
    assert "is suspended already" in run("suspend", "dev").output
    losses += [notebook.step(), notebook.step()]  # the first of them brings it back
    assert read("list")[0]["phase"] == "Running"
    assert run("suspend").exit_code == 0
    result = run("resume")
    assert (result.exit_code, result.stdout) == (0, "dev is ready\n")
    losses.append(notebook.step())
    said = notebook.said.read_text()
    assert said.count("this session is suspended") == said.count("the session goes on") == 2
    assert losses == undisturbed(tmp_path, len(losses))


def undisturbed(folder: Path, count: int) -> list[str]:
    alone = folder / "alone"
    alone.mkdir()
    other = Notebook(alone)
    try:
        return [other.read(), *(other.step() for _ in range(count - 1))]
    finally:
        other.close()


def test_down_of_a_suspended_worker_deletes_what_it_held(run: Run, read: Read, notebook: Notebook, home: Path) -> None:
    notebook.read()
    assert run("suspend", "dev").exit_code == 0
    assert list((home / "state").rglob("*.safetensors"))
    assert run("down", "dev").exit_code == 0
    assert read("list") == []
    assert not list((home / "state").rglob("*.safetensors"))
    notebook.step()
    assert notebook.process.wait(60) == 1
    assert "there is no worker 'dev' any more" in notebook.said.read_text()


@pytest.mark.slow
def test_a_program_moves_to_another_worker_and_back(run: Run, notebook: Notebook, tmp_path: Path, home: Path) -> None:
    losses = [notebook.read(), notebook.step()]
    assert run("move", "dev", "nowhere").exit_code == 3
    assert run("up", "other", "--provider", "local", "--gpus", "0", "--no-use").exit_code == 0
    result = run("move", "dev", "other")
    assert (result.exit_code, result.stdout) == (0, "1 session moved from dev to other\n"), result.output
    assert run("down", "dev").exit_code == 0
    losses += [notebook.step(), notebook.step()]
    assert run("suspend", "other").exit_code == 0  # it is this one that comes back now
    losses.append(notebook.step())
    assert run("context", "use", "other").exit_code == 0
    assert losses == undisturbed(tmp_path, len(losses))
    assert not list((home / "state" / "skyproxy" / "workers").glob("other/snapshots/*/*/snapshot-*"))
