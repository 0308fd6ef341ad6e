"""The garbage collector rests while much is loaded, and is as it was afterwards."""

from __future__ import annotations

import gc
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


@pytest.mark.parametrize("enabled", [True, False])
def test_what_was_loaded_is_looked_at_unless_the_program_does_without_the_collector(enabled: bool) -> None:
    class Circle:
        def __init__(self) -> None:
            self.self = self

    gc.collect()
    gc.disable()
    died = weakref.ref(Circle())
    try:
        if enabled:
            gc.enable()
        collect_loaded()
        assert (died() is None) == enabled
    finally:
        gc.enable()
