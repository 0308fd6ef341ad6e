"""A worker behind a network of its own, whose link can be taken down: real TCP, no proxy. Needs root and Linux."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.programs import environment, port_in, wait_for


def why_not() -> str:
    """Why this machine has no such networks; an empty text where it has."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no program `ip`"
    name = f"skyproxy-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Link:
    """The cable between this machine and the worker's network.

    Attributes:
        url: where the worker listens, at its other end.
        token: the worker's.
        process: the worker.
        address, gateway: of the worker in its network, and of this machine there.
    """

    url: str
    token: str
    process: subprocess.Popen[bytes]
    namespace: str
    device: str
    address: str
    gateway: str

    def set(self, *, up: bool) -> None:
        """Plug the cable in, or pull it out: what is on its way is lost, and nobody is told."""
        _run("ip", "-n", self.namespace, "link", "set", self.device, "up" if up else "down")


@contextlib.contextmanager
def cable_between(one: Link, other: Link) -> Iterator[None]:
    """A cable between the networks of two workers, who reach each other over it at the addresses that we know."""
    mark = secrets.token_hex(3)
    ends = {one: f"sky{mark}c", other: f"sky{mark}d"}
    first, second = ends.values()
    _run("ip", "-n", one.namespace, "link", "add", first, "type", "veth", "peer", second, "netns", other.namespace)
    try:
        for end, device in ends.items():
            _run("ip", "-n", end.namespace, "link", "set", device, "up")
        for here, there in ((one, other), (other, one)):
            route = ["ip", "-n", here.namespace, "route", "add", f"{there.address}/32", "dev", ends[here]]
            _run(*route, "src", here.address)
        yield
    finally:
        _run("ip", "-n", one.namespace, "link", "del", first)


@contextlib.contextmanager
def silence_between(one: Link, other: Link) -> Iterator[None]:
    """What these workers send each other goes to this machine, which drops it without a word."""
    for here, there in ((one, other), (other, one)):
        gateway = ["via", here.gateway]
        _run("ip", "-n", here.namespace, "route", "add", f"{there.address}/32", *gateway)
    try:
        yield
    finally:
        for here, there in ((one, other), (other, one)):
            _run("ip", "-n", here.namespace, "route", "del", f"{there.address}/32")


@contextlib.contextmanager
def worker_behind_a_link(folder: Path, *arguments: str) -> Iterator[Link]:
    """A worker in a network namespace that a pair of virtual devices joins to this one."""
    mark = secrets.token_hex(3)
    namespace, ours, theirs = f"skyproxy-{mark}", f"sky{mark}a", f"sky{mark}b"
    third = int(mark[:2], 16)
    fourth = int(mark[2:4], 16) & 0xFC
    here, there = f"10.213.{third}.{fourth + 1}", f"10.213.{third}.{fourth + 2}"
    token = secrets.token_urlsafe(32)
    path, log = folder / "token", folder / "worker.log"
    path.write_text(token, encoding="ascii")
    path.chmod(0o600)
    with contextlib.ExitStack() as stack:
        _run("ip", "netns", "add", namespace)
        stack.callback(_run, "ip", "netns", "del", namespace)  # and with it both devices
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", namespace)
        _run("ip", "address", "add", f"{here}/30", "dev", ours)
        # Containers leave a machine that passes packets on; what comes from this namespace is for this machine.
        Path(f"/proc/sys/net/ipv4/conf/{ours}/forwarding").write_text("0", encoding="ascii")
        _run("ip", "link", "set", ours, "up")
        _run("ip", "-n", namespace, "address", "add", f"{there}/30", "dev", theirs)
        _run("ip", "-n", namespace, "link", "set", theirs, "up")
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "skyproxy_server", "--device", "cpu"]
        command += ["--host", there, "--port", "0", "--insecure", "--token-file", str(path), *arguments]
        stderr = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment()
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        port = wait_for(lambda: port_in(log, process), "the worker listens", 100)
        yield Link(f"ws://{there}:{port}", token, process, namespace, theirs, there, here)
