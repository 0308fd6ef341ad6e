"""The life of a call: errors, cancellation, timeouts, generators, many at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, RemoteFunctionError, RemoteTraceback, VersionMismatchError
from tests.functions.gates import count, gate, hold, open_gate


class OwnError(Exception):
    def __init__(self, code: int, text: str) -> None:  # unpickling calls it with one argument, and fails
        super().__init__(text)
        self.code = code


class Unpicklable(Exception):
    def __init__(self, code: int = 7) -> None:
        super().__init__("I hold a lock")
        self.lock = threading.Lock()
        self.code = code


class Stubborn(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("no")


class Mine(ValueError):
    pass


def test_an_exception_keeps_its_type_and_shows_where_it_came_from(node: skyproxy.Node) -> None:
    def outer() -> None:
        def inner() -> None:
            raise Mine("too bad", 5)

        inner()

    with pytest.raises(Mine) as caught:
        node.run(outer)
    assert caught.value.args == ("too bad", 5)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = "".join(traceback.format_exception(caught.value))
    assert "in inner" in text
    assert "skyproxy_server" not in text


def test_an_exception_with_an_init_of_its_own_is_that_exception(node: skyproxy.Node) -> None:
    def fail() -> None:
        raise OwnError(3, "broken")

    with pytest.raises(OwnError, match="broken") as caught:
        node.run(fail)
    assert vars(caught.value).keys() >= vars(OwnError(3, "broken")).keys()


def test_an_exception_that_holds_what_cannot_be_pickled_keeps_its_class_and_the_rest(node: skyproxy.Node) -> None:
    def fail(error: BaseException) -> None:
        raise {"lock": Unpicklable, "stubborn": Stubborn}[str(error)]()

    with pytest.raises(Unpicklable, match="I hold a lock") as caught:
        node.run(fail, ValueError("lock"))
    assert caught.value.code == 7
    assert any("left out: lock" in note for note in caught.value.__notes__)
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(Stubborn):
        node.run(fail, ValueError("stubborn"))


def test_a_group_keeps_those_of_its_exceptions_that_hold_what_cannot_be_pickled(node: skyproxy.Node) -> None:
    def fail() -> None:
        raise ExceptionGroup("several", [Unpicklable(1), ValueError("plain"), Unpicklable(2)])

    with pytest.raises(ExceptionGroup) as caught:
        node.run(fail)
    first, second, third = caught.value.exceptions
    assert isinstance(first, Unpicklable)
    assert isinstance(third, Unpicklable)
    assert (first.code, str(second), third.code) == (1, "plain", 2)


def test_an_exception_that_cannot_be_made_again_is_named(node: skyproxy.Node) -> None:
    def fail() -> None:
        module = sys.modules["only_on_the_worker"] = types.ModuleType("only_on_the_worker")
        exec("class Error(Exception): pass", vars(module))
        raise module.Error("me")

    with pytest.raises(RemoteFunctionError, match=r"only_on_the_worker.Error: me") as caught:
        node.run(fail)
    assert "in fail" in caught.value.remote_traceback


def test_a_result_that_cannot_be_pickled_says_so(node: skyproxy.Node) -> None:
    with pytest.raises(TypeError, match=r"result of .* cannot be sent back: a lock"):
        node.run(threading.Lock)


def test_a_module_that_the_worker_lacks_is_named(node: skyproxy.Node) -> None:
    def use() -> None:
        import not_installed_anywhere  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        node.run(use)


def test_errors_are_raised_as_often_as_they_are_asked_for(node: skyproxy.Node) -> None:
    call = node.submit(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            call.result(60)
    assert isinstance(call.exception(60), ZeroDivisionError)


def test_a_call_is_a_future(node: skyproxy.Node) -> None:
    call = node.submit(lambda: hold("future") or 5, name="waiting")
    seen: list[object] = []
    done = threading.Event()
    call.add_done_callback(lambda each: (seen.append(each), done.set()))
    with pytest.raises(TimeoutError):
        call.result(0.01)
    assert not call.done()
    assert "running" in repr(call)
    node.run(open_gate, "future")
    assert call.result(60) == 5
    assert call.done()
    assert done.wait(60)
    assert seen == [call]
    assert call.name == "waiting"
    assert not call.cancel()


def test_a_call_that_is_cancelled_ends_at_once_and_is_interrupted(node: skyproxy.Node) -> None:
    def spin() -> None:
        try:
            open_gate("spinning")
            while True:
                time.sleep(0.001)
        finally:
            open_gate("interrupted")

    call = node.submit(spin)
    node.run(hold, "spinning")
    assert call.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        call.result(60)
    assert call.cancelled()
    node.run(hold, "interrupted")


def test_a_function_deep_in_c_is_left_behind(node: skyproxy.Node) -> None:
    def stuck() -> None:
        open_gate("stuck")
        hold("unstick")

    call = node.submit(stuck)
    node.run(hold, "stuck")
    call.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        call.result(60)
    node.run(open_gate, "unstick")


def test_a_function_can_profile_itself_after_others_and_beside_one_that_was_left_behind(node: skyproxy.Node) -> None:
    def stuck() -> None:
        open_gate("stuck behind")
        hold("unstick behind")

    def profile() -> int:
        import cProfile

        def function() -> int:
            return 1

        with cProfile.Profile() as found:
            function()
        return next(row.callcount for row in found.getstats() if "function" in str(row.code))

    assert node.submit(profile).result(60) == 1
    assert node.submit(profile).result(60) == 1
    call = node.submit(stuck)
    node.run(hold, "stuck behind")
    call.cancel()
    assert node.submit(profile).result(60) == 1
    node.run(open_gate, "unstick behind")


def test_an_async_function_is_cancelled_where_it_waits(node: skyproxy.Node) -> None:
    async def wait() -> None:
        try:
            open_gate("async waits")
            await asyncio.sleep(3600)
        finally:
            open_gate("async cancelled")

    call = node.submit(wait)
    node.run(hold, "async waits")
    call.cancel()
    node.run(hold, "async cancelled")


def test_a_timeout_ends_the_call_wherever_its_function_is(node: skyproxy.Node) -> None:
    call = node.submit(hold, "timeout", timeout=0.05, name="slow")
    with pytest.raises(TimeoutError, match=r"slow did not finish within 0\.05 s"):
        call.result(60)
    node.run(open_gate, "timeout")
    with pytest.raises(ConfigurationError, match="positive"):
        node.submit(hold, "x", timeout=-1)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="POSIX signals")
def test_ctrl_c_cancels_and_leaves_the_node_usable(node: skyproxy.Node) -> None:
    def spin() -> None:
        try:
            print("running")
            while True:
                time.sleep(0.001)
        finally:
            open_gate("after ctrl-c")

    def interrupt(stream: str, text: str) -> None:
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    plain, sys.stdout = sys.stdout, type("Interrupting", (), {"write": lambda s, t: interrupt("", t), "flush": str})()
    try:
        with pytest.raises(KeyboardInterrupt):
            node.run(spin)
    finally:
        sys.stdout = plain
    node.run(hold, "after ctrl-c")


def numbers(upto: int):  # a generator
    for number in range(upto):
        yield number, torch.full((2,), float(number))
    return "the end"


def test_a_generator_streams_and_returns(node: skyproxy.Node, sky: str) -> None:
    iterator = node.run(numbers, 3)
    items = [next(iterator) for _ in range(3)]
    assert [(number, tensor.tolist()) for number, tensor in items] == [(0, [0, 0]), (1, [1, 1]), (2, [2, 2])]
    assert {tensor.device for _, tensor in items} == {torch.device(sky)}
    with pytest.raises(StopIteration) as end:
        next(iterator)
    assert end.value.value == "the end"


def test_items_come_as_they_are_made(node: skyproxy.Node) -> None:
    def two():
        yield "first"
        hold("second item")
        yield "second"

    items = iter(node.submit(two))
    assert next(items) == "first"
    node.run(open_gate, "second item")
    assert list(items) == ["second"]


def test_a_generator_does_not_run_far_ahead(node: skyproxy.Node) -> None:
    def endless():
        while True:
            yield count("endless")

    items = iter(node.submit(endless))
    assert [next(items) for _ in range(3)] == [1, 2, 3]
    # What it has made by now is bounded by what it may make ahead of us.
    assert node.run(count, "endless") <= 3 + skyproxy.settings.SETTINGS.max_waiting_items + 2
    items.close()


def test_who_stops_early_ends_the_generator(node: skyproxy.Node) -> None:
    def endless():
        try:
            while True:
                yield 1
        finally:
            open_gate("generator closed")

    for _ in node.submit(endless):
        break
    node.run(hold, "generator closed")


def test_a_generator_that_has_ended_stays_so(node: skyproxy.Node) -> None:
    call = node.submit(numbers, 2)
    items = iter(call)
    assert len(list(items)) == 2
    assert list(items) == list(call) == []

    async def again() -> list[int]:
        return [item async for item in call]

    assert asyncio.run(again()) == []


def test_a_generator_that_has_failed_has_no_more_items(node: skyproxy.Node) -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    items = iter(node.submit(fail))
    assert next(items) == 1
    with pytest.raises(KeyError):
        next(items)
    assert list(items) == []


def test_a_cancelled_generator_is_cancelled_for_all_who_ask(node: skyproxy.Node) -> None:
    call = node.submit(numbers, 1000)
    items = iter(call)
    next(items)
    call.cancel()
    for _ in range(2):
        with pytest.raises(concurrent.futures.CancelledError):
            list(items)


def test_a_generator_that_fails_fails_behind_its_items(node: skyproxy.Node) -> None:
    def failing():
        yield 1
        raise Mine("after one")

    seen = []
    with pytest.raises(Mine, match="after one"):
        for item in node.submit(failing):
            seen.append(item)
    assert seen == [1]
    with pytest.raises(TypeError, match="only generators"):
        iter(node.submit(lambda: 5))


def test_async_for_and_async_generators(node: skyproxy.Node) -> None:
    async def letters():
        for letter in "abc":
            await asyncio.sleep(0)
            yield letter

    async def collect() -> list[object]:
        return [item async for item in node.submit(letters)]

    assert asyncio.run(collect()) == ["a", "b", "c"]


def test_a_hundred_at_once_each_with_its_own_end(node: skyproxy.Node) -> None:
    def work(number: int) -> torch.Tensor:
        print(f"call {number}")
        if number % 7 == 3:
            raise Mine(number)
        return torch.full((1,), float(number))

    outputs: dict[int, str] = {}

    async def one(number: int) -> float:
        def keep(stream: str, text: str) -> None:
            outputs[number] = outputs.get(number, "") + text

        call = await asyncio.to_thread(node.submit, work, number, on_output=keep)
        return (await call).item()

    async def everything() -> list[object]:
        return await asyncio.gather(*(one(number) for number in range(100)), return_exceptions=True)

    results = asyncio.run(everything())
    for number, result in enumerate(results):
        if number % 7 == 3:
            assert isinstance(result, Mine)
            assert result.args == (number,)
        else:
            assert result == number
    assert outputs == {number: f"call {number}\n" for number in range(100)}


def test_a_hundred_executes_from_one_loop(node: skyproxy.Node, capsys: pytest.CaptureFixture[str]) -> None:
    def work(number: int) -> int:
        print(number)
        if number % 10 == 0:
            raise Mine(number)
        return number * number

    async def everything() -> list[object]:
        return await asyncio.gather(*(node.execute(work, number) for number in range(100)), return_exceptions=True)

    for number, result in enumerate(asyncio.run(everything())):
        assert result.args == (number,) if number % 10 == 0 else result == number * number
    assert sorted(map(int, capsys.readouterr().out.split())) == list(range(100))


def test_execute_does_not_block_the_loop(node: skyproxy.Node) -> None:
    async def both() -> str:
        task = asyncio.create_task(node.execute(hold, "loop is free"))
        # This can only finish while the other waits.
        await node.execute(open_gate, "loop is free")
        await task
        return "both"

    assert asyncio.run(both()) == "both"


def test_cancelling_the_task_cancels_the_call(node: skyproxy.Node) -> None:
    def spin() -> None:
        try:
            open_gate("task runs")
            while True:
                time.sleep(0.001)
        finally:
            open_gate("task cancelled")

    async def cancel() -> None:
        task = asyncio.create_task(node.execute(spin))
        await node.execute(hold, "task runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await node.execute(hold, "task cancelled")

    asyncio.run(cancel())


def test_a_call_begins_after_what_was_recorded_before(node: skyproxy.Node, sky: str) -> None:
    torch.manual_seed(7)
    expected = torch.randn(3).tolist()
    torch.manual_seed(7)
    assert node.submit(lambda: torch.randn(3), results="value").result(60).tolist() == expected


def test_a_call_knows_its_context(node: skyproxy.Node) -> None:
    def look() -> tuple[str, dict[str, object]]:
        call = skyproxy.runtime.current_call()
        return call.name, dict(call.values)

    call = node.submit(look, name="looking", context={"rank": 3, "pair": (1, 2)})
    assert call.result(60) == ("looking", {"rank": 3, "pair": (1, 2)})


def test_another_python_takes_no_bytecode(node: skyproxy.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    with pytest.raises(VersionMismatchError, match=r"travels as bytecode.*3\.99\.0"):
        node.run(lambda: 1)
    assert node.run(max, 1, 2) == 2


def test_a_gate_is_the_workers_own(node: skyproxy.Node) -> None:
    node.run(open_gate, "apart")
    assert not gate("apart").is_set()


def test_run_execute_and_submit_take_the_same_form(node: skyproxy.Node) -> None:
    def told(first: int, *rest: int, last: int = 0, **more: int) -> list[object]:
        return [first, rest, last, more]

    expected = [1, (2, 3), 4, {"five": 5}]
    assert node.run(told, 1, 2, 3, last=4, five=5) == expected
    assert asyncio.run(node.execute(told, 1, 2, 3, last=4, five=5)) == expected
    assert node.submit(told, 1, 2, 3, last=4, five=5).result(60) == expected
    assert node.submit(max, 3, 5).result(60) == 5
    assert node.submit(sorted, (3, 1), reverse=True).result(60) == [3, 1]


def test_an_argument_with_the_name_of_an_option_is_not_taken_for_it_in_silence(node: skyproxy.Node) -> None:
    def greet(name: str) -> str:
        return f"hello {name}"

    with pytest.raises(ConfigurationError, match=r"functools\.partial\(greet, name="):
        node.submit(greet, name="you")
    assert node.submit(functools.partial(greet, name="you")).result(60) == "hello you"
    assert node.run(greet, name="you") == "hello you"


@pytest.mark.parametrize("name", ["isolate", "timeout"])
def test_an_option_of_submit_that_is_given_to_run_is_named(node: skyproxy.Node, name: str) -> None:
    def takes_nothing() -> None: ...

    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as caught:
        node.run(takes_nothing, **{name: 1})
    assert f"node.submit(fn, ..., {name}=...)" in caught.value.__notes__[-1]
    with pytest.raises(TypeError) as caught:
        asyncio.run(node.execute(takes_nothing, **{name: 1}))
    assert f"node.submit(fn, ..., {name}=...)" in caught.value.__notes__[-1]
