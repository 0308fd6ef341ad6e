"""`make gpu`: what it says where it cannot run, how it counts, and that a stage leaves nothing behind."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_command", ROOT / ".ci" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_what_to_do(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "sees no CUDA device" in said
    assert "--rehearse" in said


def test_what_is_missing_is_named_with_the_command_that_brings_it(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PACKAGES", {"no_such_module_at_all": "no-such-package"})
    assert gpu.main(["--rehearse"]) == 2
    said = capsys.readouterr().err
    assert "no-such-package" in said
    assert "--download .wheels" in said


def test_a_folder_without_wheels_is_refused(gpu: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no wheels"):
        gpu.main(["--rehearse", "--wheels", str(tmp_path)])


def test_every_package_that_the_stages_import_is_one_of_the_environment(gpu: Any) -> None:
    assert gpu.missing_packages() == []


def test_tests_are_counted_and_those_that_failed_are_named(gpu: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two">'
        '<failure message="2 is\n not 3">trace</failure></testcase><testcase classname="a" name="three"><skipped/>'
        '</testcase><testcase classname="a" name="four"><error message="broke"/></testcase></testsuite></testsuites>'
    )
    stage = gpu.Stage("sweep")
    gpu.read_report(stage, report)
    assert (stage.passed, stage.failed, stage.skipped) == (1, 2, 1)
    assert stage.problems == ["a::two: 2 is not 3", "a::four: broke"]


def test_targets_are_counted_and_those_that_were_missed_are_named(gpu: Any, tmp_path: Path) -> None:
    row = {"name": "step", "link": "ws", "sky": [1.0], "unit": "steps/s", "ratio": [0.8, 0.9, 1.0]}
    rows = [
        {**row, "against": "local CUDA", "targets": ["≥ 0.95x"], "met": False},
        {**row, "against": "local CUDA", "targets": ["≥ 0.80x"], "met": True},
        {**row, "against": "", "targets": [], "met": None},
    ]
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"rows": rows, "skipped": [{}]}))
    judged, rehearsed = gpu.Stage("figures"), gpu.Stage("figures")
    gpu.read_figures(judged, path)
    gpu.read_figures(rehearsed, path, judge=False)
    assert (judged.passed, judged.failed, judged.skipped, len(judged.rows)) == (1, 1, 1, 3)
    assert judged.problems == ["step over ws: 0.900 times local CUDA, wanted ≥ 0.95x"]
    assert (rehearsed.passed, rehearsed.failed, rehearsed.problems) == (0, 0, [])


def test_a_stage_that_takes_too_long_ends_with_all_its_processes(gpu: Any, tmp_path: Path) -> None:
    noted = tmp_path / "child"
    child = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(noted)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    status = None
    limit_seconds = 2.0
    while not noted.exists() or not noted.read_text():  # a machine may take long to start a process
        status = gpu.run_limited([sys.executable, "-c", code], dict(os.environ), limit_seconds, tmp_path)
        limit_seconds *= 2
    assert status is None
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(noted.read_text())).wait(timeout=30)  # it was killed; the system may take its time


def test_a_stage_whose_tests_all_are_skipped_is_not_ok(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(stage: Any, options: argparse.Namespace, variables: dict[str, str]) -> None:
        stage.skipped = 3

    monkeypatch.setitem(gpu.STAGES, "device", nothing)
    assert gpu.run_stage("device", gpu.arguments([]), {}).outcome == "nothing ran"


@pytest.mark.slow
def test_the_tests_of_a_worker_are_rehearsed_on_the_cpu(gpu: Any, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert gpu.main(["--rehearse", "--stages", "device", "--json", str(found)]) == 0
    (stage,) = json.loads(found.read_text())["stages"]
    assert stage["outcome"] == "ok"
    assert stage["passed"] >= 20
