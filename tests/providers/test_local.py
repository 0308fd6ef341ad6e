"""Local(): real processes of this machine, all of them or none."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers import Accelerator, Image, Launched, Progress, Provider, Volume, WorkerSpec, local
from skyproxy.providers.local import Local, LocalWorkers, devices_of_node
from skyproxy.session.forking import can_fork
from skyproxy.session.local_worker import LocalWorker
from skyproxy.settings import SETTINGS


def launch(spec: WorkerSpec, provider: Local | None = None) -> tuple[LocalWorkers, list[Progress]]:
    steps: list[Progress] = []
    workers = asyncio.run((provider or Local(device="cpu")).launch(spec, steps.append))
    return workers, steps


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE}


def variables_of(pid: int) -> dict[str, str]:
    return psutil.Process(pid).environ()


def test_every_rank_is_a_process_that_knows_its_place(tmp_path: Path) -> None:
    (tmp_path / "included.py").touch()
    before = children()
    spec = WorkerSpec(
        "pool",
        nodes=1,
        procs_per_node=2,
        image=Image(env={"FROM": "image", "BOTH": "image"}, includes=[str(tmp_path / "included.py")]),
        env={"BOTH": "spec"},
        volumes=(Volume("cache", "1Gi", str(tmp_path / "cache")),),
    )
    workers, steps = launch(spec)
    try:
        assert isinstance(workers, Launched)
        assert [(e.node, e.rank, e.local_rank, e.address) for e in workers.endpoints] == [
            (0, 0, 0, "127.0.0.1"),
            (0, 1, 1, "127.0.0.1"),
        ]
        assert len({e.url for e in workers.endpoints}) == len({e.token for e in workers.endpoints}) == 2
        assert [step.phase for step in steps] == ["bootstrapping", "running", "running"]
        places = [variables_of(pid) for pid in workers.process_ids()]
        told = [json.loads(place["COMPUTE_POOL"]) for place in places]
        assert [(t["rank"], t["local_rank"], t["world_size"], t["total_nodes"]) for t in told] == [
            (0, 0, 2, 1),
            (1, 1, 2, 1),
        ]
        assert [len(t["peers"]) for t in told] == [2, 2]
        assert told[0]["head_port"] == told[1]["head_port"]
        assert [(place["FROM"], place["BOTH"]) for place in places] == [("image", "spec")] * 2
        included = [Path(place["PYTHONPATH"].split(os.pathsep)[0]) for place in places]
        assert all((folder / "included.py").exists() for folder in included)
        assert (tmp_path / "cache").is_dir()

        old = workers.process_ids()[1]
        endpoint = asyncio.run(workers.restart(1))
        assert endpoint.rank == 1
        assert not psutil.pid_exists(old)
        assert children() - before == set(workers.process_ids())
    finally:
        asyncio.run(workers.close())
    asyncio.run(workers.close())
    assert children() == before
    assert not included[0].exists()
    with pytest.raises(WorkerStartError, match="closed"):
        asyncio.run(workers.restart(0))


def test_one_that_does_not_come_up_takes_the_others_with_it() -> None:
    before = children()
    with pytest.raises(WorkerStartError, match=r"(?s)rank \d: .*SKYPROXY_MAX_HANDLES='many' is not a number"):
        launch(WorkerSpec("pool", nodes=2, env={"SKYPROXY_MAX_HANDLES": "many"}))
    assert children() == before


@pytest.mark.skipif(not can_fork("cpu"), reason="workers are forked on Linux only")
def test_many_processes_are_copies_of_one_that_ends_with_them() -> None:
    async def run() -> tuple[set[int], list[psutil.Process]]:
        workers = await Local(device="cpu").launch(WorkerSpec("pool", nodes=4), lambda progress: None)
        processes = [psutil.Process(number) for number in workers.process_ids()]
        try:
            parents = {process.ppid() for process in processes}
            processes[1].kill()
            await workers.restart(1)
            again = psutil.Process(workers.process_ids()[1])
            parents.add(again.ppid())
            return parents, [*processes, again, psutil.Process(again.ppid())]
        finally:
            await workers.close()

    parents, processes = asyncio.run(run())
    assert len(parents) == 1
    assert os.getpid() not in parents
    assert not any(process.is_running() for process in processes)


def test_without_a_process_to_copy_each_is_started_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(python: str, variables: dict[str, str]) -> None:
        raise OSError("it has 2 threads")

    async def run() -> set[int]:
        workers = await Local(device="cpu").launch(WorkerSpec("pool", nodes=2), lambda progress: None)
        try:
            return {psutil.Process(number).ppid() for number in workers.process_ids()}
        finally:
            await workers.close()

    monkeypatch.setattr(local, "_MANY", 2)
    monkeypatch.setattr(local, "ForkServer", refused)
    assert asyncio.run(run()) == {os.getpid()}


def test_cancelling_ends_what_was_begun() -> None:
    before = children()
    seen: set[int] = set()

    async def give_up() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(Local(device="cpu").launch(WorkerSpec("pool", nodes=2), lambda p: begun.set()))
        await begun.wait()
        await asyncio.sleep(0)  # the processes are started in the very next step of the loop
        await asyncio.sleep(0)
        seen.update(children() - before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert seen
    assert children() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"image": "debian"}, "Container"),
        ({"image": Image(apt=["git"])}, "git"),
        ({"image": Image(base="debian")}, "base"),
        ({"keep": True}, "skyproxy up"),
        ({"image": Image(includes=["/nowhere/at/all"])}, "/nowhere/at/all"),
        ({"volumes": (Volume("v", "1Gi", "/proc/nothing"),)}, "/proc/nothing"),
    ],
)
def test_what_it_cannot_give_is_an_error(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        launch(WorkerSpec("pool", **change))


def test_a_missing_accelerator_is_not_passed_over_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    workers, steps = launch(WorkerSpec("pool", accelerator=Accelerator("A100")))
    asyncio.run(workers.close())
    assert any("no CUDA device" in step.message for step in steps)
    assert "no CUDA device" in caplog.text


@pytest.mark.parametrize(
    ("visible", "nodes", "dealt"),
    [
        ("0,1,2,3", 2, [["0", "1"], ["2", "3"]]),
        ("4,5", 2, [["4"], ["5"]]),
        ("0", 2, [["0"], ["0"]]),
        ("0,1,2,3", 1, [["0", "1", "2", "3"]]),
        ("0,1,2", 2, [["0"], ["1", "2"]]),
        ("", 2, [[], []]),
    ],
)
def test_devices_are_dealt_out(
    visible: str, nodes: int, dealt: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(
        "skyproxy.providers.local.count_accelerators", lambda: len([v for v in visible.split(",") if v])
    )
    assert [devices_of_node(node, nodes) for node in range(nodes)] == dealt


def test_a_worker_that_never_speaks_is_stopped_from_another_thread() -> None:
    worker = LocalWorker("cpu", SETTINGS, wait=False)
    worker.stop()
    with pytest.raises(WorkerStartError):
        worker.wait_until_it_listens(30.0)


def test_it_is_a_provider() -> None:
    assert isinstance(Local(), Provider)
    assert Local().name == "local"
