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
        (("jobs",), 2),
        (("attach", "nothing"), 2),
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


_LISTING_PROGRAM = """
import sys
from skyproxy.cli.main import main
try:
    main()
finally:
    print("|".join(sys.modules), file=sys.stderr)
"""
_SLOW_TO_IMPORT = {
    "torch",
    "numpy",
    "kubernetes_asyncio",
    "aiohttp",
    "websockets",
    "msgspec",
    "yaml",
    "skyproxy_server",
}


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("down", "nobody"),
        ("logs", "nobody"),
        ("status", "nobody"),
        ("context", "list"),
    ],
    ids=" ".join,
)
def test_a_command_without_a_cluster_imports_nothing_that_takes_long(home: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LISTING_PROGRAM, *arguments], capture_output=True, text=True, timeout=60
    )
    imported = set(done.stderr.rstrip().rpartition("\n")[2].split("|"))
    assert "skyproxy.cli.main" in imported, done.stderr
    assert not imported & _SLOW_TO_IMPORT


def test_a_cluster_that_is_configured_is_still_asked(home: Path) -> None:
    config = home / ".kube" / "config"
    config.parent.mkdir()
    config.write_text("current-context: nowhere\ncontexts: []\n", encoding="ascii")
    done = subprocess.run([sys.executable, "-c", _LISTING_PROGRAM, "list"], capture_output=True, text=True, timeout=120)
    assert "has no context 'nowhere'" in done.stderr or "cannot be used" in done.stderr, done.stderr


def test_no_worker_is_started_here_without_torch(home: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, "up", "dev", "--provider", "local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert "needs torch, which is not installed" in done.stderr
    assert "pip install" in done.stderr
    assert list(home.rglob("worker.json")) == []
