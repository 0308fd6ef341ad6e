"""Instances, security groups and parameters of programs that have ended: against moto's server."""

from __future__ import annotations

import datetime
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from skyproxy.providers.aws_instances import owner, reap
from tests.providers.test_aws import REGION, _credentials, ami, boto3, ec2, groups, states, url

__all__ = ["_credentials", "ami", "ec2", "url"]

LEAVING = """
import sys
from types import SimpleNamespace
import boto3
from skyproxy.providers.aws_bootstrap import Keys
from skyproxy.providers.aws_instances import Instances
url, region, ami = sys.argv[1:]
ec2, ssm = (boto3.client(kind, endpoint_url=url, region_name=region) for kind in ("ec2", "ssm"))
spec = SimpleNamespace(name="left", nodes=1, procs_per_node=1, world_size=1)
instances = Instances(ec2, spec, Keys("a", "c", "k"), 0.1, None, ssm)
instances.store_secrets({"HF_TOKEN": "hf"})
request = {"ImageId": ami, "MinCount": 1, "MaxCount": 1, "InstanceType": "t3.large", "AllowFrom": "203.0.113.7/32"}
instances._run(request)
print(instances._name, flush=True)
input()
"""


@pytest.fixture
def left(url: str, ami: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A launch of a program that will not take it away, and the program."""
    command = [sys.executable, "-c", LEAVING, url, REGION, ami]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        yield program.stdout.readline().strip(), program
        program.kill()


def tags_of(ec2: Any, pool: str) -> list[dict[str, str]]:
    found = ec2.describe_instances(Filters=[{"Name": "tag:skyproxy:pool", "Values": [pool]}])["Reservations"]
    return [{"Key": tag["Key"], "Value": tag["Value"]} for tag in found[-1]["Instances"][0]["Tags"]]


def test_what_a_dead_program_left_is_ended_and_nothing_else(
    url: str, ami: str, ec2: Any, left: tuple[str, subprocess.Popen[str]]
) -> None:
    ssm = boto3.client("ssm", endpoint_url=url, region_name=REGION)
    name, program = left
    assert states(ec2, "left") == ["running"]
    others = {
        "ours": owner("ours"),
        "far": "another-host/1/x",
        "nonsense": "///",
        "digits": f"{socket.gethostname()}/²/x",
    }
    for pool, text in others.items():
        tags = [{"Key": "skyproxy:pool", "Value": pool}, {"Key": "skyproxy:owner", "Value": text}]
        group = ec2.create_security_group(GroupName=pool, Description="of somebody")["GroupId"]
        spec = [{"ResourceType": "instance", "Tags": tags}]
        ec2.run_instances(ImageId=ami, MinCount=1, MaxCount=1, SecurityGroupIds=[group], TagSpecifications=spec)
    assert reap(ec2, ssm) == 0
    assert [row["Name"] for row in ssm.describe_parameters()["Parameters"]] == [f"/skyproxy/{name}"]
    program.communicate("\n")
    assert reap(ec2, ssm) == 1
    assert states(ec2, "left") == ["terminated"]
    assert [states(ec2, pool) for pool in others] == [["running"]] * len(others)
    assert ssm.describe_parameters()["Parameters"] == []
    assert name not in groups(ec2)


def test_who_may_write_tags_has_nothing_ended_by_naming_a_dead_program(
    url: str, ami: str, ec2: Any, left: tuple[str, subprocess.Popen[str]]
) -> None:
    ssm = boto3.client("ssm", endpoint_url=url, region_name=REGION)
    _, program = left
    copied = tags_of(ec2, "left")
    program.communicate("\n")
    (text,) = (tag["Value"] for tag in copied if tag["Key"] == "skyproxy:owner")
    dead = text.rpartition("/")[0]
    victim = ec2.create_security_group(GroupName="payroll", Description="of somebody")["GroupId"]
    for number, forged in enumerate((text, dead, f"{dead}/", f"{dead}/{'0' * 32}")):
        tags = [{"Key": "skyproxy:pool", "Value": f"victim-{number}"}, {"Key": "skyproxy:owner", "Value": forged}]
        spec = [{"ResourceType": "instance", "Tags": tags}]
        ec2.run_instances(ImageId=ami, MinCount=1, MaxCount=1, SecurityGroupIds=[victim], TagSpecifications=spec)
    ec2.create_tags(Resources=[victim], Tags=copied)
    ssm.put_parameter(Name="/skyproxy/database", Value="x", Type="SecureString", Tags=copied)
    assert reap(ec2, ssm) == 1
    assert [states(ec2, f"victim-{number}") for number in range(4)] == [["running"]] * 4
    assert "payroll" in groups(ec2)
    assert [row["Name"] for row in ssm.describe_parameters()["Parameters"]] == ["/skyproxy/database"]
    ssm.delete_parameter(Name="/skyproxy/database")


def test_a_parameter_ends_by_itself_where_nobody_takes_it_away(
    url: str, left: tuple[str, subprocess.Popen[str]]
) -> None:
    ssm = boto3.client("ssm", endpoint_url=url, region_name=REGION)
    name, _ = left
    (row,) = [row for row in ssm.describe_parameters()["Parameters"] if row["Name"] == f"/skyproxy/{name}"]
    # Where AWS has JSON, moto has what Python makes of it.
    (policy,) = [json.loads(each["PolicyText"].replace("'", '"')) for each in row.get("Policies", ())]
    assert policy["Type"] == "Expiration"
    left_for = datetime.datetime.fromisoformat(policy["Attributes"]["Timestamp"]) - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(hours=23) < left_for <= datetime.timedelta(hours=24)
