"""Functions import the program's own modules, on workers that see its folders and on those that do not."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyproxy
from skyproxy.session.local_worker import LocalWorker, worker_environment
from skyproxy.settings import SETTINGS


@pytest.fixture(scope="module", params=["sees the folders", "gets copies"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[skyproxy.Node]:
    environment = worker_environment() | {"TMPDIR": str(tmp_path_factory.mktemp("worker"))}
    own = LocalWorker("cpu", SETTINGS, environment=environment)
    shares_files = request.param == "sees the folders"
    node = skyproxy.connect(own.url, token=own.token, shares_files=shares_files, trust_worker=True)
    yield node
    node.close()
    own.stop()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_function_imports_what_the_program_never_loaded(worker: skyproxy.Node, folder: Path) -> None:
    write(folder / "inner_pkg" / "__init__.py", "")
    write(folder / "inner_pkg" / "a.py", "from . import b\nvalue = b.value + 1\n")
    write(folder / "inner_pkg" / "b.py", "value = 1\n")

    def use() -> int:
        import inner_pkg.a

        return int(inner_pkg.a.value)

    assert worker.run(use) == 2


def test_what_was_pickled_and_what_is_imported_are_one_class(worker: skyproxy.Node, folder: Path) -> None:
    write(folder / "one_class.py", "class Thing:\n    pass\n\ndef is_one(x):\n    return isinstance(x, Thing)\n")
    module = importlib.import_module("one_class")
    kind = module.Thing

    def check(thing: Any) -> tuple[bool, bool, Any]:
        import one_class

        return one_class.is_one(thing), kind is one_class.Thing, kind()

    inside, same, back = worker.run(check, kind())
    assert inside
    assert same
    assert type(back) is kind


def test_an_edit_between_two_calls_is_seen(worker: skyproxy.Node, folder: Path) -> None:
    path = write(folder / "edited_one.py", "import skyproxy as sky\n\n@sky.compute\ndef f():\n    return 1\n")
    function = importlib.import_module("edited_one").f
    assert function() >> worker == 1
    assert function() >> worker == 1
    path.write_text(path.read_text(encoding="utf-8").replace("return 1", "return 2"), encoding="utf-8")
    assert function() >> worker == 2, "of the same length, within the same second"
    write(folder / "new_one.py", "value = 3\n")
    assert worker.run(lambda: __import__("new_one").value) == 3


def test_globals_of_a_module_live_on(worker: skyproxy.Node, folder: Path) -> None:
    write(folder / "counting.py", "count = 0\n\ndef up():\n    global count\n    count += 1\n    return count\n")
    module = importlib.import_module("counting")
    assert [worker.run(module.up) for _ in range(3)] == [1, 2, 3]
    assert module.count == 0


def test_a_module_that_is_nowhere_names_what_to_do(worker: skyproxy.Node, folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        worker.run(lambda: importlib.import_module("not_anywhere"))
    text = "\n".join(caught.value.__notes__)
    assert "includes" in text
    assert "pip" in text
    assert "sys.path" in text


def test_a_module_that_names_do_not_lead_to_travels_as_code(worker: skyproxy.Node, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("other_name", write(folder / "file_name.py", "def f(): return 5\n"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["other_name"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert worker.run(module.f) == 5


_PROGRAM = """
import skyproxy as sky

@sky.compute
def f():
    from parts import made
    return sky.instance_info().rank, made.value

if __name__ == "__main__":
    with sky.Compute(provider=sky.Local(device="cpu"), procs_per_node=2) as pool:
        print(f() @ pool)
"""


@pytest.mark.parametrize("arguments", [["app/main.py"], ["-m", "app.main"]])
def test_ranks_of_a_program_import_from_where_it_does(tmp_path: Path, arguments: list[str]) -> None:
    write(tmp_path / "app" / "main.py", _PROGRAM)
    beside = tmp_path if arguments[0] == "-m" else tmp_path / "app"
    write(beside / "parts" / "made.py", "value = 'found'\n")
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=worker_environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.stdout == "[(0, 'found'), (1, 'found')]\n", ended.stderr
