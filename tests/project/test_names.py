"""Names of private functions say what they do, or what they return: a verb, or a noun."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("skyproxy", "skyproxy_server", "operator/skyproxy_operator")

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


def private_functions(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and not node.name.startswith("__"):
                yield node.lineno, node.name


@pytest.mark.parametrize("package", PACKAGES)
def test_private_functions_are_verbs_or_nouns(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in private_functions(path.read_text(encoding="utf-8"))
        if must_be_decoded(name) and name not in ALLOWED
    ]
    assert found == []


def test_each_exception_is_needed() -> None:
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {name for source in sources for _, name in private_functions(source) if must_be_decoded(name)}
    assert ALLOWED.keys() - names == set()


@pytest.mark.parametrize(
    "name", ["_taken", "_wanted", "_asked_for", "_turned_away", "_how", "_while_it_runs", "_of_one"]
)
def test_names_to_decode_are_found(name: str) -> None:
    assert must_be_decoded(name)


@pytest.mark.parametrize(
    "name", ["_take", "_failed_processes", "_on_end", "_as_lists", "_next_frame", "_all_rows", "_feed"]
)
def test_verbs_and_nouns_are_not_found(name: str) -> None:
    assert not must_be_decoded(name)
