"""Docstrings begin with a verb or a noun, as the style of the house has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skyproxy", "skyproxy_server", "operator/skyproxy_operator")
FIRST_WORDS_TO_DECODE = {
    *("Whether", "What", "How", "Which", "Where", "That", "Who", "Whom", "Whose", "When", "Why", "If", "Does", "So")
}
"""They begin a clause that says what comes out, and leave the reader to find out what is done."""
SECTIONS = {"Args:", "Attributes:", "Example:", "Raises:", "Returns:", "Yields:"}
"""They stand below a first sentence, and never in its place."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes and functions, and the strings below attributes; each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for index, statement in enumerate(node.body):
                below = index > 0 and isinstance(node.body[index - 1], ast.Assign | ast.AnnAssign)
                if (index == 0 or below) and isinstance(statement, ast.Expr):
                    value = statement.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield statement.lineno, value.value.strip()


def to_decode(source: str) -> list[tuple[int, str]]:
    """The docstrings that begin otherwise than with a verb or a noun, as far as a word tells."""
    found = []
    for line, text in docstrings(source):
        first = text.split(maxsplit=1)[0] if text else ""
        if not text or first in SECTIONS or first.rstrip(".,:;") in FIRST_WORDS_TO_DECODE:
            found.append((line, text.partition("\n")[0]))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_verb_or_a_noun(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 20
    found = {path.relative_to(ROOT).as_posix(): to_decode(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""What is here."""',
        'class A:\n    """Which one."""',
        'class A:\n    x = 1\n    """How many."""',
        'class A:\n    x: int\n    """Whether it is."""',
        'async def f():\n    """Whether it is: it may be."""',
        'def f():\n    """\n    That of the other.\n    """',
        'def f():\n    """"""',
        'def f(x):\n    """Args:\n    x: a number.\n    """',
    ],
)
def test_other_beginnings_are_found(source: str) -> None:
    assert len(to_decode(source)) == 1


def test_verbs_and_nouns_are_not_found() -> None:
    assert to_decode('"""Whatever."""\nX = 1\n"""Returns what."""\nf("What")\n') == []
