"""Jobs of a pool: under torchrun on all nodes, or on one rank; found again by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, UnknownJobError

pytestmark = pytest.mark.slow
SECONDS = 240.0


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
