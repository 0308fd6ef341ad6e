"""Signals that come where Python drops what their handlers raise."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest
from torch.utils.weak import WeakIdKeyDictionary

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends POSIX signals")


class _Item:
    """Something that can be referred to weakly."""


@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize("kept", [WeakSet, WeakKeyDictionary, WeakValueDictionary, WeakIdKeyDictionary])
def test_a_signal_while_a_weak_collection_forgets_strikes_after_it(kept: type[Any]) -> None:
    """Of forty interrupts of a training, one was lost now and then."""

    def strike(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name in ("_remove", "remove"):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    item, collection = _Item(), kept()
    if kept is WeakSet:
        collection.add(item)
    else:
        collection.update([(1, item) if kept is WeakValueDictionary else (item, 1)])
    try:
        with pytest.raises(KeyboardInterrupt):
            sys.setprofile(strike)
            del item
            threading.Event().wait(20)  # no empty loop: Python 3.13.0 leaves the jump back out of the block's table
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not len(collection)
