"""Workers in containers of a real podman: its networks, limits and confinement, builds, and GPUs by names of CDI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyproxy as sky
from skyproxy.errors import SessionLostError
from skyproxy.providers import Container, Image
from tests.e2e.container_functions import die, given, imported, surroundings, total

pytestmark = pytest.mark.real

_REPOSITORY = Path(__file__).parents[2]
_IMAGE = "ghcr.io/skyproxy/worker:0.1.0"
_NEEDED = ("podman", "catatonit", "conmon", "mmdebstrap", "buildah")
_PACKAGES = "podman catatonit conmon netavark aardvark-dns iptables mmdebstrap buildah runc"

PROGRAM = """
import sys
import skyproxy as sky
from skyproxy.providers import Container

with sky.Compute(name="killed", provider=Container(cli="podman"), image=sys.argv[1]):
    print("there", flush=True)
    sys.stdin.readline()
"""

CHECK = """
import torch, skyproxy
print((torch.ones(3, device="sky") * 14).sum().item())
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A podman with this tree's image of workers, and storage and networks of its own."""
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        pytest.fail(f"missing: {', '.join(missing)}. On Debian: apt-get install {_PACKAGES}")
    build = subprocess.run(
        [str(_REPOSITORY / "tests/e2e/real/images.sh"), "--engine"],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    folder = Path(build.stdout.strip())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        patch.setenv("CONTAINERS_REGISTRIES_CONF", str(folder / "registries.conf"))
        patch.setenv("CONTAINERS_CONF", str(folder / "podman.conf"))
        patch.setenv("SKYPROXY_CONTAINER_ENGINE", "podman")
        for kind in ("CONFIG", "STATE", "CACHE"):
            patch.setenv(f"XDG_{kind}_HOME", str(tmp_path_factory.mktemp(kind.lower())))
        patch.setenv("PYTHONPATH", str(_REPOSITORY))
        networks = engine("network", "ls", "--quiet")
        yield
        assert engine("ps", "--all", "--quiet") == ""
        assert engine("network", "ls", "--quiet") == networks


def engine(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def containers() -> list[str]:
    return engine("ps", "--format", "{{.Names}}").split()


def skyproxy(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("skyproxy")), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.usefixtures("podman")
def test_two_nodes_reach_each_other_by_name_and_are_confined() -> None:
    with sky.Compute(
        name="net",
        provider=Container(cli="podman"),
        nodes=2,
        memory_gb=2,
        image=_IMAGE,
        env={"SECRET": "hidden"},
        plugins=[sky.plugins.torch(backend="gloo")],
    ) as pool:
        assert total() @ pool == [3.0, 3.0]
        seen = surroundings() @ pool
        assert len(containers()) == 2
        told = engine("inspect", *containers())
    expected = {"capabilities": 0, "no new privileges": "1", "user": 10001, "writes": False, "secret": "hidden"}
    assert [{**row, "memory": ""} for row in seen] == [{**expected, "memory": ""}] * 2
    assert [row["memory"] for row in seen] == [str(2 << 30)] * 2
    assert "127.0.0.1" in told
    assert containers() == []


@pytest.mark.usefixtures("podman")
def test_a_process_that_dies_is_named_and_replaced() -> None:
    with sky.Compute(name="deaths", provider=Container(cli="podman"), image=_IMAGE) as pool:
        with pytest.raises(SessionLostError, match=r"137|SIGKILL"):
            die() >> pool
        assert (surroundings() >> pool)["user"] == 10001


@pytest.mark.usefixtures("podman")
def test_what_an_image_asks_for_is_built_once() -> None:
    image = Image(base=_IMAGE, pip=["einops"], env={"GREETING": "hello"})

    def run() -> str:
        with sky.Compute(name="built", provider=Container(cli="podman"), image=image) as pool:
            return imported("einops") >> pool

    assert run() == "einops"
    images = engine("images", "--quiet", "skyproxy-worker")
    assert images
    assert run() == "einops"
    assert engine("images", "--quiet", "skyproxy-worker") == images


@pytest.mark.usefixtures("podman")
def test_containers_end_with_a_program_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, _IMAGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "there\n"
        assert len(containers()) == 1
        program.kill()
    deadline = time.monotonic() + 60
    while engine("ps", "--all", "--quiet"):
        assert time.monotonic() < deadline, engine("ps", "--all")
        time.sleep(0.2)


@pytest.mark.usefixtures("podman")
def test_a_worker_that_stays_from_up_to_down() -> None:
    skyproxy("up", "box", "--provider", "container", "--image", _IMAGE, "--volume", "cache:1Gi:/cache")
    try:
        (row,) = json.loads(skyproxy("list", "--json"))
        assert (row["name"], row["phase"]) == ("box", "Running")
        program = subprocess.run([sys.executable, "-c", CHECK], stdout=subprocess.PIPE, text=True, check=True)
        assert program.stdout == "42.0\n"
        assert skyproxy("token", "rotate", "box")
        program = subprocess.run([sys.executable, "-c", CHECK], stdout=subprocess.PIPE, text=True, check=True)
        assert program.stdout == "42.0\n"
        assert "the former one is accepted" in skyproxy("logs", "box")
    finally:
        skyproxy("down", "box")
    assert engine("ps", "--all", "--quiet") == ""
    engine("volume", "rm", "skyproxy-box-cache")


@pytest.mark.usefixtures("podman")
def test_gpus_are_asked_for_by_their_names_of_cdi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What this specification adds is variables, for there is no GPU here; who reads it is podman itself.
    devices = [{"name": name, "containerEdits": {"env": [f"GIVEN_{name}=yes"]}} for name in ("0", "1", "all")]
    specification = Path("/etc/cdi/skyproxy-test.json")
    specification.parent.mkdir(exist_ok=True)
    specification.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))
    monkeypatch.setattr("skyproxy.providers.container.devices_of_node", lambda node, nodes: ["1"])
    try:
        with sky.Compute(name="gpus", provider=Container(cli="podman"), accelerator="A100", image=_IMAGE) as pool:
            found = given() >> pool
        assert found == ["GIVEN_1"]
    finally:
        specification.unlink()
