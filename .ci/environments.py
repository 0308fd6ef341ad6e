"""Environments of Python that are made once and kept outside of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder below `$SKYPROXY_CACHE`, by default `~/.cache/skyproxy`."""
    return Path(os.environ.get("SKYPROXY_CACHE") or Path.home() / ".cache" / "skyproxy") / name


def make_environment(folder: Path, torch: str, packages: Sequence[str], apart: Sequence[str] = ()) -> Path:
    """Make a virtual environment, where it is not there whole; install what is wanted by now and is not in it.

    Args:
        folder: where to keep it.
        torch: as pip reads it; installed first, so that nothing else can choose another one.
        packages: what else it needs.
        apart: what goes into its folder `apart` instead, without dependencies: packages that harm others by being
            importable.

    Returns:
        Its interpreter.

    Raises:
        subprocess.CalledProcessError: if pip cannot install it.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    contents = "\n".join([torch, *packages, *(f"apart: {package}" for package in apart)])
    if ready.exists() and ready.read_text(encoding="utf-8") == contents:
        return python
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for wanted in ([torch], [torch, *packages]):
        subprocess.run([*pip, *wanted], check=True)
    if apart:
        shutil.rmtree(folder / "apart", ignore_errors=True)
        subprocess.run([*pip, "--no-deps", "--target", str(folder / "apart"), *apart], check=True)
    ready.write_text(contents, encoding="utf-8")
    return python
