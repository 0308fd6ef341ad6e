"""Functions in processes of their own: what the session keeps when they end badly, and that all else is as ever."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, FunctionCrashedError, RemoteFunctionError
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import wait_for
from tests.server.isolation.workers import TOKEN, Worker

if not are_sessions_separable():
    pytest.skip("processes of functions need Linux", allow_module_level=True)

WAIT_SECONDS = 60


def isolated(node: skyproxy.Node, function: Callable[..., Any], *args: object, **options: Any) -> Any:
    return node.submit(function, *args, isolate=True, **options).result(WAIT_SECONDS)


def segfault() -> None:
    ctypes.string_at(0)


def exit_seven() -> None:
    os._exit(7)


def exit_zero() -> None:
    os._exit(0)


def abort() -> None:
    os.abort()


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_everything() -> None:
    os.closerange(3, 4096)


DEATHS = [
    (segfault, ["SIGSEGV", "in segfault"]),
    (exit_seven, ["exited with status 7"]),
    (exit_zero, ["exited with status 0"]),
    (abort, ["SIGABRT", "in abort"]),
    (kill_itself, ["SIGKILL", "memory ran out"]),
    (close_everything, ["exited with status"]),
]


@pytest.mark.parametrize(("die", "said"), DEATHS, ids=[die.__name__ for die, _ in DEATHS])
def test_the_sessions_tensors_survive_what_a_function_does_to_its_process(
    node: skyproxy.Node, sky: str, die: Callable[[], None], said: list[str]
) -> None:
    kept = torch.arange(4.0, device=sky)
    given = torch.zeros(3, device=sky)

    def change_and_die(tensor: torch.Tensor) -> None:
        tensor.add_(1)
        print("my last words")
        die()

    with pytest.raises(FunctionCrashedError) as caught:
        isolated(node, change_and_die, given)
    for words in ["change_and_die", "my last words", *said]:
        assert words in str(caught.value)
    assert kept.tolist() == [0, 1, 2, 3]
    assert given.tolist() == [1, 1, 1]  # as it left them
    assert isolated(node, pow, 2, 10) == 1024


def test_memory_that_is_refused_is_an_error_of_the_function_alone(node: skyproxy.Node, sky: str) -> None:
    def eat() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (64 << 20, 64 << 20))
        bytearray(1 << 30)

    kept = torch.ones(3, device=sky)
    with pytest.raises(MemoryError):
        isolated(node, eat)
    assert kept.sum().item() == 3
    assert node.run(len, bytes(1 << 20)) == 1 << 20


def test_sys_exit_ends_the_function_and_says_so(node: skyproxy.Node) -> None:
    with pytest.raises(RemoteFunctionError, match=r"called sys.exit\(3\)"):
        isolated(node, sys.exit, 3)


def is_gone(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_a_function_leaves_running_ends_with_it(node: skyproxy.Node) -> None:
    def leave() -> tuple[int, int]:
        threading.Thread(target=threading.Event().wait).start()
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return os.getpid(), left.pid

    own, left = isolated(node, leave)
    wait_for(lambda: is_gone(own), "the function's process has ended", WAIT_SECONDS)
    wait_for(lambda: is_gone(left), "what it had started has ended", WAIT_SECONDS)


def take_memory_away(tensor: torch.Tensor) -> list[str]:
    """Make every file shorter that this process has open or mapped; what came of it."""
    found = []
    for folder in ("/proc/self/fd", "/proc/self/map_files"):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            try:
                if "/memfd:" in os.readlink(path):
                    os.truncate(path, 0)
                    found.append("done")
            except OSError as error:
                found.append(type(error).__name__)
    tensor.add_(1)
    return found


def test_a_function_cannot_take_memory_away_that_it_was_lent(node: skyproxy.Node, sky: str) -> None:
    given = torch.arange(4.0, device=sky)
    assert "done" not in isolated(node, take_memory_away, given)
    assert given.tolist() == [1, 2, 3, 4]


def open_files() -> set[str]:
    """What this process has open beside files with names: each socket, pipe and file in memory, by its number."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the list itself
            continue
    return {name for name in found if name.startswith(("socket:", "pipe:", "/memfd:"))}


def test_a_functions_process_has_no_descriptor_of_its_session(node: skyproxy.Node, sky: str) -> None:
    torch.arange(4.0, device=sky).sum().item()
    of_session, own = node.run(open_files), isolated(node, open_files)
    assert len(of_session) > 3
    # Its two outputs, which the session reads, and its end of the channel to the session.
    assert sorted(name.partition(":")[0] for name in own) == ["pipe", "pipe", "socket"]
    assert {name for name in of_session & own if not name.startswith("pipe:")} == set()


def test_changes_in_place_are_seen_through_every_view(node: skyproxy.Node, sky: str) -> None:
    whole = torch.zeros(2, 3, device=sky)
    column = whole[:, 1]

    def change(column: torch.Tensor) -> None:
        column += 5

    isolated(node, change, column)
    whole.add_(1)  # and the session goes on with the same memory
    isolated(node, change, column)
    assert whole.tolist() == [[1, 11, 1], [1, 11, 1]]
    assert column.tolist() == [11, 11]


def test_results_may_be_arguments_views_of_them_and_tensors_of_their_own(node: skyproxy.Node, sky: str) -> None:
    given = torch.arange(4.0, device=sky)

    def give_back(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fresh = torch.ones(2, 2)
        return tensor, tensor[1:], fresh, fresh[0], torch.empty(0), torch.tensor([1 + 2j]).conj()

    same, view, fresh, row, empty, conjugate = isolated(node, give_back, given)
    assert same is given
    given.zero_()
    fresh.mul_(3)
    assert view.tolist() == [0, 0, 0]
    assert row.tolist() == [3, 3]
    assert (empty.shape, conjugate.tolist()) == ((0,), [1 - 2j])
    fresh.resize_(8, 8)  # memory of its own, as every other tensor's


def test_modules_and_values_travel_as_ever(node: skyproxy.Node, sky: str) -> None:
    model = torch.nn.Linear(3, 2).to(sky)
    by_value = torch.full((1000,), 2.0)

    def step(model: torch.nn.Linear, by_value: torch.Tensor, data: bytes) -> tuple[float, int]:
        with torch.no_grad():
            model.weight.fill_(1.0)
        return by_value.sum().item(), len(data)

    assert isolated(node, step, model, by_value, bytes(3 << 20)) == (2000, 3 << 20)
    assert model.weight.tolist() == [[1.0] * 3] * 2


def remember(tensor: torch.Tensor) -> None:
    sys.kept_by_a_test = tensor  # type: ignore[attr-defined]


def tell() -> list[float]:
    kept: torch.Tensor = sys.kept_by_a_test  # type: ignore[attr-defined]
    del sys.kept_by_a_test  # type: ignore[attr-defined]
    return kept.tolist()


def test_memory_that_a_global_of_the_worker_holds_too_stays_where_it_is(node: skyproxy.Node, sky: str) -> None:
    def change(tensor: torch.Tensor) -> None:
        tensor.add_(1)

    given = torch.zeros(2, device=sky)
    node.run(remember, given)
    isolated(node, change, given)
    assert given.tolist() == [1, 1]
    assert node.run(tell) == [1, 1]


def test_each_call_begins_with_fresh_globals_and_its_own_process(node: skyproxy.Node) -> None:
    def count() -> tuple[int, int]:
        sys.calls_of_a_test = getattr(sys, "calls_of_a_test", 0) + 1  # type: ignore[attr-defined]
        return sys.calls_of_a_test, os.getpid()  # type: ignore[attr-defined]

    (first, one), (second, other) = isolated(node, count), isolated(node, count)
    assert (first, second) == (1, 1)
    assert len({one, other, node.run(os.getpid)}) == 3


def loaded(name: str) -> bool:
    return name in sys.modules


def test_its_process_imports_nothing_that_the_function_does_not_ask_for(node: skyproxy.Node) -> None:
    """What is imported behind the fork is imported for each call."""
    assert isolated(node, loaded, "numpy")
    assert not isolated(node, loaded, "numpy.random")


def test_random_numbers_go_on_where_they_were(node: skyproxy.Node, sky: str) -> None:
    def draw() -> list[float]:
        return torch.rand(2).tolist()

    torch.manual_seed(5)
    apart = [isolated(node, draw), isolated(node, draw), torch.rand(2, device=sky).tolist()]
    torch.manual_seed(5)
    assert apart == [node.run(draw), node.run(draw), torch.rand(2, device=sky).tolist()]


def test_a_generator_streams_and_does_not_run_far_ahead(node: skyproxy.Node, sky: str) -> None:
    made = torch.zeros((), device=sky)

    def numbers(made: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            made += 1
            yield made * 2

    items: Any = iter(node.submit(numbers, made, isolate=True))
    assert [next(items).item() for _ in range(200)] == [2.0 * n for n in range(1, 201)]
    assert made.item() < 200 + 80
    items.close()


def test_a_generator_that_dies_fails_behind_its_items(node: skyproxy.Node) -> None:
    def two() -> Iterator[int]:
        yield 1
        yield 2
        kill_itself()

    items = iter(node.submit(two, isolate=True))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(FunctionCrashedError, match="SIGKILL"):
        next(items)


def test_an_exception_keeps_its_class_and_its_traceback(node: skyproxy.Node) -> None:
    def fail() -> None:
        raise KeyError("nothing here")

    with pytest.raises(KeyError, match="nothing here") as caught:
        isolated(node, fail)
    assert "in fail" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_a_gpu_tells_late_is_the_functions_and_comes_though_it_stays(
    node: skyproxy.Node, sky: str
) -> None:
    def play(computes: Any) -> Any:
        """Play a GPU that says of all it is asked that an index was out of bounds, as a real one does from then on."""

        def fail(index: int) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        torch.cuda.is_initialized = lambda: True
        torch.cuda.device_count = lambda: 1
        torch._C._cuda_hasPrimaryContext = lambda index: True  # type: ignore[attr-defined]
        torch.cuda.synchronize = torch.cuda.get_rng_state = fail  # type: ignore[assignment]
        return computes()

    kept = torch.ones(2, device=sky)
    late: Callable[[], Any] = lambda: kept
    for computes in (late, lambda: torch.cuda.synchronize(0)):
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            isolated(node, play, computes)
    assert kept.tolist() == [1, 1]


def test_where_processes_cannot_share_memory_of_a_gpu_they_get_copies(node: skyproxy.Node, sky: str) -> None:
    def play() -> None:
        """Play a GPU in this worker, whose memory no process of a function can open."""
        lending: Any = importlib.import_module("skyproxy_server.functions.lent_tensors")
        lending.originals = lending.kind_of, lending.handle_of
        lending.kind_of = lambda storage: "cuda"
        lending.handle_of = lambda storage: [0, b"handle", 16, 0, b"counter", 0, b"event", False]

    def stop() -> None:
        lending: Any = importlib.import_module("skyproxy_server.functions.lent_tensors")
        lending.kind_of, lending.handle_of = lending.originals

    def change(tensor: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.add_(1)[1:], tensor + other

    given, other = torch.arange(4.0, device=sky), torch.ones(4, device=sky)
    node.run(play)
    try:
        for _ in range(2):
            view, total = isolated(node, change, given, other)
    finally:
        node.run(stop)
    assert (given.tolist(), view.tolist(), total.tolist()) == ([2, 3, 4, 5], [3, 4, 5], [3, 4, 5, 6])
    view.zero_()
    assert given.tolist() == [2, 0, 0, 0]


def test_a_call_knows_its_context(node: skyproxy.Node) -> None:
    def look() -> tuple[str, Any, int]:
        call = skyproxy.runtime.current_call()
        assert call is not None
        return call.name, call.values["step"], skyproxy.instance_info().rank

    assert isolated(node, look, context={"step": 3}) == ("look", 3, 0)


def test_a_call_that_is_cancelled_ends_even_deep_in_c(node: skyproxy.Node) -> None:
    begun = threading.Event()
    told: list[str] = []

    def sleep() -> None:
        print(os.getpid())
        time.sleep(10_000)

    def note(stream: str, text: str) -> None:
        told.append(text)
        begun.set()

    call = node.submit(sleep, isolate=True, on_output=note)
    assert begun.wait(WAIT_SECONDS)
    assert call.cancel()
    wait_for(lambda: is_gone(int(told[0])), "the process of the cancelled call has ended", WAIT_SECONDS)


def test_a_function_that_is_cancelled_cleans_up(node: skyproxy.Node, sky: str) -> None:
    begun = threading.Event()
    done = torch.zeros((), device=sky)

    def spin(done: torch.Tensor) -> None:
        print("begun")
        try:
            while True:
                time.sleep(0.001)
        finally:
            done.add_(1)

    call = node.submit(spin, done, isolate=True, on_output=lambda stream, text: begun.set())
    assert begun.wait(WAIT_SECONDS)
    call.cancel()
    wait_for(lambda: done.item() == 1, "the function has cleaned up", WAIT_SECONDS)


def test_a_timeout_ends_the_call(node: skyproxy.Node) -> None:
    with pytest.raises(TimeoutError, match="did not finish within"):
        isolated(node, time.sleep, 10_000, timeout=0.2)


def test_all_that_is_printed_is_printed_here(node: skyproxy.Node) -> None:
    seen: dict[str, str] = {"stdout": "", "stderr": ""}

    def speak() -> None:
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["sh", "-c", "echo from a program >&2"], check=True)

    def note(stream: str, text: str) -> None:
        seen[stream] += text

    call = node.submit(speak, isolate=True, on_output=note)
    call.result(WAIT_SECONDS)
    assert "from Python\n" in seen["stdout"]
    assert "from C\n" in seen["stdout"]
    assert "from a program\n" in seen["stderr"]


def test_more_output_than_any_buffer_holds_arrives(node: skyproxy.Node) -> None:
    count = 0

    def speak() -> None:
        for _ in range(40):
            print("x" * 50_000)

    def note(stream: str, text: str) -> None:
        nonlocal count
        count += text.count("x")

    node.submit(speak, isolate=True, on_output=note).result(WAIT_SECONDS)
    assert count == 40 * 50_000


def test_many_at_once_each_with_its_own_end(node: skyproxy.Node, sky: str) -> None:
    def work(number: int, tensor: torch.Tensor) -> torch.Tensor:
        if number % 4 == 3:
            kill_itself()
        return tensor + number

    shared = torch.ones(3, device=sky)
    calls = [node.submit(work, number, shared, isolate=True) for number in range(8)]
    ends = [call.exception(WAIT_SECONDS) for call in calls]
    assert [type(end) for end in ends] == [FunctionCrashedError if n % 4 == 3 else type(None) for n in range(8)]
    assert [call.result()[0].item() for call, end in zip(calls, ends) if end is None] == [1, 2, 3, 5, 6, 7]


def test_what_has_no_memory_to_lend_is_refused_by_name(node: skyproxy.Node, sky: str) -> None:
    sparse = torch.eye(2).to_sparse().to(sky)
    with pytest.raises(RemoteFunctionError, match="sparse"):
        isolated(node, torch.sum, sparse)
    assert isolated(node, pow, 2, 3) == 8


def test_a_setting_isolates_what_users_run_and_not_what_is_ours(
    node: skyproxy.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = node.run(os.getpid)
    settings = node._session.settings
    monkeypatch.setattr(node._session, "settings", skyproxy.settings.Settings(isolate=True))
    try:
        assert node.run(os.getpid) != own
        assert node.submit(os.getpid, isolate=False).result() == own
        assert not node._runner.isolates(skyproxy.runtime.current_call)
    finally:
        monkeypatch.setattr(node._session, "settings", settings)


def test_a_worker_that_cannot_isolate_is_asked_in_vain(node: skyproxy.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(node._session.welcome.limits, "isolates")
    with pytest.raises(ConfigurationError, match="cannot give functions processes of their own"):
        node.submit(pow, 2, 3, isolate=True)


def test_a_pools_function_says_it_with_its_decorator(node: skyproxy.Node) -> None:
    @skyproxy.function(isolate=True)
    def own_process() -> int:
        return os.getpid()

    assert own_process() >> node != node.run(os.getpid)


def test_a_session_with_a_process_of_its_own_outlives_its_functions(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        with skyproxy.connect(worker.url, token=TOKEN) as node:
            given = torch.zeros(3, device=node.devices[0])

            def change_and_die(tensor: torch.Tensor) -> None:
                tensor.add_(1)
                segfault()

            with pytest.raises(FunctionCrashedError, match="SIGSEGV"):
                isolated(node, change_and_die, given)
            process = isolated(node, os.getppid)
            assert given.tolist() == [1, 1, 1]
        wait_for(lambda: is_gone(process), "the functions' parent has ended with the session", WAIT_SECONDS)
    finally:
        worker.end()
