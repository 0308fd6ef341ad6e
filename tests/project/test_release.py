"""Tag, version and changelog of a release fit together."""

from __future__ import annotations

import datetime
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TODAY = datetime.date(2026, 11, 22)


def module() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["release"] = made
    spec.loader.exec_module(made)
    return made


release = module()
PYPROJECT = '[project]\nversion = "1.2.3" # the only place\n'
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- x\n\n## [1.2.3] - 2026-01-02\n\n- y\n\n## [1.2.2] - 2026-01-01\n"
)


def test_the_notes_are_those_of_the_version() -> None:
    assert release.notes("v1.2.3", PYPROJECT, CHANGELOG) == "- y\n"


@pytest.mark.parametrize(
    ("tag", "version", "problem"),
    [
        ("1.2.3", "1.2.3", "is no tag"),
        ("v1.2", "1.2", "is no tag"),
        ("v1.2.4", "1.2.3", "the tag says 1.2.4"),
        ("v1.2.4", "1.2.4", "no section"),
        ("v1.2.2", "1.2.2", "says nothing of 1.2.2"),
    ],
)
def test_what_does_not_fit_is_not_released(tag: str, version: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        release.notes(tag, PYPROJECT.replace("1.2.3", version), CHANGELOG)


def test_what_was_begun_can_be_released() -> None:
    pyproject, changelog = release.begun("v2.0.0rc1", PYPROJECT, CHANGELOG, TODAY)
    assert release.notes("v2.0.0rc1", pyproject, changelog) == "### Added\n\n- x\n"
    assert "## [Unreleased]\n\n## [2.0.0rc1] - 2026-11-22\n" in changelog
    assert "# the only place" in pyproject
    with pytest.raises(ValueError, match="already"):
        release.begun("v2.0.0rc1", pyproject, changelog, TODAY)


def test_the_tree_as_it_is_can_be_begun() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md")]
    pyproject, changelog = release.begun("v999.0.0", *texts, TODAY)
    assert release.notes("v999.0.0", pyproject, changelog).startswith("### ")


def test_the_recipe_for_conda_asks_for_what_the_wheel_asks_for() -> None:
    page = (ROOT / "docs" / "project" / "releasing.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^    - (.+)$", page.partition("  run:\n")[2].partition("\ntests:")[0], re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {"msgpack": "msgpack-python", "torch": "pytorch"}  # where conda-forge has another one
    wanted = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    parts = [re.fullmatch(r"([\w-]+)(.*)", text) for text in wanted]
    shown = {f"{names.get(part[1], part[1])} {part[2]}".strip() for part in parts if part is not None}
    assert listed - {"python >=${{ python_min }}"} == shown


def test_the_workflow_runs_for_tags_and_its_commands_are_those_of_the_page() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # `on` is a truth value to YAML 1.1
    assert "python .ci/release.py" in text
    assert "twine check --strict" in text
    assert workflow["permissions"] == {"contents": "read"}
