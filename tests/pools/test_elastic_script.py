"""The agents of a script whose number of nodes changes: which are started, and what the end of one means."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, ScriptError, SessionLostError, WorkerStartError
from skyproxy.functions.scripts import Script, node_range
from skyproxy.pools import Compute, PoolFuture
from skyproxy.pools.elastic_script import ElasticScript
from skyproxy.providers.base import Endpoint
from tests.integration import programs

pytestmark = pytest.mark.timeout(300)
wait_for = partial(programs.wait_for, timeout=100.0)


class FakePool:
    """Nodes by rank; `agents` has what the agents' calls return, in the order in which they are made."""

    def __init__(self, ranks: list[int], agents: list[object]) -> None:
        self.ranks = ranks
        self.agents = agents
        self.begun: list[tuple[int | None, Script]] = []
        self.wanted: list[int] = []
        self.running: list[PoolFuture[Any]] = []

    def script_endpoints(self) -> list[Endpoint]:
        return [Endpoint("ws://x", "t", node=rank, rank=rank, address=f"10.0.0.{rank}") for rank in self.ranks]

    def want_nodes(self, count: int) -> None:
        self.wanted.append(count)

    def submit_call(self, call: Any) -> PoolFuture[Any]:
        future: PoolFuture[Any] = PoolFuture(call.name)
        if not isinstance(call.args[0], Script):
            future.settle([4000])
            return future
        self.begun.append((call.options.rank, call.args[0]))
        ending = self.agents.pop(0)
        if callable(ending):
            ending = ending(self)
        if isinstance(ending, Exception):
            future.fail(ending)
        elif ending == "runs":
            self.running.append(future)
        else:
            future.settle(None)
        return future


def run(pool: FakePool, nodes: tuple[int, int], max_restarts: int = 0, timeout: float | None = None) -> None:
    script = Script("/x/train.py", nodes=nodes, max_restarts=max_restarts)
    ElasticScript(pool, script, timeout, start_seconds=0.0).run()


def test_each_node_gets_an_agent_and_the_first_one_the_store() -> None:
    pool = FakePool([2, 0, 5], [None, None, None])
    run(pool, (1, 4))
    assert [rank for rank, _ in pool.begun] == [0, 2, 5]
    meetings = [script.meeting for _, script in pool.begun]
    assert [meeting.endpoint for meeting in meetings if meeting] == ["10.0.0.0:4000"] * 3
    assert [meeting.is_host for meeting in meetings if meeting] == [True, False, False]
    assert pool.wanted == [4, 0]


def test_no_more_agents_than_asked_for() -> None:
    pool = FakePool([0, 1, 2], [None, None])
    run(pool, (1, 2))
    assert len(pool.begun) == 2


def test_a_node_that_comes_later_gets_an_agent() -> None:
    def comes(pool: FakePool) -> str:
        pool.ranks.append(1)
        return "runs"

    def ends(pool: FakePool) -> None:
        pool.running.pop().settle(None)

    pool = FakePool([0], [comes, ends])
    run(pool, (1, 2))
    assert [rank for rank, _ in pool.begun] == [0, 1]


def test_a_run_that_takes_too_long_is_ended() -> None:
    pool = FakePool([0], ["runs"])
    with pytest.raises(TimeoutError, match="did not end in time"):
        run(pool, (1, 2), timeout=0.01)
    assert pool.running[0].cancelled()


def test_a_lost_node_is_no_end_but_the_loss_of_the_store_is_a_restart() -> None:
    lost = SessionLostError("gone")
    pool = FakePool([0, 1], [lost, "runs", None, None])
    run(pool, (1, 2), max_restarts=1)
    assert [rank for rank, _ in pool.begun] == [0, 1, 0, 1]
    assert [script.meeting.restarts for _, script in pool.begun if script.meeting] == [0, 0, 1, 1]
    assert pool.begun[0][1].run != pool.begun[2][1].run

    with pytest.raises(SessionLostError, match="gone"):
        run(FakePool([0], [lost]), (1, 2))


def test_a_script_that_fails_ends_all_agents() -> None:
    with pytest.raises(ScriptError, match="rank 1 failed"):
        run(FakePool([0, 1], ["runs", ScriptError("rank 1 failed")]), (1, 2))


def test_too_few_nodes_are_an_error() -> None:
    with pytest.raises(WorkerStartError, match="needs 2 nodes, and there were 1"):
        run(FakePool([0], []), (2, 3))


@pytest.mark.parametrize(("given", "limits"), [(2, (2, 2)), ("3", (3, 3)), ("1:4", (1, 4))])
def test_a_number_of_nodes_is_read_as_torchrun_does(given: int | str, limits: tuple[int, int]) -> None:
    assert node_range(given) == limits


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "", "a", "4:1", "0:2", "1:2:3", ":", "1:", "-1:2"])
def test_what_is_no_number_of_nodes_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="nnodes="):
        node_range(given)


TRAIN = """
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
saved = folder / "checkpoint"
step, value = json.loads(saved.read_text()) if saved.exists() else (0, 1.0)
(folder / f"begun-{os.getpid()}").write_text(json.dumps([dist.get_world_size(), step]))
while step < steps:
    x = torch.full((1,), value / (rank + 3))
    dist.all_reduce(x)
    step, value = step + 1, x.item()
    with open(folder / f"losses-{rank}", "a") as file:
        print(value.hex(), file=file)
    if rank == 0:
        (folder / "new").write_text(json.dumps([step, value]))
        (folder / "new").replace(saved)
    while (step == 5 and (folder / "pause").exists()) or (step == 20 and dist.get_world_size() == 1):
        time.sleep(0.02)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def pool() -> Any:
    with Compute(provider=sky.Local(device="cpu"), nodes=sky.Nodes(2, 2)) as pool:
        yield pool


@pytest.mark.slow
def test_an_undisturbed_run_has_the_losses_of_torchrun(pool: Compute, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    pool.torchrun(script, ours, 8, nnodes=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(script), str(theirs), "8"], check=True, timeout=300)
    for rank in range(2):
        assert (ours / f"losses-{rank}").read_text() == (theirs / f"losses-{rank}").read_text() != ""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0], ids=["a node", "the node with the store"])
def test_the_loss_of_a_node_is_survived_from_the_checkpoint(pool: Compute, tmp_path: Path, victim: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "pause").touch()
    process = pool.broadcast(os.getpid)[victim]

    def lose() -> None:
        wait_for(lambda: (tmp_path / "checkpoint").exists(), "the first step")
        wait_for(lambda: (tmp_path / "checkpoint").read_text().startswith("[5,"), "the fifth step")
        os.kill(process, signal.SIGKILL)
        (tmp_path / "pause").unlink()

    losing = threading.Thread(target=lose)
    losing.start()
    try:
        pool.torchrun(script, tmp_path, 40, nnodes="1:2", max_restarts=5, timeout=250)
    finally:
        losing.join()
    assert (tmp_path / "checkpoint").read_text().startswith("[40,")
    begun = [json.loads(path.read_text()) for path in tmp_path.glob("begun-*")]
    assert begun.count([2, 0]) == 2  # both, at first
    later = [step for size, step in begun if size == 2 and step >= 5]
    assert len(later) >= 2  # and both again, from one checkpoint: alone, neither goes beyond step 20
    assert pool.ranks == [0, 1]
