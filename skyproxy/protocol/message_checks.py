"""Checks of the values of one message, whatever came before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyproxy.errors import CLOSE_CODES, ProtocolError, visible
from skyproxy.protocol import answers
from skyproxy.protocol.call_messages import CALL_EVENTS, CallData, CallEvent
from skyproxy.protocol.digests import DIGEST_BYTES
from skyproxy.protocol.messages import (
    BULK,
    FUNCTIONS,
    JOB_ACTIONS,
    JOB_PROBLEMS,
    JOBS,
    MAX_ELEMENT_BYTES,
    MAX_PACKED_BYTES,
    OPERATIONS,
    CancelOperations,
    Chunk,
    Goodbye,
    Hello,
    JobAnswer,
    JobRequest,
    Landed,
    Message,
    Offer,
    PackedChunk,
    Welcome,
)

ROLES = (OPERATIONS, BULK, FUNCTIONS, JOBS)
MAX_SECRET_BYTES = 64
MAX_TRANSFER_BYTES = 1 << 62
"""The most bytes that a transfer may announce: what is more does not fit into the sizes of tensors."""


_MOST_DEVICES = 1024
_MOST_TEXTS = 1000
_MOST_CHARACTERS = 1000
_DEVICE = answers.fields(
    {"type": answers.text, "index": answers.optional(answers.size)},
    {
        "name": answers.text,
        "total_memory_bytes": answers.size,
        "compute_capability": answers.row(answers.size, answers.size),
        "multiprocessors": answers.size,
        "uuid": answers.text,
        "threads": answers.size,
        "cudnn": answers.flag,
        "onednn_lstm": answers.rows(answers.text),
    },
)
"""A row of `skyproxy_server.inventory`; what else is there, nobody reads."""


def _check_hello(message: Hello) -> None:
    if message.role not in ROLES:
        raise ProtocolError(f"Hello asks for the role {message.role!r:.40}; {', '.join(ROLES)} exist.")
    if message.role == JOBS and (message.session or message.secret):
        raise ProtocolError(f"Hello for {JOBS} names the session {message.session!r:.80}; jobs belong to none.")
    if not message.session and message.role not in (OPERATIONS, JOBS):
        raise ProtocolError(f"Hello for {message.role} names no session; only {OPERATIONS} and {JOBS} may do so.")
    if message.role == OPERATIONS and bool(message.session) != bool(message.secret):
        raise ProtocolError(
            f"Hello for {OPERATIONS} names the session {message.session!r:.80}: a secret takes one up again, "
            "and none opens one."
        )
    if message.grace_seconds < 0 or message.received < 0 or len(message.secret) > MAX_SECRET_BYTES:
        raise ProtocolError("Hello has a negative number, or a secret that is none.")


def _check_welcome(message: Welcome) -> None:
    if message.received < 0 or len(message.secret) > MAX_SECRET_BYTES or len(message.devices) > _MOST_DEVICES:
        raise ProtocolError("Welcome has a negative number, a secret that is none, or too many devices.")
    texts = [message.session, *message.software, *message.software.values(), *message.limits]
    if len(texts) > _MOST_TEXTS or any(len(text) > _MOST_CHARACTERS or visible(text) != text for text in texts):
        raise ProtocolError("Welcome has words that are none: too many, too long, or with control characters.")
    for row in message.devices:
        try:
            shown = _DEVICE(row)
        except ValueError as error:
            raise ProtocolError(f"Welcome has a device {row!r:.80}, which should have been {error}.") from None
        if any(row[key] != value for key, value in shown.items()):
            raise ProtocolError(f"Welcome has a device {row!r:.80} with control characters.")


def _check_landed(message: Landed) -> None:
    if message.byte_count < 0:
        raise ProtocolError(f"Landed says that {message.byte_count} bytes of transfer {message.transfer} came.")


def _check_cancel_operations(message: CancelOperations) -> None:
    if message.number < 1:
        raise ProtocolError(f"CancelOperations has the number {message.number}; they count up from 1.")


def _check_chunk(message: Chunk) -> None:
    if len(message.buffers) != 1:
        raise ProtocolError(f"Chunk of transfer {message.transfer} has {len(message.buffers)} buffers instead of 1.")
    check_range(message, memoryview(message.buffers[0]).nbytes)


def _check_packed_chunk(message: PackedChunk) -> None:
    if len(message.buffers) != 1:
        raise ProtocolError(f"PackedChunk of transfer {message.transfer} has {len(message.buffers)} buffers, not 1.")
    if not 0 < message.raw_bytes <= MAX_PACKED_BYTES or not 0 < message.width <= MAX_ELEMENT_BYTES:
        raise ProtocolError(
            f"PackedChunk of transfer {message.transfer} names {message.raw_bytes} bytes of width {message.width}; "
            f"up to {MAX_PACKED_BYTES} of width {MAX_ELEMENT_BYTES} are allowed."
        )
    check_range(message, message.raw_bytes)


def check_range(message: Chunk | PackedChunk, size: int) -> None:
    """Check that the bytes of a piece, which are so many, lie within its transfer.

    Raises:
        ProtocolError: they do not.
    """
    if message.offset < 0 or not message.offset + size <= message.total_bytes <= MAX_TRANSFER_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} of transfer {message.transfer} has bytes {message.offset} "
            f"to {message.offset + size} of {message.total_bytes}."
        )


def _check_offer(message: Offer) -> None:
    if len(message.digest) not in (0, DIGEST_BYTES) or not 0 <= message.total_bytes <= MAX_TRANSFER_BYTES:
        raise ProtocolError(
            f"Offer of transfer {message.transfer} names {message.total_bytes} bytes and a digest of "
            f"{len(message.digest)}; {DIGEST_BYTES} or none are right."
        )


def _check_call_data(message: CallData) -> None:
    if len(message.buffers) != 1 or message.piece < 0 or message.offset < 0:
        raise ProtocolError(
            f"CallData has {len(message.buffers)} buffers, for byte {message.offset} of piece {message.piece}."
        )


def _check_call_event(message: CallEvent) -> None:
    if message.kind not in CALL_EVENTS or (message.number == 0) != (message.kind == "unknown"):
        raise ProtocolError(f"CallEvent {message.number} cannot be of the kind {message.kind!r:.40}.")


def _check_job_request(message: JobRequest) -> None:
    if message.action not in JOB_ACTIONS or len(message.buffers) != (message.action == "data"):
        raise ProtocolError(f"JobRequest asks for {message.action!r:.40} with {len(message.buffers)} buffers.")


def _check_job_answer(message: JobAnswer) -> None:
    if (message.problem and message.problem not in JOB_PROBLEMS) or len(message.buffers) > 1:
        raise ProtocolError(f"JobAnswer has the problem {message.problem!r:.40} and {len(message.buffers)} buffers.")


def _check_goodbye(message: Goodbye) -> None:
    if message.code_name not in CLOSE_CODES:
        raise ProtocolError(f"Goodbye has the code {message.code_name!r:.40}; known are {sorted(CLOSE_CODES)}.")


VALUE_CHECKS: dict[type[Message], Callable[[Any], None]] = {
    Hello: _check_hello,
    Welcome: _check_welcome,
    Landed: _check_landed,
    CancelOperations: _check_cancel_operations,
    Chunk: _check_chunk,
    PackedChunk: _check_packed_chunk,
    Offer: _check_offer,
    CallData: _check_call_data,
    CallEvent: _check_call_event,
    JobRequest: _check_job_request,
    JobAnswer: _check_job_answer,
    Goodbye: _check_goodbye,
}
"""A check for each class of messages: it raises ProtocolError where the values are impossible."""
