"""Remote(): workers that are already running are used as they are, and stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import AuthenticationError, ConfigurationError, WorkerStartError
from skyproxy.pools.workers import connect_worker
from skyproxy.providers import Image, Launched, Provider, WorkerSpec
from skyproxy.session.local_worker import LocalWorker
from skyproxy.settings import SETTINGS
from tests.integration.programs import wait_for
from tests.integration.programs import worker as running_worker


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    worker = LocalWorker("cpu", SETTINGS)
    yield worker
    worker.stop()


@sky.compute
def where() -> tuple[int, int, str]:
    info = sky.instance_info()
    return info.rank, info.world_size, info.head_addr


def test_one_worker_can_serve_two_ranks_and_outlives_the_pool(worker: LocalWorker) -> None:
    for _ in range(2):
        # Two sessions of one process: what each call is told goes with the call, not with the process.
        with sky.Compute(provider=sky.Remote([worker.url, worker.url], token=worker.token)) as pool:
            assert where() @ pool == [(0, 2, "127.0.0.1"), (1, 2, "127.0.0.1")]


def test_a_token_of_the_environment(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_TOKEN", worker.token)
    with sky.Compute(provider=sky.Remote([worker.url])) as pool:
        assert where() >> pool == (0, 1, "127.0.0.1")
    with pytest.raises(AuthenticationError):
        sky.Compute(provider=sky.Remote([worker.url], token="x" * 32)).start()
    monkeypatch.delenv("SKYPROXY_TOKEN")
    with pytest.raises(ConfigurationError, match="SKYPROXY_TOKEN"):
        sky.Compute(provider=sky.Remote([worker.url])).start()


def test_a_pools_further_connections_have_the_new_token(tmp_path: Path) -> None:
    extra = {"SKYPROXY_TOKEN_POLL_SECONDS": "0.05", "SKYPROXY_TOKEN_OVERLAP_SECONDS": "0"}
    spec, file = WorkerSpec("a"), tmp_path / "token"
    with running_worker(tmp_path, **extra) as (url, former):
        launched = asyncio.run(sky.Remote([url], token_file=file).launch(spec, lambda progress: None))
        (endpoint,) = launched.endpoints
        assert endpoint.token == former
        first, second = (asyncio.run(connect_worker(spec, each)) for each in (endpoint, replace(endpoint, renew=None)))
        draft = tmp_path / ".draft"
        draft.write_text("another-token-for-this-worker")
        draft.chmod(0o600)
        draft.rename(file)
        wait_for(lambda: _is_refused(url, former), "the former token is refused")
        assert first.worker_status()["sessions"]
        with pytest.raises(AuthenticationError):
            second.worker_status()
        # Functions have a connection of their own, which is made now.
        assert first.run(abs, -2) == 2
        with pytest.raises(AuthenticationError):
            second.run(abs, -2)
        first.close()
        second.close()


def _is_refused(url: str, token: str) -> bool:
    try:
        sky.connect(url, token=token).close()
    except AuthenticationError:
        return True
    return False


def test_a_token_file_is_read_and_is_the_only_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="both token= and token_file="):
        sky.Remote(["ws://host:1"], token="x", token_file=tmp_path / "token")
    provider = sky.Remote(["ws://127.0.0.1:1"], token_file=tmp_path / "token")
    for text, problem in ((None, "cannot be read"), ("", "is empty")):
        if text is not None:
            (tmp_path / "token").write_text(text)
        with pytest.raises(ConfigurationError, match=problem):
            asyncio.run(provider.launch(WorkerSpec("a"), lambda progress: None))


def test_packages_are_checked_and_not_installed(worker: LocalWorker) -> None:
    provider = sky.Remote([worker.url], token=worker.token)
    with sky.Compute(provider=provider, image=Image(pip=["torch", "numpy"])):
        pass
    with pytest.raises(ConfigurationError, match="rank 0 lacks no-such-package-here"):
        sky.Compute(provider=provider, image=Image(pip=["torch", "no-such-package-here"])).start()


@pytest.mark.parametrize(
    "write",
    [
        lambda: sky.Remote([]),
        lambda: sky.Remote("ws://host:1"),
        lambda: sky.Remote(["http://host:1"]),
        lambda: sky.Remote(["ws://a:1", "ws://b:1"], token=["one"]),
    ],
)
def test_what_cannot_work_is_refused(write: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError):
        write()


@pytest.mark.parametrize(
    "spec",
    [
        WorkerSpec("a", nodes=2),
        WorkerSpec("a", image="debian"),
        WorkerSpec("a", image=Image(apt=["git"])),
        WorkerSpec("a", env={"A": "1"}),
        WorkerSpec("a", max_lifetime_seconds=1.0),
        WorkerSpec("a", options={"colour": "red"}),
    ],
)
def test_what_it_cannot_give_is_an_error(spec: WorkerSpec) -> None:
    with pytest.raises(ConfigurationError):
        asyncio.run(sky.Remote(["ws://host:1"], token="x").launch(spec, lambda progress: None))


def test_it_cannot_start_a_worker_again() -> None:
    provider = sky.Remote(["ws://host:1"], token="x")
    launched = asyncio.run(provider.launch(WorkerSpec("a"), lambda progress: None))
    assert isinstance(provider, Provider)
    assert isinstance(launched, Launched)
    with pytest.raises(WorkerStartError, match="ws://host:1"):
        asyncio.run(launched.restart(0))
    assert asyncio.run(launched.logs(0)) == ""
    asyncio.run(launched.close())
