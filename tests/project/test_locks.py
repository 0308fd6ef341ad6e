"""What images and instances are installed from is known by exact versions and hashes, and fits pyproject.toml."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


lock = module("lock")
audit = module("audit")


def test_the_locks_fit_what_is_wanted() -> None:
    assert lock.problems() == [], "run: make lock"


@pytest.mark.parametrize("name", sorted(lock.LOCKS))
def test_a_lock_names_no_index_and_no_path(name: str) -> None:
    text = lock.LOCKS[name].read_text(encoding="utf-8")
    assert len(lock.locked(text)) > 3
    assert not any(word in text for word in ("http:", "https:", "--index", "file:", "@ "))


@pytest.mark.parametrize("text", ["a>=1 --hash=sha256:0", "a==1", "-r other.txt --hash=sha256:0"])
def test_what_has_no_exact_version_or_no_hash_is_no_lock(text: str) -> None:
    with pytest.raises(ValueError, match="no exact version with a hash"):
        lock.locked(text)


@pytest.mark.parametrize("name", ["worker", "operator"])
def test_images_install_nothing_that_is_not_locked_but_torch(name: str) -> None:
    text = (ROOT / "manifests" / "images" / f"Containerfile.{name}").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [part for part in text.replace("&&", "\n").splitlines() if "pip install" in part or "pip wheel" in part]
    assert len(installs) >= 4
    for line in installs:
        known = any(flag in line for flag in ("--require-hashes", "--no-deps"))
        assert known or '"${TORCH}"' in line, line


def test_an_index_that_knows_nothing_is_no_proof_that_nothing_is_wrong() -> None:
    fine = {"name": "a", "version": "1", "vulns": []}
    skipped = {"name": "b", "skip_reason": "not found"}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1"}]}
    told = json.dumps({"dependencies": [fine, skipped]})
    assert audit.verdict("x", told, "") == ("x: 1 of 2 packages audited; not audited: b", 0)
    text, status = audit.verdict("x", json.dumps({"dependencies": [fine, bad]}), "")
    assert ("c 2: CVE-1" in text, status) == (True, 1)
    assert audit.verdict("x", "", "Max retries exceeded with url")[1] == 0
    assert audit.verdict("x", "", "Traceback: a bug")[1] == 2


def test_ci_writes_what_images_are_made_of_and_asks_what_is_known_against_it_each_week() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = [step.get("run") for step in workflow["jobs"]["supply"]["steps"]]
    assert {"make sbom", "make audit"} <= set(commands)
    assert workflow[True]["schedule"]  # YAML reads "on" so
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert ".ci/audit.py sbom" in targets
    assert ".ci/audit.py audit" in targets


def test_a_bill_of_materials_that_cannot_be_asked_about_is_told_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unreachable = subprocess.CompletedProcess([], 1, "", "requests.exceptions.ConnectionError: Max retries exceeded")
    monkeypatch.setattr(audit.subprocess, "run", lambda *arguments, **options: unreachable)
    assert audit.audit() == 0
    assert capsys.readouterr().out.count("not audited, because nobody could be asked") == len(lock.LOCKS)
