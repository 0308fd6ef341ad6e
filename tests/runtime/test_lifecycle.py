"""Plugins' hooks in a process: entered once and in order, left once and in reverse, whoever fails."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError, PluginError
from skyproxy.runtime import CallContext, InstanceInfo, entered_call, instance_info
from skyproxy.runtime import lifecycle as lifecycle_module
from skyproxy.runtime.lifecycle import Lifecycle, Task, environment, free_ports, open_hooks, port_for, wait_in_slices
from skyproxy.runtime.plugin import Plugin, has_hook, name_of
from skyproxy.runtime.project_code import ProjectCode

INFO = InstanceInfo(job="pool/1")


class Noting(Plugin):
    """Notes when its hooks are entered and left."""

    def __init__(self, label: str, notes: list[str]) -> None:
        self.label = label
        self.notes = notes

    @property
    def name(self) -> str:
        return self.label

    @contextlib.contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        self.notes.append(f"{self.label} process in")
        yield
        self.notes.append(f"{self.label} process out")

    @contextlib.contextmanager
    def around_app(self, info: InstanceInfo) -> Iterator[None]:
        self.notes.append(f"{self.label} app in")
        yield
        self.notes.append(f"{self.label} app out")

    def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: f"{self.label}({function(*args)})"


@pytest.fixture
def lifecycle() -> Iterator[Lifecycle]:
    made = Lifecycle()
    yield made
    made.close()


def test_hooks_are_entered_in_order_and_left_in_reverse(lifecycle: Lifecycle) -> None:
    notes: list[str] = []
    lifecycle.open([Noting("a", notes), Noting("b", notes)], INFO)
    assert notes == ["a process in", "b process in", "a app in", "b app in"]
    notes.clear()
    lifecycle.close("pool")
    lifecycle.close("pool")
    assert notes == ["b app out", "a app out", "b process out", "a process out"]


def test_many_first_tasks_open_once(lifecycle: Lifecycle) -> None:
    entered = threading.Barrier(8)
    notes: list[str] = []

    def open_it() -> None:
        entered.wait(30)
        lifecycle.open([Noting("a", notes)], INFO)
        assert "a app in" in notes  # whoever comes back may rely on it

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert notes == ["a process in", "a app in"]


def test_the_next_generation_closes_the_one_before(lifecycle: Lifecycle) -> None:
    notes: list[str] = []
    lifecycle.open([Noting("a", notes)], INFO)
    lifecycle.open([Noting("b", notes)], InstanceInfo(job="pool/2"))
    assert notes[2:] == ["a app out", "a process out", "b process in", "b app in"]
    assert lifecycle.job == "pool/2"


def test_the_hooks_of_another_pool_are_in_nobodys_way_but_its_own(lifecycle: Lifecycle) -> None:
    notes: list[str] = []
    lifecycle.open([Noting("a", notes)], INFO)
    with pytest.raises(ConfigurationError, match="plugins of pool 'pool'"):
        lifecycle.open([Noting("b", notes)], InstanceInfo(job="other/1"))
    lifecycle.close("other")
    assert notes == ["a process in", "a app in"]
    assert lifecycle.job == "pool/1"


def test_hooks_are_left_with_the_last_session_that_opened_them(lifecycle: Lifecycle) -> None:
    notes: list[str] = []
    for session in ("one", "two"):  # two ranks in one process
        with entered_call(CallContext("call", session=session)):
            lifecycle.open([Noting("a", notes)], INFO)
    notes.clear()
    lifecycle.abandon("one")
    lifecycle.abandon("a stranger")
    assert notes == []
    lifecycle.abandon("two")
    assert notes == ["a app out", "a process out"]
    lifecycle.open([Noting("b", notes)], InstanceInfo(job="other/1"))
    assert lifecycle.job == "other/1"


def test_what_given_up_calls_wait_for_is_aborted_before_the_hooks_are_left(lifecycle: Lifecycle) -> None:
    aborted, begun = threading.Event(), threading.Event()
    notes: list[str] = []

    class Waiting(Noting):
        def abort(self, info: InstanceInfo) -> None:
            notes.append("aborted")
            aborted.set()

    def wait_for_a_peer() -> None:
        begun.set()
        assert aborted.wait(30)

    def task() -> None:
        with entered_call(CallContext("call", session="one")):
            lifecycle.open([Waiting("a", notes)], INFO)
            lifecycle.run(wait_for_a_peer, (), {})

    thread = threading.Thread(target=task)
    thread.start()
    assert begun.wait(30)
    notes.clear()
    lifecycle.abandon("one", ["call"])
    thread.join(30)
    assert notes == ["aborted", "a app out", "a process out"]


def test_a_failing_hook_is_named_and_the_others_are_left(lifecycle: Lifecycle) -> None:
    notes: list[str] = []

    class Broken(Plugin):
        def around_app(self, info: InstanceInfo) -> Any:
            raise OSError("no such card")

    with pytest.raises(PluginError, match=r"plugin 'Broken', around_app, rank 0 of 1: OSError: no such card") as caught:
        lifecycle.open([Noting("a", notes), Broken()], INFO)
    assert isinstance(caught.value.__cause__, OSError)
    assert notes == ["a process in", "a app in", "a app out", "a process out"]
    assert lifecycle.job == ""


def test_a_hook_that_is_no_context_manager_is_explained(lifecycle: Lifecycle) -> None:
    class Forgetful:
        def around_process(self, info: InstanceInfo) -> Iterator[None]:
            yield

    with pytest.raises(PluginError, match=r"contextlib\.contextmanager"):
        lifecycle.open([Forgetful()], INFO)


def test_a_hook_that_fails_on_the_way_out_leaves_the_rest_to_be_left(
    lifecycle: Lifecycle, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[str] = []

    class Sticky(Plugin):
        @contextlib.contextmanager
        def around_app(self, info: InstanceInfo) -> Iterator[None]:
            yield
            raise RuntimeError("does not come off")

    lifecycle.open([Noting("a", notes), Sticky()], INFO)
    lifecycle.close()
    assert notes[2:] == ["a app out", "a process out"]
    assert "does not come off" in caplog.text
    assert "plugin 'Sticky', around_app, rank 0 of 1, on the way out" in caplog.text


def test_tasks_are_called_as_the_plugins_want_it_the_first_outermost(lifecycle: Lifecycle) -> None:
    lifecycle.open([Noting("a", []), Noting("b", [])], INFO)
    assert lifecycle.run(lambda text: text, ("x",), {}) == "a(b(x))"


def test_a_decorator_gets_a_function_also_where_an_object_is_called(lifecycle: Lifecycle) -> None:
    class Named(Plugin):
        def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: (function.__name__, function(*args))

    class Adder:
        def __call__(self, number: int) -> int:
            return number + 1

    lifecycle.open([Named()], INFO)
    assert lifecycle.run(Adder(), (1,), {}) == ("Adder", 2)


def test_the_topology_is_in_the_environment_while_hooks_are_open(
    lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPUTE_POOL", raising=False)
    info = InstanceInfo(node=1, total_nodes=2, rank=1, world_size=2, head_port=29123, job="pool/1")
    lifecycle.open([], info)
    assert instance_info() == info
    lifecycle.close()
    assert "COMPUTE_POOL" not in os.environ


def test_what_is_entered_once_is_left_with_the_job(lifecycle: Lifecycle) -> None:
    notes: list[str] = []

    @contextlib.contextmanager
    def group() -> Iterator[None]:
        notes.append("in")
        yield
        notes.append("out")

    for _ in range(2):
        lifecycle.enter_once("group", INFO, group)
    assert notes == ["in"]
    lifecycle.enter_once("group", InstanceInfo(job="pool/2"), group)
    assert notes == ["in", "out", "in"]
    lifecycle.close("pool")
    assert notes == ["in", "out", "in", "out"]


def test_of_many_first_tasks_one_enters(lifecycle: Lifecycle) -> None:
    ready = threading.Barrier(8)
    notes: list[str] = []

    @contextlib.contextmanager
    def group() -> Iterator[None]:
        notes.append("in")
        yield

    def task() -> None:
        ready.wait(30)
        lifecycle.enter_once("group", INFO, group)
        assert notes  # whoever comes back finds it entered

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(task) for _ in range(8)]:
            done.result(30)
    assert notes == ["in"]


def test_abort_reaches_plugins_while_a_hook_hangs_and_tells_what_still_runs(lifecycle: Lifecycle) -> None:
    aborted, running = threading.Event(), threading.Event()

    class Hanging(Plugin):
        @contextlib.contextmanager
        def around_app(self, info: InstanceInfo) -> Iterator[None]:
            running.set()
            assert aborted.wait(30)
            yield

        def abort(self, info: InstanceInfo) -> None:
            aborted.set()

    opening = threading.Thread(target=lifecycle.open, args=([Hanging()], INFO))
    opening.start()
    assert running.wait(30)
    assert lifecycle.abort(["call"], 0.0) == {"idle": True, "holds": True}
    opening.join(30)
    assert not opening.is_alive()

    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(30)

    def task() -> None:
        with entered_call(CallContext("call")):
            lifecycle.run(work, (), {})

    thread = threading.Thread(target=task)
    thread.start()
    assert begun.wait(30)
    assert lifecycle.abort(["call"], 0.0)["idle"] is False
    assert lifecycle.abort(["another"], 0.0)["idle"] is True
    end.set()
    assert lifecycle.abort(["call"], 30.0)["idle"] is True
    thread.join(30)


def test_hooks_are_left_when_the_process_ends_by_itself() -> None:
    code = (
        "import contextlib\n"
        "from skyproxy.runtime import InstanceInfo\n"
        "from skyproxy.runtime.lifecycle import LIFECYCLE\n"
        "class P:\n"
        "    @contextlib.contextmanager\n"
        "    def around_app(self, info):\n"
        "        yield\n"
        "        print('left')\n"
        "LIFECYCLE.open([P()], InstanceInfo(job='pool/1'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "left\n"


def test_plugins_that_cannot_be_loaded_are_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="cannot be loaded on the worker"):
        open_hooks(b"no pickle")


def test_a_task_travels_with_its_function() -> None:
    assert pickle.loads(pickle.dumps(Task(abs)))(-3) == 3
    assert Task(abs).__name__ == "abs"


def test_only_hooks_that_do_something_count() -> None:
    assert not any(has_hook(Plugin(), hook) for hook in ("transform", "around_app", "decorate"))
    assert has_hook(Noting("a", []), "around_app")
    assert not has_hook(object(), "around_app")
    assert name_of(Noting("a", [])) == "a"
    assert name_of(object()) == "object"


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    with socket.socket() as one:
        one.bind(("127.0.0.1", ports[0]))


def test_each_purpose_has_a_port_of_its_own() -> None:
    info = InstanceInfo(head_port=1000)
    assert port_for("jax", info) == 1000
    with entered_call(CallContext("call", values={"ports": {"torch": 1000, "jax": 1001}})):
        assert port_for("jax", info) == 1001


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKY_ONE", "1")
    monkeypatch.delenv("SKY_TWO", raising=False)
    with environment({"SKY_ONE": None, "SKY_TWO": "2"}):
        assert "SKY_ONE" not in os.environ
        assert os.environ["SKY_TWO"] == "2"
    assert os.environ["SKY_ONE"] == "1"
    assert "SKY_TWO" not in os.environ


def test_a_wait_in_slices_ends_with_its_time() -> None:
    slices: list[float] = []

    def never(seconds: float) -> bool:
        slices.append(seconds)
        return False

    assert wait_in_slices(never, 0.0) is False
    assert wait_in_slices(lambda seconds: True, 100.0) is True
    assert max(slices) <= 0.5


def test_a_process_that_ends_at_once_removes_what_programs_have_sent_though_a_hook_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lifecycle_module, "_AT_ONCE_SECONDS", 0.01)
    code, gate, done = ProjectCode(), threading.Event(), threading.Event()
    monkeypatch.setattr(code, "close", lambda: done.set() if ProjectCode.close(code) is None else None)
    monkeypatch.setattr(lifecycle_module, "PROJECT_CODE", code)
    monkeypatch.setattr(lifecycle_module.LIFECYCLE, "close", lambda *_: gate.wait(60))
    code.receive("a", [True], {(0, "module.py"): b"x = 1"})
    assert [path.name for path in tmp_path.rglob("*.py")] == ["module.py"]
    lifecycle_module.close_at_once()
    assert done.wait(60)
    gate.set()
    assert list(tmp_path.iterdir()) == []
