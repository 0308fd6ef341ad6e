"""The operator's answers over HTTP: whether it lives, whether it is ready, and what it has counted."""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from skyproxy_operator.metrics import METRICS


class HttpServer:
    """Serves /healthz, /readyz and /metrics.

    Attributes:
        port: where; 0 before it was started.
    """

    def __init__(self, host: str, port: int, alive: Callable[[], bool], ready: Callable[[], bool]) -> None:
        """Make a server that does not listen yet.

        Args:
            host: the address to listen on; `*` for all of whichever family there is.
            port: the port, 0 for a free one.
            alive: whether the operator works; if not, it should be started again.
            ready: whether it has seen the cluster.
        """
        self.port = 0
        self._host = host
        self._wanted_port = port
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Begins to listen."""
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(application, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        for listening in listen(self._host, self._wanted_port):
            await web.SockSite(self._runner, listening).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Ends it; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="alive\n") if self._alive() else web.Response(text="not working\n", status=503)

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response(text="ready\n") if self._ready() else web.Response(text="not ready\n", status=503)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(METRICS.registry), headers={"Content-Type": content_type})


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on an address, at least one, all on the same port.

    Args:
        host: the address; `*` for all addresses of IPv4 and of IPv6, as far as the machine has them.
        port: the port, 0 for a free one.

    Raises:
        OSError: nobody can listen there.
    """
    everywhere = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    own = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host)]
    found: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in everywhere if host == "*" else own:
        try:
            # Each family by itself: one that the kernel lacks must not take the other with it.
            found.append(socket.create_server((address, port), family=family, reuse_port=False))
            port = found[0].getsockname()[1]
        except OSError as exc:
            problem = exc
    if not found and problem is not None:
        raise problem
    return found
