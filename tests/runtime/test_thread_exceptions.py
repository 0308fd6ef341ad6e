"""Exceptions that are raised in other threads, and tracing beside them."""

from __future__ import annotations

import threading
import time

import pytest

from skyproxy.runtime.thread_exceptions import raise_in, take_back
from tests.integration.programs import succeed

PATIENCE_SECONDS = 60
TRACED = """
    import sys, threading, time
    from skyproxy.runtime.thread_exceptions import raise_in, take_back

    class Struck(BaseException):
        pass

    def traced_calls():
        def function():
            return 1
        sys.setprofile(lambda *arguments: None)
        try:
            return sum(function() for _ in range(10))
        finally:
            sys.setprofile(None)
"""


class Struck(BaseException):
    pass


def test_a_thread_that_computes_or_waits_in_short_steps_is_struck_once() -> None:
    for step in (lambda: None, lambda: time.sleep(0.001)):
        begun, seen = threading.Event(), []

        def work(step=step, begun=begun, seen=seen) -> None:
            for _ in range(3):
                try:
                    begun.set()
                    until = time.monotonic() + (PATIENCE_SECONDS if not seen else 0.3)
                    while time.monotonic() < until:
                        step()
                    seen.append("ended")
                except Struck:
                    seen.append("struck")

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(PATIENCE_SECONDS)
        assert thread.ident is not None
        raise_in(thread.ident, Struck, thread.is_alive)
        thread.join(PATIENCE_SECONDS)
        assert seen == ["struck", "ended", "ended"]


def test_what_was_taken_back_is_never_raised() -> None:
    for _ in range(100):
        seen = []

        def work(seen=seen) -> None:
            take_back(Struck)
            for number in range(100):
                seen.append(number)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert len(seen) == 100


@pytest.mark.parametrize("end", ["", "raise_in(thread.ident, Struck, thread.is_alive)"], ids=["nothing", "struck"])
def test_traced_functions_run_after_what_was_taken_back(end: str) -> None:
    """In a process of its own, which can be ended where they do not."""
    program = f"""
    entered, leave = threading.Event(), threading.Event()
    def work():
        try:
            entered.set()
            leave.wait(10)
            take_back(Struck)
        except Struck:
            pass
    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(10)
    {end}
    leave.set()
    thread.join(30)
    print(traced_calls())
    """
    assert succeed(TRACED + program, timeout=PATIENCE_SECONDS) == "10"


def test_traced_functions_run_while_a_thread_that_was_struck_is_in_c_code() -> None:
    program = """
    inside, outside = threading.Lock(), threading.Lock()
    inside.acquire()
    told = []
    def work():
        try:
            told.append("begun")
            inside.acquire()
            while True:
                time.sleep(0.001)
        except Struck:
            told.append("struck")
    thread = threading.Thread(target=work)
    thread.start()
    while not told:
        time.sleep(0.01)
    raise_in(thread.ident, Struck, thread.is_alive)
    for _ in range(20):
        traced_calls()
    inside.release()
    thread.join(30)
    print(*told)
    """
    assert succeed(TRACED + program, timeout=PATIENCE_SECONDS) == "begun struck"


def test_threads_of_a_process_in_which_all_are_profiled_go_on() -> None:
    program = """
    threading.setprofile(lambda *arguments: None)
    lock = threading.Lock()
    lock.acquire()
    begun = []
    def wait():
        try:
            begun.append(1)
            lock.acquire()
            time.sleep(60)
        except Struck:
            pass
    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        while len(begun) <= number:
            time.sleep(0.01)
        raise_in(thread.ident, Struck, thread.is_alive)
    done = threading.Event()
    threading.Thread(target=lambda: [traced_calls(), done.set()]).start()
    print(done.wait(30))
    """
    assert succeed(TRACED + program, timeout=PATIENCE_SECONDS) == "True"
