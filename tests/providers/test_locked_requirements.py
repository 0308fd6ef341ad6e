"""Locked requirements: what a file must say, and that nothing is installed whose hash it does not have."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.plugins.requirements import with_requirements
from skyproxy.providers import AWS, Image, PipIndex, Remote, WorkerSpec
from skyproxy.providers.container_image import containerfile
from skyproxy.providers.environments import (
    WORKER_REQUIREMENTS,
    EnvironmentStore,
    install_steps,
    own_environment_satisfies,
)
from skyproxy.providers.kubernetes_provider import with_packages
from skyproxy.providers.locked_requirements import locked_packages
from tests.providers.test_environments import ask, main_index, own_index, take, wheel

__all__ = ["main_index", "own_index"]
pytestmark = pytest.mark.timeout(300)  # a new environment takes a minute where the machine is busy

HASH = "--hash=sha256:" + "0" * 64
PROGRAM = "import tiny_for_tests as t; print(t.version)"


def hash_of(folder: Path, name: str, version: str) -> str:
    file = folder / name / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    return f"--hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A file that locks a tiny package of the main index, as uv writes it."""
    wheel(tmp_path / "main", "tiny-for-tests", "1.5")
    file = tmp_path / "requirements.lock"
    file.write_text(
        "# This file was made by a program\n"
        f"tiny-for-tests==1.5 ; python_version >= '3' \\\n    {HASH} \\\n"
        f"    {hash_of(tmp_path / 'main', 'tiny-for-tests', '1.5')}\n    # via -r requirements.in\n"
    )
    return file


# --- what a file must say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("numpy==2.0\n", "has no hash"),
        (f"numpy>=2.0 {HASH}\n", "no exact version"),
        (f"numpy==2.* {HASH}\n", "no exact version"),
        (f"numpy {HASH}\n", "no exact version"),
        (f"numpy==2.0 {HASH[:-1]}\n", "is not a requirement"),
        ("numpy==2.0 --hash=md5:00\n", "is not a requirement"),
        (f"numpy @ https://example.org/numpy.whl {HASH}\n", "no exact version"),
        (f"./here {HASH}\n", "is not a requirement"),
        (f"-e . {HASH}\n", "is an option"),
        ("--extra-index-url https://example.org\n", "pip_indexes"),
        (f"--trusted-host example.org\nnumpy==2.0 {HASH}\n", "is an option"),
        ("-r others.lock\n", "is an option"),
        (f"numpy==2.0 {HASH}\nmsgpack==1.1\n", "'msgpack==1.1' has no hash"),
        ("# nothing\n\n", "names no packages"),
    ],
)
def test_what_is_not_locked_is_refused_before_anything_starts(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Image(requirements=text)
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        Image(requirements=tmp_path / "file")


def test_files_of_the_usual_tools_are_read() -> None:
    found = locked_packages(
        f"Foo_Bar[extra]==1.0 ; sys_platform == 'linux' \\\r\n  {HASH} \\\n  {HASH}\n"
        f"  # via\n  #   other\nother==2.0+cpu {HASH} # why\n"
    )
    assert sorted(found) == ["foo-bar", "other"]
    assert str(found["other"].specifier) == "==2.0+cpu"


def test_a_file_that_is_not_there_and_one_beside_pip_are_errors(tmp_path: Path, lock: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Image(requirements=tmp_path / "missing.lock")
    with pytest.raises(ConfigurationError, match="leave out pip"):
        Image(pip=["numpy"], requirements=lock)


def test_an_image_is_its_files_text_and_not_its_path(tmp_path: Path, lock: Path) -> None:
    image = Image(requirements=str(lock))
    (tmp_path / "copy").write_text(lock.read_text())
    assert Image(requirements=tmp_path / "copy") == image
    assert Image(requirements=tmp_path / "copy").content_hash() == image.content_hash()
    lock.write_text(lock.read_text() + f"more==1.0 {HASH}\n")
    changed = Image(requirements=lock)
    assert changed != image
    assert changed.content_hash() != image.content_hash()
    assert image.replace(env={"A": "1"}).requirements == image.requirements
    assert pickle.loads(pickle.dumps(image)) == image
    assert Image().content_hash() == Image(requirements=None).content_hash()


# --- what is installed -----------------------------------------------------------------------------------------------


def test_what_is_installed_here_by_itself_never_counts_as_locked() -> None:
    assert own_environment_satisfies(Image(pip=["numpy"]))
    assert not own_environment_satisfies(Image(requirements=f"numpy==2.0 {HASH}\n"))


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_what_has_its_hash_is_installed_from_whichever_index_has_it(
    installer: str, own_index, main_index, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(installer, monkeypatch)
    shutil.move(tmp_path / "main" / "tiny-for-tests", tmp_path / "own" / "tiny-for-tests")
    image = Image(requirements=lock, pip_indexes=[PipIndex(own_index[0], packages=["tiny-for-tests"])])
    store = EnvironmentStore(tmp_path / "environments")
    made = asyncio.run(store.environment(image, isolated=False, report=lambda told: None))
    assert ask(made.python, PROGRAM) == "1.5"


def test_a_hash_that_does_not_match_is_an_error_and_leaves_no_environment(
    main_index, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take("pip", monkeypatch)
    lock.write_text(f"tiny-for-tests==1.5 {HASH}\n")
    store = EnvironmentStore(tmp_path / "environments")
    with pytest.raises(WorkerStartError, match="DO NOT MATCH THE HASHES"):
        asyncio.run(store.environment(Image(requirements=lock), isolated=False, report=lambda told: None))
    assert [path for path in (tmp_path / "environments").iterdir() if path.is_dir()] == []


def test_an_isolated_environment_needs_what_a_worker_needs_in_the_file() -> None:
    with pytest.raises(ConfigurationError, match=r"also needs torch, .*websockets>=14.*lock it again"):
        install_steps(Image(requirements=f"cloudpickle==3.1 {HASH}\n"), isolated=True)
    with pytest.raises(ConfigurationError, match=r"also needs msgpack>=1\.0\.8"):
        install_steps(Image(requirements=worker_lock().replace("msgpack==99", "msgpack==1.0.7")), isolated=True)
    (step,) = install_steps(Image(requirements=worker_lock()), isolated=True)
    assert "--require-hashes" in step


def worker_lock() -> str:
    names = ["torch", *(requirement.split(">=")[0] for requirement in WORKER_REQUIREMENTS)]
    return "".join(f"{name}==99 {HASH}\n" for name in names)


# --- the places of workers -------------------------------------------------------------------------------------------


def test_a_container_is_built_from_the_file() -> None:
    lines = containerfile(Image(base="debian", requirements=worker_lock())).splitlines()
    copied = next(line for line in lines if line.startswith("COPY skyproxy-requirements"))
    installed = next(line for line in lines if "pip" in line and line.startswith("RUN ["))
    assert lines.index(copied) < lines.index(installed)
    words = json.loads(installed.removeprefix("RUN "))
    assert words[-2:] == ["-r", copied.split()[-1]]
    assert {"--require-hashes", "--only-binary"} <= set(words)


@pytest.mark.skipif(os.name != "posix", reason="containers are Linux")
def test_a_pod_installs_by_hashes_before_the_worker_starts(main_index, lock: Path, tmp_path: Path) -> None:
    (worker,) = with_packages(None, Image(requirements=lock))["spec"]["containers"]
    home = tmp_path / "home"
    home.mkdir()
    path = os.pathsep.join(item for item in sys.path if item)
    done = subprocess.run(
        [sys.executable, *worker["command"][1:], "--help"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "usage: skyproxy_server" in done.stdout
    (place,) = (home / ".skyproxy").iterdir()
    assert ask(str(place / "bin" / "python"), PROGRAM) == "1.5"


def test_a_file_that_is_too_long_for_a_pods_command_is_told() -> None:
    text = "".join(f"a{n}==1 --hash=sha256:{hashlib.sha256(str(n).encode()).hexdigest()}\n" for n in range(4000))
    with pytest.raises(ConfigurationError, match="Build a container image"):
        with_packages(None, Image(requirements=text))


def test_places_that_cannot_install_by_hashes_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorkerSpec("name", image=Image(requirements=worker_lock()))
    with pytest.raises(ConfigurationError, match="requirements"):
        asyncio.run(Remote(["ws://127.0.0.1:1"], token="token").launch(spec, lambda progress: None))
    with pytest.raises(ConfigurationError, match="no room for hashes"):
        AWS(region="eu-central-1")._check_image(spec)


def test_what_a_plugin_needs_has_to_be_locked_too() -> None:
    image = Image(requirements=worker_lock())
    assert with_requirements(image, ["msgpack>=1"]) == image
    with pytest.raises(ConfigurationError, match="a plugin needs jax"):
        with_requirements(image, ["jax"])
    assert sky.Image is Image
