"""The binaries of the control plane: found in the cache, or built into it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

VERSION = "1.20.2"

NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE_NAMES = ("kubelet", "kube-proxy", "pause")
"""What a real node needs besides."""


@dataclass(frozen=True)
class Binaries:
    """Where each program is."""

    directory: Path

    def __getitem__(self, name: str) -> str:
        if name not in NAMES:
            raise KeyError(name)
        return str(self.directory / name)


def cached_directory() -> Path:
    """Where the binaries are kept, whether they are there or not."""
    cache = Path(os.environ.get("SKYPROXY_CACHE") or Path.home() / ".cache" / "skyproxy")
    return cache / f"kubernetes-{VERSION}"


def ensure(*, nodes: bool = False) -> Binaries:
    """Gives the binaries; builds them first where any is missing, which takes minutes.

    Args:
        nodes: those of a real node, too.

    Raises:
        RuntimeError: the build failed; the message holds the end of its log.
    """
    directory = cached_directory()
    wanted = (*NAMES, *NODE_NAMES) if nodes else NAMES
    if not all(os.access(directory / "bin" / name, os.X_OK) for name in wanted):
        script = Path(__file__).with_name("build.sh")
        options = ["--node"] if nodes else []
        built = subprocess.run([script, *options, directory], capture_output=True, text=True, check=False)
        if built.returncode:
            raise RuntimeError(f"{script.name} failed:\n{built.stderr}")
    return Binaries(directory / "bin")
