"""What a release uploads: `python -m build`, `twine check`, and a fresh environment from each of the two files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.firstrun.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

pytestmark = [pytest.mark.firstrun, pytest.mark.timeout(600)]


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def uv() -> str:
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found is not None, "uv is in the extra `dev`"
    return found


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it: not from the checkout."""
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def files_of_wheel(wheel: Path) -> dict[str, int]:
    """The checksums of a wheel's files; its list of them is left out."""
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist() if not item.filename.endswith("RECORD")}


def test_twine_finds_nothing_wrong(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    run(uv(), "venv", "--quiet", "--python", sys.executable, str(tmp_path / "twine"))
    python = str(tmp_path / "twine" / "bin" / "python")
    run(uv(), "pip", "install", "--quiet", "--python", python, "twine>=6")
    told = run(python, "-m", "twine", "check", "--strict", *map(str, distributions))
    assert told.count("PASSED") == 2, told


def test_the_wheel_from_the_source_distribution_is_that_of_the_checkout(
    distributions: tuple[Path, Path], wheel: Path
) -> None:
    _, built = distributions
    assert built.name == wheel.name == f"skyproxy-{VERSION}-py3-none-any.whl"
    assert files_of_wheel(built) == files_of_wheel(wheel)


def test_the_source_distribution_has_tests_and_documentation_and_nothing_made(distributions: tuple[Path, Path]) -> None:
    source, _ = distributions
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for wanted in (
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "docs/index.md",
        "tests/conftest.py",
        "Makefile",
    ):
        assert wanted in names, wanted
    made = ("__pycache__", ".pyc", ".venv", ".git/", ".mypy_cache", "build/")
    assert [name for name in names if any(part in name for part in made)] == []


@pytest.mark.parametrize("kind", ["source", "wheel"])
def test_either_can_be_installed(
    distributions: tuple[Path, Path], kind: str, tmp_path: Path, home: dict[str, str]
) -> None:
    run(uv(), "venv", "--quiet", "--python", sys.executable, str(tmp_path / "fresh"))
    python = str(tmp_path / "fresh" / "bin" / "python")
    run(uv(), "pip", "install", "--quiet", "--python", python, str(distributions[kind == "wheel"]))
    told = run(str(tmp_path / "fresh" / "bin" / "skyproxy"), "version", cwd=tmp_path, env=home)
    assert VERSION in told


def recipe() -> dict[str, Any]:
    """The recipe for conda, as it stands on the page, with what conda puts into it."""
    (text,) = [block for block in blocks("docs/project/releasing.md", "yaml") if "schema_version" in block]
    values = {"version": VERSION, "python_min": "3.11", "PYTHON": "python"}
    parsed: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\{ (\w+) \}\}", lambda match: values[match[1]], text))
    return parsed


def test_the_recipe_for_conda_builds_from_the_source_distribution_and_readme_runs(
    distributions: tuple[Path, Path], tmp_path: Path, home: dict[str, str]
) -> None:
    """As conda does: what it requires is there, the source is built without an index, and its tests are run."""
    made, names = recipe(), {"msgpack-python": "msgpack", "pytorch": "torch"}
    assert (made["package"]["version"], made["build"]["noarch"]) == (VERSION, "python")
    required = [*made["requirements"]["host"], *made["requirements"]["run"]]
    packages = {names.get(word[0], word[0]) + "".join(word[1:]) for word in map(str.split, required)}
    packages -= {text for text in packages if text.startswith("python")}
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"torch=={version('torch').partition('+')[0]}\n", encoding="ascii")
    python = str(tmp_path / "fresh" / "bin" / "python")
    run(uv(), "venv", "--quiet", "--python", sys.executable, str(tmp_path / "fresh"))
    options = ("--quiet", "--link-mode", "hardlink", "--python", python, "--constraint", str(constraint))
    run(uv(), "pip", "install", *options, *sorted(packages))
    with tarfile.open(distributions[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    program, *arguments = shlex.split(made["build"]["script"])
    assert program == "python"
    offline = home | {"PIP_NO_INDEX": "1", "PATH": f"{Path(python).parent}{os.pathsep}{home['PATH']}"}
    run(python, *arguments, cwd=tmp_path / f"skyproxy-{VERSION}", env=offline)
    for part in made["tests"]:
        for name in part.get("python", {}).get("imports", []):
            run(python, "-c", f"import {name}", cwd=tmp_path, env=offline)
        for line in part.get("script", []):
            assert VERSION in run("sh", "-c", line, cwd=tmp_path, env=offline)
    assert made["build"]["python"]["entry_points"] == ["skyproxy = skyproxy.cli.main:main"]
    assert "tensor(" in run(python, "-c", "\n".join(blocks("README.md", "python")), cwd=tmp_path, env=home)
