"""`make matrix`: what it notes of tests, what a run that was cut short leaves out later, and what the table says."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
from pathlib import Path

import pytest

HERE = Path(__file__).parent

def ran(name):
    with (HERE / "ran").open("a") as file:
        print(name, file=file)

def test_that_passes():
    ran("passes")

@pytest.mark.skip(reason="no time")
def test_that_is_skipped():
    ran("skipped")

def test_that_depends():
    ran("depends")
    assert (HERE / "mended").exists()

def test_that_may_end_the_run():
    ran("ends")
    if not (HERE / "mended").exists():
        os._exit(1)

def test_at_the_end():
    ran("end")
"""


@pytest.fixture(scope="module")
def matrix() -> Any:
    spec = importlib.util.spec_from_file_location("matrix_command", ROOT / ".ci" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture
def group(matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a group of five tests, as the only group."""
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "test_five.py").write_text(TESTS, encoding="utf-8")
    monkeypatch.setattr(matrix, "GROUPS", {"five": ([str(folder)], "not gpu")})
    return folder


def run(matrix: Any, journal: Path, resume: bool) -> Any:
    matrix.run_group(Path(sys.executable), "five", journal, 1, 300.0, resume)
    return matrix.read_journal(journal)


def names(folder: Path) -> list[str]:
    found = (folder / "ran").read_text(encoding="utf-8").split()
    (folder / "ran").unlink()
    return found


def test_a_run_that_goes_on_leaves_out_what_passed_or_was_skipped(matrix: Any, group: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    first = run(matrix, journal, resume=False)
    assert (first.count("passed"), first.count("failed"), first.count("skipped")) == (2, 2, 1)
    assert dict(first.skips) == {"no time": 1}
    assert not first.done
    assert names(group) == ["passes", "depends", "ends", "end"]

    (group / "mended").touch()
    second = run(matrix, journal, resume=True)
    assert (second.count("passed"), second.count("skipped")) == (4, 1)
    assert second.done
    assert names(group) == ["depends", "ends"]

    run(matrix, journal, resume=False)
    assert names(group) == ["passes", "depends", "ends", "end"]


def test_a_file_that_cannot_be_imported_has_failed(matrix: Any, group: Path, tmp_path: Path) -> None:
    (group / "test_five.py").write_text("import no_such_module\n", encoding="utf-8")
    outcomes = run(matrix, tmp_path / "journal.jsonl", resume=False)
    assert list(outcomes.tests.values()) == ["failed"]
    assert not outcomes.done


def test_the_table_says_what_failed_and_what_did_not_run(
    matrix: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = matrix.journal_of("session", "2.15", tmp_path)
    for entry in (
        {"begun": "2026-11-28 10:00 UTC abc"},
        {"found": 4},
        {"test": "a", "outcome": "passed"},
        {"test": "b", "outcome": "failed"},
        {"test": "c", "outcome": "skipped", "why": "no fork"},
        {"seconds": 7},
    ):
        matrix.note(journal, entry)
    with journal.open("a", encoding="utf-8") as file:
        file.write('{"test": "d", "outc')  # its process was killed while it wrote
    assert matrix.show(["2.11", "2.15"], ["session"], tmp_path) == [
        "torch 2.15: b",
        "torch 2.15, session: 1 tests did not run; --resume runs them",
    ]
    printed = capsys.readouterr().out
    row = "| session | not run | 1, 1 skipped, 1 failed, not to the end (7 s, 2026-11-28 10:00 UTC abc) |"
    assert row in printed.splitlines()
    assert "torch 2.15, 1 skipped: no fork" in printed.splitlines()


def test_a_command_that_is_told_to_end_ends_what_it_started(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT / '.ci')!r})\n"
        "from pathlib import Path\n"
        "from limits import end_with_processes, run_limited\n"
        "end_with_processes()\n"
        f"run_limited([sys.executable, '-c', {child!r}], dict(os.environ), 600, Path({str(tmp_path)!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        started = psutil.Process(int(command.stdout.readline()))
        command.terminate()
        assert command.wait(60) == 128 + signal.SIGTERM
        started.wait(30)


def test_an_environment_gets_what_the_list_of_packages_has_since(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[list[str]]()
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, check: ran.append(list(command)))
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "ready").touch()  # of a version that kept no list
    wanted = ["torch==2.15.*", "numpy", "psutil"]
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    matrix.make_environment(folder, wanted[0], wanted[1:])
    assert ran == [[*install, wanted[0]], [*install, *wanted]]
    matrix.make_environment(folder, wanted[0], wanted[1:])
    assert len(ran) == 2
    matrix.make_environment(folder, wanted[0], [*wanted[1:], "tqdm"])
    assert ran[2:] == [[*install, wanted[0]], [*install, *wanted, "tqdm"]]
