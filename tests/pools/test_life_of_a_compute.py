"""From a wish to workers and back: both ways to use a Compute, Cluster, failures, interrupts. Nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import skyproxy as sky
from skyproxy.errors import ConfigurationError, PluginError, RankErrors, WorkerStartError
from skyproxy.pools import Compute
from skyproxy.providers import Progress, WorkerSpec
from skyproxy.providers.base import Report

CPU = sky.Local(device="cpu")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    def children() -> set[int]:
        found = psutil.Process().children(recursive=True)
        return {child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE}

    before = children()
    yield
    assert children() - before == set()


def test_one_worker_is_a_node_in_asynchronous_code() -> None:
    @sky.compute
    def rank() -> int:
        return sky.instance_info().rank

    async def use() -> list[Any]:
        async with Compute(name="one", provider=CPU, env={"HF_HOME": "/cache"}) as node:
            assert isinstance(node, sky.Node)
            model = torch.nn.Linear(2, 1).to(node.device("cpu"))
            home = await node.execute(os.getenv, "HF_HOME")
            return [model.weight.device.type, home, await (rank() > node)]

    assert asyncio.run(use()) == ["sky", "/cache", 0]


def test_a_decorated_coroutine_function_brings_its_worker() -> None:
    @sky.compute(name="own", provider=CPU, env={"COLOUR": "blue"})
    async def train(node: Any, steps: int, *, rate: float = 0.5, **more: int) -> tuple[Any, ...]:
        """Trains."""
        return (await node.execute(os.getenv, "COLOUR"), steps, rate, more, node.alive)

    assert list(inspect.signature(train).parameters) == ["steps", "rate", "more"]
    assert inspect.iscoroutinefunction(train)
    coroutine = train(3, rate=0.1, extra=1)
    assert inspect.iscoroutine(coroutine)
    assert asyncio.run(coroutine) == ("blue", 3, 0.1, {"extra": 1}, True)
    with pytest.raises(TypeError, match="steps"):
        asyncio.run(train())
    # Whoever has a node already provisions nothing.
    given = asyncio.run(train(node=_Alive(), steps=1))
    assert given[1:] == (1, 0.5, {}, True)


class _Alive:
    alive = True

    async def execute(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def test_a_cluster_is_its_nodes_in_order() -> None:
    async def use() -> list[str | None]:
        first = Compute(provider=CPU, env={"WHO": "a"})
        second = Compute(provider=CPU, env={"WHO": "b"})
        async with sky.Cluster(first, second) as (a, b):
            assert a.device("cpu") != b.device("cpu")
            x = torch.ones(2, device=a.device("cpu")).to(b.device("cpu"))
            assert x.tolist() == [1.0, 1.0]
            return [await node.execute(os.getenv, "WHO") for node in (a, b)]

    assert asyncio.run(use()) == ["a", "b"]


def test_a_cluster_comes_up_whole_or_not_at_all() -> None:
    seen: list[Progress] = []
    bad = Compute(provider=CPU, env={"SKYPROXY_MAX_HANDLES": "many"})
    good = Compute(provider=CPU, on_event=seen.append)
    with pytest.raises(WorkerStartError, match="SKYPROXY_MAX_HANDLES"):
        with sky.Cluster(good, bad):
            pass
    assert seen
    with pytest.raises(ConfigurationError, match="is not running"):
        good.nodes
    with pytest.raises(ConfigurationError, match="twice"):
        sky.Cluster(good, good)


def test_events_tell_how_it_comes_up() -> None:
    seen: list[Progress] = []

    def note(progress: Progress) -> None:
        seen.append(progress)
        raise RuntimeError("somebody's callback")  # logged, and no reason to fail

    with Compute(provider=CPU, on_event=note):
        pass
    phases = [progress.phase for progress in seen]
    assert phases[0] == "provisioning"
    assert phases[-1] == "running"
    assert seen[-1].message == "all worker processes are ready"


class Waits:
    """A provider that never gets there."""

    name = "waits"

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cleaned_up = False

    async def launch(self, spec: WorkerSpec, report: Report) -> Any:
        report(Progress("provisioning", 0, "no GPU is free"))
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True


def test_what_takes_too_long_says_what_it_waited_for() -> None:
    provider = Waits()
    with pytest.raises(WorkerStartError, match=r"within 0.2 s.*no GPU is free"):
        Compute(provider=provider, timeout=0.2).start()
    assert provider.cleaned_up


def test_an_interrupt_takes_back_what_was_begun() -> None:
    provider = Waits()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        provider.begun.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Compute(provider=provider).start()
    assert provider.cleaned_up


def test_cancelling_takes_back_what_was_begun() -> None:
    provider = Waits()

    async def give_up() -> None:
        task = asyncio.create_task(Compute(provider=provider).start_async())
        await asyncio.to_thread(provider.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert provider.cleaned_up

    asyncio.run(give_up())


class Fails:
    """A plugin whose hooks fail on request."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def around_app(self, info: Any) -> Any:
        import contextlib

        if self.hook == "around_app":
            raise OSError("no such interface")
        return contextlib.nullcontext()

    def around_client(self, pool: Any) -> Any:
        import contextlib

        if self.hook == "around_client":
            raise OSError("no such backend")
        return contextlib.nullcontext()


def test_a_plugin_that_fails_takes_the_workers_with_it() -> None:
    with pytest.raises(RankErrors, match="no such interface"):
        Compute(provider=CPU, plugins=[Fails("around_app")]).start()
    with pytest.raises(PluginError, match="'Fails', around_client: OSError: no such backend"):
        Compute(provider=CPU, plugins=[Fails("around_client")]).start()


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return [sys.executable, str(path)]


def test_an_interrupted_program_leaves_no_process(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import time
        import skyproxy as sky

        @sky.compute
        def forever():
            print("begun")
            while True:
                time.sleep(0.01)

        if __name__ == "__main__":
            try:
                with sky.Compute(provider=sky.Local(device="cpu")) as pool:
                    print(pool.launched.process_ids()[0], flush=True)
                    forever() >> pool
            except KeyboardInterrupt:
                print("interrupted")
        """,
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        assert program.wait(60) == 0
    assert not psutil.pid_exists(worker)


def test_a_program_that_is_interrupted_in_a_collective_leaves_no_process(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import multiprocessing, time
        import skyproxy as sky

        @sky.compute
        def forever():
            import torch, torch.distributed as dist
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,))
            child.start()
            dist.barrier()
            print("begun", child.pid)
            if dist.get_rank():
                time.sleep(10_000)
            dist.all_reduce(torch.ones(1))

        if __name__ == "__main__":
            plugins = [sky.plugins.torch(backend="gloo")]
            try:
                with sky.Compute(provider=sky.Local(device="cpu"), nodes=2, plugins=plugins) as pool:
                    print(*pool.launched.process_ids(), flush=True)
                    forever() @ pool
            except KeyboardInterrupt:
                print("interrupted")
        """,
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        left = [int(word) for word in program.stdout.readline().split()]
        left += [int(program.stdout.readline().split()[-1]) for _ in left]
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        assert program.wait(60) == 0
    assert len(left) == 4
    for number in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(number).wait(30)


def test_a_model_defined_in_the_program_comes_back_trained(tmp_path: Path) -> None:
    """The class travels by value and the result is an instance of the very class of the program."""
    command = script(
        tmp_path,
        """
        import torch
        import skyproxy as sky

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(64, 10)

            def forward(self, x):
                return self.layer(x)

        @sky.function
        def train(model, x, y, epochs, lr):
            optimizer = torch.optim.Adam(model.parameters(), lr=lr)
            for epoch in range(epochs):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"trained by {type(model).__name__}")
            return model

        def accuracy(model, x, y):
            with torch.no_grad():
                return (model(x).argmax(1) == y).float().mean().item()

        if __name__ == "__main__":
            from sklearn.datasets import load_digits

            digits = load_digits()
            x = torch.tensor(digits.data, dtype=torch.float32) / 16
            y = torch.tensor(digits.target)
            torch.manual_seed(0)
            model = Model()
            before, forward = accuracy(model, x, y), Model.forward
            version = torch.__version__.split("+")[0]
            index = sky.PipIndex(url="https://download.pytorch.org/whl/cpu", packages=["torch"])
            image = sky.Image(pip=[f"torch=={version}"], pip_indexes=[index])
            with sky.Compute(provider=sky.Local(), vcpus=1, memory_gb=2, image=image) as compute:
                trained = train(model, x, y, epochs=60, lr=0.02) >> compute
            assert type(trained) is Model, type(trained)
            assert trained is not model
            assert accuracy(model, x, y) == before
            assert {p.device.type for p in trained.parameters()} == {"cpu"}
            assert before < 0.3 < 0.9 < accuracy(trained, x, y), (before, accuracy(trained, x, y))
            print("done")
        """,
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained by Model\ndone\n"
