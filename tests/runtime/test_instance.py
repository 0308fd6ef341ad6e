"""instance_info: the call's word, the variable's, or a pool of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.runtime import CallContext, InstanceInfo, Peer, current_call, entered_call, instance_info
from skyproxy.runtime.instance import POOL_VARIABLE

FOUR = InstanceInfo(
    node=1,
    total_nodes=2,
    head_addr="10.0.0.1",
    head_port=4711,
    accelerators=8,
    peers=tuple(Peer(rank, rank // 2, f"10.0.0.{rank // 2 + 1}") for rank in range(4)),
    rank=3,
    world_size=4,
    local_rank=1,
    procs_per_node=2,
    job="job-1",
)


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL_VARIABLE, raising=False)


def test_outside_of_a_pool_it_describes_a_pool_of_one() -> None:
    info = instance_info()
    assert (info.node, info.total_nodes, info.rank, info.world_size, info.is_head) == (0, 1, 0, 1, True)
    assert [peer.address for peer in info.peers] == ["127.0.0.1"]


def test_a_cpu_machine_has_no_accelerators() -> None:
    torch = pytest.importorskip("torch")
    assert instance_info().accelerators == torch.cuda.device_count()


def test_the_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL_VARIABLE, FOUR.to_json())
    assert instance_info() == FOUR
    assert not instance_info().is_head


def test_the_call_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL_VARIABLE, InstanceInfo(job="other").to_json())
    with entered_call(CallContext("1", "train", {"pool": json.loads(FOUR.to_json())})):
        assert instance_info() == FOUR
    assert instance_info().job == "other"


def test_what_is_missing_follows_from_the_rest() -> None:
    info = InstanceInfo.from_mapping({"node": 1, "total_nodes": 3, "procs_per_node": 2, "local_rank": 1})
    assert (info.rank, info.world_size) == (3, 6)


@pytest.mark.parametrize("values", [{"node": 2, "total_nodes": 2}, {"node": "x"}, {"peers": [{}]}, {"peers": 3}])
def test_a_contradiction_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        InstanceInfo.from_mapping(values)


def test_a_variable_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL_VARIABLE, "nodes=4")
    with pytest.raises(ConfigurationError, match=POOL_VARIABLE):
        instance_info()


def test_no_call_outside_of_one() -> None:
    assert current_call() is None


def test_the_public_names_need_neither_torch_nor_the_device() -> None:
    code = (
        "import sys, skyproxy as sky\n"
        "sky.instance_info(); sky.shard([1, 2]); sky.Image(); sky.Accelerator('A100'); sky.silent(print)\n"
        "assert not {'torch', 'websockets', 'skyproxy.nodes'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=dict(os.environ))


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4711",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


def test_processes_of_torchrun_know_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    info = instance_info()
    assert (info.rank, info.world_size, info.local_rank, info.procs_per_node) == (3, 4, 1, 2)
    assert (info.node, info.total_nodes, info.head_addr, info.head_port, info.job) == (1, 2, "10.0.0.1", 4711, "run")


def test_another_launcher_that_uses_the_name_only_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("RANK", "3")
    assert instance_info().world_size == 1
