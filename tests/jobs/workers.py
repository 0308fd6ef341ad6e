"""A worker that has jobs and nothing else, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyproxy.jobs.link import OpenConnection, jobs_hello
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server.auth import Authenticator
from skyproxy_server.jobs.store import Jobs
from skyproxy_server.listener import Listener, serve
from tests.server.jobs.programs import limits

TOKEN = "a-token-of-a-test-0123456789"


class NoSessions:
    """A host of sessions that has none."""

    def open_session(self, hello: object, transport: object) -> Any:
        raise LookupError("no sessions")

    resume_session = join_bulk = join_functions = open_session

    def end_refused(self, refusal: Callable[[Any], str]) -> None:
        """There is nothing to end."""

    def activity(self) -> dict[str, object]:
        return {"sessions": 0, "idle_seconds": 50.0, "devices": [], "software": {}}

    def session_rows(self, client: object = None) -> list[dict[str, object]]:
        return []


@contextmanager
def worker_with_jobs(
    root: Path, settings: Settings | None = None, token: str | Authenticator = TOKEN, jobs: str | None = None
) -> Iterator[tuple[Listener, Jobs]]:
    """A worker, and its jobs; with a text, it runs none, and says this."""
    settings = settings or limits(job_grace_seconds=0.2)
    store = Jobs(root, settings)
    listener = serve("127.0.0.1", 0, token, NoSessions(), settings=settings, jobs=store if jobs is None else jobs)
    try:
        yield listener, store
    finally:
        store.preempt()
        listener.close()
        store.close()


def opener(listener: Listener, token: str = TOKEN) -> OpenConnection:
    """What opens connections for jobs to it."""

    def open_connection(timeout_seconds: float | None = None) -> Transport:
        return connect_websocket(f"ws://127.0.0.1:{listener.port}", token, jobs_hello())[0]

    return open_connection
