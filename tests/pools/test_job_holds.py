"""Jobs keep their processes in an elastic pool: while they run, and a while longer, whatever happens to them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, ConnectError
from skyproxy.jobs.job import Job
from skyproxy.pools.job_holds import JobHolds
from tests.integration.programs import wait_for

WAIT_SECONDS = 60.0


class Lasting(Job):
    """A job that ends when it is told to, with an error or without."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("lasting", [])
        self.end = threading.Event()
        self._error = error

    def wait(self, timeout: float | None = None) -> Any:
        assert self.end.wait(WAIT_SECONDS)
        if self._error is not None:
            raise self._error


def end(job: Lasting) -> None:
    """End a job, and wait until that was taken note of."""
    (thread,) = [one for one in threading.enumerate() if one.name == "skyproxy-job-hold"]
    job.end.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [None, ConnectError("its worker is gone")])
def test_a_rank_is_held_until_its_job_has_ended_and_its_result_was_there_for_a_while(error: Exception | None) -> None:
    now = [100.0]
    holds = JobHolds(5.0, clock=lambda: now[0])
    job = Lasting(error)
    with holds.submitting([2, 3]) as hold:
        assert holds.has(2)
        assert hold(job) is job
    now[0] += 1000
    assert [holds.has(rank) for rank in range(4)] == [False, False, True, True]
    end(job)
    now[0] += 4.9
    assert holds.has(2)
    now[0] += 0.2
    assert not holds.has(2)


def test_a_rank_with_two_jobs_is_held_by_the_longer_one() -> None:
    holds = JobHolds(0.0)
    short, long = Lasting(), Lasting()
    with holds.submitting([0]) as hold:
        hold(short)
    end(short)
    with holds.submitting([0]) as hold:
        hold(long)
    with holds.submitting([0]):
        pass
    assert holds.has(0)
    end(long)
    assert not holds.has(0)


def test_what_could_not_be_submitted_holds_nothing_for_long() -> None:
    holds = JobHolds(0.0)
    with pytest.raises(ConnectError), holds.submitting([1]):
        raise ConnectError("gone")
    assert not holds.has(1)


@pytest.mark.slow
def test_an_elastic_pool_keeps_the_node_of_a_job_and_lets_go_of_it_then(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = (
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\nprint('done')\n"
    )
    (tmp_path / "wait.py").write_text(script)
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=sky.Nodes(0, 1, idle=0.5)) as pool:
        with pytest.raises(ConfigurationError, match=r"no rank 0 in this pool .* There are: none"):
            pool.submit_job(tmp_path / "wait.py", gate)
        assert pool.run(pow, 2, 3) == 8
        with pytest.raises(ConfigurationError, match="no rank 5"):
            pool.submit_job(tmp_path / "wait.py", gate, rank=5)
        job = pool.submit_job(tmp_path / "wait.py", gate)
        with pytest.raises(TimeoutError):
            job.wait(3.0)  # six times as long as an idle node stays, with three looks at it
        gate.touch()
        assert job.wait(WAIT_SECONDS).state == "succeeded"
        assert list(job.logs()) == ["done"]
        wait_for(lambda: not pool.nodes, "the node is taken away", WAIT_SECONDS)
