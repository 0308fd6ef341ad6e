"""How sessions begin and end by `reset`, `close` and settings, and how threads and event loops share one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, SessionLostError
from tests.integration.busy_workers import keep_busy
from tests.integration.programs import run_program, succeed, wait_for, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")


@pytest.fixture
def node(sky: str) -> Iterator[skyproxy.Node]:
    """A worker that may be killed. The devices of other tests come first and keep their numbers."""
    with skyproxy.launch_local("cpu") as fresh:
        yield fresh


def test_reset_ends_everything_and_the_next_use_starts_anew() -> None:
    source = """
    import threading, torch, skyproxy
    import psutil
    skyproxy.reset()
    assert skyproxy.devices() == []
    old = torch.ones(2, device="sky:0")
    skyproxy.launch_local("cpu")
    torch.ones(300_000).to("sky:1").cpu()
    pids = [node.process_id for node in skyproxy.list_nodes()]
    assert len(pids) == 2 and len(skyproxy.devices()) == 2
    skyproxy.reset()
    assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    skyproxy.reset()
    assert skyproxy.devices() == []
    try:
        old.cpu()
    except skyproxy.errors.SessionLostError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError
    assert (torch.ones(2, device="sky:0") + 1).tolist() == [2, 2]
    assert skyproxy.list_nodes()[0].process_id not in pids
    assert len(skyproxy.devices()) == 1
    """
    succeed(source)


def test_closing_twice_is_fine_and_a_node_is_a_context_manager(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        assert node.alive
        assert torch.ones(2, device=device).sum().item() == 2
        assert node.device("cpu") == device
        with pytest.raises(ConfigurationError, match="this worker has no cuda"):
            node.device("cuda")
        process = psutil.Process(node.process_id)
    node.close()
    assert not node.alive
    assert "lost" in repr(node)
    with pytest.raises(psutil.NoSuchProcess):
        process.status()
    with pytest.raises(SessionLostError, match="closed"):
        torch.ones(2, device=device).cpu()
    # The others keep their numbers.
    assert torch.ones(2, device=sky).sum().item() == 2


def test_devices_lists_what_there_is(node: skyproxy.Node) -> None:
    row = skyproxy.devices()[-1]
    assert row.device == node.devices[0]
    assert row.type == "cpu"
    assert row.total_memory_bytes > 0
    assert row.source == "skyproxy.launch_local"
    assert row.alive


def test_where_sky_0_comes_from(tmp_path: Path) -> None:
    source = "import skyproxy, torch; torch.ones(2, device='sky:0').cpu()"
    source += "; print([d.source for d in skyproxy.devices()])"
    explicit = """
    import os, skyproxy, torch
    skyproxy.connect(os.environ["URL"], token=os.environ["TOKEN"])
    torch.ones(2, device='sky:0').cpu()
    print([d.source for d in skyproxy.devices()])
    """
    with worker(tmp_path) as (url, token):
        assert succeed(source, SKYPROXY_URL=url, SKYPROXY_TOKEN=token) == "['SKYPROXY_URL']"
        taken = succeed(explicit, SKYPROXY_URL="ws://127.0.0.1:1", SKYPROXY_TOKEN="no", URL=url, TOKEN=token)
        assert taken == "['skyproxy.connect']"
        done = run_program(source, SKYPROXY_URL=url)
        assert "ConfigurationError" in done.stderr
        assert "SKYPROXY_TOKEN" in done.stderr
    # What was asked for and is not there is an error: never silently another worker.
    done = run_program(source, SKYPROXY_URL=url, SKYPROXY_TOKEN=token)
    assert done.returncode == 1
    assert "nothing listens on port" in done.stderr
    assert succeed(source).startswith("['embedded worker")


def test_a_worker_that_does_not_start_says_why(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_MAX_HANDLES", "many")
    with pytest.raises(skyproxy.errors.WorkerStartError, match=r"SKYPROXY_MAX_HANDLES='many' is not a number"):
        skyproxy.launch_local("cpu")
    with pytest.raises(ConfigurationError, match="not one of 'auto', 'cpu', 'cuda'"):
        skyproxy.launch_local("tpu")


def test_several_threads_share_a_session(sky: str) -> None:
    failures: list[BaseException] = []
    base = torch.arange(50.0, device=sky)

    def work(seed: int) -> None:
        try:
            for i in range(100):
                x = base * seed + i
                if i % 10 == 0:
                    assert x.tolist() == [v * seed + i for v in range(50)]
                if i % 25 == 0:
                    y = torch.full((30_000,), float(seed)).to(sky) + i
                    assert torch.equal(y.cpu(), torch.full((30_000,), float(seed + i)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_the_asynchronous_surface_leaves_the_event_loop_free(tmp_path: Path) -> None:
    async def main(url: str, token: str) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with await skyproxy.connect_async(url, token=token) as node:
            device = node.devices[0]
            result = await asyncio.to_thread(keep_busy, device, 1.0)
            before = ticks
            value = await skyproxy.fetch_async(result)
            assert value.device.type == "cpu"
            assert value.item() == pytest.approx(1 / 768, rel=1e-3)
            assert ticks - before > 10
            await asyncio.to_thread(keep_busy, device, 1.0)
            before = ticks
            await node.synchronize_async()
            assert ticks - before > 10
            several = [torch.full((n,), float(n), device=device) for n in (1, 2, 30_000)]
            fetched = await asyncio.gather(*map(skyproxy.fetch_async, several))
            assert [v.sum().item() for v in fetched] == [1, 4, pytest.approx(9e8)]
            sparse = torch.eye(3).to_sparse().to(device)
            assert torch.equal((await skyproxy.fetch_async(sparse)).to_dense(), torch.eye(3))
            assert torch.equal(await skyproxy.fetch_async(torch.ones(2)), torch.ones(2))
            bad = torch.nn.functional.embedding(torch.full((1,), 7, device=device), torch.zeros(3, 2, device=device))
            with pytest.raises(IndexError):
                await skyproxy.fetch_async(bad)
        assert not node.alive
        ticking.cancel()

    with worker(tmp_path) as (url, token):
        asyncio.run(main(url, token))


def test_no_token_is_in_arguments_or_environment(node: skyproxy.Node) -> None:
    assert node._worker is not None
    token = node._worker.token
    process = psutil.Process(node.process_id)
    assert token not in " ".join(process.cmdline())
    assert token not in " ".join(process.environ().values())
    assert token not in repr(node)
    assert token not in node._worker.output()
    wait_for(lambda: node.alive, "it lives")


@pytest.mark.parametrize("url", ["", "localhost:8765", "http://localhost:8765"])
def test_a_wrong_url_is_named_before_a_missing_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYPROXY_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="must begin with ws:// or wss://"):
        skyproxy.connect(url)
