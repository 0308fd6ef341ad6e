"""Real nodes as a process of the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.control_plane.addresses import Slot
from tests.e2e.control_plane.binaries import Binaries, cached_directory
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.control_plane.processes import Process, bound

# Nodes and their GPUs, as the scheduler counts them.
NODES = {"real-0": 2, "real-1": 1}
NEEDED = ("containerd", "runc", "iptables", "conntrack", "buildah", "mmdebstrap", "nsenter", "unshare")
PACKAGES = (
    "containerd runc containernetworking-plugins iptables conntrack socat ethtool kmod mmdebstrap buildah "
    "util-linux iproute2"
)

_REPOSITORY = Path(__file__).resolve().parents[3]
_IMAGES = _REPOSITORY / "tests" / "e2e" / "real" / "images.sh"
_BRIDGE_SECONDS = 60.0
_LONGEST_SOCKET = 107


def images() -> Path:
    """The store of a containerd with the images of this tree; builds it first where sources have changed.

    Raises:
        RuntimeError: the build failed; the message holds the end of its log.
    """
    with subprocess.Popen(
        bound([str(_IMAGES)], "TERM"),
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as build:
        try:
            output, errors = build.communicate()
        except BaseException:
            build.terminate()  # it ends what it has started
            raise
    if build.returncode:
        raise RuntimeError(f"{_IMAGES.name} failed:\n{errors}")
    return Path(output.strip())


class RealNodes:
    """Nodes for a control plane; see tests/e2e/real. Start them first: the control plane is on their bridge.

    Attributes:
        address: this machine's, for nodes and Pods.
        store: of a containerd, with the images.
    """

    def __init__(self, slot: Slot, directory: Path, binaries: Binaries, store: Path) -> None:
        self._slot = slot
        self._directory = directory
        self._binaries = binaries
        self.store = store
        self._process: Process | None = None
        self.address = slot.node_address(-1)

    def start(self, plane: ControlPlane) -> None:
        """Starts them, and waits until this machine is on their bridge. They appear when the control plane is up.

        Raises:
            RuntimeError: the kubelet could not make its sockets in so deep a folder, or there is no bridge in time.
        """
        if len(str(self.directory_of("real-0") / "kubelet" / "pod-resources" / "4294967295")) > _LONGEST_SOCKET:
            raise RuntimeError(f"the path of {self._directory} is too long for the sockets of a kubelet in it")
        for index, name in enumerate(NODES):
            plane.authority.issue(name, self._slot.node_address(index), name)
            made = plane.user_kubeconfig(f"system:node:{name}", group="system:nodes")
            place = self.directory_of(name)
            place.mkdir(parents=True)
            made.rename(place / "kubelet.kubeconfig")
        plane.user_kubeconfig("system:kube-proxy")
        self._process = Process(
            "real nodes",
            [
                *(sys.executable, "-m", "tests.e2e.real"),
                f"--kubeconfig={plane.user_kubeconfig('real-nodes', group='system:masters')}",
                f"--slot={self._slot.index}",
                f"--directory={self._directory}",
                f"--binaries={cached_directory() / 'bin'}",
                f"--images={self.store}",
                f"--stores={self.store.parent / 'nodes'}",
                *(f"--node={name}={gpus}" for name, gpus in NODES.items()),
            ],
            self._directory / "nodes.log",
            env={"PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'operator'}"},
            # Not SIGKILL: it has a bridge and control groups to remove.
            death_signal="TERM",
            pass_fds=[self._slot.lock],
        )
        self._wait_for_bridge()

    def directory_of(self, name: str) -> Path:
        """Where a node writes."""
        return self._directory / "nodes" / name

    def lose(self, name: str) -> None:
        """Ends a node at once with all that runs there, as if its power were gone."""
        (self.directory_of(name) / "lost").touch()

    def regain(self, name: str) -> None:
        """Starts a lost node again."""
        (self.directory_of(name) / "lost").unlink(missing_ok=True)

    def check(self) -> None:
        """Raises RuntimeError when they have ended by themselves."""
        if self._process is not None and self._process.ended:
            raise RuntimeError(f"the nodes have ended:\n{self._process.tail()}")

    def stop(self) -> None:
        """Ends them and all Pods. Idempotent."""
        if self._process is not None:
            self._process.stop(60)

    def _wait_for_bridge(self) -> None:
        deadline = time.monotonic() + _BRIDGE_SECONDS
        while True:
            self.check()
            with socket.socket() as probe:
                try:
                    probe.bind((self.address, 0))
                    return
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"no bridge for the nodes within {_BRIDGE_SECONDS:g} s: {error}") from error
            time.sleep(0.05)
