"""What plugins opened in a worker is closed, however it ends; and nothing is left of a pool that did not come about."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyproxy as sky
from skyproxy.errors import PluginError, RankErrors
from skyproxy.pools.ranks import RankGroup
from skyproxy.session.local_worker import LocalWorker, worker_environment
from skyproxy.settings import SETTINGS
from skyproxy.transport.worker_report import ask_worker
from tests.integration.programs import wait_for

pytestmark = pytest.mark.timeout(300)


class Leaving(sky.plugins.Plugin):
    """Writes down, when it is left, whether there is a process group."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    @contextlib.contextmanager
    def around_app(self, info: sky.InstanceInfo) -> Iterator[None]:
        import torch.distributed as dist

        yield
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {dist.is_initialized()}\n")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


@pytest.mark.parametrize("end", ["pool", "client", "SIGTERM"])
def test_hooks_are_left_however_it_ends(end: str, tmp_path: Path) -> None:
    node = sky.launch_local("cpu")
    pid = node.process_id
    assert pid is not None
    told = tmp_path / "told"
    plugins = [Leaving(told), sky.plugins.torch(backend="gloo", init="always"), Leaving(told)]
    group = RankGroup("pool", [node], [sky.InstanceInfo()], plugins=plugins)
    group.ensure()
    assert not told.exists()
    process = psutil.Process(pid)
    if end == "pool":
        group.close()
    elif end == "client":
        node.close()  # an embedded worker sees its client go
    else:
        os.kill(pid, signal.SIGTERM)
        process.wait(60)
    # The last plugin first; before the first one is left, torch has destroyed its group.
    assert told.read_text() == f"{pid} True\n{pid} False\n"
    node.close()


class Absent(sky.plugins.Plugin):
    """One rank never comes to the meeting."""

    @contextlib.contextmanager
    def around_process(self, info: sky.InstanceInfo) -> Iterator[None]:
        if info.rank == 1:
            threading.Event().wait(60)
        yield


def test_a_rank_that_does_not_come_is_named_and_the_pool_leaves_nothing() -> None:
    before = children()
    plugins = [sky.plugins.torch(backend="gloo", join_timeout_seconds=2.0), Absent()]
    with pytest.raises(RankErrors) as caught:
        with sky.Compute(provider=sky.Local(device="cpu"), nodes=2, plugins=plugins):
            raise AssertionError("it did start")
    assert caught.value.first == 0
    text = str(caught.value)
    assert "plugin 'torch', around_app, rank 0 of 2" in text
    assert "rank 1 (127.0.0.1) did not join within 2 s" in text
    assert children() <= before


class Stumbling(sky.plugins.Plugin):
    """Fails on the client, once the workers run."""

    def around_client(self, pool: sky.Compute) -> contextlib.AbstractContextManager[None]:
        raise LookupError("nothing here")


def test_a_plugin_that_fails_on_the_client_is_named_and_leaves_nothing() -> None:
    before = children()
    with pytest.raises(PluginError, match="plugin 'Stumbling', around_client: LookupError: nothing here"):
        sky.Compute(provider=sky.Local(device="cpu"), plugins=[Stumbling()]).start()
    assert children() <= before


# A client with a pool on two workers that are not its own. It says when its pool is set up, and never ends by itself.
PROGRAM = """
import contextlib, json, sys, time
import skyproxy as sky

class Leaving(sky.plugins.Plugin):
    def __init__(self, told):
        self.told = told

    @contextlib.contextmanager
    def around_app(self, info):
        yield
        with open(self.told, "a") as told:
            told.write(f"rank {info.rank} left\\n")

@sky.compute
def stuck(told):
    import torch, torch.distributed as dist
    with open(told, "a") as file:
        file.write("begun\\n")
    if dist.get_rank():
        time.sleep(10_000)  # C code that no exception reaches
    dist.all_reduce(torch.ones(1))  # for ever, if nobody ends it

urls, tokens, told, busy = json.loads(sys.argv[1])
plugins = [sky.plugins.torch(backend="gloo"), Leaving(told)]
pool = sky.Compute(name="mine", provider=sky.Remote(urls, token=tokens), plugins=plugins).start()
if busy:
    stuck(told) @ pool
print("ready", flush=True)
sys.stdin.read()
"""


@sky.compute
def summed() -> float:
    import torch
    import torch.distributed as dist

    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("busy", [False, True])
def test_the_hooks_of_a_client_that_was_killed_are_left(busy: bool, tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    # What its functions get, to be found again by another client: they are given up then.
    variables = {
        **worker_environment(),
        "SKYPROXY_CALL_GRACE_SECONDS": "1",
        "SKYPROXY_SESSION_GRACE_SECONDS": "1",
    }
    workers = [LocalWorker("cpu", SETTINGS, environment=variables) for _ in range(2)]
    urls, tokens = [worker.url for worker in workers], [worker.token for worker in workers]
    arguments = json.dumps([urls, tokens, str(told), busy])
    # Open for both, so that nobody who opens it has to wait for somebody at its other end.
    words = os.fdopen(os.open(told, os.O_RDWR))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=worker_environment(),
        ) as program:
            assert program.stdout is not None
            if busy:
                assert [words.readline() for _ in range(2)] == ["begun\n"] * 2
            else:
                assert program.stdout.readline() == "ready\n"
            with pytest.raises(RankErrors, match="holds the plugins of pool 'mine-"):
                pool_on(urls, tokens).start()
            program.kill()
        assert sorted(words.readline() for _ in range(2)) == ["rank 0 left\n", "rank 1 left\n"]
        with pool_on(urls, tokens) as pool:
            assert summed() @ pool == [2.0, 2.0]
    finally:
        words.close()
        for worker in workers:
            worker.stop()


def test_a_pool_gets_the_workers_that_a_killed_program_of_its_client_held(tmp_path: Path) -> None:
    told = tmp_path / "told"
    workers = [LocalWorker("cpu", SETTINGS, environment=worker_environment()) for _ in range(2)]
    urls, tokens = [worker.url for worker in workers], [worker.token for worker in workers]

    def has_noticed(url: str, token: str) -> bool:
        sessions = ask_worker(url, token, "/status")["sessions"]
        return [row["state"] for row in sessions] == ["detached"]

    try:
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([urls, tokens, str(told), False])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=worker_environment(),
        ) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            program.kill()
        for url, token in zip(urls, tokens, strict=True):
            wait_for(partial(has_noticed, url, token), "the worker notices")
        with pool_on(urls, tokens) as pool:  # long before the grace of that program's sessions is over
            assert summed() @ pool == [2.0, 2.0]
        assert sorted(told.read_text().splitlines()) == ["rank 0 left", "rank 1 left"]
    finally:
        for worker in workers:
            worker.stop()


def pool_on(urls: list[str], tokens: list[str]) -> Any:
    plugins = [sky.plugins.torch(backend="gloo")]
    return sky.Compute(name="mine", provider=sky.Remote(urls, token=tokens), plugins=plugins)
