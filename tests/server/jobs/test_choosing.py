"""Which workers run jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyproxy_server.jobs.choosing import choose_jobs


@pytest.mark.parametrize(
    ("functions", "bounds_sessions", "words"),
    [(False, False, "--no-functions"), (True, True, "bounds what sessions use"), (False, True, "--no-functions")],
)
def test_a_worker_says_why_it_runs_no_jobs(functions: bool, bounds_sessions: bool, words: str, tmp_path: Path) -> None:
    said = choose_jobs(tmp_path / "jobs", functions=functions, bounds_sessions=bounds_sessions)
    assert isinstance(said, str)
    assert words in said
    assert not (tmp_path / "jobs").exists()


def test_others_do(tmp_path: Path) -> None:
    jobs = choose_jobs(tmp_path / "jobs", functions=True, bounds_sessions=False)
    assert not isinstance(jobs, str)
    jobs.close()
    assert (tmp_path / "jobs").is_dir()
