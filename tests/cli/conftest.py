"""The command line in a world of its own: no saved context, no worker and no cluster of whoever runs the tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from skyproxy.cli import main as cli
from skyproxy.providers.detached import list_detached

Run = Callable[..., Result]
_FOREIGN = ("SKYPROXY_", "KUBE")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, whose workers are ended afterwards."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(name)
    for name, folder in (("HOME", "."), ("XDG_CONFIG_HOME", "config"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    yield tmp_path
    for worker in list_detached():
        worker.stop()


@pytest.fixture
def run(home: Path) -> Run:
    """Runs a command line in that home."""

    def run(*arguments: str) -> Result:
        settings = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        return CliRunner().invoke(cli.app, list(arguments), env=settings)

    return run


@pytest.fixture
def read(run: Run) -> Callable[..., Any]:
    """Runs a command line with --json and reads its result."""

    def read(*arguments: str) -> Any:
        return json.loads(run(*arguments, "--json").stdout)

    return read
