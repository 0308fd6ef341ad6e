"""Two machines, two commands, encrypted: two network namespaces with a distant, narrow and lossy network in between.

Where the kernel has no netem, `benchmarks/delay_proxy.py` stands on the client's side, with the same delay and the same
rate, and without losses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.firstrun.pages import ROOT, blocks

Environment = Callable[..., Path]

pytestmark = [pytest.mark.firstrun, pytest.mark.timeout(900)]

WORKERS_ADDRESS, CLIENTS_ADDRESS = "192.0.2.1", "192.0.2.2"  # RFC 5737: nobody's
NETWORK = ("delay", "25ms", "loss", "1%", "rate", "20mbit")
"""In each direction: 50 ms for a round trip."""
WAIT_SECONDS = 300.0
PROGRAM = """
import torch, skyproxy
x = torch.arange(1 << 18, dtype=torch.float32)
y = x.to("sky:0")
(node,) = skyproxy.list_nodes()
assert torch.equal((y * 2).cpu(), x * 2)
assert node.process_id is None, "not an embedded worker"
model = torch.nn.Linear(8, 1).to("sky:0")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.ones(4, 8, device="sky:0")).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(node.url, loss.isfinite().item())
"""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    assert program is not None
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


@dataclass(frozen=True)
class Network:
    """Two namespaces that reach each other.

    Attributes:
        worker, client: their names.
        has_netem: whether the kernel makes the network distant by itself.
    """

    worker: str
    client: str
    has_netem: bool


@pytest.fixture
def network() -> Iterator[Network]:
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip", path=f"{os.environ.get('PATH')}:/usr/sbin"):
        pytest.skip("network namespaces need root and iproute2")
    worker, client = (f"sky-{side}-{os.getpid()}" for side in ("w", "c"))
    made = ip("netns", "add", worker)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        for command in (
            ("netns", "add", client),
            ("link", "add", "sky0", "netns", worker, "type", "veth", "peer", "name", "sky0", "netns", client),
            ("-n", worker, "addr", "add", f"{WORKERS_ADDRESS}/24", "dev", "sky0"),
            ("-n", client, "addr", "add", f"{CLIENTS_ADDRESS}/24", "dev", "sky0"),
            *(("-n", name, "link", "set", link, "up") for name in (worker, client) for link in ("lo", "sky0")),
        ):
            done = ip(*command)
            if done.returncode != 0:
                pytest.skip(f"no veth here: {' '.join(command)}: {done.stderr.strip()}")
        netem = [
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "sky0", "root", "netem", *NETWORK)
            for name in (worker, client)
        ]
        yield Network(worker, client, all(done.returncode == 0 for done in netem))
    finally:
        for name in (worker, client):
            ip("netns", "del", name)


def first_match(process: subprocess.Popen[str], pattern: str) -> str:
    """What is first found in the lines that a process writes; the pattern has one group."""
    assert process.stdout is not None
    watchdog = threading.Timer(WAIT_SECONDS, process.kill)
    watchdog.start()
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError("".join(lines))
    finally:
        watchdog.cancel()


@contextlib.contextmanager
def running(namespace: str, *command: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program in a namespace; `ip` becomes it, so it is this process that ends."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command],
        env=env,
        cwd=env["HOME"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def run(namespace: str, *command: str, env: dict[str, str], told: str = "") -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, *command],
        env=env,
        cwd=env["HOME"],
        input=told,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def machine(home: dict[str, str], tmp_path: Path, name: str) -> dict[str, str]:
    folder = tmp_path / name
    folder.mkdir()
    paths = os.pathsep.join([home["PATH"], "/usr/sbin", "/sbin"])
    return home | {key: str(folder) for key in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")} | {"PATH": paths}


def test_two_machines_two_commands(
    environment: Environment, home: dict[str, str], tmp_path: Path, network: Network
) -> None:
    there, here = machine(home, tmp_path, "there"), machine(home, tmp_path, "here")
    serves, python = environment("server"), environment("torch")
    with contextlib.ExitStack() as stack:
        command = (str(serves.parent / "skyproxy"), "serve", "--tls", "--port", "0", "--advertise", WORKERS_ADDRESS)
        worker = stack.enter_context(running(network.worker, *command, env=there))
        link = first_match(worker, r"(sky://\S+)")
        assert link.startswith(f"sky://{WORKERS_ADDRESS}:")
        if not network.has_netem:
            address = link.removeprefix("sky://").partition("#")[0]
            script = str(ROOT / "benchmarks" / "delay_proxy.py")
            options = ("--to", address, "--rtt-ms", "50", "--mbit-up", "20", "--mbit-down", "20")
            proxy = stack.enter_context(running(network.client, sys.executable, script, *options, env=here))
            assert proxy.stdout is not None
            (port,) = json.loads(proxy.stdout.readline())["ports"]
            link = link.replace(address, f"127.0.0.1:{port}")
        token = Path(there["XDG_STATE_HOME"], "skyproxy", "serving", "token").read_text(encoding="ascii")
        run(network.client, str(python.parent / "skyproxy"), "connect", link, env=here, told=token)
        assert "tensor(" in run(network.client, str(python), "-c", "\n".join(blocks("README.md", "python")), env=here)
        said = run(network.client, str(python), "-c", PROGRAM, env=here)
        assert said.startswith("wss://"), said
        assert said.rstrip().endswith("True"), said
        listed = json.loads(run(network.client, str(python.parent / "skyproxy"), "list", "--json", env=here))
        assert [(row["phase"], row["ready"]) for row in listed] == [("Running", True)]
        run(network.client, str(python.parent / "skyproxy"), "context", "remove", listed[0]["name"], env=here)


def test_what_is_not_encrypted_does_not_leave_the_machine(
    environment: Environment, home: dict[str, str], tmp_path: Path, network: Network
) -> None:
    """A worker without --tls listens to its own machine only, and a client sends it no token."""
    there, here = machine(home, tmp_path, "there"), machine(home, tmp_path, "here")
    serves, python = environment("server"), environment("torch")
    with running(network.worker, str(serves.parent / "skyproxy"), "serve", "--port", "0", env=there) as worker:
        port = first_match(worker, r"listening on 127\.0\.0\.1 port (\d+)")
        done = subprocess.run(
            ["ip", "netns", "exec", network.client, str(python.parent / "skyproxy"), "connect"]
            + [f"ws://{WORKERS_ADDRESS}:{port}"],
            env=here,
            cwd=here["HOME"],
            input="a-token-of-some-length\n",
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert "would not be encrypted" in done.stderr
