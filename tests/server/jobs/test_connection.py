"""A client's connection for jobs: what it may ask, and what a hostile one gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError, LimitExceededError, SessionLostError, UnknownJobError
from skyproxy.jobs.job import Job
from skyproxy.jobs.link import JobLink, result_bytes, send_job
from skyproxy.protocol.messages import JobAnswer, JobRequest, RequestId
from skyproxy_server.auth import ADMIN, FUNCTIONS, OPERATIONS, Bounds, Identity
from skyproxy_server.jobs.store import Jobs
from skyproxy_server.listener import Listener
from tests.integration.programs import wait_for
from tests.jobs.workers import opener, worker_with_jobs
from tests.server.jobs.programs import LONG, PATIENCE_SECONDS, limits, payload_of, text_of

ASKED = {"name": "mine", "kind": "script", "title": "t", "payload_bytes": 3}


class Names:
    """Tokens that are their own names; the scopes follow a colon."""

    def identify(self, headers: Any) -> Identity | None:
        name, _, scopes = headers[0].removeprefix("Bearer ").partition(":")
        bounds = Bounds(memory_bytes=1) if name == "bounded" else Bounds()
        return Identity(name, frozenset(scopes.split(",")) if scopes else frozenset({OPERATIONS, FUNCTIONS}), bounds)

    def refresh(self) -> None:
        pass

    def refusal(self, identity: Identity) -> str:
        return ""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Listener, Jobs]]:
    with worker_with_jobs(tmp_path / "jobs", token=Names()) as made:
        yield made


def link_to(worker: tuple[Listener, Jobs], token: str = "me") -> JobLink:
    return JobLink(opener(worker[0], token))


def test_a_job_from_its_bytes_to_its_removal(worker: tuple[Listener, Jobs], tmp_path: Path) -> None:
    with link_to(worker) as link:
        row = send_job(link, {**ASKED, "title": "\x1b]0;x\x07"}, payload_of(tmp_path, "print('here')\n"))
        assert (row["name"], row["state"], row["title"]) == ("mine", "running", "\x1b]0;x\x07")
        job = Job("mine", [opener(worker[0], "me")])
        assert "\x1b" not in job.status().title
        assert job.wait(PATIENCE_SECONDS).state == "succeeded"
        assert list(job.logs()) == ["here"]
        assert result_bytes(link, "mine") is None
        link.order("remove", {"name": "mine"})
        with pytest.raises(UnknownJobError):
            link.ask("status", name="mine")


def test_a_client_that_leaves_takes_no_job_along(worker: tuple[Listener, Jobs], tmp_path: Path) -> None:
    with link_to(worker) as link:
        send_job(link, ASKED, payload_of(tmp_path, LONG))
    with link_to(worker) as link:
        assert link.ask("status", name="mine")[0]["state"] == "running"
        link.ask("cancel", name="mine")
        assert Job("mine", [opener(worker[0], "me")]).wait(PATIENCE_SECONDS).state == "cancelled"


def test_other_tokens_see_nothing(worker: tuple[Listener, Jobs], tmp_path: Path) -> None:
    with link_to(worker) as link, link_to(worker, "other") as other:
        send_job(link, ASKED, payload_of(tmp_path, LONG))
        assert other.ask("list")[0] == {"jobs": []}
        for action in ("status", "log", "wait", "result", "cancel", "remove"):
            with pytest.raises(UnknownJobError, match="none of this token"):
                other.order(action, {"name": "mine", "offset": 0, "limit": 10})


@pytest.mark.parametrize("token", [f"me:{OPERATIONS}", f"me:{OPERATIONS},{ADMIN}", "bounded"])
@pytest.mark.parametrize("action", ["begin", "list", "status", "log", "wait", "result", "cancel", "remove"])
def test_a_token_without_functions_has_no_jobs(worker: tuple[Listener, Jobs], token: str, action: str) -> None:
    with link_to(worker, token) as link, pytest.raises(ConfigurationError, match="this token runs no jobs"):
        link.order(action, ASKED)


def test_a_worker_without_functions_has_no_jobs(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path, jobs="this worker runs no jobs: it was started with --no-functions") as (worker, _):
        with JobLink(opener(worker)) as link, pytest.raises(ConfigurationError, match="--no-functions"):
            link.order("begin", ASKED)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "." * 3, None, 7, ["mine"]])
@pytest.mark.parametrize("action", ["begin", "status", "log", "wait", "result", "cancel", "remove"])
def test_a_name_is_no_path(worker: tuple[Listener, Jobs], action: str, name: object) -> None:
    with link_to(worker) as link, pytest.raises(ConfigurationError, match="name"):
        link.order(action, {**ASKED, "name": name, "offset": 0, "limit": 1})


@pytest.mark.parametrize("value", [None, -1, 1 << 62, 1.5, "1", True])
@pytest.mark.parametrize("name", ["offset", "limit"])
def test_a_place_in_a_log_is_a_number(worker: tuple[Listener, Jobs], name: str, value: object, tmp_path: Path) -> None:
    with link_to(worker) as link:
        send_job(link, ASKED, payload_of(tmp_path, ""))
        if name == "offset" and value == -1:
            link.order("log", {"name": "mine", "offset": -1, "limit": 10})
            return
        with pytest.raises(ConfigurationError, match=name):
            link.order("log", {"name": "mine", "offset": 0, "limit": 10, name: value})


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", None, [], True])
def test_a_wait_is_a_number_of_seconds(worker: tuple[Listener, Jobs], seconds: object, tmp_path: Path) -> None:
    with link_to(worker) as link:
        send_job(link, ASKED, payload_of(tmp_path, LONG))
        with pytest.raises(ConfigurationError, match="wait_seconds"):
            link.order("wait", {"name": "mine", "wait_seconds": seconds})


def test_bytes_come_as_announced_or_the_job_is_forgotten(worker: tuple[Listener, Jobs]) -> None:
    with link_to(worker) as link:
        for action, data in (("data", b"x"), ("start", None)):
            with pytest.raises(ConfigurationError, match="no job"):
                link.order(action, {}, data)
        link.order("begin", ASKED)
        with pytest.raises(ConfigurationError, match="another job"):
            link.order("begin", ASKED)
        with pytest.raises(ConfigurationError, match="more bytes"):
            link.order("data", {}, b"four")
        link.order("begin", ASKED)
        link.order("data", {}, b"ab")
        with pytest.raises(ConfigurationError, match="1 bytes of the job are missing"):
            link.order("start", {})
        link.order("begin", ASKED)
    with link_to(worker) as link:
        wait_for(lambda: _is_free(link), "the job was given up, on a thread of the worker's", PATIENCE_SECONDS)


def _is_free(link: JobLink) -> bool:
    try:
        link.order("begin", ASKED)
    except LimitExceededError:
        return False
    return True


@pytest.mark.parametrize("size", [-1, None, "3", 1.0, 1 << 80])
def test_a_size_is_a_number_of_bytes(worker: tuple[Listener, Jobs], size: object) -> None:
    with link_to(worker) as link, pytest.raises((ConfigurationError, OverflowError, LimitExceededError)):
        link.order("begin", {**ASKED, "payload_bytes": size})


def test_too_many_bytes_are_refused_before_they_come(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path, limits(max_job_bytes=10)) as (worker, _):
        with JobLink(opener(worker)) as link, pytest.raises(LimitExceededError, match="SKYPROXY_MAX_JOB_BYTES"):
            link.order("begin", {**ASKED, "payload_bytes": 11})


def test_a_job_that_puts_other_files_in_its_folder_shows_its_client_nothing_else(
    worker: tuple[Listener, Jobs], tmp_path: Path
) -> None:
    text = """
import os
folder = os.environ["SKYPROXY_JOB_FOLDER"]
os.symlink("/etc/passwd", folder + "/result")
os.mkfifo(folder + "/log-" + "9" * 20)
"""
    with link_to(worker) as link:
        send_job(link, ASKED, payload_of(tmp_path, text))
        job = worker[1].find(Identity("me"), "mine")
        assert job.wait(PATIENCE_SECONDS), text_of(job)
        with pytest.raises(LimitExceededError):
            result_bytes(link, "mine")
        assert link.ask("status", name="mine")[0]["state"] == "succeeded"


def test_what_is_no_request_ends_the_connection_and_nothing_else(worker: tuple[Listener, Jobs]) -> None:
    transport = opener(worker[0], "me")()
    try:
        transport.repeat(JobAnswer(RequestId(1), "", {}))
        with pytest.raises(SessionLostError):
            transport.recv(60)
    finally:
        transport.close()
    with link_to(worker) as link:
        assert link.ask("list")[0] == {"jobs": []}


def test_each_answer_has_the_number_of_its_request(worker: tuple[Listener, Jobs]) -> None:
    transport = opener(worker[0], "me")()
    try:
        for number in (7, 7, -1):
            transport.send(JobRequest(RequestId(number), "list", {}))
            assert transport.recv(60) == JobAnswer(RequestId(number), "", {"jobs": []})
    finally:
        transport.close()
