"""Workers on instances of Amazon EC2."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import secrets
import socket
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from skyproxy.contexts import installation_id
from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.extras import install_command
from skyproxy.providers.all_or_none import run_all_or_none
from skyproxy.providers.aws_bootstrap import (
    PORT,
    SERVER_NAME,
    Keys,
    SecretStore,
    new_keys,
    secret_files,
    startup_script,
)
from skyproxy.providers.aws_catalogue import instance_type_for
from skyproxy.providers.base import Endpoint, Progress, Report, WorkerSpec, refuse_options
from skyproxy.providers.environments import install_steps
from skyproxy.providers.image import Image
from skyproxy.providers.processes import identity_of, is_alive

logger = logging.getLogger("skyproxy")

_OWNER = "skyproxy:owner"
_POOL = "skyproxy:pool"
_POLL_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 1800.0
_MAX_PARAMETER_BYTES = 8192
_CPU_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
_GPU_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_LEFT = ("pending", "running", "stopping", "stopped")


class AWS:
    """An instance for every node. They are terminated when the pool ends.

    They are terminated also where this program dies: each shuts itself down after `idle_timeout` (half an hour by
    default) without work, and the next launch from this machine ends what dead programs left.

    Attributes:
        name: "aws".

    Example:
        ```python
        where = skyproxy.AWS(region="eu-central-1", spot=True, package="skyproxy @ https://host.example/skyproxy.whl")
        with skyproxy.Compute(provider=where, accelerator="A100") as pool:
            train() >> pool
        ```
    """

    name = "aws"

    def __init__(
        self,
        *,
        region: str | None = None,
        instance_type: str | None = None,
        image_id: str | None = None,
        subnet: str | None = None,
        allow_from: str | None = None,
        spot: bool = False,
        disk_gb: int = 100,
        package: str | None = None,
        profile: str | None = None,
        instance_profile: str | None = None,
        endpoint_url: str | None = None,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """Says where; asks nothing of AWS yet.

        Args:
            region: of the instances; boto3's own choice by default.
            instance_type: what every node is; by default the smallest that has what is asked for.
            image_id: the AMI, of a Debian kind; by default Ubuntu's, or for GPUs AWS's own with drivers.
            subnet: where the instances are; one of the default network by default.
            allow_from: the addresses that may reach the workers, such as "203.0.113.0/24"; by default this machine's
                own public address. The workers ask for the token in any case, and speak TLS only.
            spot: whether to take instances that AWS may take back.
            disk_gb: of each instance.
            package: how the workers install skyproxy: a requirement for pip, such as "skyproxy @ https://...whl". By
                default from where this one was installed, if that is an address that an instance can reach.
            profile: of the AWS configuration.
            instance_profile: name of an instance profile whose role may `ssm:GetParameter` on `parameter/skyproxy/*`:
                the instances then fetch the token, the key and the variables of the workers from there, and user data
                has none of them. Without one, they are in the user data.
            endpoint_url: of another service that speaks EC2's language.
            poll_seconds: how often to look whether instances and workers are up.
        """
        self._region = region
        self._instance_type = instance_type
        self._image_id = image_id
        self._subnet = subnet
        self._allow_from = allow_from
        self._spot = spot
        self._disk_gb = disk_gb
        self._package = package or _own_source()
        self._profile = profile
        self._instance_profile = instance_profile
        self._endpoint_url = endpoint_url
        self._poll_seconds = poll_seconds

    async def launch(self, spec: WorkerSpec, report: Report) -> Instances:
        """Starts all instances or none; see `Provider.launch`."""
        image = self._check_image(spec)
        ec2, ssm = await asyncio.to_thread(self._clients)
        if self._package is None:
            raise ConfigurationError(
                "AWS() must be told how the instances install skyproxy, which is on no package index: "
                "AWS(package='skyproxy @ https://HOST/skyproxy-0.1.0-py3-none-any.whl'). Make the wheel in a checkout "
                "with: python -m build --wheel"
            )
        reaped = await asyncio.to_thread(reap, ec2)
        if reaped:
            report(Progress("provisioning", None, f"terminated {reaped} instance(s) left behind by programs that died"))
        store = ssm if self._instance_profile is not None else None
        instances = Instances(ec2, spec, new_keys(), self._poll_seconds, self.reach, store)
        try:
            await instances.start(await asyncio.to_thread(self._request, ssm, spec, image, instances, report), report)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(instances.close()))
            raise
        return instances

    def reach(self, instance: Mapping[str, object], local_rank: int) -> tuple[str, int]:
        """Host and port by which this machine reaches a worker process. A subclass may know another way."""
        return str(instance.get("PublicIpAddress") or instance["PrivateIpAddress"]), PORT + local_rank

    def _check_image(self, spec: WorkerSpec) -> Image:
        if isinstance(spec.image, str) or (spec.image is not None and spec.image.base is not None):
            raise ConfigurationError(
                "AWS() runs no container images. Describe the software: Image(pip=[...], apt=[...])."
            )
        refuse_options("AWS()", spec.options)
        image = spec.image or Image()
        wanted = {"keep": spec.keep, "volumes": spec.volumes, "Image(includes)": image.includes}
        cannot = [str(name) for name, value in wanted.items() if value]
        if image.requirements is not None:
            raise ConfigurationError(
                "AWS() cannot give Image(requirements=...): user data of 16 KiB has no room "
                "for hashes. Build a machine image with these packages (AWS(image_id=...)), or use pip=[...]."
            )
        if cannot:
            raise ConfigurationError(
                f"AWS() cannot give {', '.join(cannot)} yet. Modules of your program travel by value."
            )
        return image

    def _clients(self) -> tuple[object, object]:
        try:
            import boto3
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"AWS() needs boto3. Install it: {install_command('aws')}") from error
        session = boto3.Session(profile_name=self._profile, region_name=self._region)
        if session.region_name is None:
            raise ConfigurationError(
                "AWS(): no region is configured. Pass AWS(region='eu-central-1'), or set AWS_REGION."
            )
        if session.get_credentials() is None:
            raise ConfigurationError("AWS(): no credentials were found. Set them up: aws configure, or aws sso login")
        ec2, ssm = (session.client(name, endpoint_url=self._endpoint_url) for name in ("ec2", "ssm"))
        return ec2, ssm

    def _request(
        self, ssm: Any, spec: WorkerSpec, image: Image, instances: Instances, report: Report
    ) -> dict[str, object]:
        """The arguments of run_instances, but for what the launch makes itself."""
        kind = self._instance_type or instance_type_for(spec)
        ami = self._image_id
        if ami is None:
            parameter = _GPU_IMAGE if spec.accelerator is not None else _CPU_IMAGE
            ami = ssm.get_parameter(Name=parameter)["Parameter"]["Value"]
        report(Progress("provisioning", None, f"asking EC2 for {spec.nodes} x {kind}"))
        env = {**image.env, **spec.env}
        store = None
        if self._instance_profile is not None:
            instances.store_secrets(env)
            store = SecretStore(instances.parameter, ssm.meta.region_name)
        script = startup_script(
            keys=instances.keys,
            token=instances.token,
            python=image.python or ".".join(platform.python_version_tuple()[:2]),
            apt=image.apt,
            install_steps=[*install_steps(image, isolated=True), [str(self._package)]],
            env=env,
            name=spec.name,
            nodes=spec.nodes,
            procs_per_node=spec.procs_per_node,
            idle_seconds=spec.idle_timeout_seconds or _IDLE_SECONDS,
            lifetime_seconds=spec.max_lifetime_seconds,
            store=store,
        )
        request: dict[str, object] = {
            "ImageId": ami,
            "InstanceType": kind,
            "MinCount": spec.nodes,
            "MaxCount": spec.nodes,
            "UserData": script,
            # With this, the instance's own `shutdown` is the end of its costs.
            "InstanceInitiatedShutdownBehavior": "terminate",
            # Workers cannot ask the metadata service at all; nor can containers, or what is tricked into one request.
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "BlockDeviceMappings": [
                {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": self._disk_gb, "VolumeType": "gp3"}}
            ],
        }
        if self._subnet is not None:
            request["SubnetId"] = self._subnet
        if self._instance_profile is not None:
            request["IamInstanceProfile"] = {"Name": self._instance_profile}
        if self._spot:
            request["InstanceMarketOptions"] = {"MarketType": "spot"}
        request["AllowFrom"] = self._allow_from or f"{_own_address()}/32"
        return request


class Instances:
    """The instances that `AWS` launched.

    Attributes:
        keys: of this launch.
        token: of this launch.
    """

    def __init__(
        self,
        ec2: Any,
        spec: WorkerSpec,
        keys: Keys,
        poll_seconds: float,
        reach: Callable[[Mapping[str, object], int], tuple[str, int]],
        ssm: Any = None,
    ) -> None:
        self.keys = keys
        self.token = secrets.token_urlsafe(32)
        self._ec2 = ec2
        self._spec = spec
        self._poll_seconds = poll_seconds
        self._reach = reach
        self._name = f"skyproxy-{spec.name}-{secrets.token_hex(3)}"
        self._ssm = ssm
        self._stored = False
        self._group: str | None = None
        self._instances: list[dict[str, Any]] = []
        self._starting: asyncio.Task[None] | None = None

    async def start(self, request: dict[str, object], report: Report) -> None:
        """Asks for the instances, and waits until every worker process accepts connections."""
        # Not interrupted halfway: what was asked for and not noted down would be paid for and forgotten.
        self._starting = asyncio.create_task(asyncio.to_thread(self._run, request))
        await asyncio.shield(self._starting)
        report(Progress("provisioning", None, f"waiting for {len(self._instances)} instance(s)"))
        await self._wait_until_running()
        await run_all_or_none(
            self._wait_until_it_listens(node, local_rank, report)
            for node in range(self._spec.nodes)
            for local_rank in range(self._spec.procs_per_node)
        )
        await asyncio.to_thread(self._forget_secrets)

    @property
    def parameter(self) -> str:
        """The name of SSM's parameter with the secrets of this launch."""
        return f"/skyproxy/{self._name}"

    def store_secrets(self, env: dict[str, str]) -> None:
        """Put what only the instances may know where they fetch it.

        Raises:
            ConfigurationError: it is too much for a parameter.
            WorkerStartError: SSM refused.
        """
        value = json.dumps(secret_files(self.keys, self.token, env))
        if len(value.encode()) > _MAX_PARAMETER_BYTES:
            raise ConfigurationError(
                f"AWS(instance_profile=...): the variables of the workers are {len(value)} bytes with token and "
                f"key, and a parameter of SSM holds {_MAX_PARAMETER_BYTES}. Pass fewer in env=."
            )
        tags = [{"Key": _POOL, "Value": self._spec.name}, {"Key": _OWNER, "Value": owner()}]
        try:
            self._ssm.put_parameter(
                Name=self.parameter, Value=value, Type="SecureString", Tier="Intelligent-Tiering", Tags=tags
            )
        except Exception as error:
            raise WorkerStartError(f"SSM does not accept the parameter {self.parameter}: {error}") from error
        self._stored = True

    def _forget_secrets(self) -> None:
        """Take the secrets away again: every instance has fetched them, or none will."""
        stored, self._stored = self._stored, False
        if stored:
            try:
                self._ssm.delete_parameter(Name=self.parameter)
            except Exception as error:
                logger.warning("skyproxy: the SSM parameter %s was left behind: %s", self.parameter, error)

    def _run(self, request: dict[str, object]) -> None:
        tags = [
            {"Key": "Name", "Value": self._name},
            {"Key": _POOL, "Value": self._spec.name},
            {"Key": _OWNER, "Value": owner()},
        ]
        allow_from = request.pop("AllowFrom")
        place: dict[str, str] = {}
        if "SubnetId" in request:
            found = self._ec2.describe_subnets(SubnetIds=[request["SubnetId"]])["Subnets"][0]
            place["VpcId"] = found["VpcId"]
        self._group = self._ec2.create_security_group(
            GroupName=self._name,
            Description="skyproxy workers",
            TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
            **place,
        )["GroupId"]
        last = PORT + self._spec.procs_per_node - 1
        from_client = {"IpProtocol": "tcp", "FromPort": PORT, "ToPort": last, "IpRanges": [{"CidrIp": allow_from}]}
        among_them = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self._group}]}
        self._ec2.authorize_security_group_ingress(GroupId=self._group, IpPermissions=[from_client, among_them])
        try:
            answer = self._ec2.run_instances(
                **request,
                SecurityGroupIds=[self._group],
                TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
            )
        except Exception as error:
            raise WorkerStartError(
                f"EC2 does not provide {self._spec.nodes} x {request['InstanceType']}: {error}. Another region, "
                "another instance type or a higher quota may help."
            ) from error
        self._instances = sorted(answer["Instances"], key=lambda row: int(row.get("AmiLaunchIndex", 0)))

    async def _wait_until_running(self) -> None:
        while True:
            rows = await asyncio.to_thread(self._describe_instances)
            ended = [row for row in rows if row["State"]["Name"] not in ("pending", "running")]
            if ended:
                reason = ended[0].get("StateReason", {}).get("Message", "no reason was given")
                raise WorkerStartError(f"instance {ended[0]['InstanceId']} is {ended[0]['State']['Name']}: {reason}")
            if rows and all(row["State"]["Name"] == "running" for row in rows):
                self._instances = rows
                return
            await asyncio.sleep(self._poll_seconds)

    def _describe_instances(self) -> list[dict[str, Any]]:
        ids = [row["InstanceId"] for row in self._instances]
        answer = self._ec2.describe_instances(InstanceIds=ids)
        rows = {row["InstanceId"]: row for group in answer["Reservations"] for row in group["Instances"]}
        return [rows[instance] for instance in ids if instance in rows]

    async def _wait_until_it_listens(self, node: int, local_rank: int, report: Report) -> None:
        """Installing takes minutes; an instance that ends meanwhile will never listen."""
        instance = self._instances[node]
        host, port = self._reach(instance, local_rank)
        report(Progress("bootstrapping", node, f"{instance['InstanceId']} installs its software"))
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                report(Progress("running", node, f"a worker listens on {instance['InstanceId']}"))
                return
            (row,) = [
                r
                for r in await asyncio.to_thread(self._describe_instances)
                if r["InstanceId"] == instance["InstanceId"]
            ]
            if row["State"]["Name"] != "running":
                log = await self.logs(node * self._spec.procs_per_node)
                raise WorkerStartError(f"instance {instance['InstanceId']} ended before its worker listened.\n{log}")
            await asyncio.sleep(self._poll_seconds)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses where they listen, in the order of ranks."""
        procs = self._spec.procs_per_node
        return [self._endpoint(rank // procs, rank % procs) for rank in range(self._spec.world_size)]

    def _endpoint(self, node: int, local_rank: int) -> Endpoint:
        host, port = self._reach(self._instances[node], local_rank)
        rank = node * self._spec.procs_per_node + local_rank
        address = self._instances[node]["PrivateIpAddress"]
        url = f"wss://{host}:{port}"
        return Endpoint(url, self.token, node, rank, local_rank, address, self.keys.authority, SERVER_NAME)

    async def logs(self, rank: int) -> str:
        """The end of the instance's console, where cloud-init reports."""
        instance = self._instances[rank // self._spec.procs_per_node]["InstanceId"]
        try:
            answer = await asyncio.to_thread(self._ec2.get_console_output, InstanceId=instance)
        except Exception as error:
            return f"(no console: {error})"
        return "\n".join(str(answer.get("Output", "")).splitlines()[-40:])

    async def restart(self, rank: int) -> Endpoint:
        """Waits until a process that died listens again: the instance itself starts it anew."""
        node, local_rank = divmod(rank, self._spec.procs_per_node)
        await self._wait_until_it_listens(node, local_rank, lambda progress: None)
        return self._endpoint(node, local_rank)

    async def close(self) -> None:
        """Terminates the instances and removes their security group; idempotent."""
        if self._starting is not None:
            with contextlib.suppress(Exception):
                await self._starting  # only then is it known what there is to end
        await asyncio.to_thread(self._forget_secrets)
        await asyncio.to_thread(_take_away, self._ec2, [row["InstanceId"] for row in self._instances], self._group)
        self._group = None


def _take_away(ec2: Any, instances: list[str], group: str | None) -> None:
    if instances:
        ec2.terminate_instances(InstanceIds=instances)
    if group is None:
        return
    if instances:
        # A group cannot go before its members.
        ec2.get_waiter("instance_terminated").wait(InstanceIds=instances, WaiterConfig={"Delay": 5, "MaxAttempts": 60})
    try:
        ec2.delete_security_group(GroupId=group)
    except Exception as error:
        logger.warning("skyproxy: the security group %s was left behind: %s", group, error)


def _own_source() -> str | None:
    """Return where this skyproxy was installed from, as pip noted it (PEP 610); None for a folder of this machine.

    Never `skyproxy==VERSION`: on an index that name belongs to nobody, so anybody could take it.
    """
    try:
        noted = json.loads(importlib.metadata.distribution("skyproxy").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    url = str(noted.get("url", ""))
    if not url.startswith("https://"):
        return None
    version_control = noted.get("vcs_info")
    if version_control:
        return f"skyproxy @ {version_control['vcs']}+{url}@{version_control['commit_id']}"
    return f"skyproxy @ {url}"


def owner() -> str:
    """Return a name of this program that no other ever had or will have."""
    return f"{_machine()}/{os.getpid()}/{identity_of(os.getpid())}"


def _machine() -> str:
    # Both: homes are shared between machines, and host names between strangers.
    return f"{socket.gethostname()}:{installation_id()}"


def reap(ec2: Any) -> int:
    """Ends the instances whose program, one of this machine, no longer lives.

    Returns:
        How many there were.
    """
    filters = [{"Name": "tag-key", "Values": [_OWNER]}, {"Name": "instance-state-name", "Values": list(_LEFT)}]
    answer = ec2.describe_instances(Filters=filters)
    orphans: list[str] = []
    for row in (row for group in answer["Reservations"] for row in group["Instances"]):
        tags = {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}
        if _is_orphan(tags[_OWNER]):
            orphans.append(row["InstanceId"])
    if orphans:
        logger.warning("skyproxy: terminating instances that were left behind: %s", ", ".join(orphans))
        ec2.terminate_instances(InstanceIds=orphans)
    groups = ec2.describe_security_groups(Filters=[{"Name": "tag-key", "Values": [_OWNER]}])["SecurityGroups"]
    for group in groups:
        tags = {tag["Key"]: tag["Value"] for tag in group.get("Tags", ())}
        if _is_orphan(tags[_OWNER]):
            # Its instances may still be ending; then the next launch succeeds.
            with contextlib.suppress(Exception):
                ec2.delete_security_group(GroupId=group["GroupId"])
    return len(orphans)


def _is_orphan(text: str) -> bool:
    host, _, rest = text.partition("/")
    process, _, identity = rest.partition("/")
    return host == _machine() and process.isdigit() and not is_alive(int(process), identity)


def _own_address() -> str:
    try:
        with urllib.request.urlopen("https://checkip.amazonaws.com", timeout=_CONNECT_SECONDS) as answer:
            return str(answer.read().decode().strip())
    except OSError as error:
        raise ConfigurationError(
            f"AWS(): this machine's public address cannot be determined ({error}). Pass "
            "AWS(allow_from='203.0.113.7/32')."
        ) from error
