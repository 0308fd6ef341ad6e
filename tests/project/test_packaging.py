"""The wheel that users install: what is in it, what it asks for, and what its import pulls in."""

from __future__ import annotations

import configparser
import email
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skyproxy", "skyproxy_operator", "skyproxy_server")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as pip would lay it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(installed: Path) -> Message:
    (file,) = installed.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text(encoding="utf-8"))


def python(installed: Path, code: str) -> str:
    """What `code` prints in a fresh interpreter that sees the wheel and not the working tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    environment |= {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=installed,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_pure_python_wheel_serves_every_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_three_packages_and_nothing_else(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_complete_and_declares_its_types(package: str, names: list[str]) -> None:
    folder = ROOT / "operator" / package if package == "skyproxy_operator" else ROOT / package
    sources = {f"{package}/{file.relative_to(folder).as_posix()}" for file in folder.rglob("*.py")}
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(names)
    assert {name for name in names if name.startswith(package + "/") and name.endswith(".py")} == sources


def test_the_manifests_travel_with_the_wheel(names: list[str]) -> None:
    folder = ROOT / "manifests"
    for part in ("base", "overlays"):
        for file in (folder / part).rglob("*.yaml"):
            assert f"skyproxy/manifests/{file.relative_to(folder).as_posix()}" in names


def test_the_license_travels_with_the_wheel(names: list[str], metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_command_is_a_callable_of_the_wheel(installed: Path) -> None:
    (file,) = installed.glob("*.dist-info/entry_points.txt")
    scripts = configparser.ConfigParser()
    scripts.read(file, encoding="utf-8")
    assert dict(scripts["console_scripts"]) == {"skyproxy": "skyproxy.cli.main:main"}
    assert python(installed, "from skyproxy.cli.main import main; print(callable(main))") == "True"


def test_torch_is_asked_for_only_by_extras(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist", [])
    unconditional = {re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line}
    assert unconditional == {"cloudpickle", "msgpack", "packaging", "psutil", "rich", "typer", "websockets"}
    assert any(line.startswith("torch") and "extra == 'torch'" in line for line in required)


def test_the_version_is_the_one_in_pyproject(installed: Path, metadata: Message) -> None:
    assert python(installed, "import skyproxy; print(skyproxy.__version__)") == metadata["Version"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("skyproxy", {"torch", "numpy", "kopf", "kubernetes", "kubernetes_asyncio"}),
        ("skyproxy.errors", {"torch", "websockets"}),
        ("skyproxy.settings", {"torch", "websockets"}),
        ("skyproxy.protocol", {"torch", "numpy", "socket"}),
        ("skyproxy.transport", {"torch", "numpy"}),
        ("skyproxy.cli.main", {"torch", "numpy"}),
        ("skyproxy_operator", {"torch", "numpy", "skyproxy_server"}),
    ],
)
def test_an_import_stays_light(module: str, absent: set[str], installed: Path) -> None:
    loaded = python(installed, f"import {module}, sys; print({module}.__file__); print(*sys.modules)").splitlines()
    assert Path(loaded[0]).is_relative_to(installed)
    assert absent.isdisjoint(loaded[1].split())


def test_no_folder_shadows_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []
