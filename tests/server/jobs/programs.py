"""Small programs as jobs, and the stores that run them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from skyproxy.functions.scripts import Script
from skyproxy.jobs.documents import script_document
from skyproxy.settings import SETTINGS, Settings
from skyproxy_server.auth import Identity
from skyproxy_server.jobs.job import WorkerJob
from skyproxy_server.jobs.store import Jobs

ME = Identity("me")
OTHER = Identity("other")
LONG = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
"""A program that runs until it is ended."""
PATIENCE_SECONDS = 120.0
_numbers = itertools.count(1)


def limits(**changes: object) -> Settings:
    """The settings, with no pause before a restart."""
    return dataclasses.replace(SETTINGS, **{"job_restart_seconds": 0.0, "job_grace_seconds": 60.0, **changes})  # type: ignore[arg-type]


def payload_of(folder: Path, text: str, *args: str) -> bytes:
    """The document of a script with this text, which lies in a folder of the test."""
    path = folder / f"program{next(_numbers)}.py"
    path.write_text(text)
    return script_document(Script(target=str(path), args=args, folder=str(folder), directory=str(folder)), None)


def submit(jobs: Jobs, payload: bytes, client: Identity = ME, **asked: Any) -> WorkerJob:
    """Start a job as a client's connection does."""
    wanted = {"name": f"job{next(_numbers)}", "kind": "script", "title": "a job", **asked}
    incoming = jobs.begin(client, {**wanted, "payload_bytes": len(payload)})
    incoming.add(payload)
    return jobs.start(incoming)


def text_of(job: WorkerJob) -> str:
    """All that it has printed."""
    return job.log.read(0, 1 << 20)[1].decode()


def wait_for_text(job: WorkerJob, text: str) -> None:
    """Wait until it has printed this."""
    offset = 0
    for _ in range(int(PATIENCE_SECONDS)):
        if text in text_of(job):
            return
        offset = job.log.end
        job.log.wait_beyond(offset, 1.0)
        if not job.is_running:
            break
    assert text in text_of(job), f"{text!r} is not in what it printed: {text_of(job)!r}, {job.record}"
