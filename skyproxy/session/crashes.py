"""The loss of a worker's CUDA context, as its client explains it: kernels run later than they are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skyproxy.protocol import commands
from skyproxy.session.lines import describe_line
from skyproxy.session.recorder import RecordedBatch, Recorder
from skyproxy.session.signatures import op_name
from skyproxy.transport.base import Transport

CONTEXT_LOST = "ContextLostError"
"""The type of the failure that a worker reports before it ends for the loss of its CUDA context."""
_MOST_SHOWN = 3
_WAITING = ("item", "synchronize")
"""The controls whose answers come when the GPU has done all that was launched before."""
_CHECKED_NAMES = """
_assert_async _ctc_loss _embedding_bag _embedding_bag_forward_only _index_put_impl _unsafe_index _unsafe_index_put
bernoulli binary_cross_entropy binary_cross_entropy_backward bincount binomial embedding embedding_dense_backward
embedding_renorm gather index index_add index_copy index_fill index_put index_reduce index_select masked_scatter
max_unpool2d max_unpool3d multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multinomial
nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward one_hot poisson put repeat_interleave
scatter scatter_add scatter_reduce segment_reduce take
"""
_CHECKED = frozenset(_CHECKED_NAMES.split())
"""The operations of PyTorch whose kernels for CUDA assert something of values, as of indices; in place as well."""


def has_crashed(*connections: Transport) -> bool:
    """Return whether a worker has said on one of these connections that the process behind it is lost."""
    goodbyes = [item.connection.goodbye for item in connections]
    return any(goodbye is not None and goodbye.code_name == "crashed" for goodbye in goodbyes)


def explain_loss(record: Mapping[str, Any], line: str, recorder: Recorder, structures: Mapping[int, Any]) -> str:
    """Return sentences on where the loss of a CUDA context was noticed, and on what may have caused it.

    Args:
        record: the failure, as the worker tells it.
        line: the line that recorded what failed; an empty text where that is not known.
        recorder: has the operations that may be to blame.
        structures: the first part of each is the name of an operation, by the number of its signature.
    """
    sequence, position = record.get("sequence"), record.get("position")
    latest: Iterator[tuple[str, str]] = iter(())
    if record.get("graph") is None and isinstance(sequence, int) and isinstance(position, int):
        latest = _latest_ops(recorder, structures, (sequence, position))
    if recorder.wait_for_outcome is not None:  # each was waited for, so that it is the last one
        return next((f" It was {_place(*found)}." for found in latest), "")
    op = str(record.get("op") or "")
    waited = "where values were uploaded" if op == "upload" else "where the program waited"
    noticed = f"at {_place(op, line)}" if op.startswith("aten::") or line else waited
    text = f" Kernels run later than they are recorded: it was noticed {noticed}."
    if suspects := _suspects(latest):
        text += f" Of what ran before, these check their operands on the GPU, the latest first: {suspects}."
    return f"{text} SKYPROXY_LAUNCH_BLOCKING=1 finds the statement."


def explain_share(recorder: Recorder, structures: Mapping[int, Any]) -> str:
    """Return sentences on what a session may have done to a CUDA context that another one found lost."""
    suspects = _suspects(_latest_ops(recorder, structures))
    if not suspects:
        return ""
    return f" Of what this session ran, these check their operands on the GPU, the latest first: {suspects}."


def _suspects(latest: Iterable[tuple[str, str]]) -> str:
    """Return the latest operations that may lose a context, in words; an empty text if there are none."""
    found: dict[str, None] = {}
    for name, place in latest:
        short = name.removeprefix("aten::").partition(".")[0].rstrip("_")
        if short in _CHECKED or not name.startswith("aten::"):
            found.setdefault(_place(name, place))
        if len(found) == _MOST_SHOWN:
            break
    return "; ".join(found)


def _place(op: str, line: str) -> str:
    return f"{op}, recorded at {line}" if line else op


def _latest_ops(
    recorder: Recorder, structures: Mapping[int, Any], place: tuple[int, int] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the line of each operation back to the last one that was waited for, the latest first.

    Args:
        recorder: has them.
        structures: as in `explain_loss`.
        place: the batch and the position of what failed, which is among them: with CUDA_LAUNCH_BLOCKING it is to blame
            itself. By default the end of all that was sent.
    """
    waiting = {sent.sequence for sent in recorder.sent_batches()} if place is None else ()
    for sent in reversed(recorder.sent_batches(acked=True)):
        if place is not None and sent.sequence > place[0]:
            continue
        last = commands.op_at(sent.stream, place[1]) if place is not None and sent.sequence == place[0] else math.inf
        for at in reversed(commands.walk(sent.stream, recorder.widths)):
            if at > last:
                continue
            if _waits(sent, at) and (sent.sequence, at) != place and sent.sequence not in waiting:
                return
            if name := op_name(structures, sent.stream[at]):
                yield name, describe_line(sent, at, recorder.widths)


def _waits(sent: RecordedBatch, at: int) -> bool:
    number = sent.stream[at]
    return bool(number == commands.FETCH or (number == commands.CALL and sent.stream[at + 2] in _WAITING))
