"""Commands that need no tensor do not pay for importing torch, and run where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# As if torch were not installed; a command that imports it all the same ends with the traceback.
_PROGRAM = """
import sys

class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, WithoutTorch())
from skyproxy.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--help",), 0),
        (("version",), 0),
        (("list",), 0),
        (("context", "list"), 0),
        (("status", "nobody", "--provider", "local"), 3),
        (("logs", "nobody", "--provider", "local"), 3),
        (("down", "nobody", "--provider", "local"), 3),
        (("ui", "--help"), 0),
        (("ui", "nobody"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_runs_without_torch(home: Path, arguments: tuple[str, ...], status: int) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    assert "torch" not in done.stderr, done.stderr
    assert done.returncode == status, done.stderr


def test_doctor_says_how_to_install_what_is_missing(home: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, "doctor"], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
