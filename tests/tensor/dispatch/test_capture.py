"""Captures that an interrupt strikes."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch

from skyproxy.session.session import Session


class StruckError(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("where", ["divert", "end_diversion"])
def test_an_interrupt_as_a_capture_begins_or_ends_leaves_none_behind(
    where: str, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(number: int, frame: object) -> None:
        raise StruckError

    def be_struck(self: Session, *args: Any) -> None:
        action(self, *args)
        monkeypatch.setattr(Session, where, action)
        signal.raise_signal(signal.SIGUSR1)

    x = torch.ones(3, device=sky)
    action = getattr(Session, where)
    before = signal.signal(signal.SIGUSR1, strike)
    monkeypatch.setattr(Session, where, be_struck)
    try:
        with pytest.raises(StruckError):
            with torch.sky.graph(torch.sky.SkyGraph()):
                x.add_(1)
                if where == "divert":
                    threading.Event().wait(60)
            threading.Event().wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not torch.sky.is_current_stream_capturing()
    assert x.tolist() == [1, 1, 1]
