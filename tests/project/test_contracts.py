"""The import contracts in pyproject.toml cover the whole client; `make imports` then holds them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
CONTRACTS = {contract["id"]: contract for contract in CONFIGURATION["contracts"]}
SHARED_WITH_SERVER = {
    "cell_names",
    "errors",
    "extras",
    "fake_guard",
    "collector",
    "import_watcher",
    "context_edges",
    "interrupts",
    "patching",
    "payloads",
    "protocol",
    "relays",
    "runtime",
    "settings",
    "snapshots",
    "torch_codec",
    "torch_modes",
    "torch_versions",
    "transport",
    "units",
    "webpage",
}
FACADES = {"client"}
"""Alias modules that only hand on the public names."""


def parts() -> set[str]:
    """The modules and packages directly in skyproxy/."""
    folder = ROOT / "skyproxy"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return packages | {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}


def test_every_part_of_the_client_has_a_layer() -> None:
    rows = [re.split(r" [:|] ", row) for row in CONTRACTS["layers"]["layers"]]
    layers = {layer.strip("()").removeprefix("skyproxy.") for row in rows for layer in row}
    assert parts() - FACADES - layers == set()


def test_the_server_may_not_import_what_is_not_shared() -> None:
    forbidden = {name.removeprefix("skyproxy.") for name in CONTRACTS["server"]["forbidden_modules"]}
    assert parts() - FACADES - SHARED_WITH_SERVER - forbidden == set()


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("skyproxy/session/intruder.py", "import skyproxy_server", "The client imports no server"),
        ("skyproxy/session/intruder.py", "import kopf", "The client imports no server"),
        ("skyproxy/session/intruder.py", "import skyproxy.tensor", "Imports inside the client"),
        ("skyproxy/protocol/intruder.py", "import skyproxy.transport", "Imports inside the client"),
        ("skyproxy/transport/intruder.py", "import torch", "What moves messages"),
        ("skyproxy_server/intruder.py", "import skyproxy.session", "The server imports only"),
        ("operator/skyproxy_operator/intruder.py", "import torch", "The operator imports"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str, contract: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("skyproxy", "skyproxy_server", "operator/skyproxy_operator"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unwanted)
    (tmp_path / module).write_text(line + "\n", encoding="utf-8")
    search = "import sys; sys.path[:0] = ['.', 'operator']; "
    lint = "from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", search + lint]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(contract in row and "BROKEN" in row for row in done.stdout.splitlines()), done.stdout


def test_the_page_of_the_architecture_has_every_part_in_the_order_of_the_layers() -> None:
    page = (ROOT / "docs" / "topics" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| part | task |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    rows = [re.split(r" [:|] ", row) for row in CONTRACTS["layers"]["layers"]]
    assert listed == [layer.strip("()").removeprefix("skyproxy.") for row in rows for layer in row]


TESTS = ROOT / "tests"
PLACES = tomllib.loads((TESTS / "project/tested_by.toml").read_text(encoding="utf-8"))
TESTED_BY, SUBJECTS = PLACES["modules"], PLACES["subjects"]
PACKAGES = {"": "skyproxy", "server/": "skyproxy_server", "operator/": "operator/skyproxy_operator"}


def modules() -> dict[str, str]:
    """Return where each module's own test lies, by the module's name in the table."""
    found = {}
    for prefix, package in PACKAGES.items():
        for path in (ROOT / package).rglob("*.py"):
            if path.stem != "__init__":
                name = prefix + path.relative_to(ROOT / package).with_suffix("").as_posix()
                folder, _, stem = name.rpartition("/")
                found[name] = f"{folder}/test_{stem}.py".lstrip("/")
    return found


def test_each_module_has_a_test_of_its_name_or_a_row_that_names_one() -> None:
    """Write the test, or name in tests/project/tested_by.toml the one that shows the module."""
    own = {name for name, test in modules().items() if (TESTS / test).is_file()}
    rows = set(TESTED_BY)
    assert modules().keys() - own - rows == set()
    assert rows - modules().keys() == set()  # rows of modules that are no more
    assert rows & own == set()  # the row can go
    assert {test for test in TESTED_BY.values() if not (TESTS / test).is_file()} == set()


def test_each_test_lies_beside_its_module_or_has_a_subject() -> None:
    places = set(modules().values()) | set(TESTED_BY.values())
    tests = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    with_subject = {name for name in tests if SUBJECTS.keys() & {name, name.partition("/")[0]}}
    assert tests - places - with_subject == set()
    assert {name for name in SUBJECTS if name.endswith(".py") and name in set(modules().values())} == set()
    assert {name for name in SUBJECTS if not (TESTS / name).exists()} == set()


def test_files_have_one_subject_each() -> None:
    """A file of more than 500 lines has several."""
    files = [path for folder in (*PACKAGES.values(), "tests") for path in (ROOT / folder).rglob("*.py")]
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8").count("\n") for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > 500} == {}
