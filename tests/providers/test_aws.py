"""AWS(): against moto's server, which speaks EC2's language and runs nothing.

What an instance would run is shown in two parts: the script is checked by bash, and a worker is started here with the
token and the certificate that the script holds, at the address where the provider looks for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers import Accelerator, Image, PipIndex, Progress, WorkerSpec
from skyproxy.providers import aws as aws_module
from skyproxy.providers.aws import AWS
from skyproxy.providers.aws_bootstrap import SecretStore, new_keys, startup_script
from skyproxy.providers.aws_catalogue import instance_type_for
from skyproxy.providers.local import free_port
from tests.integration.programs import wait_for

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")
REGION = "eu-central-1"
PACKAGE: dict[str, Any] = {"package": "skyproxy @ https://example.org/s.whl"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = dict(os.environ) | {"MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true"}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment) as server:
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None
                threading.Event().wait(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture
def ec2(url: str) -> Any:
    return boto3.client("ec2", endpoint_url=url, region_name=REGION)


@pytest.fixture(scope="module")
def ami(url: str) -> str:
    client = boto3.client(
        "ec2", endpoint_url=url, region_name=REGION, aws_access_key_id="test", aws_secret_access_key="test"
    )
    return str(client.describe_images()["Images"][0]["ImageId"])


def states(ec2: Any, pool: str) -> list[str]:
    found = ec2.describe_instances(Filters=[{"Name": "tag:skyproxy:pool", "Values": [pool]}])["Reservations"]
    return [row["State"]["Name"] for group in found for row in group["Instances"]]


def groups(ec2: Any) -> list[str]:
    return [g["GroupName"] for g in ec2.describe_security_groups()["SecurityGroups"] if g["GroupName"] != "default"]


def script_of(ec2: Any, instance: str) -> str:
    data = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")["UserData"]["Value"]
    return base64.b64decode(data).decode()


def file_in(script: str, name: str) -> str:
    found = re.search(rf"cat > \S*/{re.escape(name)} <<'SKYPROXY_END'\n(.*?)\nSKYPROXY_END", script, re.DOTALL)
    assert found is not None
    return found[1]


class Here(AWS):
    """Reaches the instances on this machine, where it starts what they would run."""

    def __init__(self, ec2: Any, folder: Path, **options: Any) -> None:
        super().__init__(region=REGION, allow_from="203.0.113.7/32", poll_seconds=0.1, **options)
        self.ec2 = ec2
        self.folder = folder
        self.ports: dict[tuple[str, int], int] = {}
        self.workers: list[subprocess.Popen[bytes]] = []

    def reach(self, instance: Mapping[str, Any], local_rank: int) -> tuple[str, int]:
        key = (instance["InstanceId"], local_rank)
        if key not in self.ports:
            self.ports[key] = free_port()
            self.boot(instance["InstanceId"], self.ports[key])
        return "127.0.0.1", self.ports[key]

    def boot(self, instance: str, port: int) -> None:
        script = script_of(self.ec2, instance)
        command = [sys.executable, "-m", "skyproxy_server", "--port", str(port), "--device", "cpu"]
        for option, name in (("token-file", "token"), ("tls-cert", "tls.crt"), ("tls-key", "tls.key")):
            path = self.folder / f"{port}-{name}"
            path.touch(mode=0o600)
            path.write_text(file_in(script, name), encoding="ascii")
            command += [f"--{option}", str(path)]
        self.workers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()


@sky.compute
def where() -> tuple[int, int]:
    info = sky.instance_info()
    return info.rank, len(info.peers)


def test_instances_come_up_are_used_and_go(url: str, ami: str, ec2: Any, tmp_path: Path) -> None:
    provider = Here(ec2, tmp_path, endpoint_url=url, image_id=ami, package="skyproxy @ https://example.org/s.whl")
    seen: list[Progress] = []
    try:
        with sky.Compute(name="works", provider=provider, nodes=2, vcpus=8, on_event=seen.append) as pool:
            assert where() @ pool == [(0, 2), (1, 2)]
            assert [endpoint.url[:6] for endpoint in pool.launched.endpoints] == ["wss://"] * 2
            assert states(ec2, "works") == ["running"] * 2
            (group,) = groups(ec2)
            rules = ec2.describe_security_groups(GroupNames=[group])["SecurityGroups"][0]["IpPermissions"]
            assert {r["CidrIp"] for rule in rules for r in rule["IpRanges"]} == {"203.0.113.7/32"}
            assert asyncio.run(pool.launched.restart(1)).rank == 1
        assert states(ec2, "works") == ["terminated"] * 2
        assert groups(ec2) == []
        assert any("2 x c7i.2xlarge" in step.message for step in seen)
    finally:
        provider.end()


def test_instances_of_a_program_that_ends_without_closing_are_terminated(
    url: str, ami: str, ec2: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import atexit, pathlib, runpy
import boto3
import skyproxy as sky

Here = runpy.run_path({__file__!r})["Here"]
ec2 = boto3.client("ec2", endpoint_url={url!r}, region_name={REGION!r})
package = "skyproxy @ https://example.org/s.whl"
provider = Here(ec2, pathlib.Path({str(tmp_path)!r}), endpoint_url={url!r}, image_id={ami!r}, package=package)
atexit.register(provider.end)  # the processes that stand for what instances run
pool = sky.Compute(name="unclosed", provider=provider, nodes=2, vcpus=8)
pool.start()
print(pool.world_size, flush=True)
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "could not be closed" not in done.stderr
    assert states(ec2, "unclosed") == ["terminated"] * 2


def test_a_launch_that_is_cancelled_leaves_nothing(url: str, ami: str, ec2: Any) -> None:
    class Never(AWS):
        def reach(self, instance: Mapping[str, Any], local_rank: int) -> tuple[str, int]:
            return "127.0.0.1", 1  # nobody listens there

    provider = Never(
        region=REGION, endpoint_url=url, image_id=ami, allow_from="203.0.113.7/32", poll_seconds=0.05, **PACKAGE
    )
    with pytest.raises(WorkerStartError, match="installs its software"):
        sky.Compute(name="slow", provider=provider, timeout=5).start()
    assert states(ec2, "slow") == ["terminated"]
    assert groups(ec2) == []


def test_an_elastic_pool_asks_for_single_instances_and_ends_each(url: str, ami: str, ec2: Any, tmp_path: Path) -> None:
    provider = Here(ec2, tmp_path, endpoint_url=url, image_id=ami, **PACKAGE)
    limits = sky.Nodes(0, 2, idle=0.1)
    try:
        with sky.Compute(name="elastic", provider=provider, nodes=limits, vcpus=8) as pool:
            assert states(ec2, "elastic-0") == []
            assert pool.run(pow, 2, 3) == 8
            wait_for(lambda: states(ec2, "elastic-0") == ["terminated"], "the idle instance is terminated", 100.0)
            assert pool.run(pow, 2, 4) == 16
        assert states(ec2, "elastic-0") == ["terminated"] * 2
        assert states(ec2, "elastic-1") == []
        assert groups(ec2) == []
    finally:
        provider.end()


def test_an_elastic_pool_that_is_closed_ends_instances_that_nobody_used(url: str, ami: str, ec2: Any) -> None:
    class Never(AWS):
        def reach(self, instance: Mapping[str, Any], local_rank: int) -> tuple[str, int]:
            return "127.0.0.1", 1  # nobody listens there

    provider = Never(
        region=REGION, endpoint_url=url, image_id=ami, allow_from="203.0.113.7/32", poll_seconds=0.05, **PACKAGE
    )
    with sky.Compute(name="unused", provider=provider, nodes=sky.Nodes(0, 1)) as pool:
        future = pool.submit(pow, 2, 3)
        wait_for(lambda: states(ec2, "unused-0") == ["running"], "the instance runs", 100.0)
    assert future.cancelled()
    assert states(ec2, "unused-0") == ["terminated"]
    assert groups(ec2) == []


def test_what_ec2_refuses_is_told_and_leaves_nothing(url: str, ami: str, ec2: Any) -> None:
    options = {**PACKAGE, "endpoint_url": url, "image_id": ami, "allow_from": "203.0.113.7/32"}
    provider = AWS(region=REGION, instance_type="no.such", **options)
    with pytest.raises(WorkerStartError, match=r"EC2 does not provide 1 x no\.such"):
        sky.Compute(name="refused", provider=provider).start()
    assert groups(ec2) == []


def test_it_installs_no_package_by_a_name_that_anybody_could_take(
    url: str, ami: str, ec2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        noted: Mapping[str, Any] = {"url": "file:///home/me/skyproxy"}

        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return json.dumps(self.noted)

    monkeypatch.setattr(aws_module.importlib.metadata, "distribution", lambda name: Installed())
    with pytest.raises(ConfigurationError, match=r"on no package index: AWS\(package='skyproxy @ https://"):
        sky.Compute(name="unknown", provider=AWS(region=REGION, endpoint_url=url, image_id=ami)).start()
    assert states(ec2, "unknown") == []
    Installed.noted = {"url": "https://host/skyproxy.whl"}
    assert aws_module._own_source() == "skyproxy @ https://host/skyproxy.whl"
    Installed.noted = {"url": "https://host/repository", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert aws_module._own_source() == "skyproxy @ git+https://host/repository@abc"


def a_script(**changes: Any) -> str:
    values: dict[str, Any] = {
        "keys": new_keys(),
        "token": "t" * 32,
        "python": "3.11",
        "apt": ["git"],
        "install_steps": [["--no-deps", "--index-url", "https://example.org/whl", "torch==2.13.0"], ["a[b]>=1"]],
        "env": {"A": 'with "quotes" and $HOME'},
        "name": "p",
        "nodes": 2,
        "procs_per_node": 2,
        "idle_seconds": 600.0,
        "lifetime_seconds": None,
    }
    return startup_script(**values | changes)


def test_the_script_is_one_that_bash_and_cloud_init_take(tmp_path: Path) -> None:
    script = a_script()
    assert script.startswith("#!/bin/bash\n")
    assert len(script.encode()) < 16 << 10  # the bound for user data
    path = tmp_path / "script"
    path.write_text(script, encoding="utf-8")
    subprocess.run([shutil.which("bash") or "bash", "-n", str(path)], check=True, timeout=60)
    assert "'a[b]>=1'" in script
    # What installs the rest, as root, is known by its hashes.
    assert "pip install -q --require-hashes -r /var/lib/skyproxy/installer.lock" in script
    assert re.match(r"uv==[0-9.]+ ", file_in(script, "installer.lock"))
    fetching = a_script(store=SecretStore("/skyproxy/x", REGION))
    assert "boto3==" in file_in(fetching, "installer.lock")
    assert len(fetching.encode()) < 16 << 10
    subprocess.run([shutil.which("bash") or "bash", "-n", "-c", fetching], check=True, timeout=60)
    compile(file_in(script, "watch.py"), "watch.py", "exec")
    assert script.count("systemctl enable --now") == 2


def units_in(script: str) -> list[str]:
    return [
        file_in(script, f"skyproxy-worker-{number}.service")
        for number in range(script.count("systemctl enable --now skyproxy-worker-"))
    ]


def test_workers_run_as_a_user_without_rights() -> None:
    script = a_script()
    units = units_in(script)
    assert len(units) == 2
    for unit in units:
        settings = [line for line in unit.splitlines() if "=" in line]
        for line in (
            "User=skyproxy",
            "NoNewPrivileges=yes",
            "CapabilityBoundingSet=",
            "ProtectSystem=strict",
            "ReadWritePaths=/var/lib/skyproxy/home",
            "PrivateTmp=yes",
            # Functions cannot read the user data or use the credentials of the instance's profile.
            "IPAddressDeny=169.254.169.254 fd00:ec2::254",
        ):
            assert line in settings, line
    # Nothing of a package runs as root, and no worker can change its own program.
    assert all("runuser -u skyproxy -- " in line for line in script.splitlines() if "$UV pip install" in line)
    assert script.index("pip install -q --python") < script.index("chown -R root:root /opt/skyproxy-worker")
    assert "chmod 400 /var/lib/skyproxy/token /var/lib/skyproxy/tls.key" in script


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "skyproxy-worker-0.service"
    path.write_text(units_in(a_script())[0].replace("/opt/skyproxy-worker/bin/python", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if path.name in line]
    assert not any("Unknown" in line or "Failed to parse" in line for line in told), told


def test_with_an_instance_profile_user_data_has_no_secret_and_the_instance_fetches_them(
    url: str, ami: str, ec2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssm = boto3.client("ssm", endpoint_url=url, region_name=REGION)
    iam = boto3.client("iam", endpoint_url=url, region_name=REGION)
    iam.create_instance_profile(InstanceProfileName="workers")
    fetched = {}

    class Fetching(Here):
        def boot(self, instance: str, port: int) -> None:
            script = script_of(self.ec2, instance)
            folder = self.folder / instance
            folder.mkdir()
            # As the instance would, by boto3 and the very program.
            environment = dict(os.environ) | {"AWS_ENDPOINT_URL": url}
            program = [sys.executable, "-c", file_in(script, "fetch.py"), str(folder)]
            subprocess.run(program, check=True, timeout=100, env=environment)
            (folder / "tls.crt").write_text(file_in(script, "tls.crt"))
            fetched[script] = {path.name: path.read_text() for path in folder.iterdir()}
            command = [sys.executable, "-m", "skyproxy_server", "--port", str(port), "--device", "cpu"]
            for option, name in (("token-file", "token"), ("tls-cert", "tls.crt"), ("tls-key", "tls.key")):
                command += [f"--{option}", str(folder / name)]
            self.workers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    provider = Fetching(ec2, tmp_path, endpoint_url=url, image_id=ami, instance_profile="workers", **PACKAGE)
    env = {"HF_TOKEN": "hf_nobody-may-see-it"}
    try:
        with sky.Compute(name="secret", provider=provider, vcpus=8, env=env) as pool:
            assert where() @ pool == [(0, 1)]
            ((script, files),) = fetched.items()
            assert files["env"] == 'HF_TOKEN="hf_nobody-may-see-it"\n'
            for secret in (files["token"].strip(), files["tls.key"].splitlines()[1], "hf_nobody-may-see-it"):
                assert secret not in script
            # Everybody has fetched them: they are nowhere any more.
            assert ssm.describe_parameters()["Parameters"] == []
    finally:
        provider.end()


def test_what_could_not_be_launched_leaves_no_secret(url: str, ami: str, ec2: Any) -> None:
    ssm = boto3.client("ssm", endpoint_url=url, region_name=REGION)
    options = {**PACKAGE, "endpoint_url": url, "image_id": ami, "allow_from": "203.0.113.7/32"}
    provider = AWS(region=REGION, instance_type="no.such", instance_profile="workers", **options)
    with pytest.raises(WorkerStartError, match=r"EC2 does not provide 1 x no\.such"):
        sky.Compute(name="refused-secret", provider=provider).start()
    assert ssm.describe_parameters()["Parameters"] == []
    provider = AWS(region=REGION, instance_profile="workers", **options)
    with pytest.raises(ConfigurationError, match="a parameter of SSM holds 8192"):
        sky.Compute(name="large", provider=provider, env={"A": "x" * 9000}).start()
    assert ssm.describe_parameters()["Parameters"] == []


def test_each_process_learns_its_place(tmp_path: Path) -> None:
    (block,) = [
        part
        for part in re.findall(r"(?s)<<'SKYPROXY_END'\n(import json, sys.*?)\nSKYPROXY_END", a_script())
        if "local_rank=1" in part
    ]
    done = subprocess.run([sys.executable, "-c", block, "1"], capture_output=True, text=True, check=True, timeout=60)
    name, _, value = done.stdout.strip().partition("=")
    # As systemd reads the file: a quoted text, with the quotes inside escaped.
    import json

    environment = dict(os.environ) | {name: json.loads(value)}
    ask = "import skyproxy as sky; i = sky.instance_info(); print(i.rank, i.node, i.world_size, i.local_rank)"
    told = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "3 1 4 1\n"


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (WorkerSpec("a"), "m7i.xlarge"),
        (WorkerSpec("a", resources={"cpu": "8", "memory": "20Gi"}), "m7i.2xlarge"),
        (WorkerSpec("a", resources={"cpu": "500m", "memory": "1Gi"}), "c7i.large"),
        (WorkerSpec("a", accelerator=Accelerator("A100", 8)), "p4d.24xlarge"),
        (WorkerSpec("a", accelerator=Accelerator("L4", 2)), "g6.12xlarge"),
    ],
)
def test_the_smallest_instance_that_will_do(spec: WorkerSpec, kind: str) -> None:
    assert instance_type_for(spec) == kind


@pytest.mark.parametrize(
    "spec",
    [
        WorkerSpec("a", resources={"cpu": "1000"}),
        WorkerSpec("a", resources={"nvidia.com/gpu": "1"}),
        WorkerSpec("a", accelerator=Accelerator("TPUv4")),
        WorkerSpec("a", accelerator=Accelerator("L4", 16)),
        WorkerSpec("a", image="debian"),
        WorkerSpec("a", keep=True),
        WorkerSpec("a", image=Image(pip_indexes=[PipIndex("https://example.org", ["a"])], includes=["x"])),
    ],
)
def test_what_it_cannot_give_is_an_error(spec: WorkerSpec, url: str) -> None:
    provider = AWS(region=REGION, endpoint_url=url, image_id="ami-1", allow_from="203.0.113.7/32")
    with pytest.raises(ConfigurationError):
        asyncio.run(provider.launch(spec, lambda progress: None))
