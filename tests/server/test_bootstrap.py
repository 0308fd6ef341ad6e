"""A worker that gets packages before it starts: real environments, from wheels on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(os.name != "posix", reason="containers are Linux"),
]


def wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def bootstrap(home: Path, requirements: list[str], steps: list[list[str]]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    wanted = json.dumps({"requirements": requirements, "steps": steps})
    return subprocess.run(
        [sys.executable, "-m", "skyproxy_server.bootstrap", wanted, "--help"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )


def test_what_the_image_has_is_not_installed_again(tmp_path: Path) -> None:
    done = bootstrap(tmp_path, ["torch", "msgpack>=1"], [["no-such-package-anywhere"]])
    assert done.returncode == 0, done.stderr
    assert "usage: skyproxy_server" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_added_over_what_is_there_and_once(tmp_path: Path) -> None:
    wheel(tmp_path, "small_addition", "1.5")
    steps = [["--no-index", "--find-links", str(tmp_path), "small-addition>=1", "msgpack"]]
    for _ in range(2):
        done = bootstrap(tmp_path, ["small-addition>=1", "msgpack"], steps)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "usage: skyproxy_server" in done.stdout
    # The second time there was nothing to install.
    assert "Successfully installed" not in done.stdout
    (place,) = (tmp_path / ".skyproxy").iterdir()
    program = "import small_addition, msgpack, torch; print(small_addition.version, msgpack.__file__)"
    told = subprocess.run([place / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("1.5 ")
    # msgpack stayed the image's.
    assert str(place) not in told.stdout


def test_what_cannot_be_had_ends_the_worker_with_the_reason_and_leaves_no_half(tmp_path: Path) -> None:
    steps = [["--no-index", "no-such-package-anywhere"]]
    done = bootstrap(tmp_path, ["no-such-package-anywhere"], steps)
    assert done.returncode != 0
    assert "no-such-package-anywhere" in done.stderr
    assert "the packages could not be installed" in done.stderr
    assert not list(tmp_path.rglob("finished"))
