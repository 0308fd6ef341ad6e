"""The process group of one rank, and what it says about ranks that do not come."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import skyproxy as sky
from skyproxy.plugins.process_group import process_group, variables
from skyproxy.runtime import InstanceInfo, Peer
from skyproxy.runtime.lifecycle import free_ports

PEERS = (Peer(0, 0, "127.0.0.1"), Peer(1, 1, "10.1.2.3"))


def info(rank: int = 0, world_size: int = 2, **more: object) -> InstanceInfo:
    (port,) = free_ports(1)
    values = {"total_nodes": world_size, "peers": PEERS[:world_size], "job": "pool/1", "head_port": port} | more
    return InstanceInfo(node=rank, rank=rank, world_size=world_size, **values)  # type: ignore[arg-type]


def test_the_variables_are_torchruns() -> None:
    found = variables(
        InstanceInfo(
            node=1,
            total_nodes=2,
            head_addr="10.0.0.1",
            head_port=29501,
            rank=5,
            world_size=8,
            local_rank=1,
            procs_per_node=4,
        )
    )
    assert {name: found[name] for name in found if not name.startswith("TORCHELASTIC")} == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "WORLD_SIZE": "8",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
    }


def test_a_single_rank_needs_no_group_unless_told() -> None:
    single = info(world_size=1)
    with sky.plugins.torch().around_app(single):
        assert not dist.is_initialized()
    with sky.plugins.torch(init="always").around_app(single):
        assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert os.environ["MASTER_PORT"] == str(single.head_port)
    assert not dist.is_initialized()
    assert "MASTER_PORT" not in os.environ


def test_a_group_that_is_there_is_left_alone() -> None:
    single = info(world_size=1)
    with process_group(single, "gloo"):
        with process_group(single, "gloo"):
            assert dist.is_initialized()
        assert dist.is_initialized()


def test_the_head_names_who_is_missing_and_where() -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 \(10\.1\.2\.3\) did not join within 1 s.*127\.0\.0\.1:"):
        with process_group(info(), "gloo", join_timeout_seconds=1.0):
            pass
    assert not dist.is_initialized()
    assert "MASTER_ADDR" not in os.environ


def test_a_rank_that_finds_no_head_says_where_it_looked() -> None:
    lonely = info(rank=1)
    with pytest.raises(TimeoutError, match=rf"rank 1 found nobody at 127\.0\.0\.1:{lonely.head_port}"):
        with process_group(lonely, "gloo", join_timeout_seconds=1.0):
            pass
