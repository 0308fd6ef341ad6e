"""Packages of Debian for what the end-to-end tests build: from where this machine's own apt has them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "debian.sh"
SITES = ["http://security.example/debian-security", "http://ubuntu.example/ubuntu", "http://mirror.example/debian/"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="a script of bash")


def sourced(folder: Path, sites: list[str] | None, then: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a script that sources ours does, where apt knows these places; None: there is no apt."""
    commands = folder / "bin"
    commands.mkdir()
    if sites is not None:
        apt = commands / "apt-get"
        lines = "\n".join(sites)
        apt.write_text(f'#!/bin/sh\n[ "$*" = "indextargets --format \\$(SITE)" ] || exit 1\ncat <<END\n{lines}\nEND\n')
        apt.chmod(0o755)
    for tool in ("bash", "grep", "head", "mkdir", "cat", "id", "sh"):
        found = shutil.which(tool)
        assert found is not None
        (commands / tool).symlink_to(found)
    script = f"set -euo pipefail; source {SCRIPT}; {then}"
    kept = {name: value for name, value in os.environ.items() if name != "DEBIAN_MIRROR"}
    return subprocess.run(
        ["bash", "-c", script],
        env={**kept, "PATH": str(commands), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_place_is_the_machines_own(tmp_path: Path) -> None:
    assert sourced(tmp_path, SITES, 'require_mirror; echo "$mirror"').stdout == "http://mirror.example/debian/\n"


def test_who_names_another_place_gets_it(tmp_path: Path) -> None:
    done = sourced(tmp_path, SITES, 'require_mirror; echo "$mirror"', DEBIAN_MIRROR="http://own.example/d")
    assert done.stdout == "http://own.example/d\n"


@pytest.mark.parametrize("sites", [None, [], SITES[:2]], ids=["no apt", "no source", "no Debian"])
def test_without_one_it_says_what_to_name(tmp_path: Path, sites: list[str] | None) -> None:
    done = sourced(tmp_path, sites, "require_mirror; echo went on")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Name one: DEBIAN_MIRROR=URL" in done.stderr


def test_packages_come_from_there_with_debians_keys_and_the_machines_apt_is_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    then = f'private_apt {state} "deb-src bookworm" "deb sid"; echo "$APT_CONFIG"; cat {state}/parts/debian.list'
    config, *sources = sourced(tmp_path, SITES, then).stdout.splitlines()
    keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    assert sources == [
        f"deb-src {keys} http://mirror.example/debian/ bookworm main",
        f"deb {keys} http://mirror.example/debian/ sid main",
    ]
    said = Path(config).read_text()
    places = dict(re.findall(r'^(Dir::\S+) "(.*)";$', said, re.MULTILINE))
    assert places.pop("Dir::Etc::sourcelist") == "-"
    assert len(places) == 5
    assert all(Path(place).is_relative_to(state) for place in places.values())


def test_no_script_of_the_tests_names_a_place_of_packages() -> None:
    scripts = [path for path in (ROOT / "tests" / "e2e").rglob("*") if path.suffix in (".sh", ".py")]
    named = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in scripts
        for found in re.findall(r"https?://[\w.-]*(?:debian|deb\.|pypi|mirror)[\w./-]*", path.read_text())
    ]
    assert named == []
    builders = [path for path in scripts if path.suffix == ".sh" and "apt-get" in path.read_text()]
    assert len(builders) >= 4
    assert all("/debian.sh" in path.read_text() for path in builders if path != SCRIPT)
