"""Instances of Amazon EC2: what one launch started, and what programs that died left behind."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyproxy.contexts import installation_id, kept_text, state_folder
from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers.all_or_none import run_all_or_none
from skyproxy.providers.aws_bootstrap import PORT, SERVER_NAME, Keys, secret_files
from skyproxy.providers.base import Endpoint, Progress, Report, WorkerSpec
from skyproxy.providers.processes import identity_of, is_alive

logger = logging.getLogger("skyproxy")

_OWNER = "skyproxy:owner"
_POOL = "skyproxy:pool"
_PARAMETERS = "/skyproxy/"
_PARAMETER_HOURS = 24
"""More than any instance needs to fetch it."""
_CONNECT_SECONDS = 5.0
_MAX_PARAMETER_BYTES = 8192
_LEFT = ("pending", "running", "stopping", "stopped")


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
        return _PARAMETERS + self._name

    def store_secrets(self, env: dict[str, str]) -> None:
        """Store the secrets of this launch in SSM, where the instances fetch them.

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
        request = {
            "Name": self.parameter,
            "Value": value,
            "Type": "SecureString",
            "Tier": "Intelligent-Tiering",
            "Tags": [{"Key": _POOL, "Value": self._spec.name}, {"Key": _OWNER, "Value": owner(self._name)}],
        }
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=_PARAMETER_HOURS)
        expiry = {"Type": "Expiration", "Version": "1.0", "Attributes": {"Timestamp": f"{end:%Y-%m-%dT%H:%M:%S.000Z}"}}
        try:
            try:
                # A program that is killed takes nothing away.
                self._ssm.put_parameter(**request, Policies=json.dumps([expiry]))
            except Exception as error:
                logger.info("skyproxy: a parameter of SSM that ends by itself is not to be had: %s", error)
                self._ssm.put_parameter(**request)
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
            {"Key": _OWNER, "Value": owner(self._name)},
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


def owner(launch: str) -> str:
    """Return the mark of what this program makes for a launch: who it is, as no other program ever was or will be, and
    a proof that it is for that launch alone.

    Whoever may write tags could name us as the owner of anything. But nobody can change the names of security groups
    and parameters, which are those of their launch; and none of them fits a proof that was copied from somewhere else.

    Args:
        launch: its name.
    """
    program = f"{_machine()}/{os.getpid()}/{identity_of(os.getpid())}"
    return f"{program}/{_proof(program, launch)}"


def _proof(program: str, launch: str) -> str:
    key = kept_text(state_folder() / "launch-key", lambda: secrets.token_hex(32)).strip()
    return hmac.new(key.encode(), f"{program}\n{launch}".encode(), hashlib.sha256).hexdigest()[:32]


def _machine() -> str:
    # Both: homes are shared between machines, and host names between strangers.
    return f"{socket.gethostname()}:{installation_id()}"


def reap(ec2: Any, ssm: Any = None) -> int:
    """End what a program of this machine left behind that no longer lives: instances, security groups and parameters.

    Args:
        ec2: client of EC2.
        ssm: client of SSM; None where no parameter is looked for.

    Returns:
        How many instances there were.
    """
    filters = [{"Name": "tag-key", "Values": [_OWNER]}, {"Name": "instance-state-name", "Values": list(_LEFT)}]
    answer = ec2.describe_instances(Filters=filters)
    orphans = [
        row["InstanceId"]
        for reservation in answer["Reservations"]
        for row in reservation["Instances"]
        if _is_orphan(row.get("Tags"), [group["GroupName"] for group in row.get("SecurityGroups", ())])
    ]
    if orphans:
        logger.warning("skyproxy: terminating instances that were left behind: %s", ", ".join(orphans))
        ec2.terminate_instances(InstanceIds=orphans)
    groups = ec2.describe_security_groups(Filters=[{"Name": "tag-key", "Values": [_OWNER]}])["SecurityGroups"]
    for group in groups:
        if _is_orphan(group.get("Tags"), [group["GroupName"]]):
            # Its instances may still be ending; then the next launch succeeds.
            with contextlib.suppress(Exception):
                ec2.delete_security_group(GroupId=group["GroupId"])
    if ssm is not None:
        try:
            _reap_parameters(ssm)
        except Exception as error:
            logger.info("skyproxy: parameters of SSM that were left behind cannot be looked for: %s", error)
    return len(orphans)


def _reap_parameters(ssm: Any) -> None:
    wanted = [{"Key": "Name", "Option": "BeginsWith", "Values": [_PARAMETERS]}]
    for page in ssm.get_paginator("describe_parameters").paginate(ParameterFilters=wanted):
        for row in page["Parameters"]:
            name = row["Name"]
            tags = ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
            if _is_orphan(tags, [name.removeprefix(_PARAMETERS)]):
                logger.warning("skyproxy: deleting the SSM parameter that was left behind: %s", name)
                ssm.delete_parameter(Name=name)


def _is_orphan(tags: Iterable[Mapping[str, str]] | None, launches: Iterable[str]) -> bool:
    """Return whether something was made for one of these launches by a program of this machine that has ended."""
    text = next((tag["Value"] for tag in tags or () if tag["Key"] == _OWNER), "")
    program, _, proof = text.rpartition("/")
    host, _, rest = program.partition("/")
    process, _, identity = rest.partition("/")
    if host != _machine() or not process.isascii() or not process.isdigit():
        return False
    is_ours = any(hmac.compare_digest(proof.encode(), _proof(program, launch).encode()) for launch in launches)
    return is_ours and not is_alive(int(process), identity)
