"""Which thread runs a call: the one before's where nothing was left in it, and a new one else."""

from __future__ import annotations

import contextvars
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skyproxy_server.functions.call_threads import CallThreads

LOCAL = threading.local()
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def thread_of(threads: CallThreads, body: Callable[[], object] = lambda: None) -> tuple[threading.Thread, Any]:
    """The thread that ran `body`, after it is at rest or has ended, and what `body` returned."""
    results: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = threads.start(lambda: results.put(body()), "skyproxy-call-test")
    result = results.get(timeout=60)
    while thread.is_alive() and thread not in [kept.thread for kept in threads._kept]:
        thread.join(0.001)
    return thread, result


def set_grad_mode() -> None:
    torch.set_grad_enabled(False)


def set_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)


def set_autocast_dtype() -> None:
    torch.set_autocast_dtype("cpu", torch.float16)


def set_default_device() -> None:
    torch.set_default_device("meta")


def flush_denormals() -> None:
    torch.set_flush_denormal(True)


def set_thread_local() -> None:
    LOCAL.value = 1


def hook_generators() -> None:
    sys.set_asyncgen_hooks(firstiter=lambda generator: None)


LEFT = [
    set_grad_mode,
    set_autocast,
    set_autocast_dtype,
    set_default_device,
    flush_denormals,
    set_thread_local,
    hook_generators,
]


@pytest.fixture(autouse=True)
def _no_denormal_is_flushed() -> Iterator[None]:
    """Where there is a device `sky` in this process, it takes note of the mode, whichever thread sets it."""
    yield
    torch.set_flush_denormal(False)


def test_the_next_call_has_the_thread_of_one_that_left_nothing_in_it() -> None:
    threads = CallThreads()
    first, _ = thread_of(threads)
    second, name = thread_of(threads, lambda: threading.current_thread().name)
    assert second is first
    assert name == "skyproxy-call-test"


@pytest.mark.parametrize("leave", LEFT, ids=lambda leave: leave.__name__)
def test_what_a_function_leaves_in_its_thread_ends_with_it(leave: Callable[[], None]) -> None:
    threads = CallThreads()
    thread, _ = thread_of(threads, leave)
    assert not thread.is_alive()
    assert thread_of(threads)[0] is not thread


def test_tracing_that_a_function_leaves_ends_with_its_thread() -> None:
    thread, _ = thread_of(CallThreads(), lambda: sys.settrace(lambda *arguments: None))
    assert not thread.is_alive()


def test_modes_that_a_function_takes_back_are_not_left() -> None:
    def function() -> None:
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
            torch.ones(2)

    threads = CallThreads()
    thread_of(threads, function)  # PyTorch has thread-locals of its own from now on
    first, _ = thread_of(threads, lambda: torch.no_grad().__enter__() and None)
    assert not first.is_alive()
    kept, _ = thread_of(threads)
    with_modes, _ = thread_of(threads, lambda: torch.inference_mode()(lambda: None)())
    assert with_modes is kept
    assert kept.is_alive()


def test_context_variables_begin_anew() -> None:
    threads = CallThreads()
    first, _ = thread_of(threads, lambda: VARIABLE.set(7) and None)
    second, value = thread_of(threads, VARIABLE.get)
    assert second is first
    assert value == 0


def test_after_another_number_of_computing_threads_all_are_new() -> None:
    before = torch.get_num_threads()
    threads = CallThreads()
    go = threading.Event()
    others = [threads.start(go.wait, "skyproxy-call-other") for _ in range(2)]
    try:
        changed, _ = thread_of(threads, lambda: torch.set_num_threads(before + 1))
        go.set()
        for other in others:
            other.join(60)  # they began before
        assert not changed.is_alive()
        assert not any(other.is_alive() for other in others)
        assert thread_of(threads, torch.get_num_threads)[1] == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_long_call_has_its_thread_for_itself() -> None:
    now = 0.0
    threads = CallThreads(clock=lambda: now)

    def long() -> None:
        nonlocal now
        now += 1.0

    assert not thread_of(threads, long)[0].is_alive()
    assert thread_of(threads)[0].is_alive()


def test_calls_at_once_have_threads_of_their_own_and_few_are_kept() -> None:
    threads = CallThreads()
    barrier = threading.Barrier(21)
    started = [threads.start(barrier.wait, "skyproxy-call-many") for _ in range(20)]
    barrier.wait(60)
    assert len(set(started)) == 20
    while len([thread for thread in started if thread.is_alive()]) > 8:
        started[0].join(0.001)
    assert len([thread for thread in started if thread.is_alive()]) <= 8


def test_a_thread_that_no_call_comes_for_ends() -> None:
    threads = CallThreads(kept_seconds=0.01)
    thread, _ = thread_of(threads)
    thread.join(60)
    assert not thread.is_alive()
    assert thread_of(threads)[0] is not thread


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_a_function_forks_does_not_wait_for_calls() -> None:
    def fork() -> int:
        child = os.fork()
        if not child:
            threads._next_job = lambda thread: os._exit(3)  # type: ignore[method-assign]
            # Before destructors of PyTorch's, which may crash or wait where such a thread ends on Python 3.11.
            threading.Thread._delete = lambda self: os._exit(0)  # type: ignore[attr-defined]
        return child

    threads = CallThreads(clock=lambda: 0.0)  # a fork of this process may not be short
    thread, child = thread_of(threads, fork)
    assert thread.is_alive()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_a_call_held_is_let_go() -> None:
    class Held:
        gone = threading.Event()

        def __del__(self) -> None:
            self.gone.set()

        def run(self) -> None:
            pass

    threads = CallThreads()
    threads.start(Held().run, "skyproxy-call-held")
    assert Held.gone.wait(60)
