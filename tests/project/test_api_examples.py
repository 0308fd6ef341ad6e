"""Every public name of skyproxy shows in its docstring how it is used, and what is shown runs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import skyproxy

NAMES = [name for name in skyproxy.__all__ if not inspect.ismodule(getattr(skyproxy, name)) and name != "__version__"]
ELSEWHERE = {"AWS", "Container", "Kubernetes", "Remote", "connect", "connect_async"}
"""What these show needs another machine, or an engine."""
PARTS = {"PendingCompute", "Profile", "RemoteStateDict", "gather", "load_ipython_extension", "unload_ipython_extension"}
"""What these show needs a model, a pool or a notebook that the reader has."""


def example(name: str) -> str:
    """The code of a name's example, or of the block after `::`; empty where there is none."""
    text = inspect.getdoc(getattr(skyproxy, name)) or ""
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL) or re.search(r"::\n\n((?: {4}.*\n?)+)", text)
    return textwrap.dedent(found[1]) if found else ""


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_shows_how_it_is_used(name: str) -> None:
    assert example(name).strip()
    compile(example(name), name, "exec")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_examples_run(tmp_path: Path) -> None:
    program = ["import asyncio, os, sys, torch, skyproxy", "train_one_epoch = lambda: None"]
    for name in NAMES:
        if name not in ELSEWHERE | PARTS:
            # Functions of a pool travel as code, so each example is a file of its own, as a reader's would be.
            path = tmp_path / f"example_{name}.py"
            path.write_text("\n".join([*program, example(name)]), encoding="utf-8")
    # Some close the node that has sky:0, after which a program has to say what it wants next.
    runner = (
        "import pathlib, runpy, sys, skyproxy\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.py')):\n"
        "    runpy.run_path(str(path), run_name='__main__')\n"
        "    skyproxy.reset()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", runner, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
