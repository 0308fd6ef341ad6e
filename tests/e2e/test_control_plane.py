"""A run of the end-to-end tests leaves nothing behind, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.control_plane.addresses import Slot, take_slot
from tests.e2e.control_plane.certificates import Authority
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.control_plane.real_nodes import NODES, RealNodes
from tests.e2e.real import control_groups

_REPOSITORY = Path(__file__).resolve().parents[2]
_WAIT_SECONDS = 60.0

# What conftest.py does, and then nothing more.
_RUN = """
import sys, time
from pathlib import Path
from tests.e2e.control_plane import binaries
from tests.e2e.control_plane.addresses import take_slot
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.control_plane.stand_in import StandIn

plane = ControlPlane(binaries.ensure(), Path(sys.argv[1]), take_slot())
stand_in = StandIn(plane)
plane.start()
stand_in.start()
from tests.e2e.cluster import Cluster
cluster = Cluster(binaries.ensure()["kubectl"], plane.kubeconfig, plane.directory, local=True)
account = "/api/v1/namespaces/default/serviceaccounts/default"
cluster.wait(account, lambda found: found and found.get("secrets"), "the account is there")
pod = {
    "metadata": {"name": "sleeper"},
    "spec": {"containers": [{"name": "main", "image": "tools", "command": ["sleep", "98765"]}]},
}
cluster.create("/api/v1/namespaces/default/pods", pod)
path = "/api/v1/namespaces/default/pods/sleeper"
cluster.wait(path, lambda found: (found or {}).get("status", {}).get("phase") == "Running", "the pod runs")
print(plane.slot.index, flush=True)
time.sleep(1000)
"""


# The same with real nodes, without waiting for an image to be built: what the run itself uses is there.
_REAL_RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background would ignore it
from pathlib import Path
from tests.e2e.control_plane import binaries, real_nodes
from tests.e2e.control_plane.addresses import take_slot
from tests.e2e.control_plane.control_plane import ControlPlane

slot, programs, directory = take_slot(), binaries.ensure(nodes=True), Path(sys.argv[1])
nodes = real_nodes.RealNodes(slot, directory, programs, Path(sys.argv[2]))
plane = ControlPlane(programs, directory, slot, nodes.address)
nodes.start(plane)
plane.start()
from tests.e2e.cluster import Cluster
cluster = Cluster(programs["kubectl"], plane.kubeconfig, plane.directory, local=True)
account = "/api/v1/namespaces/default/serviceaccounts/default"
cluster.wait(account, lambda found: found and found.get("secrets"), "the account is there")
container = {"name": "main", "image": "ghcr.io/skyproxy/worker:0.1.0", "command": ["sleep", "87654"]}
pod = {"metadata": {"name": "sleeper"}, "spec": {"containers": [container]}}
cluster.create("/api/v1/namespaces/default/pods", pod)
path = "/api/v1/namespaces/default/pods/sleeper"
cluster.wait(path, lambda found: (found or {}).get("status", {}).get("phase") == "Running", "the pod runs", 200)
print(slot.index, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short place for another run: a socket of the kubelet's below it has a path of 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="skyproxy-e2e-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _processes(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


def test_a_run_that_is_killed_takes_its_processes_and_its_network_with_it(
    control_plane: ControlPlane, stand_in: None, directory: Path
) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(directory)],
        env={**os.environ, "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'operator'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        slot = Slot(int(run.stdout.readline()), -1)
        # Two at once on one machine do not meet.
        assert slot.index != control_plane.slot.index
        assert len(_processes(str(directory))) >= 5
        assert _processes("sleep 98765")
        assert Path(f"/sys/class/net/{slot.bridge}").exists()
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    deadline, pause = time.monotonic() + _WAIT_SECONDS, threading.Event()
    while left := [*_processes(str(directory)), *_processes("sleep 98765")]:
        assert time.monotonic() < deadline, left
        pause.wait(0.1)
    assert not Path(f"/sys/class/net/{slot.bridge}").exists()
    control_plane.check()


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_real_nodes_end_with_their_run(
    control_plane: ControlPlane, real_nodes: RealNodes, directory: Path, number: signal.Signals
) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", _REAL_RUN, str(directory), str(real_nodes.store)],
        env={**os.environ, "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'operator'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        slot = Slot(int(run.stdout.readline()), -1)
        assert _processes("sleep 87654")
        assert control_groups.left(f"{slot.bridge}-") == {f"{slot.bridge}-{name}" for name in NODES}
    finally:
        run.send_signal(number)
        run.wait(_WAIT_SECONDS)
    deadline, pause = time.monotonic() + _WAIT_SECONDS, threading.Event()

    def left() -> list[str]:
        places = [Path(f"/sys/class/net/{slot.bridge}"), *real_nodes.store.parent.glob(f"nodes/{slot.bridge}-*")]
        return [
            *_processes(str(directory)),
            *_processes("sleep 87654"),
            *control_groups.left(f"{slot.bridge}-"),
            *(str(place) for place in places if place.exists()),
            *(line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{slot.bridge}-" in line),
        ]

    while found := left():
        assert time.monotonic() < deadline, found
        pause.wait(0.1)
    control_plane.check()
    real_nodes.check()


def test_a_slot_is_taken_once_and_free_again_after_its_holder() -> None:
    first = take_slot()
    second = take_slot()
    assert first.index != second.index
    assert not {first.loopback, first.pods, first.services} & {second.loopback, second.pods, second.services}
    os.close(first.lock)
    third = take_slot()
    assert third.index == first.index
    os.close(second.lock)
    os.close(third.lock)


def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    for key in (authority.issue("user", user="someone")[1], authority.signing_key("accounts")):
        assert key.stat().st_mode & 0o077 == 0
    assert (tmp_path / "certificates").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("image", "command"),
    [
        ("ghcr.io/skyproxy/operator:0.1.0", ["python", "-m", "skyproxy_operator"]),
        ("localhost:5000/operator@sha256:abc", ["python", "-m", "skyproxy_operator"]),
        ("tools", []),
    ],
)
def test_an_image_starts_what_its_containerfile_says(image: str, command: list[str]) -> None:
    from tests.e2e.kubelet.__main__ import entry_points

    assert entry_points(_REPOSITORY / "manifests" / "images")(image) == command
