"""The plugin that runs the tests of other libraries, run on tests that are written here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.upstream.comparison import Result, read_results
from tests.upstream.device_plugin import sample

PROGRAM = """
import os
import pytest

@pytest.mark.parametrize("number", range(20))
def test_of_many(number):
    pass

def test_of_another_name_that_fails():
    assert os.environ["TORCH_DEVICE"] == "no device"

def test_of_another_name_that_is_skipped():
    pytest.skip("no hub")
"""


def run(folder: Path, size: int, *arguments: str) -> dict[str, Result]:
    """Run the program above as tests of timm on the CPU, and return the outcomes by test."""
    (folder / "test_it.py").write_text(PROGRAM, encoding="utf-8")
    report = folder / "report"
    report.write_text("", encoding="utf-8")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables = own | {
        "PYTHONPATH": str(Path(__file__).parent),
        "UPSTREAM_DEVICE": "cpu",
        "UPSTREAM_LIBRARY": "timm",
        "UPSTREAM_REPORT": str(report),
        "UPSTREAM_SAMPLE": str(size),
        "UPSTREAM_SEED": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "device_plugin", "-p", "no:cacheprovider", *arguments]
    subprocess.run([*command, "test_it.py"], cwd=folder, env=variables, capture_output=True, check=False, timeout=100)
    return read_results(report.read_text(encoding="utf-8").splitlines())


def test_every_outcome_is_reported_once_with_its_error(tmp_path: Path) -> None:
    results = run(tmp_path, 0)
    assert len(results) == 22
    assert results["test_it.py::test_of_many[7]"] == Result("passed")
    assert results["test_it.py::test_of_another_name_that_is_skipped"] == Result("skipped", "Skipped: no hub")
    failed = results["test_it.py::test_of_another_name_that_fails"]
    assert failed.outcome == "failed"
    assert "assert 'cpu' == 'no device'" in failed.message


def test_a_sample_is_the_same_in_every_process(tmp_path: Path) -> None:
    names = [f"test_it.py::test_of_many[{number}]" for number in range(20)]
    names += [f"test_it.py::test_of_another_name_that_{end}" for end in ("fails", "is_skipped")]
    wanted = set(sample(names, 5, "1"))
    assert len(wanted) == 5
    assert set(run(tmp_path, 5)) == wanted
    assert set(sample(names, 5, "2")) != wanted
