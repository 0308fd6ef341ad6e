"""The user's modules in a worker process."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.runtime import project_code
from skyproxy.runtime.project_code import ProjectCode


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProjectCode]:
    """One that leaves this process as it was."""
    own = ProjectCode()
    path, hooks, modules = list(sys.path), list(sys.path_hooks), set(sys.modules)
    monkeypatch.setattr(project_code, "PROJECT_CODE", own)
    yield own
    own.close()
    sys.path[:], sys.path_hooks[:] = path, hooks
    sys.path_importer_cache.clear()
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_folders_come_where_the_program_has_them(code: ProjectCode, tmp_path: Path) -> None:
    before = list(sys.path)
    code.use("one", [(str(tmp_path / "a"), True), (str(tmp_path / "b"), False)])
    code.enter("one")
    assert sys.path == [str(tmp_path / "a"), *before, str(tmp_path / "b")]


class Watched(types.ModuleType):
    """A module that notes when it is looked at."""

    looked_at = 0

    def __getattribute__(self, name: str) -> object:
        Watched.looked_at += name == "__path__"
        return super().__getattribute__(name)


def test_the_first_program_of_a_process_looks_at_no_module(
    code: ProjectCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of an isolated function would copy the page of each: thousands, for every call."""
    monkeypatch.setitem(sys.modules, "watched_module", Watched("watched_module"))
    code.use("one", [(str(tmp_path / "a"), True)])
    code.enter("one")
    assert Watched.looked_at == 0
    code.use("two", [(str(tmp_path / "b"), True)])
    code.enter("two")
    assert Watched.looked_at > 0


def test_a_change_of_one_module_loads_all_of_the_program_anew(code: ProjectCode, tmp_path: Path) -> None:
    write(tmp_path / "made_of" / "parts.py", "value = 1\n")
    write(tmp_path / "whole_one.py", "from made_of.parts import value\n")
    code.use("one", [(str(tmp_path), True)])
    code.enter("one")
    whole = importlib.import_module("whole_one")
    code.enter("one")
    assert importlib.import_module("whole_one") is whole, "nothing has changed, so its state stays"
    # Of the same size, within the same second: Python's own cache would not see it.
    write(tmp_path / "made_of" / "parts.py.new", "value = 2\n")
    (tmp_path / "made_of" / "parts.py.new").replace(tmp_path / "made_of" / "parts.py")
    code.enter("one")
    assert importlib.import_module("whole_one").value == 2


def test_programs_with_modules_of_one_name_get_their_own(code: ProjectCode, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "shared_name" / "inner.py", f"value = {name!r}\n")
        code.use(name, [(str(tmp_path / name), True)])
    for name in ("one", "two", "one"):
        code.enter(name)
        assert importlib.import_module("shared_name.inner").value == name


def test_received_files_are_written_changed_and_removed(code: ProjectCode) -> None:
    code.receive("one", [True], {(0, "sent/a.py"): b"value = 1\n", (0, "sent/b.py"): b""})
    code.enter("one")
    assert importlib.import_module("sent.a").value == 1
    code.receive("one", [True], {(0, "sent/a.py"): b"value = 2\n", (0, "sent/b.py"): None})
    code.enter("one")
    assert importlib.import_module("sent.a").value == 2
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sent.b")
    folder = Path(code.folders("one")[0])
    code.forget("one")
    assert not folder.exists()
    assert str(folder) not in sys.path


@pytest.mark.parametrize("name", ["../a.py", "/tmp/a.py", "a/../../b.py", ""])
def test_received_files_stay_in_their_folder(code: ProjectCode, name: str) -> None:
    with pytest.raises(ProtocolError):
        code.receive("one", [True], {(0, name): b""})
    with pytest.raises(ProtocolError):
        code.receive("one", [True], {(1, "a.py"): b""})
