"""The garbage collector rests while much is loaded, and is as it was afterwards."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from skyproxy.collector import collect_loaded, collector_paused


def test_the_collector_rests_inside_and_works_again_afterwards_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_program_that_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Circle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.self = self


def test_what_was_loaded_is_looked_at() -> None:
    died = weakref.ref(Circle())
    limit = time.monotonic() + 60
    while died() is not None and time.monotonic() < limit:
        collect_loaded()  # does nothing while another thread is in the midst of a pass, which may take seconds here
        time.sleep(0.01)
    assert died() is None


def test_a_program_that_does_without_the_collector_is_not_made_to_wait_for_it() -> None:
    gc.disable()
    try:
        died = weakref.ref(Circle())
        collect_loaded()
        assert died() is not None
    finally:
        gc.enable()
