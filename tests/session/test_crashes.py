"""What a program is told of where the CUDA context of its worker was lost, and of what may have done it."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy.errors import KERNEL_FAILED
from skyproxy.protocol import commands
from skyproxy.session.crashes import explain_loss
from skyproxy.session.failures import FailureReports
from skyproxy.session.recorder import Recorder
from skyproxy.settings import SETTINGS
from tests.session.test_recorder import Wire

RELU, EMBED, CUSTOM, SUM = range(commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 4)
STRUCTURES: dict[int, Any] = {
    RELU: ("aten::relu",),
    EMBED: ("aten::embedding",),
    CUSTOM: ("mine::kernel.x",),
    SUM: ("aten::sum",),
}
CODE = compile("\n" * 6 + "x @ y", "work.py", "exec")


def recorded(*ops: int) -> Recorder:
    """A recorder with a batch for each list of ops; each op takes one operand."""
    recorder = Recorder(lambda batch: None, lambda: (0, 0), SETTINGS)
    recorder.widths.update(dict.fromkeys(STRUCTURES, 1))
    for op in ops:
        if op == commands.FETCH:
            recorder.emit((commands.FETCH, 1, 1, 0))
        elif op == commands.CALL:
            recorder.emit((commands.CALL, 1, "item", [1]))
        elif op:
            recorder.emit((op, 1))
            recorder.emit_line((CODE, 2))
        else:
            recorder.flush()
    recorder.flush()
    return recorder


def told(recorder: Recorder, sequence: int, position: int, op: str = "aten::sum", line: str = "x.py:3 in f") -> str:
    record = {"type": "ContextLostError", "op": op, "sequence": sequence, "position": position, "message": "it broke"}
    return explain_loss(record, line, recorder, STRUCTURES)


def test_operations_before_the_one_that_noticed_are_named_the_latest_first() -> None:
    said = told(recorded(EMBED, 0, RELU, CUSTOM, SUM, EMBED), 2, 4)
    place = "recorded at work.py:7 in <module>"
    assert said.startswith(
        " Kernels run later than they are recorded: it was noticed at aten::sum, recorded at x.py:3 in f. "
    )
    assert f"the latest first: mine::kernel.x, {place}; aten::embedding, {place}. " in said
    assert said.endswith("SKYPROXY_LAUNCH_BLOCKING=1 finds the statement.")


def test_what_was_waited_for_is_not_to_blame() -> None:
    said = told(recorded(EMBED, commands.FETCH, RELU, SUM), 1, 8)
    assert "embedding" not in said
    assert "latest first" not in said
    assert "embedding" not in told(recorded(EMBED, commands.CALL, RELU, SUM), 1, 8)


def test_an_upload_that_noticed_is_no_wait() -> None:
    assert "it was noticed where values were uploaded. " in told(recorded(EMBED, RELU), 1, 2, "upload", "")


def test_the_operation_that_noticed_may_be_to_blame_itself() -> None:
    assert "aten::embedding" in told(recorded(RELU, EMBED), 1, 2, "aten::embedding")


def test_a_wait_that_noticed_is_no_operation() -> None:
    said = told(recorded(EMBED, SUM, commands.FETCH), 1, 4, "fetch", "")
    assert "it was noticed where the program waited. " in said
    assert "aten::embedding" in said


def test_places_that_cannot_be_are_left_out() -> None:
    recorder = recorded(EMBED, SUM)
    for sequence, position in ((9, 0), (1, 77), (None, None), ("x", [])):
        reports = FailureReports(recorder, STRUCTURES)
        record: Any = {"type": "ContextLostError", "op": "aten::sum", "sequence": sequence, "position": position}
        reports.answer(record)
        assert "SKYPROXY_LAUNCH_BLOCKING" in reports.loss or not reports.loss


def test_batches_that_were_acknowledged_are_looked_at_too() -> None:
    recorder = recorded(EMBED, 0, RELU, SUM)
    recorder.ack(1)
    assert "aten::embedding, recorded at work.py:7" in told(recorder, 2, 2)


def test_where_each_operation_is_waited_for_it_was_the_last_one() -> None:
    recorder = recorded(EMBED, RELU, commands.FETCH)
    recorder.wait_for_outcome = lambda: None
    assert told(recorder, 1, 4, "synchronize", "") == " It was aten::relu, recorded at work.py:7 in <module>."


def test_a_session_that_did_not_notice_is_told_what_it_ran_itself() -> None:
    reports = FailureReports(recorded(RELU, commands.FETCH, EMBED, 0, SUM), STRUCTURES)
    assert reports.explain_loss("it was closed") == ""
    place = "aten::embedding, recorded at work.py:7 in <module>"
    assert reports.explain_loss(f"another session found that {KERNEL_FAILED}") == (
        f" Of what this session ran, these check their operands on the GPU, the latest first: {place}."
    )
    waited = recorded(EMBED, commands.FETCH, RELU)
    assert "embedding" in FailureReports(waited, STRUCTURES).explain_loss(KERNEL_FAILED), "it may still wait"
    waited.ack(1)
    assert FailureReports(waited, STRUCTURES).explain_loss(KERNEL_FAILED) == ""


# --- the batches that are remembered --------------------------------------------------------------------------------


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_a_batch_is_known_as_long_as_news_of_it_may_come(wire: Wire) -> None:
    found: list[Any] = []
    wire.before_send = lambda message: found.append(wire.recorder.sent(message.sequence))
    wire.op(1)
    wire.op(2)
    wire.recorder.flush()
    assert found[0].lines == [None, 1, None, 2]  # even before `send` has returned
    assert wire.recorder.sent(1) is found[0]
    run_another(wire, 7)
    assert wire.recorder.sent(1) is found[0], "the kernels of a GPU may still run"
    assert [sent.sequence for sent in wire.recorder.sent_batches(acked=True)] == list(range(1, 9))
    assert not wire.recorder.sent_batches()
    run_another(wire, 1)
    assert wire.recorder.sent(1) is None


def run_another(wire: Wire, count: int) -> None:
    """Have batches acknowledged, of which the first may be on its way already."""
    for _ in range(count):
        wire.ack()
        wire.op(1)
        wire.recorder.flush()
    wire.ack()


def test_batches_that_one_cancellation_needs_are_not_forgotten_for_the_next(wire: Wire) -> None:
    wire.op(1)
    wire.recorder.flush()
    wire.recorder.keep_acked(kept=True)
    run_another(wire, 10)
    wire.recorder.keep_acked(kept=True)
    assert wire.recorder.sent(1) is not None
    wire.recorder.keep_acked(kept=False)
    assert wire.recorder.sent(1) is None
