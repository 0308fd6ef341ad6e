"""The architecture page lists the files that a cached op passes, and how many they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.integration.programs import environment

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"recorded": "While it is recorded", "sent": "When the batch is sent", "on the worker": "On the worker, on the"}
NOT_PASSED = {"skyproxy_server/signatures.py"}  # named there for what it did before


def listed() -> dict[str, set[str]]:
    """The files that the page lists for each stage, from the repository's root."""
    page = (ROOT / "docs/topics/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The way of an op\n")[2].partition("**A cached op passes")[0]
    _, *texts = re.split("|".join(PARTS.values()), section)
    found: dict[str, set[str]] = {}
    for stage, text in zip(PARTS, texts, strict=True):
        names = re.findall(r"`([\w/]+\.py)`", text)
        found[stage] = {name if name.startswith("skyproxy_server/") else f"skyproxy/{name}" for name in names}
    return found


def test_a_cached_op_passes_the_files_that_the_architecture_page_lists() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/files_of_an_op.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    passed = {stage: set(files) for stage, files in json.loads(done.stdout).items()}
    assert {stage: files - NOT_PASSED for stage, files in listed().items()} == passed
    page = (ROOT / "docs/topics/architecture.md").read_text(encoding="utf-8")
    counted = re.search(r"passes (\d+) files\*\*: (\d+) while .*?, (\d+) more .*?, (\d+) more on", page, re.DOTALL)
    assert counted is not None
    recorded, sent, worker = (passed[stage] for stage in PARTS)
    numbers = [len(recorded | sent | worker), len(recorded), len(sent - recorded), len(worker - recorded - sent)]
    assert list(map(int, counted.groups())) == numbers
