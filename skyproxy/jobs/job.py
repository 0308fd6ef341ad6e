"""A job as its client sees it: its status, its log, its result, its end. Found again by its name."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from skyproxy.errors import (
    ConfigurationError,
    JobFailedError,
    ProtocolError,
    SessionLostError,
    SkyproxyError,
    UnknownJobError,
    visible,
)
from skyproxy.jobs.link import WAIT_SECONDS, JobLink, OpenConnection, Row, result_bytes
from skyproxy.jobs.output import JobLine, followed_lines, kept_lines
from skyproxy.settings import SETTINGS

_TAIL_BYTES = 4000
_TAIL_LINES = 20
_TURN_SECONDS = 1.0
"""For how long each node of several is waited for before the next is asked."""
_ENDED = ("succeeded", "failed", "cancelled", "lost")
_WORST_FIRST = ("failed", "lost", "cancelled", "running", "restarting", "preempted", "succeeded")
"""States, by which of them a job of several nodes is in when its parts differ."""


class JobStatus(NamedTuple):
    """The state of a job; `Job.status` gives it.

    Attributes:
        name: of the job.
        kind: "script", "function" or "torchrun".
        title: what runs.
        state: "running"; "restarting": it died, and is started again; "preempted": its worker was taken away, and it is
            started again when that comes back; then "succeeded", "failed", "cancelled", or "lost", with its worker.
        exit_code: of its process; None while it runs, or where a signal ended it.
        signal: the number of the signal that ended it; None for others.
        restarts: how often it was started again because it died.
        preemptions: how often because its worker was taken away.
        age_seconds: since it was submitted.
        seconds: since its latest start, up to its end.

    Example:
        ```python
        status = node.submit_job("train.py").status()
        print(status.state, status.exit_code)
        ```
    """

    name: str
    kind: str
    title: str
    state: str
    exit_code: int | None
    signal: int | None
    restarts: int
    preemptions: int
    age_seconds: float
    seconds: float

    @property
    def has_ended(self) -> bool:
        """True if it will not run again."""
        return self.state in _ENDED


class Job:
    """A script or a function that runs on a worker, or on several, whether this program runs or not.

    Attributes:
        name: by which any program with the same token finds it again: `node.job(name)`, `pool.job(name)`.

    Example:
        ```python
        job = node.submit_job("train.py", "--epochs", 3, name="night-run")
        for line in job.logs(follow=True):
            print(line)
        print(job.status().exit_code)
        ```
    """

    def __init__(self, name: str, nodes: Sequence[OpenConnection], *, trusted: bool = False) -> None:
        """Make a client's view of a job; nothing is asked yet.

        Args:
            name: of the job.
            nodes: for each of its workers, how to open a connection for jobs.
            trusted: whether its result may be any object; else plain data.
        """
        self.name = name
        self._nodes = list(nodes)
        self._trusted = trusted

    @property
    def node_count(self) -> int:
        """The number of nodes that it runs on.

        Example:
            ```python
            print(node.submit_job(pow, 2, 10).node_count)  # 1
            ```
        """
        return len(self._nodes)

    def status(self) -> JobStatus:
        """Ask for its state; of a job on several nodes, the one that matters most: a failed part is a failed job.

        Raises:
            UnknownJobError: it was removed.
            ConnectError: its worker cannot be reached.

        Example:
            ```python
            job = node.submit_job(pow, 2, 10)
            print(job.status().state)
            ```
        """
        rows = []
        for open_connection in self._nodes:
            with JobLink(open_connection) as link:
                rows.append(status_of(link.ask("status", name=self.name)[0]))
        return _worst_status(rows)

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until it has ended, and return its status; one that is preempted has not.

        A job on several nodes has ended with the first part that did not succeed: the others may run on, and wait for
        that one until `cancel` ends them.

        Args:
            timeout: seconds; None forever.

        Raises:
            TimeoutError: it still runs.
            ConnectError: its worker cannot be reached, for longer than SKYPROXY_RECONNECT_SECONDS or the time-out.

        Example:
            ```python
            print(node.submit_job("train.py").wait(timeout=3600).state)
            ```
        """
        return self._wait(None if timeout is None else time.monotonic() + timeout)

    def _wait(self, deadline: float | None, *, for_all: bool = False) -> JobStatus:
        """Wait for its end, or for that of all its parts; `deadline` is in seconds of the monotonic clock."""
        patience = SETTINGS.reconnect_seconds
        if deadline is not None:
            patience = min(patience, max(deadline - time.monotonic(), 0.0))
        rows = []
        with contextlib.ExitStack() as links:
            running = [links.enter_context(JobLink(each, patience, deadline)) for each in self._nodes]
            while running:
                for link in list(running):
                    seconds = WAIT_SECONDS if len(running) == 1 else _TURN_SECONDS
                    status = _wait_on(link, self.name, seconds, deadline)
                    if status.has_ended:
                        running.remove(link)
                        rows.append(status)
                        if status.state != "succeeded" and not for_all:
                            return _worst_status(rows)
        return _worst_status(rows)

    def logs(
        self,
        follow: bool = False,
        tail_bytes: int | None = None,
        *,
        node: int | None = None,
        rank: int | None = None,
    ) -> Iterator[str]:
        """Yield the lines that it has printed, standard output and standard error together.

        Of a job on several nodes, each line has its node in front: one node after the other, or with `follow` as the
        lines come. Under torchrun, the rank follows. Where a worker no longer keeps some of it, a line says so:
        SKYPROXY_MAX_JOB_LOG_BYTES.

        Args:
            follow: go on until the job has ended, on all nodes.
            tail_bytes: only about this many bytes of the end of each node's; 0 with `follow`: only what comes from now.
            node: only what this node has printed, without its number.
            rank: only what this rank has printed, of a job under torchrun.

        Raises:
            ConfigurationError: there is no such node, the job has no ranks, or `tail_bytes` is below 0.
            ConnectError: a node cannot be reached; with `follow`, after the last line of the others.

        Example:
            ```python
            for line in node.job("night-run").logs():
                print(line)
            ```
        """
        is_marked = len(self._nodes) > 1 and node is None
        for line in self.log_lines(follow, tail_bytes, node=node, rank=rank):
            yield f"[node {line.node}] {line.text}" if is_marked else line.text

    def log_lines(
        self, follow: bool = False, tail_bytes: int | None = None, *, node: int | None = None, rank: int | None = None
    ) -> Iterator[JobLine]:
        """Yield the same with the nodes apart: `line.node` and `line.text`.

        Example:
            ```python
            for line in node.job("night-run").log_lines():
                print(line.node, line.text)
            ```
        """
        if node is not None and not 0 <= node < len(self._nodes):
            raise ConfigurationError(f"the job {self.name} runs on {len(self._nodes)} nodes: there is no node {node}.")
        if rank is not None and self._kind() != "torchrun":
            raise ConfigurationError(f"the job {self.name} does not run under torchrun: it has no rank {rank}.")
        nodes = {number: one for number, one in enumerate(self._nodes) if node in (None, number)}
        if tail_bytes is not None and tail_bytes < 0:
            raise ConfigurationError(f"tail_bytes is a number of bytes, and not {tail_bytes}.")
        lines = (followed_lines if follow else kept_lines)(self.name, nodes, tail_bytes)
        prefix = "" if rank is None else f"[rank {rank}] "
        return (line for line in lines if line.text.startswith(prefix))

    def _kind(self) -> str:
        with JobLink(self._nodes[0]) as link:
            return status_of(link.ask("status", name=self.name)[0]).kind

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its end and return what its function returned; None for a script that ended with exit code 0.

        The rules are those of functions: plain data, and any object only from a worker that is trusted. The worker
        keeps the result, so that it can be asked for again, until the job is removed.

        Args:
            timeout: seconds; None forever.

        Raises:
            TimeoutError: it still runs.
            JobFailedError: it ended in another way than with exit code 0; says how, with the end of its log.
            UntrustedResultError: the function returned more than plain data, and the worker is not trusted.
            Exception: what the function raised.

        Example:
            ```python
            print(node.submit_job(pow, 2, 10).result())  # 1024
            ```
        """
        status = self.wait(timeout)
        if status.state not in ("succeeded", "failed"):
            raise self._failure(status)
        with JobLink(self._nodes[0], SETTINGS.reconnect_seconds) as link:
            content = result_bytes(link, self.name) if status.kind == "function" else None
        if content is not None:
            from skyproxy.jobs.results import read_result

            return read_result(content, self.name, trusted=self._trusted)
        if status.state == "failed":
            raise self._failure(status)
        return None

    def _failure(self, status: JobStatus) -> JobFailedError:
        lines = deque(islice(self.logs(tail_bytes=_TAIL_BYTES), _TAIL_BYTES), _TAIL_LINES)
        end = "\n".join(lines)[-_TAIL_BYTES:]
        text = f"the job {self.name} {ending_of(status)}"
        return JobFailedError(f"{text}. The end of its log:\n{visible(end)}" if end else text)

    def cancel(self, wait: bool = True) -> None:
        """End it: its processes get SIGTERM, and SIGKILL when its grace is over. Nothing happens to one that has ended.

        Args:
            wait: until it has ended.

        Raises:
            ConnectError: a node cannot be reached; the others were asked.

        Example:
            ```python
            job = node.submit_job("train.py")
            job.cancel()
            ```
        """
        self._on_each_node(lambda link: link.ask("cancel", name=self.name))
        if wait:
            self._wait(None, for_all=True)

    def remove(self) -> None:
        """Forget a job that has ended, with its log, its result and its checkpoints.

        Example:
            ```python
            job = node.submit_job(pow, 2, 10)
            job.wait()
            job.remove()
            ```
        """
        self._on_each_node(self._remove)

    def _remove(self, link: JobLink) -> None:
        try:
            link.order("remove", {"name": self.name})
        except SessionLostError:
            with contextlib.suppress(UnknownJobError):  # the worker has done it, and could not say so
                link.ask("remove", name=self.name)

    def _on_each_node(self, ask: Callable[[JobLink], object]) -> None:
        """Ask all nodes, also where one refuses or cannot be reached; the first such error is raised in the end."""
        first_error: SkyproxyError | None = None
        for open_connection in self._nodes:
            try:
                with JobLink(open_connection) as link:
                    ask(link)
            except SkyproxyError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def __repr__(self) -> str:
        return f"<Job {self.name}, on {len(self._nodes)} node{'s' * (len(self._nodes) != 1)}>"


def status_of(row: Row) -> JobStatus:
    """Return the status that a worker's row tells, of which nothing is trusted.

    Raises:
        ProtocolError: it is not a row.
    """
    try:
        return JobStatus(
            visible(row["name"]),
            visible(row["kind"]),
            visible(row["title"]),
            visible(row["state"]),
            None if row["exit_code"] is None else int(row["exit_code"]),
            None if row["signal"] is None else int(row["signal"]),
            int(row["restarts"]),
            int(row["preemptions"]),
            float(row["age_seconds"]),
            float(row["seconds"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the worker sent no job: {error!r:.200}") from error


def ending_of(status: JobStatus) -> str:
    """Return how a job ended, in words that follow its name."""
    if status.state in ("cancelled", "lost"):
        return {"cancelled": "was cancelled", "lost": "was lost with its worker"}[status.state]
    if status.signal is not None:
        import signal
        from contextlib import suppress

        with suppress(ValueError):
            return f"was ended by {signal.Signals(status.signal).name}"
        return f"was ended by signal {status.signal}"
    return f"ended with exit code {status.exit_code}" if status.has_ended else f"is {status.state}"


def _wait_on(link: JobLink, name: str, seconds: float, deadline: float | None) -> JobStatus:
    """Wait for news of one part, for so long and not beyond the deadline; return its state then."""
    left = seconds if deadline is None else min(max(deadline - time.monotonic(), 0.0), seconds)
    status = status_of(link.ask("wait", name=name, wait_seconds=left)[0])
    if not status.has_ended:
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"the job {name} {ending_of(status)}")
        if status.state == "preempted":
            time.sleep(min(left, 1.0))  # its worker is shutting down: the next one has it
    return status


def _worst_status(rows: list[JobStatus]) -> JobStatus:
    known = [row for row in rows if row.state in _WORST_FIRST] or rows
    return min(known, key=lambda row: _WORST_FIRST.index(row.state) if row.state in _WORST_FIRST else 0)
