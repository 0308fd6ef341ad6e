"""Fresh environments with the built wheel: what a new user gets, not what this checkout's environment has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Environment = Callable[..., Path]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Makes an environment with the wheel, some of its extras, and nothing else; its Python.

    torch is the version that the checkout's environment has, so that a run needs one build of it.
    """
    made: dict[tuple[str, ...], Path] = {}

    def make(*extras: str, packages: tuple[str, ...] = ()) -> Path:
        key = (*extras, *packages)
        if key not in made:
            folder = tmp_path_factory.mktemp("environment")
            uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
            assert uv is not None, "uv is in the extra `dev`"
            python = folder / "bin" / "python"
            constraint = folder.with_suffix(".txt")
            constraint.write_text(f"torch=={version('torch').partition('+')[0]}\n", encoding="ascii")
            wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
            for command in (
                ["venv", "--quiet", "--python", sys.executable, str(folder)],
                # One folder of torch for all environments: it is a gigabyte.
                ["pip", "install", "--quiet", "--link-mode", "hardlink", "--python", str(python)]
                + ["--constraint", str(constraint), wanted, *packages],
            ):
                done = subprocess.run([uv, *command], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
            made[key] = python
        return made[key]

    return make


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The variables of a user who has configured nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKYPROXY_", "PYTHON", "KUBE"))}
    return kept | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
