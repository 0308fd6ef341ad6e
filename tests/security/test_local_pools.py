"""What listens while ranks of a pool, or processes of a script, work together on this machine: for it alone."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyproxy as sky
from skyproxy.functions.scripts import describe_script, pack_for, run_script
from skyproxy.plugins.process_group import store_on_the_head
from skyproxy.runtime import InstanceInfo
from skyproxy.runtime.lifecycle import free_ports
from skyproxy.transport.addresses import listen_on_loopback

pytestmark = pytest.mark.timeout(300)


def listening(process: psutil.Process) -> list[str]:
    """The addresses on which a process listens."""
    found = process.net_connections("tcp")
    return [row.laddr.ip for row in found if row.status == psutil.CONN_LISTEN]


def reached_by_others(addresses: list[str]) -> list[str]:
    """Those of them that another machine can reach."""
    return [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]


@pytest.mark.parametrize("host", ["10.1.2.3", "0.0.0.0", "::", "worker.example"])
def test_what_is_looked_for_elsewhere_listens_as_pytorch_wants(host: str) -> None:
    assert listen_on_loopback(host, 0) is None


def test_the_store_of_ranks_on_this_machine_serves_this_machine_only() -> None:
    (port,) = free_ports(1)
    before = len(listening(psutil.Process()))
    infos = [InstanceInfo(node=rank, rank=rank, world_size=2, total_nodes=2, head_port=port) for rank in range(2)]
    stores = [store_on_the_head(info, port, 60.0) for info in infos]
    found = listening(psutil.Process())
    assert len(found) == before + 1
    assert reached_by_others(found) == []
    stores[0].set("a", "1")
    assert stores[1].get("a") == b"1"


@sky.compute
def listeners_of_the_rank() -> list[str]:
    import torch
    import torch.distributed as dist

    sky.plugins.barrier()
    dist.all_reduce(torch.ones(1))
    found = listening(psutil.Process())
    sky.plugins.barrier()
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    plugins = [sky.plugins.torch(backend="gloo"), sky.plugins.coordination()]
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2, plugins=plugins) as opened:
        yield opened


def test_nothing_that_a_rank_of_this_machine_opens_is_reached_from_others(pool: Any) -> None:
    found = listeners_of_the_rank() @ pool
    assert all(found)  # their workers, at least
    assert [reached_by_others(addresses) for addresses in found] == [[], []]


SCRIPT = """
import os
import sys

import psutil
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
found = []
for process in (psutil.Process(), psutil.Process(os.getppid())):
    rows = process.net_connections("tcp")
    found += [row.laddr.ip for row in rows if row.status == psutil.CONN_LISTEN]
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    file.write("\\n".join(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_restarts": 1}, {"nnodes": "1:4"}], ids=str)
def test_nothing_that_torchrun_opens_on_this_machine_is_reached_from_others(
    pool: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    pool.torchrun(tmp_path / "script.py", tmp_path, nproc_per_node=2, **options)
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert any(found)
    assert [reached_by_others(addresses) for addresses in found] == [[]] * 4


@pytest.mark.slow
def test_nothing_that_torchrun_opens_on_one_node_is_reached_from_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with sky.launch_local("cpu") as node:
        script = describe_script(tmp_path / "script.py", [tmp_path], procs_per_node=2)
        node.submit(run_script, pack_for(script, shares_files=True)).result(250)
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert any(found)
    assert [reached_by_others(addresses) for addresses in found] == [[]] * 2


def test_a_port_that_somebody_listens_on_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="in use"):
            listen_on_loopback("localhost", taken.getsockname()[1])


def test_a_listener_of_loopback_is_given_away_with_its_descriptor() -> None:
    descriptor = listen_on_loopback("localhost", 0)
    assert descriptor is not None
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"
    finally:
        os.close(descriptor)
