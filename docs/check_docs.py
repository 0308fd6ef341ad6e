"""Checks the documentation against itself and against the code; `make docs` runs it.

Internal links lead somewhere, Python blocks compile, pages can be reached from docs/index.md, `make` targets exist,
files that pages for readers of the code name exist, and so do errors that any page names, what a step of the
architecture's ways names is in a file of that step, and the tables of settings, errors, threads and locks say what the
code says. Prints one line a problem and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import builtins
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
MAKE = re.compile(r"(?:^|`)make((?: [a-z][a-z0-9-]*)+)", re.MULTILINE)
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")
STEP = re.compile(r"^\d+\. .*(?:\n[ \t]+\S.*)*", re.MULTILINE)
IDENTIFIER = re.compile(r"`@?([A-Za-z_]\w+)(?:\([^`]*\))?`")
ERROR = re.compile(r"\b\w+Error\b")
NAMED_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|md|toml|yaml|yml))(?:::\w+)?`")

CODE = ("skyproxy", "skyproxy_server", "operator/skyproxy_operator")
PAGES_ABOUT_FILES = (
    "architecture.md",
    "add-a-message.md",
    "add-a-plugin.md",
    "add-a-provider.md",
    "add-an-operator.md",
)
FOLDERS_LEFT_OUT = (
    "",
    "skyproxy",
    "skyproxy/tensor",
    "skyproxy/tensor/dispatch",
    "skyproxy/tensor/shapes",
    "skyproxy_server",
    "docs",
)
"""Where a page may leave out the folder of a file that it names."""
THREADS = frozenset({"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"})
LOCKS = frozenset({"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"})


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
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
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


def check_variables(root: Path, variables: ModuleType) -> Iterator[str]:
    """Differences between the settings page's table of other variables and the module that knows them.

    Args:
        variables: the module whose `OTHER_VARIABLES` are the truth.
    """
    page = root / "docs/reference/settings.md"
    documented = [row[0] for row in table_rows(page.read_text(encoding="utf-8"), columns=2)]
    name = page.relative_to(root)
    for variable in variables.OTHER_VARIABLES.keys() - set(documented):
        yield f"{name}: no row for the variable {variable}"
    for variable in set(documented) - variables.OTHER_VARIABLES.keys():
        yield f"{name}: the code has no variable {variable}"


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


def check_named_errors(root: Path) -> Iterator[str]:
    """Errors that pages name, and that neither Python nor any of the packages knows: they were renamed."""
    words = set(dir(builtins))
    for folder in CODE:
        for path in (root / folder).rglob("*.py"):
            words.update(ERROR.findall(path.read_text(encoding="utf-8")))
    for page in root.glob("docs/**/*.md"):
        text = page.read_text(encoding="utf-8")
        for match in IDENTIFIER.finditer(text):
            if ERROR.fullmatch(match[1]) and match[1] not in words:
                line = text.count("\n", 0, match.start()) + 1
                yield f"{page.relative_to(root)}:{line}: the code has no {match[1]}"


def check_named_files(root: Path) -> Iterator[str]:
    """Files that the pages for readers of the code name, and that do not exist."""
    for name in PAGES_ABOUT_FILES:
        page = root / "docs/topics" / name
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        for match in NAMED_FILE.finditer(FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)):
            if find_named_file(root, match[1]) is None:
                line = text.count("\n", 0, match.start()) + 1
                yield f"{page.relative_to(root)}:{line}: there is no file {match[1]}"


def find_named_file(root: Path, name: str) -> Path | None:
    """Return the file that a page names, perhaps without its folder."""
    found = (root / folder / name for folder in FOLDERS_LEFT_OUT)
    return next((path for path in found if path.is_file()), None)


def check_steps(root: Path) -> Iterator[str]:
    """Names in steps of the architecture's ways that no file of the step has: they were moved, or renamed."""
    page = root / "docs/topics/architecture.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    for step in STEP.finditer(text):
        files = [find_named_file(root, match[1]) for match in NAMED_FILE.finditer(step[0])]
        code = "\n".join(path.read_text(encoding="utf-8") for path in files if path is not None)
        for match in IDENTIFIER.finditer(step[0]):
            if code and not re.search(rf"\b{match[1]}\b", code):
                line = text.count("\n", 0, step.start() + match.start()) + 1
                yield f"{page.relative_to(root)}:{line}: no file of this step has {match[1]}"


@dataclasses.dataclass(frozen=True, order=True)
class Made:
    """A thread or a lock that some code makes.

    Attributes:
        file: from the repository's root.
        name: a thread's, with * for what differs; a timer's variable; a lock's class and attribute, or its variable.
        line: where it is made.
        problem: what is wrong with it; an empty text for most.
    """

    file: str
    name: str
    line: int
    problem: str = ""


class _Makers(ast.NodeVisitor):
    """Finds what one file makes."""

    def __init__(self, file: str) -> None:
        self.threads: list[Made] = []
        self.locks: list[Made] = []
        self._file = file
        self._within: list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = []
        self._target: ast.expr | None = None

    def _visit_within(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._within.append(node)
        self.generic_visit(node)
        self._within.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit_within

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets[-1], node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assigned(node.target, node)

    def _assigned(self, target: ast.expr, node: ast.AST) -> None:
        self._target = target
        self.generic_visit(node)
        self._target = None

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        kind = name.rpartition(".")[2]
        if kind in THREADS:
            self.threads.append(self._thread(kind, node))
        elif kind in LOCKS and name in (f"threading.{kind}", f"asyncio.{kind}", f"multiprocessing.{kind}"):
            self.locks.append(Made(self._file, self._variable(), node.lineno))
        self.generic_visit(node)

    def _thread(self, kind: str, node: ast.Call) -> Made:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        problem = ""
        if kind == "Thread":
            name = _text(given.get("name"))
            if ast.unparse(given.get("daemon", ast.Constant(None))) != "True":
                problem = "a thread without daemon=True keeps the process from ending"
        elif kind == "ThreadPoolExecutor":
            name = _text(given.get("thread_name_prefix", node.args[1] if len(node.args) > 1 else None))
        elif kind == "Timer":
            name = self._variable()
            variable = "" if self._target is None else ast.unparse(self._target)
            if f"{variable}.daemon = True" not in ast.unparse(self._within[-1]):
                problem = "a timer without `daemon = True` keeps the process from ending"
        else:
            name = ast.unparse(node.args[0])
        return Made(self._file, name, node.lineno, problem if name else "a thread without a name")

    def _variable(self) -> str:
        """The class and attribute that is assigned to, or the function and variable."""
        target = "" if self._target is None else ast.unparse(self._target)
        if target.startswith("self."):
            owner = next((node.name for node in reversed(self._within) if isinstance(node, ast.ClassDef)), "")
            return f"{owner}.{target.removeprefix('self.')}"
        owner = self._within[-1].name + "." if self._within else ""
        return owner + target.rpartition(".")[2]


def _text(node: ast.expr | None) -> str:
    """A text constant, with * for what an f-string inserts; for other expressions, these."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "" if node is None else ast.unparse(node)


def makers(root: Path) -> tuple[list[Made], list[Made]]:
    """Every thread and every lock that the packages make."""
    threads: list[Made] = []
    locks: list[Made] = []
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            found = _Makers(path.relative_to(root).as_posix())
            found.visit(ast.parse(path.read_text(encoding="utf-8")))
            threads += found.threads
            locks += found.locks
    return threads, locks


def check_threads(root: Path) -> Iterator[str]:
    """Differences between the tables of threads and locks and the code."""
    page = root / "docs/topics/threads.md"
    if not page.exists():
        return
    _, _, text = page.read_text(encoding="utf-8").partition("\n## Threads\n")
    first, _, second = text.partition("\n## Locks\n")
    for word, part, made in zip(("thread", "lock"), (first, second), makers(root), strict=True):
        yield from (f"{item.file}:{item.line}: {item.problem}" for item in made if item.problem)
        documented: set[tuple[str, str]] = set()
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if re.fullmatch(r"`[\w/.-]+\.py`", cells[0]):
                documented.update((cells[0].strip("`"), name) for name in re.findall(r"`([^`]+)`", cells[1]))
        actual = {(item.file, item.name): item.line for item in made}
        for (file, name), number in sorted(actual.items()):
            if name and (file, name) not in documented:
                yield f"{file}:{number}: the {word} {name} has no row in {page.relative_to(root)}"
        for file, name in sorted(documented - actual.keys()):
            yield f"{page.relative_to(root)}: the code makes no {word} {name} in {file}"


def problems(root: Path) -> list[str]:
    """Everything that is wrong with the documentation under `root`, compared with the code that can be imported."""
    from skyproxy import errors, settings, variables

    return [
        *check_links(root),
        *check_python(root),
        *check_make_targets(root),
        *check_settings(root, settings.Settings),
        *check_variables(root, variables),
        *check_errors(root, errors),
        *check_named_errors(root),
        *check_named_files(root),
        *check_steps(root),
        *check_threads(root),
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
