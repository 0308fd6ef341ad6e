"""Jobs of a pool: under torchrun on all nodes, or on one rank; found again by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, SessionLostError, UnknownJobError
from skyproxy.pools.elastic_group import ElasticGroup, Member
from skyproxy.providers.base import Endpoint
from tests.integration.programs import wait_for

SECONDS = 240.0


def pid() -> int:
    return os.getpid()


def test_a_script_under_torchrun_needs_a_process() -> None:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=sky.Nodes(0, 1)) as pool:
        with pytest.raises(ConfigurationError, match="no process at this moment"):
            pool.submit_job(__file__, nproc_per_node=1)


def test_places_of_some_processes_have_no_gaps_and_no_others() -> None:
    group = ElasticGroup("pool", 1)
    node: Any = SimpleNamespace(_devices=(), alive=True)
    group.add([Member(Endpoint(url="", token="", rank=rank, node=rank), node) for rank in (0, 1, 3)])
    places = group.places([0, 3])
    assert [(info.rank, info.node, info.total_nodes, info.world_size) for info in places] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    with pytest.raises(SessionLostError, match="rank 2 is not there"):
        group.places([1, 2])


@pytest.mark.timeout(300)
def test_jobs_of_a_killed_node_are_gone_at_once_and_those_of_others_are_found(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(600)\n")
    lost: list[int | None] = []

    def note(progress: Any) -> None:
        if progress.phase == "lost":
            lost.append(progress.node)

    nodes = sky.Nodes(2, 2, idle=0.1)
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=nodes, on_event=note) as pool:
        victim, _ = pool.broadcast(pid)
        both = pool.submit_job(script, nproc_per_node=1, name="both")
        first, second = (pool.submit_job(script, name=f"on{rank}", rank=rank) for rank in range(2))
        os.kill(victim, signal.SIGKILL)
        assert pool.job("on1").status().state == "running"
        wait_for(lambda: lost == [0], "the loss is noticed", SECONDS)
        with pytest.raises(UnknownJobError, match="gone with its worker"):
            first.wait()
        # The part that is gone is not left out, as if all had ended well.
        found = pool.job("both")
        assert found.node_count == both.node_count == 2
        with pytest.raises(UnknownJobError, match="gone with its worker"):
            found.status()
        with pytest.raises(UnknownJobError, match="gone with its worker"):
            found.cancel()
        states = {job.name: job for job in pool.nodes[-1].jobs()}
        wait_for(lambda: pool.nodes[-1].job("both").status().state == "cancelled", "the other part ends", SECONDS)
        assert set(states) == {"on1", "both"}
        wait_for(lambda: not pool._has_jobs(0), "nothing holds the next process of this rank", SECONDS)
        second.cancel()
        assert second.status().state == "cancelled"


@pytest.mark.slow
def test_a_script_under_torchrun_is_a_job_on_all_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "in", os.environ["SKYPROXY_JOB"], flush=True)
dist.barrier()  # a rank that leaves at once breaks off the other one's connecting: "Connection closed by peer"
os._exit(0)  # PyTorch's threads of gloo end a process with SIGABRT now and then when it exits
""")
    with sky.Compute(provider=sky.Local(), nodes=2) as pool:
        job = pool.submit_job(tmp_path / "train.py", nproc_per_node=1, name="both")
        status = job.wait(SECONDS)
        lines = list(pool.job("both").logs())
        assert (status.state, status.kind, status.exit_code) == ("succeeded", "torchrun", 0), lines
        for rank in range(2):
            assert sum(f"rank {rank} of 2 in both" in line for line in lines) == 1, lines
        with pytest.raises(UnknownJobError):
            pool.job("other")
        with pytest.raises(ConfigurationError, match="epochs="):
            pool.submit_job(tmp_path / "train.py", nproc_per_node=1, epochs=3)
        on_second = pool.submit_job(divmod, 7, 2, rank=1)
        assert on_second.result(SECONDS) == (3, 1)
        assert [row.name for row in pool.nodes[1].jobs()] == [on_second.name, "both"]
        assert [row.name for row in pool.nodes[0].jobs()] == ["both"]
