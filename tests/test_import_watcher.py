"""Calls at somebody's first import of a module, in processes of their own: there is one import system in each."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import skyproxy
from skyproxy import import_watcher

told = []
for name in ("colorsys", "sys", "nowhere_at_all"):
    import_watcher.when_imported(name, lambda module: told.append(module.__name__))
if {forgets}:
    import_watcher.forget_own()
import colorsys, torch
print(*told, "skyproxy.nodes" in sys.modules)
"""


@pytest.mark.parametrize(("forgets", "printed"), [(False, "sys colorsys True\n"), (True, "sys colorsys False\n")])
def test_a_worker_forgets_what_the_client_watches_and_nothing_else(forgets: bool, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(forgets=forgets)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == printed, done.stderr
