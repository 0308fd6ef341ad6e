"""Checks the documentation against itself and against the code; `make docs` runs it.

Internal links lead somewhere, Python blocks compile, pages can be reached from docs/index.md, `make` targets exist, and
the tables of settings and errors say what the code says. Prints one line a problem and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FENCE = re.compile(r"^(```+)\s*(\w*)\s*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
MAKE = re.compile(r"(?:^|`)make((?: [a-z][a-z0-9]*)+)", re.MULTILINE)
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")


def pages(root: Path) -> list[Path]:
    """Every page: those at the top of the repository and all under docs/."""
    return sorted(root.glob("*.md")) + sorted(root.glob("docs/**/*.md"))


def without_code(text: str) -> str:
    """The text with its code blanked, line numbers kept."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(text: str) -> set[str]:
    """What a link's `#part` may name in a page: its headings in lower case, with hyphens for spaces."""
    found: set[str] = set()
    for match in HEADING.finditer(FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", match[1]).lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def check_links(root: Path) -> Iterator[str]:
    """Links within the repository that lead nowhere, and pages that no other page leads to."""
    reached = {root / "README.md", root / "docs/index.md"}
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        for match in LINK.finditer(prose := without_code(text)):
            if EXTERNAL.match(match[1]):
                continue
            where = f"{page.relative_to(root)}:{prose.count(chr(10), 0, match.start()) + 1}"
            name, _, part = match[1].partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                yield f"{where}: link to {match[1]}, which does not exist"
            elif not target.is_relative_to(root):
                yield f"{where}: link to {match[1]}, which leads out of the repository"
            elif part and target.suffix == ".md" and part not in anchors(target.read_text(encoding="utf-8")):
                yield f"{where}: link to {match[1]}, but that page has no heading '#{part}'"
            elif target != page:
                reached.add(target)
    for page in sorted(set(root.glob("docs/**/*.md")) - reached):
        yield f"{page.relative_to(root)}: no page links to it; add it to docs/index.md"


def check_python(root: Path) -> Iterator[str]:
    """Python blocks that do not compile; `await` may stand at their top level."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[2] not in ("python", "py"):
                continue
            first = text.count("\n", 0, match.start(3)) + 1
            try:
                compile(match[3], str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            except SyntaxError as error:
                yield f"{page.relative_to(root)}:{first + (error.lineno or 1) - 1}: {error.msg}"


def check_make_targets(root: Path) -> Iterator[str]:
    """`make` commands, in code, whose target is not in the Makefile."""
    targets = set(re.findall(r"^([a-z][a-z0-9]*):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        for match in MAKE.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            if match[0].startswith("make") and not _in_fence(text, match.start()):
                continue  # the English word at the start of a line
            for target in match[1].split():
                if target not in targets:
                    yield f"{page.relative_to(root)}:{line}: the Makefile has no target '{target}'"


def _in_fence(text: str, position: int) -> bool:
    return any(match.start() <= position < match.end() for match in FENCE.finditer(text))


def table_rows(text: str, columns: int) -> list[tuple[str, ...]]:
    """The rows of all tables with that many columns whose first cell is one `name`; cells without their backquotes."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == columns and re.fullmatch(r"`\w+`", cells[0]):
            rows.append(tuple(cell.replace("`", "") for cell in cells))
    return rows


def check_settings(root: Path, settings: type) -> Iterator[str]:
    """Differences between the settings page and the dataclass.

    Args:
        settings: the class whose fields are the truth.
    """
    page = root / "docs/reference/settings.md"
    actual = {
        field.name: ("SKYPROXY_" + field.name.upper(), repr(field.default)) for field in dataclasses.fields(settings)
    }
    documented = {row[0]: row[1:] for row in table_rows(page.read_text(encoding="utf-8"), columns=4)}
    name = page.relative_to(root)
    for setting, (variable, default) in actual.items():
        row = documented.get(setting)
        if row is None:
            yield f"{name}: no row for the setting; add: | `{setting}` | `{variable}` | `{default}` | meaning |"
        elif row[:2] != (variable, default):
            yield f"{name}: the row of {setting} says {row[0]} and {row[1]}, the code {variable} and {default}"
        elif not row[2]:
            yield f"{name}: the row of {setting} has no meaning"
    for setting in documented.keys() - actual.keys():
        yield f"{name}: the code has no setting {setting}"


def check_errors(root: Path, errors: ModuleType) -> Iterator[str]:
    """Differences between the errors page and the module.

    Args:
        errors: the module whose exception classes are the truth.
    """
    page = root / "docs/reference/errors.md"
    actual = {
        name: ", ".join(base.__name__ for base in cls.__bases__)
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, BaseException) and cls.__module__ == errors.__name__
    }
    documented = {row[0]: row[1] for row in table_rows(page.read_text(encoding="utf-8"), columns=3)}
    name = page.relative_to(root)
    for error, bases in actual.items():
        if error not in documented:
            yield f"{name}: no row for {error}, which derives from {bases}"
        elif documented[error] != bases:
            yield f"{name}: the row of {error} says that it derives from {documented[error]}, the code {bases}"
    for error in documented.keys() - actual.keys():
        yield f"{name}: the code has no error {error}"


def problems(root: Path) -> list[str]:
    """Everything that is wrong with the documentation under `root`, compared with the code that can be imported."""
    from skyproxy import errors, settings

    return [
        *check_links(root),
        *check_python(root),
        *check_make_targets(root),
        *check_settings(root, settings.Settings),
        *check_errors(root, errors),
    ]


def main() -> int:
    """Prints the problems; returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    found = problems(root)
    for problem in found:
        print(problem)
    print(f"{len(pages(root))} pages, {len(found)} problem{'s' * (len(found) != 1)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
