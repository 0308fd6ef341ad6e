"""What `make environment` installs, and that it works together."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def installed_by_the_makefile() -> list[Requirement]:
    """Return the requirements of the extras that the Makefile installs."""
    extras = re.findall(r'-e "\.\[([a-z,]+)\]"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(extras) == 2, "that of the demo, and that of the tests"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in {name for names in extras for name in names.split(",")}:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def with_what_they_need(wanted: list[Requirement]) -> set[str]:
    """Return the names of all packages that pip installs for these requirements, as far as they are installed here."""
    found: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                further = [Requirement(line) for line in requires(name) or ()]
            except PackageNotFoundError:
                continue
            wanted += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def test_nothing_that_is_installed_brings_torchvision() -> None:
    names = with_what_they_need(installed_by_the_makefile())
    assert "transformers" in names
    assert "torchvision" not in names


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_models_of_transformers_are_imported_in_a_fresh_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from transformers import Qwen2ForCausalLM, ViTForImageClassification"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
