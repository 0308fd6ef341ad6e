"""A small API server on loopback, whose every answer a test decides. The real one is in tests/e2e."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

aiohttp_web = pytest.importorskip("aiohttp.web")
pytest.importorskip("kubernetes_asyncio")

Handler = Callable[[Any], Awaitable[Any]]


class ApiServer:
    """Answers with what `handler` gives; remembers what it was asked.

    Attributes:
        handler: called with each request; may be replaced at any time.
        requests: "METHOD /path?query" of each.
        url: where it listens.
    """

    def __init__(self) -> None:
        self.handler: Handler = self._nothing
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(started),), daemon=True)
        self._thread.start()
        assert started.wait(10)

    async def _nothing(self, request: Any) -> Any:
        raise AssertionError(f"nobody said what to answer to {request}")

    async def _serve(self, started: threading.Event) -> None:
        async def answer(request: Any) -> Any:
            self.requests.append(f"{request.method} {request.path_qs}")
            self.tokens.append(request.headers.get("Authorization", ""))
            return await self.handler(request)

        application = aiohttp_web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = aiohttp_web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = aiohttp_web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        # Handlers that hold a stream open would go on for ever.
        held = asyncio.all_tasks() - {asyncio.current_task()}
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await runner.cleanup()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """An API server of the test's own."""
    made = ApiServer()
    yield made
    made.close()


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> Path:
    """A kubeconfig that leads there; two contexts, the current one with a namespace."""
    path = tmp_path / "kubeconfig"
    path.write_text(
        f"""
apiVersion: v1
kind: Config
current-context: mine
clusters: [{{name: c, cluster: {{server: "{server.url}"}}}}]
users: [{{name: u, user: {{token: secret-token}}}}]
contexts:
- {{name: mine, context: {{cluster: c, user: u, namespace: team}}}}
- {{name: bare, context: {{cluster: c, user: u}}}}
"""
    )
    return path
