"""What plugins opened in a worker is closed, however it ends; and nothing is left of a pool that did not come about."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import skyproxy as sky
from skyproxy.errors import PluginError, RankErrors
from skyproxy.pools.ranks import RankGroup

pytestmark = pytest.mark.timeout(300)


class Leaving(sky.plugins.Plugin):
    """Leaves a file behind when it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    @contextlib.contextmanager
    def around_app(self, info: sky.InstanceInfo) -> Iterator[None]:
        yield
        Path(self.folder, str(os.getpid())).touch()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


@pytest.mark.parametrize("end", ["pool", "client", "SIGTERM"])
def test_hooks_are_left_however_it_ends(end: str, tmp_path: Path) -> None:
    node = sky.launch_local("cpu")
    pid = node.process_id
    assert pid is not None
    group = RankGroup("pool", [node], [sky.InstanceInfo()], plugins=[Leaving(tmp_path)])
    group.ensure()
    assert list(tmp_path.iterdir()) == []
    process = psutil.Process(pid)
    if end == "pool":
        group.close()
    elif end == "client":
        node.close()  # an embedded worker sees its client go
    else:
        os.kill(pid, signal.SIGTERM)
        process.wait(60)
    assert [file.name for file in tmp_path.iterdir()] == [str(pid)]
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
