"""One payload to several processes, with stand-ins for their connections."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyproxy.pools.sending import begin_on_all

PATIENCE_SECONDS = 30


def members(count: int, *, near: bool = False, new: bool = False) -> Any:
    runner = SimpleNamespace(reads_files=False, shares_files=near, is_new=new)
    return {rank: SimpleNamespace(_runner=runner) for rank in range(count)}


def payload(*, large: bool) -> Any:
    return SimpleNamespace(is_large=large)


@pytest.mark.parametrize(("large", "new"), [(True, False), (False, True)])
def test_far_processes_are_sent_much_at_once(large: bool, new: bool) -> None:
    meeting = threading.Barrier(3)
    calls: dict[int, Any] = {}

    def begin(rank: int, file: object) -> Any:
        assert file is None
        meeting.wait(PATIENCE_SECONDS)  # all of them are in here at the same time
        return f"call {rank}"

    begin_on_all(members(3, new=new), payload(large=large), begin, calls)
    assert calls == {0: "call 0", 1: "call 1", 2: "call 2"}


@pytest.mark.parametrize(("count", "near", "large"), [(3, True, True), (3, False, False), (1, False, True)])
def test_others_are_begun_one_after_the_other_here(count: int, near: bool, large: bool) -> None:
    here = threading.current_thread()
    calls: dict[int, Any] = {}

    def begin(rank: int, file: object) -> Any:
        assert threading.current_thread() is here
        return rank

    begin_on_all(members(count, near=near), payload(large=large), begin, calls)
    assert list(calls) == list(range(count))


def test_where_one_cannot_be_begun_the_others_are_cancelled() -> None:
    begun, cancelled, ended = threading.Event(), threading.Event(), threading.Event()
    calls: dict[int, Any] = {}

    def begin(rank: int, file: object) -> Any:
        if rank == 0:
            assert begun.wait(PATIENCE_SECONDS)
            raise LookupError("gone")
        begun.set()
        assert ended.wait(PATIENCE_SECONDS)  # it is still being sent when the error is raised
        return SimpleNamespace(cancel=cancelled.set)

    with pytest.raises(LookupError, match="gone"):
        begin_on_all(members(2), payload(large=True), cast(Any, begin), calls)
    assert calls == {}
    ended.set()
    assert cancelled.wait(PATIENCE_SECONDS)
