"""Calls at somebody's first import of a module, in processes of their own: there is one import system in each."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from skyproxy.import_watcher import when_imported

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


FIRST = """
import {module}
import sys, torch
print(torch.device("sky:0"), sys.modules["skyproxy.nodes"].open_saved.__module__)
"""


@pytest.mark.parametrize("module", ["skyproxy.torch_codec", "skyproxy.nodes"])
def test_any_module_of_ours_may_be_the_first_that_is_imported(module: str) -> None:
    """Importing torch loads the device, which needs the module that has just begun to import torch."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST.format(module=module)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout == "sky:0 skyproxy\n", done.stderr


HALF = """
from skyproxy.import_watcher import when_imported

told = []
when_imported("half", lambda module: told.append(module.whole))
assert not told
{end}
whole = True
"""


def test_a_module_that_imports_us_while_it_is_imported_is_told_of_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of a name that PyTorch imports, say `nt.py`, runs within `import torch`, and imports us there."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half.py").write_text(HALF.format(end="import no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("half")
    (tmp_path / "half.py").write_text(HALF.format(end=""))
    importlib.invalidate_caches()
    assert importlib.import_module("half").told == [True]
    monkeypatch.delitem(sys.modules, "half")


def test_a_loader_of_many_modules_tells_of_the_one_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("watched_of_archive.py", "import other_of_archive\nvalue = 1\n")
        archive.writestr("other_of_archive.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "archive.zip"))
    told: list[tuple[str, bool]] = []
    when_imported("watched_of_archive", lambda module: told.append((module.__name__, hasattr(module, "value"))))
    __import__("watched_of_archive")
    assert told == [("watched_of_archive", True)]


@pytest.mark.parametrize("package", ["torch", "msgpack"])
def test_a_file_that_was_imported_in_place_of_a_package_is_named(tmp_path: Path, package: str) -> None:
    file = tmp_path / f"{package}.py"
    file.touch()
    (tmp_path / "program.py").write_text("import skyproxy\nimport torch\n")
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60)
    assert f"ImportError: {file} was imported in place of the package {package}." in done.stderr


def test_on_a_worker_no_public_name_registers_the_device_but_torch_sky() -> None:
    program = (
        "from skyproxy import import_watcher; import_watcher.forget_own()\n"
        "import skyproxy, torch\n"
        "for name in set(skyproxy.__all__) - {'sky'}: getattr(skyproxy, name)\n"
        "print(torch._C._get_privateuse1_backend_name())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "privateuseone\n", done.stderr
