"""Branches for CUDA in a worker, entered with a runtime that plays two GPUs: what they ask of it, and of which GPU.

It refuses what CUDA refuses: devices that are not there, and times of events that have not come. The real one is asked
in tests/gpu.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from skyproxy.errors import ProtocolError
from skyproxy.settings import SETTINGS
from skyproxy_server import compiled
from skyproxy_server import usage as usage_module
from skyproxy_server.controls import CONTROLS
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.executor import Executor
from skyproxy_server.functions import isolated_call, isolated_process
from skyproxy_server.isolation import session_process
from skyproxy_server.profiling import WorkerProfile
from skyproxy_server.reports import Reports
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots import requests
from skyproxy_server.transfers import Transfers
from skyproxy_server.usage import usage

CPU = {"type": "cpu", "index": 0, "name": "CPU"}
GPUS = [{"type": "cuda", "index": index, "name": "GPU", "total_memory_bytes": 1000} for index in (0, 1)]


class Runtime:
    """Two GPUs with a clock that each event moves on.

    Attributes:
        calls: what was asked, and of which GPU.
        current: the GPU that is current.
        initialized: whether anybody has used one.
        delayed: what is to be called once somebody does.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.current = 0
        self.initialized = True
        self.delayed: list[Callable[[], None]] = []
        self.clock = 0.0

    def ask(self, what: str, index: int | None, answer: Any = None) -> Any:
        index = self.current if index is None else index
        if index not in (0, 1):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.calls.append((what, index))
        return answer

    @contextmanager
    def device(self, index: int | None) -> Iterator[None]:
        self.ask("device", index)
        before, self.current = self.current, self.current if index is None else index
        yield
        self.current = before


class Event:
    """An event of such a GPU; it has come once somebody has waited for it."""

    runtime: Runtime

    def __init__(self, *, enable_timing: bool) -> None:
        self.timing, self.come, self.at = enable_timing, False, -1.0

    def record(self) -> None:
        self.runtime.ask("record", None)
        self.runtime.clock += 5.0
        self.at = self.runtime.clock

    def synchronize(self) -> None:
        self.come = True

    def query(self) -> bool:
        return self.come

    def elapsed_time(self, other: Event) -> float:
        if not (self.timing and other.timing and other.come):
            raise ValueError("both events must be recorded, with timing, and complete")
        return other.at - self.at


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    Event.runtime = made
    numbers = {
        "memory_allocated": 1,
        "max_memory_allocated": 2,
        "memory_reserved": 3,
        "max_memory_reserved": 4,
        "mem_get_info": (600, 1000),
        "memory_summary": "a table",
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "utilization": 37,
    }
    for name, answer in numbers.items():
        replacement = lambda index=None, name=name, answer=answer: made.ask(name, index, answer)
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.ask("empty_cache", None))
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: made.initialized)
    monkeypatch.setattr(torch.cuda, "_lazy_call", made.delayed.append)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, index: made.ask(f"fraction {fraction}", index),
    )
    return made


def session(*devices: dict[str, Any]) -> SessionState:
    return Executor(list(devices), lambda message: None, Transfers(SETTINGS.chunk_bytes), SETTINGS).state


def test_memory_is_that_of_the_gpu_that_was_named(runtime: Runtime) -> None:
    state = session(*GPUS, CPU)
    assert CONTROLS["memory_stats"](state, ["cuda", 1]) == {
        "allocated": 1,
        "max_allocated": 2,
        "reserved": 3,
        "max_reserved": 4,
        "free": 600,
        "total": 1000,
    }
    assert CONTROLS["memory_summary"](state, ["cuda", 1]) == "a table"
    CONTROLS["reset_peak_memory"](state, ["cuda", 1])
    assert {index for _, index in runtime.calls} == {1}
    assert runtime.calls[-1] == ("reset_peak_memory_stats", 1)
    runtime.calls.clear()
    CONTROLS["memory_stats"](state, ["cpu", 0])
    CONTROLS["reset_peak_memory"](state, ["cpu", 0])
    assert runtime.calls == []


@pytest.mark.parametrize("control", ["memory_stats", "memory_summary", "reset_peak_memory"])
def test_a_gpu_that_is_not_there_is_an_error_of_the_request(runtime: Runtime, control: str) -> None:
    state = session(*GPUS)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        CONTROLS[control](state, ["cuda", 2])
    with pytest.raises(ProtocolError, match="type and its number"):
        CONTROLS[control](state, ["cuda", "0"])


def test_synchronize_waits_for_every_gpu_and_a_cpu_worker_for_none(runtime: Runtime) -> None:
    CONTROLS["synchronize"](session(*GPUS, CPU))
    assert runtime.calls == [("synchronize", 0), ("synchronize", 1)]
    runtime.calls.clear()
    CONTROLS["synchronize"](session(CPU))
    assert runtime.calls == []


@pytest.mark.parametrize(("devices", "calls"), [((*GPUS, CPU), [("empty_cache", 0)]), ((CPU,), [])])
def test_memory_is_given_back_where_there_is_a_gpu(
    runtime: Runtime, devices: tuple[dict[str, Any], ...], calls: list[tuple[str, int]]
) -> None:
    CONTROLS["empty_cache"](session(*devices))
    assert runtime.calls == calls


def test_events_are_the_gpus_own_and_have_its_clock(runtime: Runtime) -> None:
    state = session(*GPUS, CPU)
    for slot in (1, 2):
        CONTROLS["record_event"](state, slot, ["cuda", 1], True)
    assert [call for call in runtime.calls if call[0] == "record"] == [("record", 1)] * 2
    assert runtime.current == 0
    assert CONTROLS["query_event"](state, 1) is False
    CONTROLS["wait_event"](state, 1)
    assert CONTROLS["query_event"](state, 1) is True
    # It waits for the last one: an event that has not come has no time.
    assert CONTROLS["elapsed_milliseconds"](state, 1, 2) == 5.0
    CONTROLS["record_event"](state, 3, ["cpu", 0], True)
    with pytest.raises(ProtocolError, match="no common clock"):
        CONTROLS["elapsed_milliseconds"](state, 1, 3)


def test_what_a_gpu_has_in_use_is_asked_once_somebody_uses_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.initialized = False
    assert usage(GPUS[1]) == {}  # type: ignore[arg-type]
    assert runtime.calls == []
    runtime.initialized = True
    monkeypatch.setattr(usage_module, "_CAN_MEASURE_LOAD", True)
    assert usage(GPUS[1]) == {"used_memory_bytes": 400, "utilization_percent": 37}  # type: ignore[arg-type]
    assert runtime.calls == [("mem_get_info", 1), ("utilization", 1)]


def test_a_snapshot_has_the_room_of_all_gpus(runtime: Runtime) -> None:
    assert requests._room(session(*GPUS, CPU)) == 1200
    assert requests._room(session(CPU)) is None


def test_a_sessions_share_of_each_gpu_is_set_when_it_is_first_used(runtime: Runtime) -> None:
    session_process._apply_bounds({"gpu_fraction": 0.25, "devices": [*GPUS, CPU]})
    assert runtime.calls == []
    (bound,) = runtime.delayed
    bound()
    assert runtime.calls == [("fraction 0.25", 0), ("fraction 0.25", 1)]
    runtime.delayed.clear()
    session_process._apply_bounds({"gpu_fraction": 0.25, "devices": [CPU]})
    session_process._apply_bounds({"gpu_fraction": None, "devices": GPUS})
    assert runtime.delayed == []


def test_a_process_of_a_function_has_the_bounds_of_its_session(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda index: runtime.ask("bound", index, (0.25, 1.0)[index])
    )
    fractions = isolated_call.gpu_fractions([*GPUS, CPU])
    assert fractions == [(0, 0.25), (1, 1.0)]
    runtime.calls.clear()
    isolated_process.bound_gpus(fractions)
    assert runtime.calls == []  # it has no context yet
    runtime.delayed[0]()
    assert runtime.calls == [("fraction 0.25", 0), ("fraction 1.0", 1)]
    isolated_process.bound_gpus([(0, 1.0)])
    assert len(runtime.delayed) == 1
    runtime.initialized = False
    assert isolated_call.gpu_fractions([*GPUS, CPU]) == []


@pytest.mark.parametrize("devices", [[*GPUS, CPU], [CPU]], ids=["GPUs", "CPU"])
def test_a_profile_has_the_kernels_of_gpus_and_ends_when_they_have(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, devices: list[dict[str, Any]]
) -> None:
    begun: list[list[ProfilerActivity]] = []
    make, on_gpus = torch.profiler.profile, len(devices) > 1

    def profile(activities: list[ProfilerActivity], *, record_shapes: bool) -> Any:
        begun.append(list(activities))
        made = make(activities=[ProfilerActivity.CPU], record_shapes=record_shapes)  # this build has no other
        stop = made.stop
        made.stop = lambda: (runtime.ask("stop", None), stop())[1]
        return made

    monkeypatch.setattr(torch.profiler, "profile", profile)
    made = WorkerProfile(WorkerDevices(devices), Reports(lambda message: None), shapes=False)
    with made.batch(7):
        torch.ones(3).sum()
    assert b"batch 7" in gzip.decompress(made.stop())
    assert begun == [[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + on_gpus]]
    assert runtime.calls == [("synchronize", 0)] * on_gpus + [("stop", 0)]


def test_functions_in_a_process_of_their_own_have_the_random_numbers_of_all_gpus(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {0: torch.arange(16, dtype=torch.uint8), 1: torch.arange(16, dtype=torch.uint8) + 1}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: runtime.ask("get", index, kept[index]))
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda value, index: runtime.ask("set", index, kept.update({index: value}))
    )
    states = isolated_process.generator_states()
    assert [(kind, index) for kind, index, _ in states] == [("cpu", 0), ("cuda", 0), ("cuda", 1)]
    expected = {index: value.clone() for index, value in kept.items()}
    kept.clear()
    isolated_process.put_generator_states(states)
    assert runtime.calls == [("get", 0), ("get", 1), ("set", 0), ("set", 1)]
    assert all(torch.equal(kept[index], expected[index]) for index in (0, 1))
    runtime.initialized = False  # nobody has drawn there
    assert [kind for kind, _, _ in isolated_process.generator_states()] == ["cpu"]


def test_graphs_for_a_gpu_are_compiled_where_triton_is_and_with_processes_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx, config

    for has_triton in (True, False):
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda has_triton=has_triton: has_triton)
        assert ("triton" in compiled.compiler_problem("cuda")) is not has_triton
    seen: list[tuple[bool, bool]] = []

    def compile_played(module: torch.fx.GraphModule, arguments: list[object]) -> Callable[..., object]:
        seen.append((config.fallback_random, config.compile_threads == 1))
        return module

    monkeypatch.setattr(compile_fx, "compile_fx", compile_played)
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    with config.patch(compile_threads=4, fallback_random=False):
        for is_there in (True, False):
            monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
            assert compiled._compile(module, (torch.ones(2),))(3) == 3
    assert seen == [(True, False), (True, True)]
