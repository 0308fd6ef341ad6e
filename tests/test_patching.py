"""One registry for what is replaced in other libraries: set, listed, and undone."""

from __future__ import annotations

import types
from typing import Any

import pytest

from skyproxy import patching
from skyproxy.errors import ConfigurationError

REASON: dict[str, Any] = {"why": "a reason", "test": "tests/test_patching.py::a_test"}


@pytest.fixture(autouse=True)
def _own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "PATCHES", [])


@pytest.fixture
def library() -> types.ModuleType:
    module = types.ModuleType("library")
    module.__version__ = "1.2"  # type: ignore[attr-defined]
    module.names = ["a"]  # type: ignore[attr-defined]
    module.answer = lambda: 1  # type: ignore[attr-defined]
    return module


class Base:
    def inherited(self) -> str:
        return "base"


class Derived(Base):
    @staticmethod
    def fixed() -> str:
        return "plain"


def test_the_given_object_itself_is_set(library: Any) -> None:
    def new() -> int:
        return 2

    patching.replace(library, "answer", new, **REASON)
    assert library.answer is new


def test_a_replacement_is_listed_with_its_place_its_file_and_its_reason(library: Any) -> None:
    patch = patching.replace(library, "answer", len, when=patching.When.DYNAMO, **REASON)
    assert [patch] == patching.PATCHES
    assert (patch.place, patch.file, patch.why) == ("library.answer", "tests/test_patching.py", "a reason")
    assert (patch.when, patch.test) == (patching.When.DYNAMO, "tests/test_patching.py::a_test")


def test_what_is_not_there_is_refused_with_the_version_and_a_way_out(library: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "library", library)
    with pytest.raises(ConfigurationError, match=r"library 1\.2 has no library\.gone, which .* Install a version"):
        patching.replace(library, "gone", 1, **REASON)
    assert patching.PATCHES == []


def test_wrapping_gives_the_original(library: Any) -> None:
    plain = library.answer
    assert patching.wrap(library, "answer", lambda f: lambda: f() + 1, **REASON) is plain
    assert library.answer() == 2


@pytest.mark.parametrize(
    ("owner", "name"), [(Derived, "fixed"), (Derived, "inherited"), (Derived, "unheard_of"), (Derived(), "fixed")]
)
def test_undoing_leaves_the_owner_as_it_was(owner: Any, name: str) -> None:
    before = dict(vars(owner))
    patching.add(owner, name, staticmethod(lambda: "ours"), **REASON)
    assert dict(vars(owner)) != before
    assert patching.undo_all() == []
    assert dict(vars(owner)) == before
    assert patching.PATCHES == []


def test_replacements_of_one_attribute_are_undone_in_turn(library: Any) -> None:
    plain = library.answer
    for _ in range(3):
        patching.wrap(library, "answer", lambda f: lambda: f() + 1, **REASON)
    assert library.answer() == 4
    assert patching.undo_all() == []
    assert library.answer is plain


def test_a_replacement_by_somebody_else_since_then_is_left_alone(library: Any) -> None:
    ours = patching.replace(library, "answer", lambda: 2, **REASON)
    theirs = library.answer = lambda: 3
    assert patching.undo_all() == [ours]
    assert library.answer is theirs


def test_one_replacement_can_be_undone_alone(library: Any) -> None:
    plain = library.answer
    patch = patching.replace(library, "answer", len, **REASON)
    other = patching.add(library, "more", len, **REASON)
    assert patching.undo(patch)
    assert library.answer is plain
    assert [other] == patching.PATCHES
    assert not patching.undo(patch)


def test_an_item_is_appended_once_and_taken_out(library: Any) -> None:
    for _ in range(2):
        patching.append(library, "names", "b", **REASON)
    assert library.names == ["a", "b"]
    assert [patch.place for patch in patching.PATCHES] == ["library.names"]
    patching.undo_all()
    assert library.names == ["a"]


def test_a_function_is_replaced_wherever_it_was_imported(library: Any, monkeypatch: Any) -> None:
    user = types.ModuleType("user")
    user.answer = plain = library.answer  # type: ignore[attr-defined]
    other = types.ModuleType("other")
    other.answer = len  # type: ignore[attr-defined]
    for module in (library, user, other):
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    patching.replace_everywhere("answer", plain, max, **REASON)
    assert (library.answer, user.answer, other.answer) == (max, max, len)
    patching.undo_all()
    assert (library.answer, user.answer, other.answer) == (plain, plain, len)


def test_what_a_function_of_the_library_sets_is_listed_and_undone(library: Any) -> None:
    plain = library.answer
    with patching.noting([library, Derived], **REASON):
        library.answer, library.more = max, 1
        Derived.more = 2  # type: ignore[attr-defined]
    assert {patch.place for patch in patching.PATCHES} == {
        "library.answer",
        "library.more",
        f"{__name__}.Derived.more",
    }
    assert patching.PATCHES[0].file == "tests/test_patching.py"
    patching.undo_all()
    assert library.answer is plain
    assert not hasattr(library, "more")
    assert not hasattr(Derived, "more")


def test_what_stays_is_told_and_stays_on_the_list(library: Any) -> None:
    patch = patching.replace(library, "answer", len, stays="for ever", **REASON)
    other = patching.add(library, "more", len, when=patching.When.WORKER, **REASON)
    assert patching.undo_all(but=[patching.When.WORKER]) == [patch]
    assert [patch, other] == patching.PATCHES
    assert (library.answer, library.more) == (len, len)


def test_an_entry_of_a_table_is_taken_out(library: Any) -> None:
    library.table = {"a": 1}
    patching.enter(library, "table", "b", 2, **REASON)
    assert library.table == {"a": 1, "b": 2}
    assert [patch.place for patch in patching.PATCHES] == ["library.table['b']"]
    patching.undo_all()
    assert library.table == {"a": 1}


def test_an_undoing_of_its_own_takes_the_place_of_setting_the_attribute(library: Any) -> None:
    undone: list[str] = []
    patching.registered("library.table", lambda: undone.append("table"), **REASON)
    patching.replace(library, "answer", len, undo=lambda: undone.append("answer"), **REASON)
    assert patching.undo_all() == []
    assert undone == ["answer", "table"]
