"""An interpreter that every user of this machine may run, with the packages of this one."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.programs import ROOT

_LEFT_OUT = ("site-packages", "test", "idlelib", "turtledemo", "ensurepip")


def public_interpreter(folder: Path) -> tuple[str, dict[str, str]]:
    """Return an interpreter that everybody may run, and the environment in which it finds the packages.

    Args:
        folder: where a copy is made if ours lies where only we may enter; everybody must be able to enter it.
    """
    packages = sysconfig.get_path("purelib")
    for needed in (ROOT, Path(packages), folder):
        if not _is_open(needed):
            pytest.skip(f"other users cannot enter {needed}, so no session can have a user of its own here")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), packages])}
    binary = Path(sys.executable).resolve()
    if not _is_open(binary):
        prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
        library, copy = Path("lib") / version, folder / "interpreter"
        shutil.copytree(
            prefix / library, copy / library, ignore=shutil.ignore_patterns(*_LEFT_OUT), copy_function=_copied
        )
        (copy / "bin").mkdir()
        for shared in prefix.glob("lib/libpython*.so*"):
            _copied(shared, copy / "lib" / shared.name)
        binary = Path(_copied(binary, copy / "bin" / version))
        environment["LD_LIBRARY_PATH"] = str(copy / "lib")
        for path, _, _ in os.walk(copy):
            os.chmod(path, 0o755)
    return str(binary), environment


def _copied(source: str | Path, target: str | Path) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return str(target)


def _is_open(path: Path) -> bool:
    """Return whether every user may enter this folder, or read this file, and all folders above."""
    return all(place.stat().st_mode & 0o005 == 0o005 for place in (path, *path.parents) if place.exists())
