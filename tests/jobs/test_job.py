"""A job as its client sees it."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from skyproxy.errors import (
    ConfigurationError,
    ConnectError,
    JobFailedError,
    ProtocolError,
    SessionLostError,
    UnknownJobError,
)
from skyproxy.jobs.job import Job, JobStatus, ending_of, status_of
from skyproxy.jobs.link import JobLink, jobs_hello, log_pieces, result_bytes, send_job
from skyproxy.jobs.options import JobOptions
from skyproxy.jobs.submitting import JobWorker, script_of_target, submit_script
from skyproxy.settings import SETTINGS
from skyproxy.transport.base import Transport
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server.jobs.records import RUNNING
from tests.jobs.workers import TOKEN, opener, worker_with_jobs
from tests.server.jobs.programs import LONG, PATIENCE_SECONDS, limits, payload_of

ROW: dict[str, Any] = {
    "name": "a",
    "kind": "script",
    "title": "a.py",
    "state": "running",
    "exit_code": None,
    "signal": None,
    "restarts": 0,
    "preemptions": 0,
    "age_seconds": 1.0,
    "seconds": 1.0,
}


def start(open_connection: Any, payload: bytes, name: str = "mine", **asked: object) -> Job:
    with JobLink(open_connection) as link:
        send_job(link, {"name": name, "kind": "script", "title": "t", **asked}, payload)
    return Job(name, [open_connection])


def test_the_output_is_followed_to_the_end_in_whole_lines(tmp_path: Path) -> None:
    text = "for n in range(300): print('línea', n, end='\\n' if n % 2 else '; ', flush=True)\nprint('end', end='')\n"
    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        job = start(opener(worker), payload_of(tmp_path, text))
        lines = list(job.logs(follow=True))
        assert lines == [f"línea {n}; línea {n + 1}" for n in range(0, 300, 2)] + ["end"]
        assert list(job.logs()) == lines
        assert job.wait(PATIENCE_SECONDS).exit_code == 0
        assert job.result(PATIENCE_SECONDS) is None


def test_output_that_is_no_longer_kept_is_told(tmp_path: Path) -> None:
    text = """
import pathlib, sys, time
print("first", "half a line", end="", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print(*["x" * 99] * 100, "last", sep="\\n")
"""
    gate = tmp_path / "gate"
    with worker_with_jobs(tmp_path / "jobs", limits(max_job_log_bytes=1000)) as (worker, store):
        link = JobLink(opener(worker))
        job = start(opener(worker), payload_of(tmp_path, text, str(gate)))
        pieces = log_pieces(link, "mine", None, follow=True)
        seen = next(pieces)
        while b"line" not in seen:
            seen += next(pieces)
        gate.touch()
        job.wait(PATIENCE_SECONDS)
        seen += b"".join(pieces)
        link.close()
        whole = list(job.logs())
        (running,) = store._jobs.values()
        kept = running.log.end - running.log.start
    first, notice, *rest = seen.decode().splitlines()
    assert first == "first half a line"
    assert notice == f"[skyproxy] {running.log.start - len(first)} bytes before this line are no longer kept"
    assert whole[0] == f"[skyproxy] {running.log.start} bytes before this line are no longer kept"
    assert rest == whole[1:]
    assert len("\n".join(rest)) + 1 == kept
    assert rest[-1] == "last"


def test_a_failure_says_how_with_the_end_of_the_log(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        job = start(opener(worker), payload_of(tmp_path, "print('why')\nraise SystemExit(3)\n"))
        with pytest.raises(JobFailedError, match=r"(?s)the job mine ended with exit code 3.*why"):
            job.result(PATIENCE_SECONDS)
        other = start(opener(worker), payload_of(tmp_path, "import os\nos.abort()\n"), "other")
        with pytest.raises(JobFailedError, match="was ended by SIGABRT"):
            other.result(PATIENCE_SECONDS)


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        job = start(opener(worker), payload_of(tmp_path, LONG))
        with pytest.raises(TimeoutError, match="the job mine is running"):
            job.wait(0.01)
        with pytest.raises(TimeoutError):
            job.result(0.01)
        job.cancel()
        assert job.status().state == "cancelled"
        with pytest.raises(JobFailedError, match="was cancelled"):
            job.result()
        job.cancel()
        job.remove()
        with pytest.raises(UnknownJobError):
            job.status()


def test_a_wait_for_a_worker_that_is_gone_has_an_end_too() -> None:
    asked: list[int] = []

    def gone(timeout_seconds: float | None = None) -> Transport:
        asked.append(1)
        raise ConnectError("nobody answers")

    with pytest.raises(ConnectError, match="nobody answers"):
        Job("mine", [gone]).wait(0.1)
    assert len(asked) >= 2  # it might have come back


def test_who_follows_goes_on_with_the_next_worker(tmp_path: Path) -> None:
    """The worker of a job is taken away and comes back, at another address here; the job says so to who follows it."""
    text = """
import os, signal, sys, time
if os.environ["SKYPROXY_RESTART_COUNT"] != "0":
    print("second", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
print("first", flush=True)
time.sleep(600)
"""
    openers: list[Any] = []
    moved = threading.Event()

    def open_connection(timeout_seconds: float | None = None) -> Transport:
        if len(openers) > 1:
            moved.set()
        return openers[-1]()  # type: ignore[no-any-return]

    seen: list[str] = []
    with worker_with_jobs(tmp_path / "jobs", limits()) as (worker, _):
        openers.append(opener(worker))
        job = start(open_connection, payload_of(tmp_path, text))
        lines = job.logs(follow=True)
        seen.append(next(lines))
    with worker_with_jobs(tmp_path / "jobs", limits()) as (worker, store):
        openers.append(opener(worker))
        seen += list(lines)
        assert job.wait(PATIENCE_SECONDS).state == "succeeded"
        assert job.status().preemptions == 1
    assert moved.is_set()
    assert (seen[0], seen[-1]) == ("first", "second")
    assert RUNNING not in [row["state"] for row in store.rows(None)]


def test_a_worker_that_is_gone_is_told_at_once_to_who_asks_for_the_state(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        job = start(opener(worker), payload_of(tmp_path, ""))
        job.wait(PATIENCE_SECONDS)
    with pytest.raises(ConnectError):
        job.status()


def test_a_worker_that_is_stopped_is_waited_for_no_longer_than_was_asked(tmp_path: Path) -> None:
    patient = replace(SETTINGS, handshake_timeout_seconds=600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def open_connection(timeout_seconds: float | None = None) -> Transport:
            url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
            hello = jobs_hello()
            return connect_websocket(url, TOKEN, hello, settings=patient, timeout_seconds=timeout_seconds)[0]

        with pytest.raises(ConnectError):
            Job("mine", [open_connection]).wait(0.1)


@pytest.mark.parametrize("asked", ["wait", "status"])
def test_an_answer_that_never_comes_is_waited_for_no_longer_either(asked: str, tmp_path: Path) -> None:
    class Silent:
        """A connection to a worker that was stopped after it was made."""

        waited: list[float | None] = []

        def send(self, message: object) -> None: ...

        def recv(self, timeout: float | None = None) -> object:
            self.waited.append(timeout)
            raise TimeoutError

        def close(self) -> None: ...

    job = Job("mine", [lambda timeout_seconds=None: cast(Transport, Silent())])
    with pytest.raises(ConnectError if asked == "wait" else SessionLostError):
        job.wait(0.1) if asked == "wait" else JobLink(job._nodes[0]).order("status", {})
    assert all(timeout is not None and (timeout < 5) == (asked == "wait") for timeout in Silent.waited)


def test_a_job_of_several_nodes_is_as_good_as_its_worst_part(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "one") as (first, _), worker_with_jobs(tmp_path / "two") as (second, _):
        start(opener(first), payload_of(tmp_path, "print('one')\n"))
        start(opener(second), payload_of(tmp_path, "print('two')\nraise SystemExit(5)\n"))
        job = Job("mine", [opener(first), opener(second)])
        assert (job.wait(PATIENCE_SECONDS).state, job.wait().exit_code) == ("failed", 5)
        assert list(job.logs()) == ["[node 0] one", "[node 1] two"]
        job.remove()
        with pytest.raises(UnknownJobError):
            job.status()


def test_a_part_that_fails_is_told_while_the_others_wait_for_it(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "one") as (first, _), worker_with_jobs(tmp_path / "two") as (second, _):
        waiting = start(opener(first), payload_of(tmp_path, LONG))
        start(opener(second), payload_of(tmp_path, "raise SystemExit(5)\n"))
        job = Job("mine", [opener(first), opener(second)])
        assert (job.wait(PATIENCE_SECONDS).state, job.status().exit_code) == ("failed", 5)
        with pytest.raises(JobFailedError, match="exit code 5"):
            job.result(PATIENCE_SECONDS)
        assert waiting.status().state == "running"
        job.cancel()
        assert waiting.status().state == "cancelled"


def test_the_output_of_a_job_that_prints_without_end_has_one_where_it_is_not_followed() -> None:
    class Printing(JobLink):
        asked = 0

        def ask(self, action: str, **value: Any) -> tuple[dict[str, Any], bytes]:
            self.asked += 1
            assert self.asked <= 3
            return {"offset": value["offset"], "more": True, "log_bytes": value["offset"] + 6}, b"x\n"

    assert (
        list(
            log_pieces(
                Printing(lambda timeout_seconds=None: pytest.fail("nothing is opened")), "mine", None, follow=False
            )
        )
        == [b"x\n"] * 3
    )


def test_the_last_no_bytes_of_an_output_are_none(tmp_path: Path) -> None:
    text = """
import pathlib, sys, time
print("before", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("after")
"""
    gate = tmp_path / "gate"
    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        job = start(opener(worker), payload_of(tmp_path, text, str(gate)))
        assert next(job.logs(follow=True)) == "before"
        assert list(job.logs(tail_bytes=0)) == []
        with JobLink(opener(worker)) as link:
            ask = link.ask

            def ask_and_let_it_go_on(action: str, **value: object) -> tuple[dict[str, Any], bytes]:
                answer = ask(action, **value)
                gate.touch()
                return answer

            link.ask = ask_and_let_it_go_on  # type: ignore[method-assign]
            assert b"".join(log_pieces(link, "mine", 0, follow=True)) == b"after\n"
        assert list(job.logs(tail_bytes=0)) == []
        assert list(job.logs(tail_bytes=1 << 80)) == ["before", "after"]
        with pytest.raises(ConfigurationError, match="tail_bytes is a number of bytes"):
            list(job.logs(tail_bytes=-1))


class Telling(JobLink):
    """A worker that sends the bytes of a result as `pieces`, and says that there are `total`."""

    def __init__(self, total: int, pieces: list[bytes]) -> None:
        super().__init__(lambda timeout_seconds=None: pytest.fail("nothing is opened"))
        self._total, self._pieces = total, iter(pieces)

    def ask(self, action: str, **value: Any) -> tuple[dict[str, Any], bytes]:
        return {"total_bytes": self._total}, next(self._pieces)


@pytest.mark.parametrize("pieces", [[b"ab", b""], [b"ab", b"cde"], [b"", b"abcd"]])
def test_a_result_of_another_size_than_the_worker_said_is_refused(pieces: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="of the 4 bytes of the result of job mine"):
        result_bytes(Telling(4, pieces), "mine")


def test_a_result_that_comes_in_single_bytes_takes_no_more_memory_than_one_that_does_not() -> None:
    size = 50_000
    tracemalloc.start()
    try:
        assert result_bytes(Telling(size, [bytes([n % 251]) for n in range(size)]), "mine") is not None
        assert tracemalloc.get_traced_memory()[1] < 20 * size
    finally:
        tracemalloc.stop()


def test_a_node_that_is_gone_keeps_no_other_from_being_cancelled_and_removed(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "one") as (first, _):
        gone = opener(first)
    with worker_with_jobs(tmp_path / "two") as (second, store):
        own = start(opener(second), payload_of(tmp_path, LONG))
        job = Job("mine", [gone, opener(second)])
        with pytest.raises(ConnectError):
            job.cancel(wait=False)
        assert own.wait(PATIENCE_SECONDS).state == "cancelled"
        with pytest.raises(ConnectError):
            job.remove()
        assert store.rows(None) == []


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_a_job_is_removed_where_the_connection_breaks_meanwhile(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_connection(timeout_seconds: float | None = None) -> Transport:
        transport = opener(worker)()
        if not broken:
            broken.append(transport)
            if lost == "question":
                transport.close()
            else:
                monkeypatch.setattr(transport, "recv", partial(lose_answer, transport.recv))
        return transport

    def lose_answer(receive: Any, timeout_seconds: float) -> Any:
        receive(timeout_seconds)
        raise SessionLostError("cut")

    broken: list[Transport] = []
    with worker_with_jobs(tmp_path / "jobs") as (worker, store):
        start(opener(worker), payload_of(tmp_path, "")).wait(PATIENCE_SECONDS)
        Job("mine", [open_connection]).remove()
        assert store.rows(None) == []
        with pytest.raises(UnknownJobError):
            Job("mine", [opener(worker)]).remove()


def test_why_a_job_did_not_begin_on_all_nodes_is_told_though_the_others_are_gone_by_then(tmp_path: Path) -> None:
    def refuse(timeout_seconds: float | None = None) -> Transport:
        raise ConfigurationError("no jobs here")

    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        connections = [opener(worker)]

        def open_once(timeout_seconds: float | None = None) -> Transport:
            if not connections:
                raise ConnectError("gone")
            return connections.pop()(timeout_seconds)

        (tmp_path / "a.py").write_text(LONG)
        script = script_of_target(tmp_path / "a.py", (), module=False, nproc_per_node=None, env=None)
        with pytest.raises(ConfigurationError, match="no jobs here"):
            submit_script(script, [JobWorker(open_once), JobWorker(refuse)], JobOptions("mine"), torchrun=False)


@pytest.mark.parametrize(
    "change",
    [{"name": None}, {"exit_code": "x"}, {"restarts": None}, {"age_seconds": []}, {"seconds": float("inf")}],
)
def test_a_row_of_a_hostile_worker_is_harmless(change: dict[str, object]) -> None:
    try:
        status = status_of({**ROW, **change})
    except ProtocolError:
        return
    assert isinstance(status, JobStatus)


def test_a_row_without_a_field_is_none() -> None:
    for name in ROW:
        with pytest.raises(ProtocolError):
            status_of({key: value for key, value in ROW.items() if key != name})


def test_controls_in_a_row_are_shown_and_not_obeyed() -> None:
    assert "\x1b" not in "".join(map(str, status_of({**ROW, "name": "\x1b]0;x\x07", "title": "\x1b[2J"})))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "running"}, "is running"),
        ({"state": "preempted"}, "is preempted"),
        ({"state": "succeeded", "exit_code": 0}, "ended with exit code 0"),
        ({"state": "failed", "signal": 9}, "was ended by SIGKILL"),
        ({"state": "failed", "signal": 200}, "was ended by signal 200"),
        ({"state": "lost"}, "was lost with its worker"),
        ({"state": "cancelled", "signal": 9}, "was cancelled"),
    ],
)
def test_how_a_job_ended_is_said_in_words(change: dict[str, object], words: str) -> None:
    assert ending_of(status_of({**ROW, **change})) == words
