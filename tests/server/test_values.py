"""The values of a session: what a slot gives, what poisons it, what a replay and a capture change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Failure, Message
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import storage_key
from skyproxy_server.reports import Reports
from skyproxy_server.signatures import Signature
from skyproxy_server.values import Values

ADD_ = commands.FIRST_SIGNATURE


class Session:
    """Values, and what their client was told."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.reports = Reports(self.sent.append)
        self.values = Values(self.reports)
        self.add_ = Signature(["aten::add_.Tensor", ["t", "t"], {}, ["x"]], on_cpu=True)
        self.add = Signature(["aten::add.Tensor", ["t", "t"], {}, ["n"]], on_cpu=True)

    @property
    def failures(self) -> list[Failure]:
        return [message for message in self.sent if isinstance(message, Failure)]


@pytest.fixture
def session() -> Session:
    made = Session()
    made.values.slots.update({1: torch.ones(2), 2: torch.ones(2)})
    return made


def test_a_slot_gives_its_value_its_failure_or_a_protocol_error(session: Session) -> None:
    values = session.values
    assert values.get(1) is values.slots[1]
    failed = values.slots[3] = session.reports.failure(RuntimeError("x"), "op", 0)
    with pytest.raises(PoisonedError) as caught:
        values.get(3)
    assert caught.value.failed is failed
    with pytest.raises(ProtocolError, match="slot 4 holds nothing"):
        values.get(4)


def test_a_failed_op_poisons_its_outputs_and_marks_what_it_would_have_written(session: Session) -> None:
    values = session.values
    assert values.poison(session.add, [ADD_, 1, 2, 5], 0, RuntimeError("no"), None) == 4
    assert isinstance(values.slots[5], Failed)
    assert values.poison(session.add_, [ADD_, 1, 2], 0, RuntimeError("no"), None) == 3
    with pytest.raises(PoisonedError) as caught:
        values.get(1)
    assert values.get(2) is values.slots[2]
    values.mark_reported(caught.value.failed)
    assert values.get(1) is values.slots[1]
    assert len(session.failures) == 2


def test_poison_spreads_without_being_told_again(session: Session) -> None:
    values = session.values
    values.poison(session.add, [ADD_, 1, 2, 5], 0, RuntimeError("no"), None)
    values.poison(session.add, [ADD_, 5, 2, 6], 0, TypeError("not a tensor"), None)
    assert values.slots[6] is values.slots[5]
    assert len(session.failures) == 1


def test_an_op_on_a_slot_that_holds_nothing_is_told_as_that(session: Session) -> None:
    session.values.poison(session.add, [ADD_, 1, 9, 5], 0, KeyError(9), None)
    assert "does not hold" in session.failures[0].error["message"]


def test_an_answer_that_fails_is_a_refusal(session: Session) -> None:
    values = session.values

    def fail() -> None:
        raise ValueError("no")

    values.answer(7, 3, "item", fail)
    values.poison(session.add, [ADD_, 1, 2, 5], 0, RuntimeError("no"), None)
    values.answer(8, 4, "item", lambda: values.get(5))
    assert [failure.request for failure in session.failures] == [7, 0, 8]
    assert session.reports.unreported == []


def test_a_malformed_question_ends_the_session(session: Session) -> None:
    with pytest.raises(ProtocolError):
        session.values.answer(7, 3, "item", lambda: session.values.get(99))


def test_a_replay_has_values_of_its_own(session: Session) -> None:
    values, outer = session.values, session.values.slots
    scope: dict[int, Any] = {0: None, 1: torch.zeros(1)}
    with pytest.raises(RuntimeError, match="inside"), values.scope(scope, 4):
        assert values.get(1) is scope[1]
        assert session.reports.graph == 4
        raise RuntimeError("inside")
    assert values.slots is outer
    assert session.reports.graph is None


def test_released_values_are_gone_but_for_those_that_a_capture_may_read(session: Session) -> None:
    values = session.values
    first, second = values.slots[1], values.slots[2]
    assert values.release(values.slots, [commands.RELEASE, [1, 77]], 0) == 2
    assert 1 not in values.slots
    values.deferred_releases = {}
    values.release(values.slots, [commands.RELEASE, [2]], 0)
    values.slots[2] = first
    values.release(values.slots, [commands.RELEASE, [2]], 0)
    assert values.deferred_releases == {2: second}
    with values.scope({0: None, 9: first}, 4):
        values.release(values.slots, [commands.RELEASE, [9]], 0)
    assert 9 not in values.deferred_releases


def test_a_result_that_was_never_replayed_can_be_written_but_not_read(session: Session) -> None:
    values = session.values
    failed = session.reports.silent_failure(RuntimeError("not replayed"))
    values.not_replayed[storage_key(values.slots[1]) or 0] = (4, failed, values.slots[1])
    with pytest.raises(PoisonedError):
        values.get(1)
    assert values.get(1, writes=True) is values.slots[1]
    assert values.get(2) is values.slots[2]


def test_nothing_is_left_after_the_end(session: Session) -> None:
    session.values.poison(session.add_, [ADD_, 1, 2], 0, RuntimeError("no"), None)
    session.values.deferred_releases = {5: torch.ones(1)}
    session.values.forget()
    assert session.values.slots == {}
    assert session.values.deferred_releases is None
    assert not session.values.gates
