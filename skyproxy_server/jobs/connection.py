"""A client's connection for jobs: requests in, one answer each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from skyproxy.errors import LimitExceededError, ProtocolError, SessionLostError
from skyproxy.protocol.messages import Buffer, JobAnswer, JobRequest, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy_server.auth import FUNCTIONS, client_of
from skyproxy_server.jobs.incoming import IncomingJob
from skyproxy_server.jobs.job import RESULT, WorkerJob
from skyproxy_server.jobs.records import checked_job_name, open_own
from skyproxy_server.jobs.store import Jobs

logger = logging.getLogger("skyproxy.server")

_MAX_WAIT_SECONDS = 20.0
"""The longest that an answer takes: a connection that is silent for longer looks broken."""

Value = dict[str, Any]
Answer = tuple[Value, tuple[Buffer, ...]]


class RefusedError(Exception):
    """The client may have no jobs here; says why."""


class JobsConnection:
    """One connection, as the listener runs it.

    Args:
        jobs: those of this worker; a text says why there are none.
        transport: of the connection.
        settings: limits.
    """

    def __init__(self, jobs: Jobs | str, transport: Transport, settings: Settings) -> None:
        self._jobs = jobs
        self._transport = transport
        self._settings = settings
        self._client = client_of(transport)
        self._incoming: IncomingJob | None = None
        self.welcome = Welcome(0, "", {}, [], {"jobs": int(not isinstance(jobs, str))})
        self._actions: dict[str, Callable[[Value, tuple[Buffer, ...]], Answer]] = {
            "begin": self._begin,
            "data": self._data,
            "start": self._start,
            "list": lambda value, buffers: ({"jobs": self._store().rows(self._client)}, ()),
            "status": lambda value, buffers: (self._find(value).row(), ()),
            "log": self._log,
            "wait": self._wait,
            "result": self._result,
            "cancel": self._cancel,
            "remove": self._remove,
        }

    def run(self) -> None:
        """Answer requests until the connection ends. Jobs go on."""
        handlers = {JobRequest: self._on_request}
        try:
            while True:
                message = self._transport.recv()
                handlers[type(message)](message)  # type: ignore[index, arg-type]
        except SessionLostError:
            pass
        except ProtocolError as error:
            logger.warning("the jobs connection of %s ended: %s", self._client.name, error)
            self._transport.close("protocol", str(error))
        finally:
            if self._incoming is not None:
                self._incoming.discard()

    def _on_request(self, message: JobRequest) -> None:
        try:
            self._store()  # whatever is asked: who may have no jobs is told that
            value, buffers = self._actions[message.action](message.value, message.buffers)
            answer = JobAnswer(message.request, "", value, buffers)
        except LookupError as error:
            answer = _problem(message, "unknown", str(error.args[0]))
        except LimitExceededError as error:
            answer = _problem(message, "limit", str(error))
        except RefusedError as error:
            answer = _problem(message, "refused", str(error))
        except ProtocolError as error:
            answer = _problem(message, "invalid", str(error))
        except OSError as error:
            answer = _problem(message, "limit", f"the worker's disk refused: {error.strerror}")
        self._transport.send(answer)

    def _store(self) -> Jobs:
        if isinstance(self._jobs, str):
            raise RefusedError(self._jobs)
        if not self._client.may(FUNCTIONS):
            raise RefusedError("this token runs no jobs: it does not have the scope 'functions'")
        if self._client.bounds.memory_bytes is not None:
            raise RefusedError("this token runs no jobs: its memory is bounded, and that of jobs cannot be")
        return self._jobs

    def _find(self, value: Value) -> WorkerJob:
        return self._store().find(self._client, checked_job_name(value.get("name")))

    def _begin(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        if self._incoming is not None:
            raise ProtocolError("another job is on its way on this connection")
        self._incoming = self._store().begin(self._client, value)
        return {}, ()

    def _data(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        if self._incoming is None:
            raise ProtocolError("bytes of no job")
        try:
            self._incoming.add(buffers[0])
        except (OSError, ProtocolError):
            self._drop_incoming()
            raise
        return {}, ()

    def _start(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        if self._incoming is None:
            raise ProtocolError("no job is on its way on this connection")
        try:
            job = self._store().start(self._incoming)
        except BaseException:
            self._drop_incoming()
            raise
        self._incoming = None
        return job.row(), ()

    def _drop_incoming(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.discard()

    def _log(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        job = self._find(value)
        offset, limit = _number(value, "offset", signed=True), self._limit(value)
        if offset >= job.log.end and job.is_running:
            job.log.wait_beyond(offset, _seconds(value))
        is_running = job.is_running  # before it is read, so that nothing of its end is missed
        begin, data = job.log.read(offset, limit)
        return {**job.row(), "offset": begin, "more": is_running or begin + len(data) < job.log.end}, (data,)

    def _wait(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        job = self._find(value)
        job.wait(_seconds(value))
        return job.row(), ()

    def _result(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        job = self._find(value)
        offset = _number(value, "offset")
        try:
            with open_own(job.folder / RESULT) as file:
                total = file.seek(0, 2)
                file.seek(min(offset, total))
                return {"total_bytes": total}, (file.read(self._limit(value)),)
        except FileNotFoundError:
            return {"total_bytes": -1}, (b"",)

    def _limit(self, value: Value) -> int:
        return min(_number(value, "limit"), self._settings.chunk_bytes)

    def _cancel(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        job = self._store().cancel(self._client, checked_job_name(value.get("name")))
        job.wait(_seconds(value))
        return job.row(), ()

    def _remove(self, value: Value, buffers: tuple[Buffer, ...]) -> Answer:
        self._store().remove(self._client, checked_job_name(value.get("name")))
        return {}, ()


def _problem(message: JobRequest, problem: str, text: str) -> JobAnswer:
    return JobAnswer(message.request, problem, {"message": text})


def _number(value: Value, name: str, *, signed: bool = False) -> int:
    number = value.get(name)
    if type(number) is not int or not (-(1 << 62) if signed else 0) <= number < 1 << 62:
        raise ProtocolError(f"{name} is a number of bytes")
    return number


def _seconds(value: Value) -> float:
    seconds = value.get("wait_seconds", 0.0)
    if type(seconds) not in (int, float) or not seconds >= 0:
        raise ProtocolError("wait_seconds is a number of seconds")
    return float(min(seconds, _MAX_WAIT_SECONDS))
