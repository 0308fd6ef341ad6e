"""The kubelet stand-in as a process of the run."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.control_plane.processes import Process

# Nodes and their GPUs.
NODES = {"gpu-0": 2, "gpu-1": 1, "cpu-0": 0}

_REPOSITORY = Path(__file__).resolve().parents[3]


class StandIn:
    """Nodes for a control plane; see tests/e2e/kubelet."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._process: Process | None = None

    def start(self) -> None:
        """Starts it; its nodes appear when it is up."""
        plane = self._plane
        certificate, key = plane.authority.issue("kubelet", plane.slot.loopback)
        self._process = Process(
            "kubelet stand-in",
            [
                *(sys.executable, "-m", "tests.e2e.kubelet"),
                f"--kubeconfig={plane.user_kubeconfig('kubelet-stand-in', group='system:masters')}",
                f"--slot={plane.slot.index}",
                f"--directory={plane.directory}",
                f"--certificate={certificate}",
                f"--key={key}",
                f"--authority={plane.authority.certificate}",
                *(f"--node={name}={gpus}" for name, gpus in NODES.items()),
            ],
            plane.directory / "kubelet.log",
            env={"PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'operator'}"},
            # Not SIGKILL: it has a bridge to remove.
            death_signal="TERM",
            pass_fds=[plane.slot.lock],
        )

    def check(self) -> None:
        """Raises RuntimeError when it has ended by itself."""
        if self._process is not None and self._process.ended:
            raise RuntimeError(f"the kubelet stand-in has ended:\n{self._process.tail()}")

    def stop(self) -> None:
        """Ends it and all Pods. Idempotent."""
        if self._process is not None:
            self._process.stop(30)
