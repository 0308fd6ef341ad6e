"""Container(): the commands it gives, and workers that really start; the engine itself is a stand-in that records.

No container engine runs where these tests do. The stand-in starts what a container would run as a process of this
machine, so the token, the life-line and the published port are real; isolation, images and GPUs are not shown here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, SessionLostError, WorkerStartError
from skyproxy.providers import Image, PipIndex, WorkerSpec
from skyproxy.providers.container import Container
from skyproxy.providers.container_engine import gpu_options
from skyproxy.providers.container_image import container_image, containerfile

ENGINE = """#!{python}
import json, os, shutil, subprocess, sys, socket, time
home = {home!r}
arguments = sys.argv[1:]
with open(home + "/calls", "a") as file:
    file.write(json.dumps([arguments, os.environ.get("SECRET")]) + "\\n")
if arguments[0] == "images":
    print("using cgroups-v1 is deprecated", file=sys.stderr)  # as podman says of old machines, and no answer
    print("abc" if os.path.exists(home + "/built-" + arguments[-1].replace(":", "-")) else "", end="")
elif arguments[0] == "build":
    tag = arguments[arguments.index("--tag") + 1]
    assert os.path.exists(arguments[-1] + "/skyproxy-source/skyproxy_server/__main__.py")
    shutil.copy(arguments[-1] + "/Dockerfile", home)
    open(home + "/built-" + tag.replace(":", "-"), "w").close()
elif arguments[0] == "run":
    name = arguments[arguments.index("--name") + 1]
    command = arguments[arguments.index("python3"):]
    inside = command.index("--port") + 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    share = [a for a in arguments if a.startswith("container:")]
    owner = share[0].partition(":")[2] if share else name
    open(home + "/port-" + owner + "-" + command[inside], "w").write(port)
    command[inside] = port
    if os.path.exists(home + "/broken"):
        sys.exit("exec format error")
    if not os.path.exists(home + "/slow"):
        os.execv(sys.executable, [sys.executable, *command[1:]])
    status = subprocess.call([sys.executable, *command[1:]])
    while not os.path.exists(home + "/asked"):  # it tells of the end once somebody has asked
        time.sleep(0.05)
    sys.exit(128 - status)
elif arguments[0] == "inspect":
    open(home + "/asked", "w").close()
    print("false")
elif arguments[0] == "--version":
    print("podman version 4.3.1" if os.path.exists(home + "/is-podman") else "Docker version 29.3.1, build c2be9cc")
    print("using cgroups-v1 is deprecated", file=sys.stderr)
elif arguments[0] == "image":
    if not os.path.exists(home + "/pulled"):
        sys.exit("Error: No such image")
    print("10001:0" if "guarded" in arguments[-1] else "")
elif arguments[0] == "pull":
    open(home + "/pulled", "w").close()
elif arguments[0] not in ("network", "rm", "ps", "port"):
    sys.exit("what docker knows and podman does not, or the other way round: " + arguments[0])
elif arguments[0] == "port":
    print("127.0.0.1:" + open(home + "/port-" + arguments[1] + "-" + arguments[2].partition("/")[0]).read())
"""


class Engine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "docker"
        self.path.write_text(ENGINE.format(python=sys.executable, home=str(folder)), encoding="utf-8")
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line)[0] for line in (self.folder / "calls").read_text().splitlines()]

    def named(self, name: str) -> list[list[str]]:
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def value_of(call: list[str], option: str) -> list[str]:
    return [call[index + 1] for index, part in enumerate(call) if part == option]


@sky.compute
def where() -> tuple[int, str, str | None]:
    info = sky.instance_info()
    return info.rank, info.head_addr, os.getenv("SECRET")


@sky.compute
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_how_a_worker_ended_is_told_also_where_the_engine_takes_its_time(engine: Engine) -> None:
    (engine.folder / "slow").touch()
    with sky.Compute(name="slow", provider=Container(cli=str(engine.path)), image="worker:1") as pool:
        with pytest.raises(SessionLostError, match=r"The worker is gone: its process .*SIGKILL"):
            die() >> pool
    assert engine.named("inspect")[0][-1].startswith("skyproxy-slow-")


def test_two_nodes_are_two_containers_in_a_network(engine: Engine) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with sky.Compute(
        name="net",
        provider=Container(cli=str(engine.path)),
        nodes=2,
        vcpus=4,
        memory_gb=2,
        image="worker:1",
        env={"SECRET": "hidden-value"},
        volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache"}],
    ) as pool:
        results = where() @ pool
    (network,) = [call[-1] for call in engine.named("network") if call[1] == "create"]
    assert results == [(0, f"{network}-0", "hidden-value"), (1, f"{network}-0", "hidden-value")]
    runs = engine.named("run")
    assert [value_of(run, "--network") for run in runs] == [[network], [network]]
    assert {value_of(run, "--hostname")[0] for run in runs} == {f"{network}-0", f"{network}-1"}
    for run in runs:
        assert value_of(run, "--publish") == ["127.0.0.1::8765"]
        assert value_of(run, "--cpus") == ["4"]
        assert value_of(run, "--memory") == [str(2 << 30)]
        assert value_of(run, "--volume") == ["skyproxy-cache:/cache"]
        assert "SECRET" in value_of(run, "--env")
        assert "--rm" in run
        assert "worker:1" in run
        # Neither the token nor a variable's value is where the process list shows it.
        assert not any("hidden-value" in part for part in run)
    assert ["network", "rm", network] in engine.calls
    assert engine.named("build") == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_the_nodes_of_an_elastic_pool_share_a_network(engine: Engine) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    provider = Container(cli=str(engine.path))
    with sky.Compute(name="elastic", provider=provider, nodes=sky.Nodes(2, 2), image="worker:1") as pool:
        results = where() @ pool
        (network,) = [call[-1] for call in engine.named("network") if call[1] == "create"]
        runs = engine.named("run")
        assert [value_of(run, "--network") for run in runs] == [[network], [network]]
        assert {rank for rank, _, _ in results} == {0, 1}
        heads = {head for _, head, _ in results}
        assert len(heads) == 1
        assert heads <= {value_of(run, "--hostname")[0] for run in runs}
    assert engine.calls[-1] == ["network", "rm", network]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_containers_are_confined_as_pods_are(engine: Engine) -> None:
    provider = Container(cli=str(engine.path))
    with sky.Compute(name="tight", provider=provider, procs_per_node=2, image="worker:1", env={"HOME": "/x"}):
        pass
    for run in engine.named("run"):
        assert {"--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"} <= set(run)
        assert {"--volume=/tmp", "--volume=/home/worker"} <= set(run)
        assert run.index("--env=HOME=/home/worker") < run.index("HOME")
        assert not {"--privileged", "--cap-add"} & {part.partition("=")[0] for part in run}
    # Volumes without a name go with their container.
    assert {call[1] for call in engine.named("rm")} == {"-fv"}


def test_an_image_that_is_built_has_a_home_for_every_user() -> None:
    assert "RUN mkdir -p -m 1777 /home/worker" in containerfile(Image(base="debian")).splitlines()


def test_processes_of_a_node_share_its_network(engine: Engine) -> None:
    provider = Container(cli=str(engine.path))
    with sky.Compute(name="procs", provider=provider, procs_per_node=2, image="worker:1") as pool:
        assert [result[:2] for result in where() @ pool] == [(0, "127.0.0.1"), (1, "127.0.0.1")]
        first, second = engine.named("run")
        assert value_of(first, "--publish") == ["127.0.0.1::8765", "127.0.0.1::8766"]
        assert (
            value_of(second, "--network") == value_of(second, "--ipc") == [f"container:{value_of(first, '--name')[0]}"]
        )
        assert second[-1] == "8766"
        restarted = asyncio.run(pool.launched.restart(1))
        assert restarted.rank == 1
        with pytest.raises(WorkerStartError, match="rank 0"):
            asyncio.run(pool.launched.restart(0))


def test_an_image_is_built_once(engine: Engine) -> None:
    image = Image(pip=["einops"], env={"SECRET": "of the image"})
    for _ in range(2):
        with sky.Compute(provider=Container(cli=str(engine.path)), image=image) as pool:
            assert (where() >> pool)[2] == "of the image"
    (build,) = engine.named("build")
    tag = value_of(build, "--tag")[0]
    assert all(tag in run for run in engine.named("run"))


def test_what_a_build_does() -> None:
    index = PipIndex(url="https://download.pytorch.org/whl/cpu", packages=["torch"])
    text = containerfile(Image(base="debian", pip=["torch==2.13.0", "einops"], pip_indexes=[index], apt=["git"]))
    lines = text.splitlines()
    assert lines[:2] == ["FROM debian", "USER 0"]
    assert lines[-1].startswith("ENV ")
    assert "apt-get install -y --no-install-recommends git &&" in lines[3]
    torch = ["python3", "-m", "pip", "install", "--no-deps", "--index-url", index.url, "torch==2.13.0"]
    assert json.loads(lines[4].removeprefix("RUN ")) == torch
    assert {"einops", "psutil>=5.9"} <= set(json.loads(lines[5].removeprefix("RUN ")))


def test_who_runs_in_the_base_runs_in_what_is_built_on_it(engine: Engine) -> None:
    asyncio.run(container_image(str(engine.path), Image(base="guarded", pip=["einops"]), gpus=False))
    assert [call[0] for call in engine.calls[:3]] == ["image", "pull", "image"]
    assert containerfile(Image(base="guarded"), "10001:0").splitlines()[-1] == "USER 10001:0"
    assert (engine.folder / "Dockerfile").read_text().splitlines()[-1] == "USER 10001:0"


def test_gpus_are_passed_through(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyproxy.providers.container.devices_of_node", lambda node, nodes: ["2", "3"])
    with sky.Compute(provider=Container(cli=str(engine.path)), accelerator="A100:2", image="worker:1"):
        pass
    assert value_of(engine.named("run")[0], "--gpus") == ['"device=2,3"']
    (engine.folder / "is-podman").touch()  # also where it is called docker
    with sky.Compute(provider=Container(cli=str(engine.path)), accelerator="A100:2", image="worker:1"):
        pass
    assert value_of(engine.named("run")[1], "--device") == ["nvidia.com/gpu=2", "nvidia.com/gpu=3"]
    assert asyncio.run(gpu_options(str(engine.path), 2)) == [
        *("--device", "nvidia.com/gpu=0"),
        *("--device", "nvidia.com/gpu=1"),
    ]


def test_one_that_does_not_come_up_leaves_nothing(engine: Engine) -> None:
    (engine.folder / "broken").touch()
    with pytest.raises(WorkerStartError, match=r"(?s)rank \d, container .*exec format error"):
        sky.Compute(provider=Container(cli=str(engine.path)), nodes=2, image="worker:1").start()
    assert len([call for call in engine.named("network") if call[1] == "rm"]) == 1


def test_an_engine_that_does_not_answer_is_named(tmp_path: Path) -> None:
    silent = tmp_path / "docker"
    silent.write_text("#!/bin/sh\necho Cannot connect to the daemon >&2\nexit 1\n", encoding="utf-8")
    silent.chmod(0o755)
    with pytest.raises(
        ConfigurationError, match=r"(?s)engine does not answer.*Cannot connect to the daemon.*Local\(\)"
    ):
        sky.Compute(provider=Container(cli=str(silent))).start()


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="docker or podman"):
        sky.Compute(provider=Container()).start()


@pytest.mark.parametrize("spec", [WorkerSpec("a", keep=True), WorkerSpec("a", options={"colour": "red"})])
def test_what_it_cannot_give_is_an_error(spec: WorkerSpec, engine: Engine) -> None:
    with pytest.raises(ConfigurationError):
        asyncio.run(Container(cli=str(engine.path)).launch(spec, lambda progress: None))


@pytest.mark.skipif(shutil.which("docker") is None, reason="the docker client is not installed")
def test_the_real_client_without_its_daemon_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(ConfigurationError, match="engine does not answer"):
        sky.Compute(provider=Container(cli="docker")).start()
