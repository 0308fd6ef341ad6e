"""The output of a job as lines: of one worker, or of all that it runs on, as they come."""

from __future__ import annotations

import codecs
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from skyproxy.jobs.link import JobLink, OpenConnection, log_pieces
from skyproxy.settings import SETTINGS
from skyproxy.transport.base import Transport

logger = logging.getLogger("skyproxy")

_MAX_LINE_LENGTH = 1 << 20
_MAX_WAITING_LINES = 100
_LOOK_SECONDS = 0.2


class JobLine(NamedTuple):
    """A line that a job has printed.

    Attributes:
        node: the number of the node that printed it, from 0.
        text: without the end of the line.
    """

    node: int
    text: str


class _End(NamedTuple):
    """The end of what comes from a node, and why there is no more, where that is an error."""

    node: int
    error: Exception | None


class _StoppedError(Exception):
    """Nobody reads any more."""


def kept_lines(name: str, nodes: Mapping[int, OpenConnection], tail_bytes: int | None) -> Iterator[JobLine]:
    """Yield what a job has printed, one node after the other.

    Args:
        name: of the job.
        nodes: its workers, by node.
        tail_bytes: what is wanted of the end of each; None: everything.
    """
    for node, open_connection in nodes.items():
        with JobLink(open_connection) as link:
            for text in _lines(log_pieces(link, name, tail_bytes, follow=False)):
                yield JobLine(node, text)


def followed_lines(name: str, nodes: Mapping[int, OpenConnection], tail_bytes: int | None) -> Iterator[JobLine]:
    """Yield what a job has printed, and what it prints, as it comes, until it has ended on all nodes.

    A node that cannot be reached any more ends the output of that node only; the error is raised after the last line of
    the others.

    Args:
        name: of the job.
        nodes: its workers, by node.
        tail_bytes: what is wanted of the end of each; None: everything.

    Raises:
        UnknownJobError, ConnectError, ...: see `JobLink.ask`.
    """
    if len(nodes) == 1:
        ((node, open_connection),) = nodes.items()
        with JobLink(open_connection, SETTINGS.reconnect_seconds) as link:
            for text in _lines(log_pieces(link, name, tail_bytes, follow=True)):
                yield JobLine(node, text)
        return
    followers = _Followers(name, nodes, tail_bytes)
    first_error: Exception | None = None
    left = len(nodes)
    try:
        while left:
            item = followers.next()
            if isinstance(item, JobLine):
                yield item
                continue
            left -= 1
            if item.error is not None:
                logger.warning("skyproxy: the output of job %s on node %d ends here: %s", name, item.node, item.error)
                first_error = first_error or item.error
    finally:
        followers.stop()
    if first_error is not None:
        raise first_error


class _Followers:
    """Threads that follow a job on its nodes, one for each; what they read waits in a short queue."""

    def __init__(self, name: str, nodes: Mapping[int, OpenConnection], tail_bytes: int | None) -> None:
        self._name = name
        self._tail_bytes = tail_bytes
        self._read: queue.Queue[JobLine | _End] = queue.Queue(_MAX_WAITING_LINES)
        self._stopped = threading.Event()
        self._links: list[JobLink] = []
        for node, open_connection in nodes.items():
            link = JobLink(self._opener_until_stopped(open_connection), SETTINGS.reconnect_seconds)
            self._links.append(link)
            threading.Thread(target=self._follow, args=(node, link), name="skyproxy-job-log", daemon=True).start()

    def next(self) -> JobLine | _End:
        """Return what comes next; each node has an end."""
        return self._read.get()

    def stop(self) -> None:
        """Have the threads end: their connections are closed, and no new ones are made."""
        self._stopped.set()
        for link in self._links:
            link.close()

    def _opener_until_stopped(self, open_connection: OpenConnection) -> OpenConnection:
        def open_unless_stopped(timeout_seconds: float | None = None) -> Transport:
            if self._stopped.is_set():
                raise _StoppedError
            return open_connection(timeout_seconds)

        return open_unless_stopped

    def _follow(self, node: int, link: JobLink) -> None:
        error: Exception | None = None
        try:
            for text in _lines(log_pieces(link, self._name, self._tail_bytes, follow=True)):
                self._put(JobLine(node, text))
        except _StoppedError:
            return
        except Exception as problem:
            error = problem
        finally:
            link.close()
        try:
            self._put(_End(node, error))
        except _StoppedError:
            return

    def _put(self, item: JobLine | _End) -> None:
        while not self._stopped.is_set():
            try:
                self._read.put(item, timeout=_LOOK_SECONDS)
                return
            except queue.Full:
                continue
        raise _StoppedError


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        yield from lines
        if len(rest) > _MAX_LINE_LENGTH:  # one without an end would be kept for ever
            yield rest
            rest = ""
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest
