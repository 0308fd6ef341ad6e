"""The documentation is sound, and its checker finds what it should find."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("check_docs", ROOT / "docs" / "check_docs.py")
assert _spec is not None
assert _spec.loader is not None
check_docs = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = check_docs
_spec.loader.exec_module(check_docs)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A small sound documentation to break."""
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Read\n\n[docs](docs/index.md#two-words)\n\n`make test`\n")
    (tmp_path / "docs/index.md").write_text("# Two words\n\n[s](reference/settings.md) [e](reference/errors.md)\n")
    (tmp_path / "docs/reference/settings.md").write_text("| `depth` | `SKYPROXY_DEPTH` | `3` | how deep |\n")
    (tmp_path / "docs/reference/errors.md").write_text("| `Oops` | `ValueError` | sometimes |\n")
    (tmp_path / "Makefile").write_text("test:\n\ttrue\n")
    return tmp_path


@dataclass
class Settings:
    depth: int = 3


def errors_module(bases: tuple[type, ...] = (ValueError,)) -> types.ModuleType:
    module = types.ModuleType("errors")
    module.Oops = type("Oops", bases, {"__module__": "errors"})  # type: ignore[attr-defined]
    return module


def found(site: Path) -> list[str]:
    return [
        *check_docs.check_links(site),
        *check_docs.check_python(site),
        *check_docs.check_make_targets(site),
        *check_docs.check_settings(site, Settings),
        *check_docs.check_errors(site, errors_module()),
        *check_docs.check_named_errors(site),
    ]


def test_our_documentation_has_no_problems() -> None:
    assert check_docs.problems(ROOT) == []


def test_sound_documentation_has_no_problems(site: Path) -> None:
    assert found(site) == []


@pytest.mark.parametrize(
    ("page", "addition", "message"),
    [
        ("README.md", "[x](docs/nowhere.md)", "README.md:6: link to docs/nowhere.md, which does not exist"),
        ("README.md", "[x](docs/index.md#three)", "no heading '#three'"),
        ("README.md", "[x](../elsewhere)", "does not exist"),
        ("README.md", "[x](..)", "out of the repository"),
        ("README.md", "`make tset`", "README.md:6: the Makefile has no target 'tset'"),
        ("README.md", "```\nmake test tset\n```", "the Makefile has no target 'tset'"),
        ("README.md", "```python\nx = 1\nif:\n```", "README.md:8: invalid syntax"),
        ("docs/lonely.md", "# Lonely", "docs/lonely.md: no page links to it"),
        ("docs/reference/settings.md", "| `width` | `SKYPROXY_WIDTH` | `1` | wide |", "the code has no setting width"),
        ("docs/reference/errors.md", "| `Ouch` | `ValueError` | never |", "the code has no error Ouch"),
        ("docs/index.md", "raises `OuchError`, or `KeyError`", "docs/index.md:4: the code has no OuchError"),
    ],
)
def test_a_mistake_is_found(page: str, addition: str, message: str, site: Path) -> None:
    with (site / page).open("a") as file:
        file.write(addition + "\n")
    (problem,) = found(site)
    assert message in problem


@pytest.mark.parametrize(
    "text",
    [
        "```python\nvalue = await thing()\n```",
        "```\n[x](nowhere.md)\nmake_love = 1\n```",
        "`[x](nowhere.md)`",
        "[x](https://nowhere.invalid/page.md)",
        "Please\nmake sure of it.",
    ],
)
def test_what_is_no_mistake_is_left_alone(text: str, site: Path) -> None:
    with (site / "README.md").open("a") as file:
        file.write(text + "\n")
    assert found(site) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "add: | `depth` | `SKYPROXY_DEPTH` | `3` | meaning |"),
        ("| `depth` | `SKYPROXY_DEPTH` | `4` | how deep |", "says SKYPROXY_DEPTH and 4, the code SKYPROXY_DEPTH and 3"),
        ("| `depth` | `DEPTH` | `3` | how deep |", "says DEPTH and 3"),
        ("| `depth` | `SKYPROXY_DEPTH` | `3` | |", "has no meaning"),
    ],
)
def test_a_settings_row_that_drifted_is_found(row: str, message: str, site: Path) -> None:
    (site / "docs/reference/settings.md").write_text(row + "\n")
    (problem,) = check_docs.check_settings(site, Settings)
    assert message in problem


def test_an_error_row_that_drifted_is_found(site: Path) -> None:
    (problem,) = check_docs.check_errors(site, errors_module((KeyError,)))
    assert "derives from ValueError, the code KeyError" in problem
    (site / "docs/reference/errors.md").write_text("")
    (problem,) = check_docs.check_errors(site, errors_module())
    assert "no row for Oops" in problem


def test_the_check_fails_when_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(check_docs, "problems", lambda root: ["page.md: wrong"])
    assert check_docs.main() == 1
    assert "page.md: wrong" in capsys.readouterr().out


def test_a_file_that_is_named_and_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "docs/topics/architecture.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "skyproxy/session").mkdir(parents=True)
    (tmp_path / "skyproxy/session/recorder.py").touch()
    page.write_text("1. `session/recorder.py`\n2. `skyproxy/session/recorder.py::emit`\n3. `session/recoder.py`\n")
    (problem,) = check_docs.check_named_files(tmp_path)
    assert problem == "docs/topics/architecture.md:3: there is no file session/recoder.py"


def test_a_name_that_no_file_of_its_step_has_is_found(tmp_path: Path) -> None:
    page = tmp_path / "docs/topics/architecture.md"
    page.parent.mkdir(parents=True)
    for name, text in {"recorder.py": "def emit(): ...", "session.py": "class Session: ..."}.items():
        path = tmp_path / "skyproxy/session" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    page.write_text(
        "1. `session/recorder.py`: `emit` writes\n   what `Session(x)` sends, in `session/session.py`.\n"
        "2. `session/recorder.py`: the class `Session`.\n3. Nothing of `session` or of `that`.\n"
    )
    (problem,) = check_docs.check_steps(tmp_path)
    assert problem == "docs/topics/architecture.md:3: no file of this step has Session"


MAKERS = """
import threading
from concurrent.futures import ThreadPoolExecutor

_lock = threading.Lock()


class Pool:
    def __init__(self, number):
        self._work = threading.Condition()
        self._thread = threading.Thread(target=print, name=f"skyproxy-{number}-pool", daemon=True)
        self._timer = threading.Timer(1.0, print)
        self._timer.daemon = True
        self._hashing = ThreadPoolExecutor(2, "skyproxy-hashing")


def wait():
    done: object = threading.Event()
"""
THREAD_ROWS = ["skyproxy-*-pool", "Pool._timer", "skyproxy-hashing"]
LOCK_ROWS = ["_lock", "Pool._work", "wait.done"]


@pytest.fixture
def threads_page(tmp_path: Path) -> Path:
    """A package that makes threads and locks, and the page that lists them."""
    (tmp_path / "skyproxy").mkdir()
    (tmp_path / "skyproxy/pool.py").write_text(MAKERS)
    page = tmp_path / "docs/topics/threads.md"
    page.parent.mkdir(parents=True)
    tables = (
        "\n".join(f"| `skyproxy/pool.py` | `{name}` | x |" for name in names) for names in (THREAD_ROWS, LOCK_ROWS)
    )
    page.write_text("# Threads\n\n## Threads\n\n{}\n\n## Locks\n\n{}\n".format(*tables))
    return page


def test_threads_and_locks_that_have_their_rows_are_no_problem(threads_page: Path) -> None:
    assert list(check_docs.check_threads(threads_page.parents[2])) == []


@pytest.mark.parametrize("name", THREAD_ROWS + LOCK_ROWS)
def test_a_thread_or_lock_without_a_row_is_found(name: str, threads_page: Path) -> None:
    rows = threads_page.read_text().splitlines()
    threads_page.write_text("\n".join(row for row in rows if f"`{name}`" not in row))
    (problem,) = check_docs.check_threads(threads_page.parents[2])
    assert problem.startswith("skyproxy/pool.py:")
    assert f" {name} has no row in docs/topics/threads.md" in problem


@pytest.mark.parametrize(("name", "word"), [("skyproxy-gone", "thread"), ("Pool._gone", "lock")])
def test_a_row_that_nothing_makes_is_found(name: str, word: str, threads_page: Path) -> None:
    text = threads_page.read_text()
    row = f"| `skyproxy/pool.py` | `{name}` | x |\n"
    threads_page.write_text(text + row if word == "lock" else text.replace("## Locks", row + "\n## Locks"))
    (problem,) = check_docs.check_threads(threads_page.parents[2])
    assert problem == f"docs/topics/threads.md: the code makes no {word} {name} in skyproxy/pool.py"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (', name=f"skyproxy-{number}-pool"', "", "a thread without a name"),
        ('pool", daemon=True', 'pool"', "a thread without daemon=True"),
        ("        self._timer.daemon = True\n", "", "a timer without `daemon = True`"),
    ],
)
def test_a_thread_that_nobody_would_find_or_end_is_found(
    before: str, after: str, message: str, threads_page: Path
) -> None:
    code = threads_page.parents[2] / "skyproxy/pool.py"
    assert before in MAKERS
    code.write_text(MAKERS.replace(before, after))
    assert any(message in problem for problem in check_docs.check_threads(threads_page.parents[2]))
