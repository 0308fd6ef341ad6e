"""The loop of the pools: whoever waits is told when a clean-up has really ended."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable

import pytest

from skyproxy.pools.loop_thread import LoopThread, _Running, loop_thread


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail() -> None:
    raise KeyError("x")


def test_results_and_errors_come_back() -> None:
    assert loop_thread().run(answer()) == 42
    assert asyncio.run(loop_thread().run_async(answer())) == 42
    with pytest.raises(KeyError):
        loop_thread().run(fail())
    assert loop_thread().finish(answer()) == 42


def forever(begin: Callable[[], object], steps: list[str]) -> Callable[[], object]:
    async def run() -> None:
        begin()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    return run


def test_cancelling_the_caller_waits_for_the_clean_up_and_leaves_nothing_to_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps: list[str] = []

    async def give_up() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        run = forever(lambda: loop.call_soon_threadsafe(begun.set), steps)
        task = asyncio.create_task(loop_thread().run_async(run()))  # type: ignore[arg-type]
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps.append("told")

    asyncio.run(give_up())
    assert steps == ["cleaned up", "told"]
    gc.collect()
    assert caplog.messages == []  # "Future exception was never retrieved"


def test_an_interrupt_waits_for_the_clean_up() -> None:
    steps: list[str] = []
    main = threading.main_thread().ident
    assert main is not None
    run = forever(lambda: signal.pthread_kill(main, signal.SIGINT), steps)
    with pytest.raises(KeyboardInterrupt):
        LoopThread().run(run())  # type: ignore[arg-type]
    assert steps == ["cleaned up"]


def test_an_interrupt_does_not_end_a_clean_up() -> None:
    steps: list[str] = []
    main = threading.main_thread().ident
    assert main is not None

    async def clean_up() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        for _ in range(100):
            await asyncio.sleep(0)
        steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        LoopThread().finish(clean_up())
    assert steps == ["cleaned up"]


@pytest.mark.parametrize("is_queued", [False, True])
def test_an_interrupt_while_a_clean_up_begins_does_not_end_it(monkeypatch: pytest.MonkeyPatch, is_queued: bool) -> None:
    steps: list[str] = []
    begin = _Running.begin
    strikes = iter([True])

    def struck(running: _Running[None]) -> None:
        strikes_now = next(strikes, False)
        if is_queued or not strikes_now:
            begin(running)
        if strikes_now:
            raise KeyboardInterrupt

    async def clean_up() -> None:
        await asyncio.sleep(0.05)
        steps.append("cleaned up")

    monkeypatch.setattr(_Running, "begin", struck)
    with pytest.raises(KeyboardInterrupt):
        LoopThread().finish(clean_up())
    assert steps == ["cleaned up"]
