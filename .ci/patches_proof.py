"""Proves docs/reference/patches.md: switches replacements off one by one, and runs the test of each, which must fail.

    make proof                              # all rows of the page
    make proof ARGS="torch.Tensor --each"   # rows with this in place, reason or test; place by place

What each test said is written to docs/patches_proof.json; tests/project/test_patches.py compares it with the page. That
the tests pass with all replacements, the test suite shows. Each runs in a process that is forked from one that has
imported PyTorch and nothing of skyproxy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs" / "patches_proof.json"
LIMIT_SECONDS = 180
"""For one test. What has not ended by then has failed."""

_SWITCHES = Path(__file__).with_name("patches_proof")
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True)
class Row:
    """A row of the page.

    Attributes:
        test: as pytest names it.
        why: the reason.
        places: what is replaced.
    """

    test: str
    why: str
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        """The row's name in the list of proofs."""
        return f"{self.test}: {self.why}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of pytest.

    Attributes:
        status: pytest's own exit status; 124 if it did not end.
        error: the first line of the first failure; empty if there is none.
        off: the places that were switched off, in whichever process.
    """

    status: int
    error: str
    off: frozenset[str]


class _FirstFailure:
    """A plugin of pytest that remembers the first line of the first failure."""

    def __init__(self) -> None:
        self.line = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.line:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()
            self.line = lines[0][:200] if crash is not None else lines[-1][:200]


def rows() -> list[Row]:
    """The rows of the page, from a process that makes every replacement."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "write_patches_reference.py"), "--rows"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    return [Row(row["test"], row["why"], tuple(row["places"])) for row in json.loads(found.stdout.splitlines()[-1])]


def run(test: str, *, why: str | None = None, place: str | None = None) -> Outcome:
    """Run a test in a forked process of its own.

    Args:
        why: the row of that test that is switched off there, and in the processes that it starts.
        place: the one place of that test that is.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, told = Path(folder, "log"), Path(folder, "told")
        log.touch()
        child = os.fork()
        if child == 0:
            os.setsid()  # what the test starts ends with it
            os.environ.update(
                WITHOUT_PATCHES=json.dumps({"test": test, "why": why, "place": place}),
                WITHOUT_PATCHES_LOG=str(log),
                PYTHONPATH=str(_SWITCHES),
            )
            _run_here(test, told)
        status = _wait(child)
        error = told.read_text(encoding="utf-8") if told.exists() else f"the process ended with {status}"
        return Outcome(status, error, frozenset(log.read_text(encoding="utf-8").splitlines()))


def _run_here(test: str, told: Path) -> None:
    import pytest

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    failure = _FirstFailure()
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test], plugins=[failure])
    told.write_text(failure.line, encoding="utf-8")
    os._exit(int(status))


def _wait(child: int) -> int:
    """Wait for a process and end its group; return its exit status, 124 if it did not end, 128 and more for signals."""
    until = time.monotonic() + LIMIT_SECONDS
    ended, raw = 0, 0
    while not ended and time.monotonic() < until:
        ended, raw = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not ended:
        os.waitpid(child, 0)
        return 124
    return os.waitstatus_to_exitcode(raw) if os.WIFEXITED(raw) else 128 + os.WTERMSIG(raw)


def prove(row: Row, *, each: bool) -> dict[str, Any]:
    """Switch a row off; return what its test said to that.

    Args:
        each: also switch off each of the row's places alone.
    """
    whole = run(row.test, why=row.why)
    said: dict[str, Any] = {"fails": _verdict(row.why, whole), "error": whole.error}
    if each:
        several = len(row.places) > 1
        said["alone"] = {
            place: _verdict(place, run(row.test, place=place)) if several else said["fails"] for place in row.places
        }
    return said


def _verdict(what: str, outcome: Outcome) -> bool:
    if not outcome.off:
        print(f"  never made: {what}", flush=True)
        return False
    return outcome.status != _PASSED


def main() -> int:
    """Prove what is asked for; return 1 if a test passes without its replacement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of places, reasons or tests; all rows where none is given")
    parser.add_argument("--each", action="store_true", help="also switch off each place of a row alone")
    parser.add_argument("--unproven", action="store_true", help="leave out rows that were proven before")
    asked = parser.parse_args()
    os.chdir(ROOT)
    runpy.run_path(str(_SWITCHES / "sitecustomize.py"))
    every = rows()
    proofs = {name: proof for name, proof in _read().items() if name in {row.name for row in every}}
    for name in ("pytest", "torch"):  # before the forks
        importlib.import_module(name)
    for row in every:
        if asked.only and not any(part in str(row) for part in asked.only):
            continue
        if asked.unproven and proofs.get(row.name, {}).get("fails"):
            continue
        proofs[row.name] = proof = {**proofs.get(row.name, {}), **prove(row, each=asked.each)}
        print(f"{'fails' if proof['fails'] else 'PASSES WITHOUT'}: {row.name}\n  {proof['error']}", flush=True)
        alone = [place for place, fails in proof.get("alone", {}).items() if not fails]
        print(*(f"  passes without {place} alone" for place in alone), sep="\n", end="\n" * bool(alone), flush=True)
        _write({row.name: proofs[row.name] for row in every if row.name in proofs})
    unproven = [row.name for row in every if not proofs.get(row.name, {}).get("fails")]
    print(f"{len(every)} rows, {len(unproven)} of them unproven", *unproven, sep="\n  ")
    return 1 if unproven else 0


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"rows": {}}
    return dict(found["rows"])


def _write(proofs: dict[str, Any]) -> None:
    torch: Any = sys.modules["torch"]
    found = {"torch": ".".join(torch.__version__.split(".")[:2]), "rows": proofs}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
