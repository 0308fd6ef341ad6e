"""Broadcasts that processes pass on: those of this machine, at several addresses, taken for others by their client."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import RankErrors, SkyproxyError
from skyproxy.pools import relaying
from skyproxy.pools.ranks import RankGroup
from skyproxy.pools.relaying import Relaying
from tests.server.isolation.workers import TOKEN, Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="payloads are passed on by workers on Linux only")
MIB = 1 << 20
RANKS = 5
PAYLOAD = os.urandom(2 * MIB)
ONCE = range(2 * MIB, 2 * MIB + 200_000)
NEXT_TO_NOTHING = range(100_000)


def addresses(group: RankGroup) -> dict[int, str]:
    """Ranks 3 and 4 share a machine."""
    return {rank: f"127.0.0.{min(rank, 3) + 1}" for rank in range(RANKS)}


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=RANKS) as pool:
        yield pool


@pytest.fixture(autouse=True)
def ways(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.broadcast(sum, [1, 2]) == [3] * RANKS
    for node in pool.nodes:  # one of them may be new: a test may have ended a process
        node._runner.shares_files = False
    monkeypatch.setattr(RankGroup, "addresses", property(addresses))
    monkeypatch.setattr(relaying, "_ALONE", set())


def bytes_sent(pool: sky.Compute) -> list[int]:
    return [node._session.bytes_sent for node in pool.nodes]


@contextlib.contextmanager
def sends(pool: sky.Compute, *expected: range) -> Iterator[None]:
    before = bytes_sent(pool)
    yield
    found = [after - other for after, other in zip(bytes_sent(pool), before)]
    assert all(count in bounds for count, bounds in zip(found, expected, strict=True)), found


def what_is_left() -> list[str]:
    import threading

    from skyproxy.relays.relays import RELAYS

    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("skyproxy-relay")]
    return threads + ["a relay"] * len(RELAYS)


def nothing_is_left(pool: sky.Compute) -> bool:
    end = time.monotonic() + 30
    while any(pool.broadcast(what_is_left)):
        if time.monotonic() > end:
            return False
    return True


def broadcast(pool: sky.Compute, ranks: int = RANKS) -> None:
    """Every rank gets its own, whatever happens on the way."""
    answers = pool.broadcast(lambda payload: (len(payload), payload[-9:], sky.instance_info().rank), PAYLOAD)
    assert answers == [(len(PAYLOAD), PAYLOAD[-9:], rank) for rank in range(ranks)]


def test_it_is_sent_once(pool: sky.Compute) -> None:
    for _ in range(2):
        with sends(pool, ONCE, *[NEXT_TO_NOTHING] * 4):
            broadcast(pool)
    assert nothing_is_left(pool)


def test_what_is_small_or_not_to_be_passed_on_is_sent_to_each(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sends(pool, *[range(MIB // 2, MIB)] * RANKS):
        pool.broadcast(len, PAYLOAD[: MIB // 2])
    for node in pool.nodes:
        monkeypatch.setitem(node._session.welcome.limits, "passes_payloads", 0)  # an older worker
    with sends(pool, *[ONCE] * RANKS):
        broadcast(pool)


def test_who_cannot_reach_another_is_sent_it_from_then_on(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody connects to this one, but it listens: rank 3 below it, whose neighbour goes on as ever.
    nowhere = {1: "240.0.0.1"}
    monkeypatch.setattr(RankGroup, "addresses", property(lambda group: {**addresses(group), **nowhere}))
    for _ in range(2):
        with sends(pool, ONCE, NEXT_TO_NOTHING, NEXT_TO_NOTHING, ONCE, NEXT_TO_NOTHING):
            broadcast(pool)
        assert nothing_is_left(pool)
        assert {node for node in pool.nodes if node in relaying._ALONE} == {pool.nodes[3]}


def replace_send(how: str) -> None:
    """On a worker: does something else where it is to pass a payload on, once."""
    from skyproxy.relays import edges

    right = edges.send

    def wrong(tls: Any, content: Any, *, near: bool) -> None:
        edges.send = right
        while (found := content(1.0)) is None:
            tls.sendall(b".")
        if how == "other bytes":
            tls.sendall(b"b" + bytes(found.size))
        elif how == "another path":
            tls.sendall(b"p\x0c/proc/1/fd/0")
        # and hangs up

    edges.send = wrong  # type: ignore[assignment]


@pytest.mark.parametrize("how", ["other bytes", "hangs up", "another path"])
def test_who_gets_something_else_or_nothing_is_sent_it(pool: sky.Compute, how: str) -> None:
    pool.nodes[1].run(replace_send, how)  # its only child is rank 3, which passes it on to rank 4
    with sends(pool, ONCE, NEXT_TO_NOTHING, NEXT_TO_NOTHING, ONCE, NEXT_TO_NOTHING):
        broadcast(pool)
    assert nothing_is_left(pool)
    with sends(pool, ONCE, *[NEXT_TO_NOTHING] * 4):
        broadcast(pool)


def test_where_the_first_one_cannot_hold_it_those_below_are_sent_it(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, size: int, digest: bytes, pieces: object) -> bool:
        raise OSError("no memory")

    hold = relaying.hold_payload

    def only_later(self: Relaying, rank: int) -> None:
        monkeypatch.setattr(relaying, "hold_payload", refuse if rank == 0 else hold)
        right(self, rank)

    right = Relaying._hold
    monkeypatch.setattr(Relaying, "_hold", only_later)
    broadcast(pool)
    assert nothing_is_left(pool)


def test_who_does_not_open_a_port_passes_nothing_on(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "open_relay", len)  # an error, on the worker
    with sends(pool, ONCE, ONCE, ONCE, ONCE, ONCE):
        broadcast(pool)
    assert nothing_is_left(pool)


@pytest.mark.parametrize(
    "answer", [None, 3, "text", (0, "sha256:" + "0" * 64), (1 << 16, ""), (22, "sha256:00"), (22,)]
)
def test_a_port_is_a_port_and_a_fingerprint_is_one(answer: object) -> None:
    assert relaying._checked_place(answer) is None
    assert relaying._checked_place([22, "sha256:" + "0" * 64]) == (22, "sha256:" + "0" * 64)


def test_who_takes_no_notice_is_not_waited_for(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(relaying, "longest_seconds", lambda size: 0.0)
    monkeypatch.setattr(relaying, "open_relay", open_late)
    with sends(pool, *[ONCE] * RANKS):
        broadcast(pool)
    assert nothing_is_left(pool)


def open_late(*arguments: object) -> None:
    import threading

    threading.Event().wait(3)


def test_an_interrupt_ends_it_everywhere(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Relaying, rank: int, step: str, answer: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Relaying, "_on_answer", interrupt)
        broadcast(pool)
    assert nothing_is_left(pool)
    broadcast(pool)


def test_sessions_with_processes_of_their_own_pass_it_on_to_one_another(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        with sky.Compute(provider=sky.Remote([worker.url] * 3, token=TOKEN)) as pool:
            assert pool.broadcast(len, "abc") == [3] * 3
            with sends(pool, ONCE, *[NEXT_TO_NOTHING] * 2):
                broadcast(pool, 3)
            assert nothing_is_left(pool)
    finally:
        worker.end()


def test_a_process_that_dies_in_the_middle_ends_the_broadcast_and_the_next_one_works(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_answer, victim = Relaying._on_answer, pool.nodes[1].run(os.getpid)

    def kill(self: Relaying, rank: int, step: str, answer: object) -> None:
        if (rank, step) == (1, "open"):
            os.kill(victim, signal.SIGKILL)
        on_answer(self, rank, step, answer)

    with monkeypatch.context() as patch, pytest.raises((SkyproxyError, RankErrors)):
        patch.setattr(Relaying, "_on_answer", kill)
        broadcast(pool)
    broadcast(pool)
    assert nothing_is_left(pool)
