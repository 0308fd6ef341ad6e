"""The examples of every command's help, run as they are written: in a shell, in a home of its own, in stories."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyproxy.cli.examples import EXAMPLES, examples_text
from tests.integration.programs import environment

pytestmark = pytest.mark.skipif(os.name != "posix", reason="homes are chosen by HOME, and lines are a shell's")
SECONDS = 200.0

LIFE = {
    "skyproxy version --json",
    "skyproxy doctor",
    "skyproxy list --json",
    "skyproxy status dev",
    "skyproxy logs dev --follow --tail 100",
    "skyproxy top dev --interval 5",
    "skyproxy ui",
    "skyproxy ui dev --port 8900",
    "skyproxy connect dev --env",
    "skyproxy run --on dev train.py --epochs 3",
    "skyproxy run -m package.train",
    "skyproxy sessions list --on dev",
    "skyproxy sessions end exp1 --on dev",
    "skyproxy token rotate dev --timeout 2m",
    "skyproxy context list",
    "skyproxy context current",
    "skyproxy context use dev",
    "skyproxy context clear",
    "skyproxy context remove old",
    "skyproxy down dev",
}
JOBS = {
    "skyproxy run --on dev --detach --max-restarts 3 train.py",
    "skyproxy jobs list --on dev",
    "skyproxy attach night-run",
    "skyproxy logs --job night-run --follow",
    "skyproxy jobs logs night-run --follow",
    "skyproxy cancel night-run --on dev",
    "skyproxy jobs remove night-run",
}
PROGRAMS = {
    "skyproxy suspend dev",
    "skyproxy resume dev",
    "skyproxy move dev bigger",
    "skyproxy debug --list",
    "skyproxy debug",
    "skyproxy debug 1f3a90bc",
}
SERVING = {
    "skyproxy serve --tls",
    "skyproxy serve --port 7777 --device cpu",
    "skyproxy connect sky://gpu-box:8765#sha256:3f0c...",
    "skyproxy connect remote --certificate sha256:3f0c...",
}
CLUSTER = {
    "skyproxy up dev --gpus 1 --idle-timeout 30m",
    "skyproxy gpus --context production",
    "skyproxy install --namespace team --dry-run",
    "skyproxy uninstall --keep-computes",
}
NOT_HERE = {
    "skyproxy run --on dev --nproc-per-node gpu train.py": (
        "a process for each GPU needs one; tests/cli/test_lifecycle.py runs it with a number of processes"
    ),
    "skyproxy port-forward dev --local-port 8765": (
        "goes through an API server to a Pod; tests/e2e/test_command_line.py runs it on one"
    ),
    "skyproxy up ssh://me@gpu-box": (
        "needs an account on another machine; tests/providers/test_ssh.py runs it on a server of its own, which it can "
        "name only by --ssh-config"
    ),
}
"""Examples that no test runs as written, and why."""
STORIES = (LIFE, JOBS, PROGRAMS, SERVING, CLUSTER)

TRAIN = """
import argparse, torch, skyproxy
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
print("trained", epochs, torch.ones(epochs, device="sky").sum().item(), flush=True)
"""
NAMED = """
import torch, skyproxy
from skyproxy.contexts import ContextStore
node = skyproxy.connect("{url}", token="{token}", session="exp1")
node.put("x", torch.ones(3, device=node.devices[0]))
"""
HOLDS = """
import sys, torch, skyproxy
x = torch.zeros(2, device="sky")
for line in sys.stdin:
    x = x + 1
    print(x.sum().item(), flush=True)
"""
WAITS = """
import torch, skyproxy
def train():
    breakpoint()
    return 7
torch.ones(1, device="sky").cpu()
(node,) = skyproxy.list_nodes()
print("result", node.run(train), flush=True)
"""


class User:
    """Somebody at a shell, in a home of their own.

    Attributes:
        home: the folder, in which every line is typed.
        ran: the examples that came to a good end.
    """

    def __init__(self, home: Path, **variables: str) -> None:
        self.home = home
        self.ran: set[str] = set()
        folders = {"HOME": home, "XDG_CONFIG_HOME": home / "config", "XDG_STATE_HOME": home / "state"}
        self.environment = environment(**{name: str(folder) for name, folder in folders.items()}) | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        for name in [name for name in self.environment if name.startswith("KUBE") and name not in variables]:
            del self.environment[name]
        (home / "train.py").write_text(textwrap.dedent(TRAIN))
        (home / "package").mkdir()
        (home / "package" / "__init__.py").touch()
        (home / "package" / "train.py").write_text(textwrap.dedent(TRAIN))

    def start(self, line: str) -> Started:
        return Started(
            subprocess.Popen(
                ["sh", "-c", f"exec {line}"],
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def types(self, line: str, told: str = "", instead: str = "") -> str:
        """What a line prints, which must end well.

        Args:
            line: an example, or what a story needs besides.
            told: on its standard input.
            instead: the same line, with what stands for something in it replaced.
        """
        started = self.start(instead or line)
        started.give(told, ends=True)
        assert started.status() == 0, f"{instead or line}: {started.text}"
        self.ran.add(line)
        return started.text

    def watches(self, line: str, until: str, instead: str = "") -> str:
        """What a line that goes on until Ctrl-C prints; it has printed something by then, and ends in order."""
        started = self.start(instead or line)
        started.wait_for(until)
        started.process.send_signal(signal.SIGINT)
        assert started.status() in (0, 130), f"{instead or line}: {started.text}"
        assert "Traceback" not in started.text
        self.ran.add(line)
        return started.text


class Started:
    """A line that runs; what it prints is read all the time, and nothing of it lasts for ever."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.text = ""
        self._has_ended = False
        self._changed = threading.Condition()
        self._watchdog = threading.Timer(SECONDS, process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for part in iter(lambda: self.process.stdout.read(1), ""):  # type: ignore[union-attr]
            with self._changed:
                self.text += part
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: text in self.text or self._has_ended, SECONDS)
            assert text in self.text, f"{text!r} is not in: {self.text}"

    def give(self, text: str, *, ends: bool = False) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()
        if ends:
            self.process.stdin.close()

    def status(self) -> int:
        status = self.process.wait(SECONDS)
        self._watchdog.cancel()
        self._reader.join(30)
        return status

    def close(self) -> None:
        self.process.kill()
        self.status()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    made = User(tmp_path)
    yield made
    for row in json.loads(made.types("skyproxy list --json --provider local")):
        made.types(f"skyproxy down {row['name']}")


@pytest.fixture
def dev(user: User) -> User:
    """Somebody with a worker `dev` on this machine."""
    user.types("skyproxy up dev --provider local --gpus 0")
    return user


def test_each_example_is_run_in_one_story_or_named_with_its_reason() -> None:
    every = [line for lines in EXAMPLES.values() for line in lines]
    assert len(every) == len(set(every))
    told = [line for story in (*STORIES, NOT_HERE) for line in story]
    assert sorted(told) == sorted(every), "a new example belongs to a story here"
    assert len(NOT_HERE) <= 3, "an example that cannot be run is a poor one; think of another"
    assert all(examples_text(command).count("\n\n") == len(lines) for command, lines in EXAMPLES.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_from_its_first_program_to_its_end(dev: User) -> None:
    assert json.loads(dev.types("skyproxy version --json"))["skyproxy"]
    assert "broken" not in dev.types("skyproxy doctor")
    assert json.loads(dev.types("skyproxy list --json"))[0]["name"] == "dev"
    assert "Running" in dev.types("skyproxy status dev")
    assert "trained 3 3.0" in dev.types("skyproxy run --on dev train.py --epochs 3")
    assert "trained 1 1.0" in dev.types("skyproxy run -m package.train")
    dev.watches("skyproxy logs dev --follow --tail 100", "session")
    dev.watches("skyproxy top dev --interval 5", "sessions")
    dev.watches("skyproxy ui", "works once")
    dev.watches("skyproxy ui dev --port 8900", "http://127.0.0.1:8900/")
    printed = dev.types("skyproxy connect dev --env")
    url = re.search(r"SKYPROXY_URL=(\S+)", printed)
    assert url is not None, printed
    (token,) = [path for path in (dev.home / "state").rglob("token") if path.parent.name == "dev"]
    named = NAMED.format(url=url[1], token=token.read_text().strip())
    (dev.home / "named.py").write_text(named)
    dev.types("python named.py")
    assert "exp1" in dev.types("skyproxy sessions list --on dev")
    dev.types("skyproxy sessions end exp1 --on dev")
    assert "dev has a new token" in dev.types("skyproxy token rotate dev --timeout 2m")
    dev.types("skyproxy up old --provider local --gpus 0 --no-use")
    assert "old" in dev.types("skyproxy context list")
    assert "dev" in dev.types("skyproxy context current")
    dev.types("skyproxy context clear")
    dev.types("skyproxy context use dev")
    dev.types("skyproxy context remove old")
    assert "dev is gone" in dev.types("skyproxy down dev")
    assert dev.ran >= LIFE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_of_a_night(dev: User) -> None:
    name = dev.types("skyproxy run --on dev --detach --max-restarts 3 train.py").split()[0]
    assert name.startswith("train-")
    assert name in dev.types("skyproxy jobs list --on dev")
    (dev.home / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    dev.types("skyproxy run --on dev --detach --name night-run slow.py")
    following = dev.start("skyproxy attach night-run")
    following.wait_for("begun")
    others = ["skyproxy logs --job night-run --follow", "skyproxy jobs logs night-run --follow"]
    started = [dev.start(line) for line in others]
    for one in started:
        one.wait_for("begun")
    assert "was cancelled" in dev.types("skyproxy cancel night-run --on dev")
    assert following.status() != 0  # the job's own end
    assert "night-run was cancelled" in following.text
    assert [one.status() for one in started] == [0, 0], [one.text for one in started]
    dev.ran |= {"skyproxy attach night-run", *others}
    dev.types("skyproxy jobs remove night-run")
    assert dev.ran >= JOBS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_that_are_suspended_moved_and_debugged(dev: User) -> None:
    (dev.home / "holds.py").write_text(HOLDS)
    program = dev.start("python holds.py")
    program.give("\n")
    program.wait_for("2.0")
    assert "dev is suspended" in dev.types("skyproxy suspend dev")
    assert "dev is ready" in dev.types("skyproxy resume dev")
    dev.types("skyproxy up bigger --provider local --gpus 0 --no-use")
    assert "1 session moved from dev to bigger" in dev.types("skyproxy move dev bigger")
    program.give("\n", ends=True)
    program.wait_for("4.0")
    assert program.status() == 0, program.text
    dev.types("skyproxy debug --list")
    (dev.home / "waits.py").write_text(WAITS)
    dev.environment["SKYPROXY_DEBUG"] = "1"
    for line in ("skyproxy debug", "skyproxy debug 1f3a90bc"):
        waiting = dev.start("python waits.py")
        waiting.wait_for("skyproxy debug")
        (row,) = json.loads(dev.types("skyproxy debug --list --json"))
        dev.types(line, told="continue\n", instead=line.replace("1f3a90bc", row["id"]))
        waiting.wait_for("result 7")
        assert waiting.status() == 0, waiting.text
    assert dev.ran >= PROGRAMS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_is_served_to_another_machine(user: User, tmp_path: Path) -> None:
    served = user.start("skyproxy serve --tls")
    try:
        served.wait_for("It asks for the token")
        served.wait_for("listening on")
        link = re.search(r"(sky://\S+)", served.text)
        assert link is not None
        token = (user.home / "state" / "skyproxy" / "serving" / "token").read_text()
        laptop = tmp_path / "laptop"
        laptop.mkdir()
        client = User(laptop)
        # The port is the usual one, and the address is that of this machine on the network: here, of the loopback.
        here = re.sub(r"//[^#]*:", "//127.0.0.1:", link[1], count=1)
        client.types(
            "skyproxy connect sky://gpu-box:8765#sha256:3f0c...",
            told=token,
            instead=f"skyproxy connect {shlex.quote(here)} --name remote --server-name {shlex.quote(_host(link[1]))}",
        )
        client.types(
            "skyproxy connect remote --certificate sha256:3f0c...",
            instead=f"skyproxy connect remote --certificate {here.partition('#')[2]}",
        )
        served.process.send_signal(signal.SIGINT)
        served.status()
        user.ran |= {"skyproxy serve --tls"} | client.ran
        user.watches("skyproxy serve --port 7777 --device cpu", "listening on 127.0.0.1 port 7777")
    finally:
        served.close()
    assert user.ran >= SERVING


def _host(link: str) -> str:
    return link.removeprefix("sky://").rpartition("#")[0].rpartition(":")[0].strip("[]")


class Cluster:
    """An API server with one GPU node, on which a worker is ready as soon as it is asked for."""

    def __init__(self) -> None:
        self.computes: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []

    async def __call__(self, request: Any) -> Any:
        from aiohttp import web

        folder, _, name = request.path.rpartition("/")
        if request.path.endswith("/api/v1/nodes"):
            gpu = {"allocatable": {"nvidia.com/gpu": "2"}, "conditions": [{"type": "Ready", "status": "True"}]}
            labels = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
            item = {"metadata": {"name": "node-7", "labels": labels}, "spec": {}, "status": gpu}
            return web.json_response({"items": [item]})
        if request.path == "/apis/apps/v1":
            return web.json_response({"resources": [{"kind": "Deployment", "name": "deployments", "namespaced": True}]})
        if request.method == "DELETE":
            self.deleted.append(request.path)
            return web.json_response({})
        if folder.endswith("/computes") and request.method == "PATCH":
            ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "observedGeneration": 1}
            given = json.loads(await request.text())
            metadata = {**given["metadata"], "uid": "u", "generation": 1, "resourceVersion": "1"}
            self.computes[name] = {**given, "metadata": metadata, "status": ready}
        if folder.endswith("/computes"):
            missing = {"reason": "NotFound", "details": {"name": name}}
            found = self.computes.get(name)
            return web.json_response(found or missing, status=200 if found else 404)
        items = list(self.computes.values()) if request.path.endswith("/computes") else []
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_asyncio")
    from tests.kubernetes.conftest import ApiServer

    cluster, server = Cluster(), ApiServer()
    server.handler = cluster
    config = tmp_path / "kubeconfig"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: production\n"
        f'clusters: [{{name: c, cluster: {{server: "{server.url}"}}}}]\nusers: [{{name: u, user: {{token: secret}}}}]\n'
        "contexts: [{name: production, context: {cluster: c, user: u, namespace: team}}]\n"
    )
    try:
        user = User(tmp_path, KUBECONFIG=str(config))
        assert "dev is ready" in user.types("skyproxy up dev --gpus 1 --idle-timeout 30m")
        spec = cluster.computes["dev"]["spec"]
        assert (spec["resources"]["nvidia.com/gpu"], spec["idleTimeout"]) == ("1", "30m"), spec
        assert "A100" in user.types("skyproxy gpus --context production")
        assert "kind: Deployment" in user.types("skyproxy install --namespace team --dry-run")
        assert "CustomResourceDefinition computes.skyproxy.dev: team/dev" in user.types(
            "skyproxy uninstall --keep-computes"
        )
        assert any("/deployments/" in path for path in cluster.deleted)
    finally:
        server.close()
    assert user.ran >= CLUSTER
