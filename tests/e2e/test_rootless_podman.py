"""Workers in containers of a podman that has no root: a user's own engine, with its own networks and limits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyproxy as sky
from skyproxy.errors import SessionLostError
from skyproxy.providers import Container
from tests.e2e.container_functions import die, reached, surroundings
from tests.e2e.test_podman import CHECK, podman, skyproxy  # noqa: F401

pytestmark = pytest.mark.real

_SCRIPT = Path(__file__).parent / "real" / "podman_as_user.sh"
_IMAGE = "ghcr.io/skyproxy/worker:0.1.0"
_NEEDED = ("newuidmap", "slirp4netns", "setpriv")


@pytest.fixture(scope="module")
def engine(podman: None) -> Iterator[str]:  # noqa: F811
    """The command of a podman without root, which has the image of workers in a storage of its own."""
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        pytest.fail(f"missing: {', '.join(missing)}. On Debian: apt-get install uidmap slirp4netns util-linux")
    # Not in pytest's own folder, which nobody else may look into.
    folder = Path(tempfile.mkdtemp(prefix="skyproxy-rootless-"))
    folder.chmod(0o711)
    command = folder / "podman"
    command.write_text(f'#!/bin/sh\nexec "{_SCRIPT}" "{folder}/home" "$@"\n')
    command.chmod(0o755)
    (folder / "home").mkdir()
    try:
        with subprocess.Popen(["podman", "save", "--quiet", _IMAGE], stdout=subprocess.PIPE) as saved:
            subprocess.run([command, "load", "--quiet"], stdin=saved.stdout, check=True)
        assert json.loads(run(command, "info", "--format", "json"))["host"]["security"]["rootless"] is True
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SKYPROXY_CONTAINER_ENGINE", str(command))
            networks = run(command, "network", "ls", "--quiet")
            yield str(command)
            assert run(command, "ps", "--all", "--quiet") == ""
            assert run(command, "network", "ls", "--quiet") == networks
    finally:
        # Ends the process that keeps the user's namespaces, too.
        run(command, "system", "migrate")
        shutil.rmtree(folder)


def run(command: str | Path, *arguments: str) -> str:
    return subprocess.run([command, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_two_nodes_reach_each_other_by_name_and_are_confined(engine: str) -> None:
    with sky.Compute(
        name="net",
        provider=Container(cli=engine),
        nodes=2,
        image=_IMAGE,
        env={"SECRET": "hidden"},
    ) as pool:
        assert reached() @ pool == [[0, 1], [0, 1]]
        seen = surroundings() @ pool
    expected = {"capabilities": 0, "no new privileges": "1", "user": 10001, "writes": False, "secret": "hidden"}
    assert [{**row, "memory": ""} for row in seen] == [{**expected, "memory": ""}] * 2


def test_a_process_that_dies_is_an_error_and_replaced(engine: str) -> None:
    with sky.Compute(name="deaths", provider=Container(cli=engine), image=_IMAGE) as pool:
        with pytest.raises(SessionLostError):
            die() >> pool
        assert (surroundings() >> pool)["user"] == 10001


def test_a_worker_that_stays_from_up_to_down(engine: str) -> None:
    skyproxy("up", "box", "--provider", "container", "--image", _IMAGE, "--volume", "cache:1Gi:/cache")
    try:
        (row,) = json.loads(skyproxy("list", "--json"))
        assert (row["name"], row["phase"]) == ("box", "Running")
        program = subprocess.run([sys.executable, "-c", CHECK], stdout=subprocess.PIPE, text=True, check=True)
        assert program.stdout == "42.0\n"
        assert "listening" in skyproxy("logs", "box")
    finally:
        skyproxy("down", "box")
    assert run(engine, "ps", "--all", "--quiet") == ""
    run(engine, "volume", "rm", "skyproxy-box-cache")
