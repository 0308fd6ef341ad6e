"""The search for a call among the processes of a token, with processes that only note what they are told."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

from skyproxy_server.control_channel import ChannelClosedError
from skyproxy_server.isolation import call_names
from skyproxy_server.isolation.call_search import MAX_SEARCHES, CallSearch

CALL = "0123456789abcdef" * 2


class Process:
    """A session's process, as the search sees it."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.orders: list[tuple[dict[str, Any], list[int]]] = []
        self.is_gone = False

    def order(self, message: dict[str, Any], descriptors: Iterable[int] = ()) -> None:
        if self.is_gone:
            raise ChannelClosedError("gone")
        self.orders.append((message, [os.dup(descriptor) for descriptor in descriptors]))

    def last(self) -> dict[str, Any]:
        return self.orders[-1][0]


def find(number: int = 7, call: str = CALL) -> dict[str, Any]:
    return {"find": number, "mark": call_names.mark(call), "seal": call_names.seal(call_names.proof(call))}


@pytest.fixture
def processes() -> tuple[Process, Process, Process]:
    return Process("asker"), Process("holder"), Process("other")


@pytest.fixture
def search(processes: tuple[Process, Process, Process]) -> CallSearch[Process]:
    return CallSearch(lambda asker: [process for process in processes if process is not asker])


def test_the_two_processes_are_connected(search, processes) -> None:
    asker, holder, other = processes
    assert search.on_message(asker, find())
    assert holder.last() == other.last() == {"order": "has-call", "search": 1, "mark": call_names.mark(CALL)}
    assert search.on_message(other, {"has": 1, "proof": b""})
    assert asker.orders == []
    assert search.on_message(holder, {"has": 1, "proof": call_names.proof(CALL)})
    (visit, theirs), (found, ours) = holder.orders[-1], asker.orders[-1]
    assert visit == {"order": "visit", "mark": call_names.mark(CALL)}
    assert found == {"order": "found", "find": 7}
    for one, another in zip(ours, theirs, strict=True):
        with socket.socket(fileno=one) as mine, socket.socket(fileno=another) as its:
            mine.sendall(b"hello")
            assert its.recv(10) == b"hello"


def test_nobody_has_it(search, processes) -> None:
    asker, holder, other = processes
    search.on_message(asker, find())
    search.on_message(other, {"has": 1, "proof": b""})
    search.on_message(holder, {"has": 1, "proof": b""})
    assert asker.orders == [({"order": "found", "find": 7}, [])]


def test_who_is_alone_finds_nothing() -> None:
    asker = Process("asker")
    CallSearch(lambda asker: []).on_message(asker, find())
    assert asker.orders == [({"order": "found", "find": 7}, [])]


@pytest.mark.parametrize("proof", [bytes(32), b"short", "text", None, call_names.mark(CALL), 5])
def test_who_does_not_know_the_name_is_not_believed(search, processes, proof: object) -> None:
    asker, holder, impostor = processes
    search.on_message(asker, find())
    search.on_message(impostor, {"has": 1, "proof": proof})
    assert asker.orders == []
    search.on_message(holder, {"has": 1, "proof": call_names.proof(CALL)})
    assert holder.last()["order"] == "visit"
    for descriptor in (*asker.orders[-1][1], *holder.orders[-1][1]):
        os.close(descriptor)


def test_processes_that_end_are_not_waited_for(search, processes) -> None:
    asker, holder, other = processes
    holder.is_gone = True
    search.on_message(asker, find())
    assert asker.orders == []
    search.forget(other)
    assert asker.orders == [({"order": "found", "find": 7}, [])]


def test_the_end_of_who_asked_ends_the_search(search, processes) -> None:
    asker, holder, _ = processes
    search.on_message(asker, find())
    search.forget(asker)
    search.on_message(holder, {"has": 1, "proof": call_names.proof(CALL)})
    assert [message["order"] for message, _ in holder.orders] == ["has-call"]
    assert asker.orders == []


def test_a_session_asks_for_so_many_calls_at_a_time(search, processes) -> None:
    asker, _, other = processes
    for number in range(MAX_SEARCHES):
        search.on_message(asker, find(number))
    with pytest.raises(ValueError, match="searches"):
        search.on_message(asker, find(MAX_SEARCHES))
    search.on_message(other, find(1))  # others may go on


@pytest.mark.parametrize(
    "message",
    [
        {"find": 1, "mark": b"short", "seal": bytes(32)},
        {"find": 1, "mark": bytes(32), "seal": "text"},
        {"find": "one", "mark": bytes(32), "seal": bytes(32)},
        {"find": 1, "mark": bytes(32)},
        {"has": 1},
        {"has": "one", "proof": b""},
    ],
)
def test_malformed_messages_are_refused(search, processes, message: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        search.on_message(processes[0], message)


def test_answers_that_nobody_asked_for_are_refused(search, processes) -> None:
    asker, _, _ = processes
    search.on_message(asker, find())
    with pytest.raises(ValueError, match="not asked"):
        search.on_message(asker, {"has": 1, "proof": call_names.proof(CALL)})
    assert search.on_message(asker, {"has": 99, "proof": b""})  # late, and of no interest
    assert not search.on_message(asker, {"something": "else"})
