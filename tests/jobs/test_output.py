"""The output of jobs on several nodes: all of it, each line once, with its node and its rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError, ConnectError, SessionLostError
from skyproxy.jobs.job import Job
from skyproxy.jobs.link import JobLink, send_job
from skyproxy.transport.base import Transport
from tests.jobs.workers import opener, worker_with_jobs
from tests.server.jobs.programs import PATIENCE_SECONDS, payload_of

RANKS = "for n in range(3): print(f'[rank {rank}] step', n, flush=True)\nprint('the agent', flush=True)\n"
WAITS = """
import pathlib, time
print("before", node, flush=True)
while not pathlib.Path(gate).exists():
    time.sleep(0.01)
print("after", node, flush=True)
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[Any]]:
    """What opens connections to three workers."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_with_jobs(tmp_path / f"jobs-{n}"))[0] for n in range(3)]
        yield [opener(worker) for worker in workers]


def start(places: list[Any], folder: Path, text: str, kind: str = "torchrun", **values: object) -> Job:
    """A job of one part on each worker."""
    for number, place in enumerate(places):
        names = {"rank": 2 * number, "node": number, **values}
        head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        (folder / f"part-{number}").mkdir(exist_ok=True)
        with JobLink(place) as link:
            payload = payload_of(folder / f"part-{number}", head + text)
            send_job(link, {"name": "mine", "kind": kind, "title": "t", "part": [number, len(places)]}, payload)
    return Job("mine", places)


def test_who_follows_sees_all_nodes_until_the_last_has_ended(places: list[Any], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = start(places, tmp_path, WAITS, gate=str(gate))
    lines = job.logs(follow=True)
    # Of all nodes, while all of them run: none waits for another's end.
    assert {next(lines) for _ in range(3)} == {f"[node {n}] before {n}" for n in range(3)}
    gate.touch()
    assert sorted(lines) == [f"[node {n}] after {n}" for n in range(3)]
    assert job.wait(PATIENCE_SECONDS).state == "succeeded"
    whole = [f"[node {n}] {word} {n}" for n in range(3) for word in ("before", "after")]
    assert list(job.logs()) == whole


@pytest.mark.parametrize("follow", [False, True])
def test_one_node_or_one_rank_can_be_chosen(places: list[Any], tmp_path: Path, follow: bool) -> None:
    job = start(places, tmp_path, RANKS)
    job.wait(PATIENCE_SECONDS)
    steps = [f"[rank 2] step {n}" for n in range(3)]
    assert list(job.logs(follow, node=1)) == [*steps, "the agent"]
    assert list(job.logs(follow, rank=2)) == [f"[node 1] {step}" for step in steps]
    assert list(job.logs(follow, rank=2, node=1)) == steps
    assert list(job.logs(follow, rank=2, node=0)) == []
    assert len(list(job.logs(follow))) == 12


def test_a_node_or_a_rank_that_cannot_be_is_refused(places: list[Any], tmp_path: Path) -> None:
    job = start(places, tmp_path, "", kind="script")
    with pytest.raises(ConfigurationError, match="runs on 3 nodes: there is no node 3"):
        job.logs(node=3).__next__()
    with pytest.raises(ConfigurationError, match="does not run under torchrun: it has no rank 0"):
        job.logs(rank=0).__next__()


def test_who_stops_following_leaves_no_thread_and_no_connection(places: list[Any], tmp_path: Path) -> None:
    opened: list[Transport] = []

    def counting(place: Any) -> Any:
        def open_connection(timeout_seconds: float | None = None) -> Transport:
            opened.append(place())
            return opened[-1]

        return open_connection

    start(places, tmp_path, WAITS, gate=str(tmp_path / "gate"))
    job = Job("mine", [counting(place) for place in places])
    lines = job.logs(follow=True)
    next(lines)
    following = [thread for thread in threading.enumerate() if thread.name == "skyproxy-job-log"]
    lines.close()  # type: ignore[attr-defined]
    for thread in following:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert len(following) == len(opened) == 3
    for transport in opened:
        with pytest.raises(SessionLostError):
            transport.recv(1.0)
    job.cancel()


def test_more_than_is_read_waits_on_the_workers(places: list[Any], tmp_path: Path) -> None:
    count = 5000
    job = start(places, tmp_path, f"for n in range({count}): print(node, n)\n")
    lines = list(job.log_lines(follow=True))
    for node in range(3):
        assert [line.text for line in lines if line.node == node] == [f"{node} {n}" for n in range(count)]


def test_a_node_that_is_gone_ends_its_own_output_only(
    places: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = start(places, tmp_path, RANKS)
    job.wait(PATIENCE_SECONDS)

    def gone(timeout_seconds: float | None = None) -> Transport:
        raise ConfigurationError("the worker runs no jobs any more")

    lines = Job("mine", [places[0], gone, places[2]]).logs(follow=True)
    seen: list[str] = []
    with pytest.raises(ConfigurationError, match="no jobs any more"):
        for line in lines:
            seen.append(line)
    assert sorted(seen) == sorted(line for line in job.logs() if not line.startswith("[node 1]"))
    assert "the output of job mine on node 1 ends here" in caplog.text


def test_errors_of_a_single_node_are_raised_as_they_are(tmp_path: Path) -> None:
    with worker_with_jobs(tmp_path / "jobs") as (worker, _):
        place = opener(worker)
    with pytest.raises(ConnectError):
        list(Job("mine", [place]).logs())
