"""Unchanged scripts for torchrun on real nodes: the environment that they find, their results, their failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyproxy as sky
from skyproxy.errors import RankErrors, ScriptError
from skyproxy.functions import scripts
from skyproxy.functions.scripts import _MARK_VARIABLE, describe_script, pack_for, run_script
from skyproxy.functions.waiting_calls import WAITING_CALLS
from skyproxy.pools import Compute
from skyproxy.runtime import debug_rooms
from skyproxy.runtime.debug_rooms import Line
from skyproxy.runtime.lifecycle import free_ports

pytestmark = pytest.mark.slow

TRAIN = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import helper

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
way = sys.argv[3]
if way == "ddp":
    model = DistributedDataParallel(model)
elif way == "fsdp2":
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = torch.Generator().manual_seed(0 if way == "tp" else rank)  # with tensor parallelism, all have the same batch
for step in range(int(sys.argv[2])):
    x = torch.randn(16, 8, generator=own)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open(f"{sys.argv[1]}/losses-{rank}", "a") as file:
        print(helper.text_of(loss.item()), file=file)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # PyTorch's threads of gloo end one process in ten or so with SIGABRT when it exits, under torchrun as well
"""

PLACE = """
import os
import sys

import skyproxy

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
info = skyproxy.instance_info()
print("place", info.rank, info.world_size, info.local_rank, info.procs_per_node, info.node, helper.text_of(1.0))
"""

FAIL = """
import os
import signal
import time

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Compute]:
    with Compute(provider=sky.Local(device="cpu"), nodes=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def node() -> Iterator[sky.Node]:
    with sky.launch_local("cpu") as node:
        yield node


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def text_of(number):\n    return number.hex()\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "place.py").write_text("import helper\n" + PLACE)
    (tmp_path / "fail.py").write_text(FAIL)
    (tmp_path / "stop.py").write_text(STOP)
    (tmp_path / "wait.py").write_text(WAIT)
    return tmp_path


STOP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total, secret = 100 * rank, 41
breakpoint()
dist.all_reduce(total := torch.tensor(total))
print("sum", int(total), flush=True)
if rank == 1:
    raise ValueError("not 42")
dist.destroy_process_group()
"""

WAIT = """
import os
import time
from pathlib import Path

Path(f"begun-{os.environ['RANK']}").touch()
time.sleep(600)
"""


def processes_of(script: Path) -> list[psutil.Process]:
    """The agents and processes of a script that are not gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(script) in process.cmdline() and _MARK_VARIABLE in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_losses_are_those_of_torchrun(pool: Compute, folder: Path, way: str) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    ours.mkdir()
    theirs.mkdir()
    pool.torchrun(folder / "train.py", ours, 3, way, nproc_per_node=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*command, str(folder / "train.py"), str(theirs), "3", way], check=True, timeout=300)
    for rank in range(4):
        assert (ours / f"losses-{rank}").read_text() == (theirs / f"losses-{rank}").read_text() != ""


VARIABLES = """
import json
import os
import sys

with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    json.dump(dict(os.environ), file)
"""
OF_EACH_RUN = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}


@pytest.mark.parametrize("options", [{}, {"nnodes": 2, "max_restarts": 1}, {"nnodes": "1:2"}], ids=str)
def test_the_environment_is_that_of_torchrun(pool: Compute, folder: Path, options: dict[str, Any]) -> None:
    (folder / "variables.py").write_text(VARIABLES)
    ours, theirs = folder / "ours", folder / "theirs"
    ours.mkdir()
    theirs.mkdir()
    pool.torchrun(folder / "variables.py", ours, nproc_per_node=2, **options)
    meeting = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command += [f"--nnodes={options.get('nnodes', 2)}", f"--max-restarts={options.get('max_restarts', 0)}"]
    agents = []
    for node in range(2):
        way = [
            f"--node-rank={node}",
            f"--master-addr={meeting.split(':')[0]}",
            f"--master-port={meeting.split(':')[1]}",
        ]
        if options:
            way = [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={meeting}",
                "--rdzv-id=x",
                f"--rdzv-conf=is_host={1 - node}",
            ]
        line = [*command, *way, str(folder / "variables.py"), str(theirs)]
        agents.append(subprocess.Popen(line, env=dict(os.environ)))
    assert [agent.wait(300) for agent in agents] == [0, 0]
    for rank in range(4):
        found = json.loads((ours / str(rank)).read_text())
        wanted = json.loads((theirs / str(rank)).read_text())
        own = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} <= own.keys()
        assert own.keys() <= found.keys()
        assert {name: found[name] for name in own.keys() - OF_EACH_RUN} == {
            name: own[name] for name in own.keys() - OF_EACH_RUN
        }


AGAIN = """
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    dist.all_reduce(total := torch.tensor(dist.get_rank()))
    print("sum", int(total), flush=True)
    dist.barrier()
    if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] < sys.argv[1]:
        raise ValueError("not yet")
    dist.barrier()
    os._exit(0)


main()
"""


@pytest.mark.parametrize("options", [{}, {"nnodes": "1:2"}], ids=str)
def test_processes_that_are_started_again_meet_anew(
    pool: Compute, folder: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # With PyTorch's own agents of 2.13, they find in their store what those before have left there, and fail.
    (folder / "again.py").write_text(AGAIN)
    pool.torchrun(folder / "again.py", 1, nproc_per_node=2, max_restarts=1, **options)
    assert capsys.readouterr().out.count("sum 6\n") == 8


def test_a_failure_says_what_the_script_has_recorded(node: sky.Node, folder: Path) -> None:
    (folder / "again.py").write_text(AGAIN)
    script = replace(describe_script(folder / "again.py", [9], procs_per_node=2), directory=str(folder))
    with pytest.raises(ScriptError, match=r"\(process 1 of this node\) ended with exit code 1: ValueError: not yet"):
        node.submit(run_script, script).result(300)


def test_a_process_that_is_killed_ends_all_and_is_named(pool: Compute, folder: Path) -> None:
    with pytest.raises(RankErrors) as caught:
        pool.torchrun(folder / "fail.py")
    (error,) = [one for one in caught.value.exceptions if isinstance(one, ScriptError)]
    assert "fail.py failed: rank 1 (process 0 of this node) was ended by SIGKILL" in str(error)
    assert caught.value.first == 1
    pool.run(os.getpid)  # the pool goes on
    assert psutil.wait_procs(processes_of(folder / "fail.py"), timeout=60)[1] == []


def test_a_call_that_is_cancelled_ends_the_processes(node: sky.Node, folder: Path) -> None:
    script = describe_script(folder / "wait.py", procs_per_node=2)
    call = node.submit(run_script, replace(script, directory=str(folder)))
    while not all((folder / f"begun-{rank}").exists() for rank in (0, 1)):
        assert not call.done()
        time.sleep(0.05)
    running = processes_of(folder / "wait.py")
    assert len(running) == 3
    call.cancel()
    assert psutil.wait_procs(running, timeout=60)[1] == []


def test_breakpoints_and_exceptions_of_ranks_wait_for_skyproxy_debug(
    node: sky.Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WAITING_CALLS, "_process", 0)
    with tempfile.TemporaryDirectory(prefix="sky") as rooms:
        monkeypatch.setenv("XDG_RUNTIME_DIR", rooms)
        monkeypatch.setattr(scripts, "SETTINGS", replace(scripts.SETTINGS, debug=True))
        script = replace(describe_script(folder / "stop.py", procs_per_node=2), directory=str(folder))
        told: list[str] = []
        call = node.submit(run_script, script, on_output=lambda stream, text: told.append(text))
        for rank in (1, 0):
            talk(call, f"{rank} breakpoint stop.py:8", f"!total += {7 + rank}", "c")
        assert "('secret', 41)" in talk(call, "1 exception stop.py:12", "p 'secret', secret", "q")
        with pytest.raises(ScriptError, match=r"rank 1 .* ended with exit code 1"):
            call.result(300)
        printed = "".join(told)
        assert "[rank 0] sum 115" in printed
        assert "rank 1 waits at a breakpoint in <module>, stop.py:8: skyproxy debug" in printed


def talk(call: sky.functions.Call, wanted: str, *lines: str) -> str:
    """What a process says to these lines, once it waits: its rank, kind, file and line."""
    while not call.done():
        for line in debug_rooms.programs():
            for row in debug_rooms.waiting(line):
                if f"{row['rank']} {row['kind']} {os.path.basename(row['file'])}:{row['line']}" == wanted:
                    line.wait_for_ever()
                    line.send({"attach": row["id"]})
                    return say(line, *lines)
            line.close()
        time.sleep(0.05)
    raise AssertionError(f"{wanted} did not wait")


def say(line: Line, *lines: str) -> str:
    """What comes until all lines are said, and a prompt follows the last one, or the end."""
    said, left = "", list(lines)
    while (message := line.receive())["kind"] != "end":
        said += message["text"]
        if message["kind"] == "prompt":
            line.send({"line": left.pop(0)})
            if left == [] and lines[-1] == "c":
                break
    line.close()
    return said


def test_copies_travel_and_a_failed_attempt_is_made_again(node: sky.Node, folder: Path) -> None:
    script = describe_script(folder / "place.py", procs_per_node=2, max_restarts=1)
    packed = pack_for(script, shares_files=False)
    (folder / "helper.py").unlink()
    told: list[str] = []
    call = node.submit(run_script, packed, on_output=lambda stream, text: told.append(text))
    call.result(300)
    # Rank 0 may have come as far in the first attempt.
    lines = {line for line in "".join(told).splitlines() if "place" in line}
    assert lines == {f"[rank {rank}] place {rank} 2 {rank} 2 0 0x1.0000000000000p+0" for rank in (0, 1)}
