"""A node's HTTPS endpoint: logs and port-forward, for the API server only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import WSMsgType, web

from tests.e2e.kubelet.pods import Pod

logger = logging.getLogger("kubelet.server")

_PORT_FORWARD = "v4.channel.k8s.io"
_FOLLOW_SECONDS = 0.2


class Server:
    """Serves one node's Pods."""

    def __init__(self, find: Callable[[str, str], Pod | None]) -> None:
        """
        Args:
            find: gives the Pod of a namespace and a name.
        """
        self._find = find
        application = web.Application()
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        application.router.add_get("/portForward/{namespace}/{pod}", self._port_forward)
        application.router.add_get("/portForward/{namespace}/{pod}/{uid}", self._port_forward)
        for kind in ("exec", "attach"):
            application.router.add_route("*", f"/{kind}/{{tail:.*}}", self._run_command)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str, certificate: tuple[Path, Path], authority: Path) -> int:
        """Starts to listen; gives the port."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(*certificate)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0, ssl_context=context)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Ends it and what it serves."""
        await self._runner.cleanup()

    def _pod(self, request: web.Request) -> Pod:
        pod = self._find(request.match_info["namespace"], request.match_info["pod"])
        if pod is None:
            raise web.HTTPNotFound(text=f"pod {request.match_info['pod']} is not on this node")
        return pod

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        pod, name, query = self._pod(request), request.match_info["container"], request.query
        path = pod.log_of(name, query.get("previous") == "true")
        if path is None:
            raise web.HTTPBadRequest(text=f'container "{name}" in pod "{pod.name}" is waiting to start')
        follow, stamped = query.get("follow") == "true", query.get("timestamps") == "true"
        since = query.get("sinceTime", "")
        if "sinceSeconds" in query:
            since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - int(query["sinceSeconds"])))
        left = int(query["limitBytes"]) if "limitBytes" in query else None
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        with path.open("rb") as file:
            if "tailLines" in query:
                lines = file.read().splitlines(keepends=True)
                wanted = int(query["tailLines"])
                file.seek(sum(map(len, lines[: len(lines) - wanted])) if wanted < len(lines) else 0)
            while left != 0:
                ended = _ended(pod, name)  # before the read: what came after it is read in the next turn
                if line := file.readline():  # lines are written whole
                    stamp, _, text = line.partition(b" ")
                    if stamp.decode() >= since.rstrip("Z"):
                        shown = (line if stamped else text)[:left]
                        left = None if left is None else left - len(shown)
                        await response.write(shown)
                elif not follow or ended:
                    break
                else:
                    await asyncio.sleep(_FOLLOW_SECONDS)
        await response.write_eof()
        return response

    async def _run_command(self, request: web.Request) -> web.StreamResponse:
        _refuse_other_accept(request)
        raise web.HTTPNotImplemented(text="this stand-in runs no commands in containers")

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        _refuse_other_accept(request)
        pod = self._pod(request)
        ports = [int(p) for text in request.query.getall("port", []) for p in text.split(",")]
        if not ports:
            raise web.HTTPBadRequest(text="query parameter 'port' is missing")
        socket = web.WebSocketResponse(protocols=(_PORT_FORWARD,), max_msg_size=0)
        if not socket.can_prepare(request).ok:
            raise web.HTTPBadRequest(text="this stand-in speaks port-forward over WebSocket only, not over SPDY")
        await socket.prepare(request)
        streams = _Streams(socket, pod, ports)
        try:
            await streams.serve()
        finally:
            # First, while its messages are still read: else it waits for the client's answer to the end.
            await socket.close()
            await streams.close()
        return socket


def _refuse_other_accept(request: web.Request) -> None:
    # The real streaming server produces "*/*" only; a client's headers reach it through the API server unchanged.
    if "*/*" not in request.headers.get("Accept", "*/*"):
        raise web.HTTPNotAcceptable(text="406: Not Acceptable")


def _ended(pod: Pod, container: str) -> bool:
    state = pod.containers.get(container)
    return state is None or state.running is None or state.running.exit_code is not None


class _Streams:
    """The channels of one port-forward: for the k-th port 2k carries data, 2k + 1 an error.

    Each begins with its port's number, little-endian.
    """

    def __init__(self, socket: web.WebSocketResponse, pod: Pod, ports: list[int]) -> None:
        self._socket = socket
        self._pod = pod
        self._ports = ports
        self._readers: dict[int, asyncio.StreamReader] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Moves bytes until the client or every stream ends."""
        for index, port in enumerate(self._ports):
            if not await self._open(index, port):
                # A real node has an error to tell, and mostly closes the tunnel before it arrives.
                return
            head = struct.pack("<H", port)
            await self._send(2 * index, head)
            await self._send(2 * index + 1, head)
            self._tasks.append(asyncio.create_task(self._upward(2 * index)))
        receiving = asyncio.create_task(self._receive())
        self._tasks.append(receiving)
        pending = set(self._tasks)
        while receiving in pending and len(pending) > 1:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Ends all streams."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _open(self, index: int, port: int) -> bool:
        try:
            if self._pod.sandbox is None:
                raise OSError("the pod is not running")
            self._readers[2 * index], self._writers[2 * index] = await self._pod.sandbox.connect(port)
        except OSError as error:
            logger.info("error forwarding port %d to pod %s: %s", port, self._pod.name, error)
            return False
        return True

    async def _upward(self, channel: int) -> None:
        reader = self._readers[channel]
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                await self._send(channel, chunk)

    async def _receive(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            writer = self._writers.get(message.data[0])
            if writer is not None and len(message.data) > 1:
                with contextlib.suppress(OSError):
                    writer.write(message.data[1:])
                    await writer.drain()

    async def _send(self, channel: int, data: bytes) -> None:
        await self._socket.send_bytes(bytes([channel]) + data)
