"""Workers on instances of Amazon EC2."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import platform
import urllib.request
from collections.abc import Mapping
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command
from skyproxy.providers.aws_bootstrap import (
    PORT,
    SecretStore,
    new_keys,
    startup_script,
)
from skyproxy.providers.aws_catalogue import instance_type_for
from skyproxy.providers.aws_instances import Instances, reap
from skyproxy.providers.base import Progress, Report, WorkerSpec, refuse_options
from skyproxy.providers.environments import install_steps
from skyproxy.providers.image import Image

logger = logging.getLogger("skyproxy")

_POLL_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 1800.0
_CPU_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
_GPU_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


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
        store = ssm if self._instance_profile is not None else None
        reaped = await asyncio.to_thread(reap, ec2, store)
        if reaped:
            report(Progress("provisioning", None, f"terminated {reaped} instance(s) left behind by programs that died"))
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


def _own_address() -> str:
    try:
        with urllib.request.urlopen("https://checkip.amazonaws.com", timeout=_CONNECT_SECONDS) as answer:
            return str(answer.read().decode().strip())
    except OSError as error:
        raise ConfigurationError(
            f"AWS(): this machine's public address cannot be determined ({error}). Pass "
            "AWS(allow_from='203.0.113.7/32')."
        ) from error
