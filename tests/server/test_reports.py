"""What a session tells its client, unasked and asked."""

from __future__ import annotations

from skyproxy.protocol.messages import Failure, Message, Reply, Warned
from skyproxy_server.kernel_warnings import KernelWarning
from skyproxy_server.reports import Reports


def reporter() -> tuple[Reports, list[Message]]:
    sent: list[Message] = []
    return Reports(sent.append), sent


def test_a_failure_is_told_at_once_and_remembered_until_it_is_seen() -> None:
    reports, sent = reporter()
    reports.sequence = 7
    failed = reports.failure(ValueError("no"), "aten::relu", 3)
    (told,) = sent
    assert isinstance(told, Failure)
    assert told.request == 0
    assert (told.error["sequence"], told.error["position"], told.error["op"]) == (7, 3, "aten::relu")
    assert reports.unreported == [failed]
    reports.mark_seen(failed)
    assert failed.delivered
    assert reports.unreported == []


def test_a_failure_of_an_earlier_batch_names_that() -> None:
    reports, _ = reporter()
    reports.sequence = 7
    assert reports.failure(ValueError("no"), "upload", 3, sequence=5).record["sequence"] == 5


def test_positions_in_a_replay_say_that_they_are_the_graphs() -> None:
    reports, sent = reporter()
    reports.graph = 4
    assert reports.failure(ValueError("no"), "op", 1).record["graph"] == 4
    reports.warn("op", [KernelWarning("UserWarning", "careful")], 2)
    assert isinstance(sent[-1], Warned)
    assert sent[-1].place == {"sequence": 0, "position": 2, "graph": 4}


def test_a_hundred_failures_are_remembered_and_all_are_told() -> None:
    reports, sent = reporter()
    for number in range(150):
        reports.failure(ValueError(str(number)), "op", number)
    assert len(sent) == 150
    assert len(reports.unreported) == 100


def test_a_silent_failure_is_told_to_nobody() -> None:
    reports, sent = reporter()
    assert reports.silent_failure(RuntimeError("not yet")).record["message"] == "not yet"
    assert sent == []
    assert reports.unreported == []


def test_whoever_watches_sees_each_message_before_it_leaves() -> None:
    reports, sent = reporter()
    seen: list[tuple[Message, int]] = []
    reports.watch = lambda message: seen.append((message, len(sent)))
    reports.reply(9, [1])
    reports.watch = None
    reports.reply(10, [2])
    assert [message.request for message in sent if isinstance(message, Reply)] == [9, 10]
    assert seen == [(sent[0], 0)]


def test_a_warning_has_a_bound() -> None:
    reports, sent = reporter()
    reports.warn("op", [KernelWarning("UserWarning", "x" * 5000)] * 100, 0)
    assert len(sent) == 64
    assert isinstance(sent[0], Warned)
    assert len(sent[0].message) == 2000
