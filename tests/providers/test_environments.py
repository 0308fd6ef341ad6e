"""Environments: made once, over the client's own or isolated; an index serves its packages only."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers import Image, PipIndex
from skyproxy.providers.environments import (
    WORKER_REQUIREMENTS,
    EnvironmentStore,
    install_steps,
    own_environment_satisfies,
)

ROOT = Path(__file__).resolve().parents[2]
TORCH = PipIndex(url="https://download.pytorch.org/whl/cpu", packages=["torch"])
OTHER = PipIndex(url="https://example.org/simple", packages=["mine", "unnamed"])


@pytest.mark.parametrize(
    ("image", "satisfied"),
    [
        (Image(), True),
        (Image(pip=["torch"], pip_indexes=[TORCH]), True),
        (Image(pip=["torch>=2.11", "numpy"]), True),
        (Image(pip=["torch==0.1"]), False),
        (Image(pip=["no-such-package-here"]), False),
        (Image(pip=["no-such-package-here; python_version < '3'"]), True),
        (Image(pip=["skyproxy @ https://example.org/x.whl"]), False),
        (Image(pip=["./here"]), False),
        (Image(python=platform.python_version()), True),
        (Image(python=".".join(platform.python_version_tuple()[:2])), True),
        (Image(python="3.1"), False),
    ],
)
def test_whether_the_client_s_own_environment_will_do(image: Image, satisfied: bool) -> None:
    assert own_environment_satisfies(image) is satisfied


def test_an_index_is_asked_for_its_packages_only() -> None:
    image = Image(pip=["numpy", "torch==2.13.0", "mine>=1"], pip_indexes=[TORCH, OTHER])
    assert install_steps(image, isolated=False) == [
        ["--no-deps", "--index-url", TORCH.url, "torch==2.13.0"],
        ["--no-deps", "--index-url", OTHER.url, "mine>=1", "unnamed"],
        ["numpy", "torch==2.13.0", "mine>=1"],
    ]


def test_an_isolated_environment_has_what_a_worker_needs() -> None:
    import torch

    *_, last = install_steps(Image(pip=["numpy"]), isolated=True)
    assert f"torch=={torch.__version__.split('+')[0]}" in last
    assert set(WORKER_REQUIREMENTS) <= set(last)


IMPORT_ALL = """
import importlib, pkgutil, sys
import skyproxy_server
for module in pkgutil.walk_packages(skyproxy_server.__path__, "skyproxy_server."):
    importlib.import_module(module.name)
print("all")
"""


def test_a_worker_imports_nothing_else_than_what_it_needs(tmp_path: Path) -> None:
    left, found = [*WORKER_REQUIREMENTS, "torch"], set[str]()
    while left:
        requirement = Requirement(left.pop())
        name = requirement.name.lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        distribution = importlib.metadata.distribution(name)
        left += distribution.requires or []
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(distribution.locate_file(top))))
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", IMPORT_ALL],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "all\n", done.stderr


def test_what_a_worker_needs_is_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {*project["dependencies"], *project["optional-dependencies"]["server"]}
    assert set(WORKER_REQUIREMENTS) <= known


def package(folder: Path, version: str) -> str:
    """A tiny package that pip can install without any index."""
    (folder / "src").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n', encoding="utf-8"
    )
    (folder / "backend.py").write_text(
        f"""
import zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    name = "tiny_for_tests-{version}-py3-none-any.whl"
    info = "tiny_for_tests-{version}.dist-info/"
    with zipfile.ZipFile(directory + "/" + name, "w") as wheel:
        wheel.writestr("tiny_for_tests.py", "version = {version!r}\\n")
        about = "Metadata-Version: 2.1\\nName: tiny-for-tests\\nVersion: {version}\\n"
        wheel.writestr(info + "METADATA", about)
        kind = "Root-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: t\\n" + kind)
        wheel.writestr(info + "RECORD", "")
    return name
""",
        encoding="utf-8",
    )
    return str(folder)


def ask(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=100).stdout.strip()


def test_an_environment_is_made_once_and_lies_over_the_client_s_own(tmp_path: Path) -> None:
    store = EnvironmentStore(tmp_path / "environments")
    image = Image(pip=[package(tmp_path / "one", "1.5")])
    told: list[str] = []

    async def twice() -> list[str]:
        both = await asyncio.gather(*(store.environment(image, isolated=False, report=told.append) for _ in range(2)))
        return [environment.python for environment in both]

    first, second = asyncio.run(twice())
    assert first == second != sys.executable
    assert len(told) == 1
    assert ask(first, "import tiny_for_tests as t, msgpack; print(t.version)") == "1.5"
    asyncio.run(store.environment(image, isolated=False, report=told.append))
    assert len(told) == 1


def test_a_failing_installation_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    store = EnvironmentStore(tmp_path)
    with pytest.raises(WorkerStartError, match="no-such-folder"):
        asyncio.run(store.environment(Image(pip=["./no-such-folder"]), isolated=False, report=lambda told: None))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_another_interpreter_needs_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    store = EnvironmentStore(tmp_path / "environments")
    with pytest.raises(ConfigurationError, match="needs uv"):
        asyncio.run(store.environment(Image(python="3.99"), isolated=True, report=lambda told: None))
    with pytest.raises(ConfigurationError, match="isolated=True"):
        asyncio.run(store.environment(Image(python="3.99"), isolated=False, report=lambda told: None))


def take(installer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has environments made by "pip" or "uv", whichever of them is on the path."""
    found = shutil.which("uv", path=os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)]))
    if installer == "uv" and found is None:
        pytest.skip("uv is not installed")
    chosen = found if installer == "uv" else None
    monkeypatch.setattr("skyproxy.providers.environments.shutil.which", lambda name: chosen)


def test_uv_makes_the_same_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take("uv", monkeypatch)
    store = EnvironmentStore(tmp_path / "environments")
    image = Image(pip=[package(tmp_path / "one", "1.5")])
    made = asyncio.run(store.environment(image, isolated=False, report=lambda told: None))
    assert ask(made.python, "import tiny_for_tests as t, msgpack; print(t.version)") == "1.5"


def wheel(index: Path, name: str, version: str) -> None:
    """Puts a tiny package into an index of files: a folder for each name."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The url of an index over HTTP, and what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, template: str, *values: Any) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join(30)


@pytest.fixture
def own_index(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    with served(tmp_path / "own") as found:
        yield found


@pytest.fixture
def main_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """What pip and uv take for PyPI; whatever this machine's owner has configured is out of it."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    with served(tmp_path / "main") as (url, asked):
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("UV_NO_CONFIG", "1")
        monkeypatch.setenv("UV_NO_CACHE", "1")
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield url, asked


@pytest.mark.parametrize(("installer", "where"), [("pip", "variable"), ("pip", "file"), ("uv", "variable")])
def test_a_package_comes_from_its_index_and_nothing_else_does(
    installer: str,
    where: str,
    own_index: tuple[str, list[str]],
    main_index: tuple[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(installer, monkeypatch)
    # A mirror that is asked for everything does not go before the index that is meant.
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", main_index[0])
    monkeypatch.setenv("UV_INDEX", main_index[0])
    if where == "file":
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
        configuration = tmp_path / "pip.conf"
        configuration.write_text(f"[global]\nextra-index-url = {main_index[0]}\n", encoding="utf-8")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    # Each index has a newer one of what is to come from the other.
    for index, name, version in [
        ("own", "tiny-for-tests", "1.5"),
        ("own", "other-for-tests", "9.0"),
        ("main", "tiny-for-tests", "7.0"),
        ("main", "other-for-tests", "2.0"),
    ]:
        wheel(tmp_path / index, name, version)
    url, asked_of_own = own_index
    image = Image(
        pip=["tiny-for-tests", "other-for-tests"], pip_indexes=[PipIndex(url=url, packages=["Tiny_for.tests"])]
    )
    store = EnvironmentStore(tmp_path / "environments")
    made = asyncio.run(store.environment(image, isolated=False, report=lambda told: None))
    code = "import tiny_for_tests as t, other_for_tests as o; print(t.version, o.version)"
    assert ask(made.python, code) == "1.5 2.0"
    assert {path.strip("/").split("/")[0] for path in asked_of_own} == {"tiny-for-tests"}
    assert any("other_for_tests-2.0" in path for path in main_index[1])
