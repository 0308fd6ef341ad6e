"""Names of private functions say what they do, or what they return; a class has a name that no other class has."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("skyproxy", "skyproxy_server", "operator/skyproxy_operator")

PUBLIC = frozenset({"up"})
"""The command `skyproxy up`."""
PARTICIPLES = """begun born bound broken brought built caught chosen done drawn fallen felt forgotten found frozen given
gone grown held hidden kept known learnt left lent lost made meant met misspelt paid rebuilt said seen sent shown spent
spoken stolen struck taken taught thought told torn understood undone unmet withdrawn won worn written"""
"""Those that do not end in -ed, and are no other word that a name may begin with (set, put, read, cut, run)."""
LITTLE_WORDS = """about ahead alike all alone along although another any apart at away be because before behind below
beside besides between both by during each either else elsewhere enough even ever every everybody everything few how if
inside instead into it its late later least less many maybe mine more most much neither never no nobody none nor not
nothing now nowhere of off often once other others otherwise our ours out outside perhaps rather same several since so
some somebody something sometimes somewhere soon still such than that the their them then there these they this those
though through thus together too under unless until up upon what whatever when whenever where whether which while who
whoever whole whose why within yet"""
"""Words that are neither verb nor noun, nor what one begins with."""
MAY_BEGIN = frozenset({"all", "another", "any", "no", "not", "other", "same", "several", "some", "still", "whole"})
"""Little words before a noun or a verb: `_all_rows`, `_no_log`, `_still_runs`."""
PARTICLES = frozenset({"ahead", "alike", "apart", "at", "away", "by", "for", "from", "in", "into", "of", "off", "on"})
PARTICLES |= {"once", "out", "to", "up", "with"}

OPEN_A_PHRASE = frozenset({"at", "between", "of", "when", "while"})
"""Little words before what they belong to: `of_options`, `between_batches`, `when_imported`."""

ALLOWED = {
    "_where": "PyTorch's name of the op",
    "_nothing": "a function that travels by its name",
    "_nobody": "a function that travels by its name",
}


def is_participle(word: str) -> bool:
    return word in PARTICIPLES.split() or (
        word.endswith("ed") and not word.endswith("eed") and word not in ("embed", "shed")
    )


def must_be_decoded(name: str) -> bool:
    """Return whether a name's first word is a participle without its noun, or none that a name begins with."""
    first, *others = name.strip("_").split("_")
    if not others:
        return is_participle(first) or first in LITTLE_WORDS.split()
    if is_participle(first):
        return others[-1] in PARTICLES
    return first in LITTLE_WORDS.split() and first not in MAY_BEGIN


def is_little(name: str) -> bool:
    """Return whether a name without an underscore in front begins, or consists of, a word that says nothing."""
    first, *others = name.split("_")
    if first in OPEN_A_PHRASE or first not in LITTLE_WORDS.split():
        return False
    return not (others and first in MAY_BEGIN)


@functools.cache
def nodes(package: str) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Return the functions and classes of a package, each with the file and the line where it is."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]


def functions(package: str) -> Iterator[tuple[str, str]]:
    return ((place, node.name) for place, node in nodes(package) if not isinstance(node, ast.ClassDef))


def private_functions(package: str) -> Iterator[tuple[str, str]]:
    return ((place, name) for place, name in functions(package) if name.startswith("_") and not name.startswith("__"))


@pytest.mark.parametrize("package", PACKAGES)
def test_private_functions_are_verbs_or_nouns(package: str) -> None:
    found = [row for row in private_functions(package) if must_be_decoded(row[1]) and row[1] not in ALLOWED]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_other_functions_do_not_begin_with_little_words(package: str) -> None:
    """What returns something made of its argument may be a participle (`packed`, as `sorted`), or an attribute."""
    assert [row for row in functions(package) if is_little(row[1]) and row[1] not in PUBLIC] == []


def test_each_exception_is_needed() -> None:
    names = {name for package in PACKAGES for _, name in private_functions(package) if must_be_decoded(name)}
    assert ALLOWED.keys() - names == set()


@pytest.mark.parametrize(
    "name", ["_taken", "_wanted", "_asked_for", "_turned_away", "_how", "_while_it_runs", "_of_one"]
)
def test_names_to_decode_are_found(name: str) -> None:
    assert must_be_decoded(name)


@pytest.mark.parametrize("name", ["during", "whoever_calls", "until_it_listens", "some", "out", "inside"])
def test_little_words_are_found(name: str) -> None:
    assert is_little(name)


@pytest.mark.parametrize("name", ["of_options", "all_rows", "on_all", "packed", "between_batches", "take", "_some"])
def test_phrases_and_participles_are_not_found(name: str) -> None:
    assert not is_little(name)


@pytest.mark.parametrize(
    "name", ["_take", "_failed_processes", "_on_end", "_as_lists", "_next_frame", "_all_rows", "_feed"]
)
def test_verbs_and_nouns_are_not_found(name: str) -> None:
    assert not must_be_decoded(name)


def shared_names(classes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the places of the names that several classes have; `_Name` is its file's own, and not looked at.

    Args:
        classes: places and names.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for place, name in classes:
        if not name.startswith("_"):
            places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    """Whoever reads or searches for `Job` finds one thing."""
    rows = [row for package in PACKAGES for row in nodes(package)]
    assert shared_names((place, node.name) for place, node in rows if isinstance(node, ast.ClassDef)) == {}


def test_names_that_classes_share_are_found() -> None:
    classes = [("a:1", "Job"), ("a:2", "_Row"), ("b:1", "Job"), ("b:2", "_Row"), ("b:3", "WorkerJob")]
    assert shared_names(classes) == {"Job": ["a:1", "b:1"]}
