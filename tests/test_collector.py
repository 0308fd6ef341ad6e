"""The garbage collector rests while much is loaded, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from skyproxy.collector import collector_paused


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
