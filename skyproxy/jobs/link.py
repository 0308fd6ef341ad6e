"""Requests to a worker about its jobs, over a connection of their own. No torch here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from math import inf
from types import TracebackType
from typing import Any, Protocol

from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    LimitExceededError,
    ProtocolError,
    SessionLostError,
    UnknownJobError,
    visible,
)
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol.messages import JOBS, Buffer, Hello, JobAnswer, JobRequest, RequestId
from skyproxy.protocol.versions import SUPPORTED
from skyproxy.settings import SETTINGS
from skyproxy.transport.base import Transport

Row = dict[str, Any]
"""An answer of a worker, of which nothing is trusted."""

WAIT_SECONDS = 15.0
"""The longest that one request asks the worker to wait for news."""
_ANSWER_SECONDS = 30.0
_GRACE_SECONDS = 2.0
"""For how long beyond its own time-out a program waits for an answer that is due then."""
_PAUSE_SECONDS = 1.0
_MOST_NODES = 10_000
_MOST_LOG_BYTES = 1 << 60
"""More than any worker keeps, and no more than a message may say."""


class OpenConnection(Protocol):
    """Makes a connection for jobs."""

    def __call__(self, timeout_seconds: float | None = None) -> Transport:
        """Make it, or fail in about so many seconds; None: as long as any connection may take."""
        ...


class JobLink:
    """A connection to one worker for its jobs, made at the first request, and again where it broke.

    Args:
        open_connection: makes it.
        patience_seconds: for how long a request is made again where the worker cannot be reached.
        deadline: until when an answer is of use, in seconds of the monotonic clock; None: for ever.
    """

    def __init__(
        self, open_connection: OpenConnection, patience_seconds: float = 0.0, deadline: float | None = None
    ) -> None:
        self._open = open_connection
        self._patience_seconds = patience_seconds
        self._deadline = deadline
        self._transport: Transport | None = None
        self._numbers = itertools.count(1)

    def ask(self, action: str, **value: object) -> tuple[Row, bytes]:
        """Ask once, or again where a connection breaks: for what may be asked twice.

        Returns:
            The answer, and the bytes that came with it.

        Raises:
            UnknownJobError: there is no such job.
            ConfigurationError: the worker runs no jobs for us, or this cannot be meant.
            LimitExceededError: one of its bounds was hit.
            ConnectError: it cannot be reached.
        """
        deadline = time.monotonic() + self._patience_seconds
        is_first = True
        while True:
            try:
                return self.order(action, value)
            except AuthenticationError:
                raise
            except (SessionLostError, ConnectError) as error:
                if not is_first and time.monotonic() >= deadline:
                    raise error if isinstance(error, ConnectError) else ConnectError(str(error)) from error
            if not is_first:
                time.sleep(min(_PAUSE_SECONDS, self._patience_seconds))
            is_first = False

    def order(self, action: str, value: Mapping[str, object], data: Buffer | None = None) -> tuple[Row, bytes]:
        """Ask once, for what must not be done twice; errors are those of `ask`, and `SessionLostError`."""
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0) + _GRACE_SECONDS
        if self._transport is None:
            self._transport = self._open(left)
        number = RequestId(next(self._numbers))
        try:
            self._transport.send(JobRequest(number, action, dict(value), () if data is None else (data,)))
            answer = self._transport.recv(min(WAIT_SECONDS + _ANSWER_SECONDS, inf if left is None else left))
            if not isinstance(answer, JobAnswer) or answer.request != number:
                raise ProtocolError("the worker answered another question")
        except TimeoutError as error:
            self.close()
            if raised_by_handler(error):
                raise
            raise SessionLostError("the worker does not answer") from error
        except BaseException:
            self.close()
            raise
        if answer.problem:
            raise _error_of(answer)
        return answer.value, bytes(answer.buffers[0]) if answer.buffers else b""

    def close(self) -> None:
        """End the connection. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def __enter__(self) -> JobLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _error_of(answer: JobAnswer) -> Exception:
    text = visible(answer.value.get("message") or "the worker could not do it")
    if answer.problem == "unknown":
        return UnknownJobError(text)
    return LimitExceededError(text) if answer.problem == "limit" else ConfigurationError(text)


def send_job(link: JobLink, asked: Mapping[str, object], payload: bytes) -> Row:
    """Send a job and start it; return its row.

    Args:
        link: to its worker.
        asked: what `skyproxy_server.jobs.records.asked_record` takes.
        payload: what its process reads.
    """
    link.order("begin", {**asked, "payload_bytes": len(payload)})
    view = memoryview(payload)
    for offset in range(0, len(view), SETTINGS.chunk_bytes):
        link.order("data", {}, view[offset : offset + SETTINGS.chunk_bytes])
    return link.order("start", {})[0]


def job_rows(link: JobLink) -> list[Row]:
    """Ask for the rows of all jobs of the token; what is in them, nobody has looked at.

    Raises:
        ProtocolError: the worker sent no list.
    """
    rows = link.ask("list")[0].get("jobs", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError(f"the worker sent no list of jobs: {rows!r:.80}")
    return rows


def part_of(row: Mapping[str, object]) -> tuple[int, int]:
    """Return which part of a job a worker has, and of how many.

    Raises:
        ProtocolError: there can be no such part.
    """
    part = row.get("part")
    if part is None:
        return 0, 1
    if isinstance(part, list) and len(part) == 2 and all(type(number) is int for number in part):
        index, count = part
        if 0 <= index < count <= _MOST_NODES:
            return index, count
    raise ProtocolError(f"the worker says that it has part {part!r:.80} of a job")


def result_bytes(link: JobLink, name: str) -> bytes | None:
    """Return the file in which a job has left its result; None where it has left none.

    Raises:
        LimitExceededError: it is larger than this program takes.
        ProtocolError: the worker did not send as many bytes as it said.
    """
    content = bytearray()  # in one piece: a worker may send many small ones, and each would take memory of its own
    while True:
        answer, data = link.ask("result", name=name, offset=len(content), limit=SETTINGS.chunk_bytes)
        total = _whole_number(answer.get("total_bytes"))
        if total < 0:
            return None
        if total > SETTINGS.max_payload_bytes:
            raise LimitExceededError(
                f"the result of job {name} has {total} bytes; SKYPROXY_MAX_PAYLOAD_BYTES bounds it"
            )
        content += data
        if len(content) == total:
            return bytes(content)
        if not data or len(content) > total:
            raise ProtocolError(f"the worker sent {len(content)} of the {total} bytes of the result of job {name}")


def log_pieces(link: JobLink, name: str, tail_bytes: int | None, *, follow: bool) -> Iterator[bytes]:
    """Yield what a job has printed, and while it runs, what it prints; a line says what is no longer kept.

    Args:
        link: to its worker.
        name: of the job.
        tail_bytes: what is wanted of its end, so far; None: everything.
        follow: until it stands still.
    """
    seconds = WAIT_SECONDS if follow else 0.0
    offset = -min(tail_bytes or 0, _MOST_LOG_BYTES)  # counted from the end
    if tail_bytes == 0:
        offset = _whole_number(link.ask("log", name=name, offset=0, limit=0)[0].get("log_bytes"))
    is_within_line = False
    end: int | None = None
    while True:
        answer, data = link.ask("log", name=name, offset=offset, limit=SETTINGS.chunk_bytes, wait_seconds=seconds)
        begin = max(_whole_number(answer.get("offset")), 0)
        if 0 <= offset < begin:
            end_of_line = "\n" if is_within_line else ""
            yield f"{end_of_line}[skyproxy] {begin - offset} bytes before this line are no longer kept\n".encode()
            is_within_line = False
        if data:
            yield data
            is_within_line = not data.endswith(b"\n")
        offset = begin + len(data)
        if end is None and not follow:
            end = _whole_number(answer.get("log_bytes"))  # of now: a job that prints on and on would keep us for ever
        if not answer.get("more") or (end is not None and (not data or offset >= end)):
            return


def _whole_number(value: object) -> int:
    if type(value) is not int:
        raise ProtocolError("the worker sent no number of bytes")
    return value


def jobs_hello() -> Hello:
    """Return what a connection for jobs begins with."""
    return Hello(list(SUPPORTED), JOBS, "", {})
