"""Which modules are the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import sysconfig
import time
import types
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch

import skyproxy
from skyproxy.payloads.projects import is_project_module, project_by_value, project_folders, reduce_decorated


@pytest.mark.parametrize("module", [json, types, torch, torch.nn, pytest, cloudpickle, skyproxy, skyproxy.errors, sys])
def test_installed_modules_are_none(module: types.ModuleType) -> None:
    assert not is_project_module(module)


def test_this_module_is_one() -> None:
    assert is_project_module(sys.modules[__name__])


def test_what_is_no_module_is_none() -> None:
    assert not is_project_module(torch.ops)
    assert not is_project_module(object())
    assert not is_project_module(types.ModuleType("made_up"))


def test_what_pip_has_put_into_a_folder_is_installed_and_its_neighbours_are_not(folder: Path) -> None:
    write(folder / "sky_apart" / "__init__.py")
    write(folder / "sky_apart" / "part.py")
    write(folder / "sky_apart-1.dist-info" / "RECORD", "sky_apart/__init__.py,,\nsky_apart/part.py,,\n")
    installed = importlib.import_module("sky_apart.part")
    assert not is_project_module(installed)
    assert str(folder) not in dict(project_folders())
    own = folder / "beside"
    write(own / "sky_vendored.py")
    write(own / "sky_vendored-1.dist-info" / "RECORD", "sky_vendored.py,,\n")
    write(own / "sky_main.py")
    assert is_project_module(load_as("sky_main", own / "sky_main.py"))
    assert not is_project_module(load_as("sky_vendored", own / "sky_vendored.py"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that the program can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load_as(name: str, path: Path) -> types.ModuleType:
    """A module of a file that its name does not lead to."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_value() -> set[str]:
    with project_by_value():
        return set(cloudpickle.list_registry_pickle_by_value())


def test_modules_that_their_name_leads_to_travel_by_name(folder: Path) -> None:
    write(folder / "plain_module.py")
    write(folder / "a_namespace" / "inner" / "__init__.py")
    importlib.import_module("plain_module"), importlib.import_module("a_namespace.inner")
    assert not by_value() & {"plain_module", "a_namespace.inner"}
    assert project_folders()[0] == (str(folder), True)


def test_modules_under_another_name_than_their_files_travel_as_code(folder: Path) -> None:
    load_as("another_name", write(folder / "some_file.py"))
    assert "another_name" in by_value()


def test_modules_that_are_called_like_something_installed_travel_as_code(folder: Path) -> None:
    load_as("yaml_like.yaml", write(folder / "yaml_like" / "yaml.py"))
    load_as("colorsys", write(folder / "colorsys.py"))
    names = by_value()
    assert "colorsys" in names
    assert "yaml_like.yaml" not in names
    del sys.modules["colorsys"]


def test_modules_that_another_folder_hides_travel_as_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "hidden" / "twice.py")
    importlib.invalidate_caches()
    monkeypatch.syspath_prepend(str(folder / "hidden"))
    importlib.import_module("twice")
    assert "twice" not in by_value()
    write(folder / "first" / "twice.py")
    monkeypatch.syspath_prepend(str(folder / "first"))
    assert "twice" in by_value()


def test_libraries_and_installed_programs_are_no_project_folders() -> None:
    folders = [path for path, _ in project_folders()]
    assert not any("site-packages" in path or path == sysconfig.get_path("scripts") for path in folders)


def test_editable_installs_with_a_finder_are_project_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "src" / "edited" / "__init__.py")
    finder = types.ModuleType("__editable___edited_1_0_finder")
    finder.MAPPING = {"edited": str(folder / "src" / "edited")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    kind = type("_EditableFinder", (), {"__module__": finder.__name__, "find_spec": lambda *arguments: None})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, kind])
    assert (str(folder / "src"), False) in project_folders()


def test_a_decorated_function_is_found_below_its_decorators(folder: Path) -> None:
    write(folder / "decorated.py", "import skyproxy as sky\n@sky.silent\n@sky.compute\ndef f(): return 7\n")
    function = importlib.import_module("decorated").f
    reduced = reduce_decorated(function.function)
    assert reduced[1] == ("decorated", "f", 1)
    assert reduced[0](*reduced[1]) is function.function
    inner = function.function.__wrapped__
    assert reduce_decorated(inner)[1] == ("decorated", "f", 2)


def test_cloudpickle_is_left_as_it_was(folder: Path) -> None:
    load_as("another_name", write(folder / "some_file.py"))
    before = cloudpickle.list_registry_pickle_by_value()
    with project_by_value():
        assert "another_name" in cloudpickle.list_registry_pickle_by_value()
        with project_by_value():
            assert "another_name" in cloudpickle.list_registry_pickle_by_value()
        assert "another_name" in cloudpickle.list_registry_pickle_by_value()
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_what_is_among_the_modules_and_cannot_be_compared_does_no_harm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("ambiguous")

        __hash__ = object.__hash__

    before = project_folders()
    for odd in (Odd(), Odd()):
        monkeypatch.setitem(sys.modules, "odd", odd)  # type: ignore[arg-type]
        assert project_folders() == before


def test_folders_follow_the_search_path_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "one")
    assert project_folders()[0] == (str(tmp_path / "one"), True)
    monkeypatch.chdir(tmp_path / "two")
    assert project_folders()[0] == (str(tmp_path / "two"), True)
    sys.path.insert(0, str(tmp_path / "one"))
    assert project_folders()[:2] == ((str(tmp_path / "one"), True), (str(tmp_path / "two"), True))


def test_what_is_imported_right_after_a_look_is_found_at_once(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = [tmp_path_factory.mktemp("place") for _ in range(2)]
    for place in places:
        project_folders()
        load_as("sky_sudden", write(place / "sky_sudden.py"))
        assert str(place) in dict(project_folders())
        del sys.modules["sky_sudden"]  # the next one comes in its place: there are as many as before


def test_a_module_that_is_put_in_the_place_of_another_is_found_when_the_moment_is_over(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as("sky_exchanged", write(folder / "sky_exchanged.py"))
    load_as("sky_last", write(folder / "sky_last.py"))
    project_folders()
    place = tmp_path_factory.mktemp("place")
    load_as("sky_exchanged", write(place / "sky_exchanged.py"))  # keeps its place in the order
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
    assert str(place) in dict(project_folders())
