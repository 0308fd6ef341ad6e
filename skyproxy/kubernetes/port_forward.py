"""A local port that leads to a port of a Pod, through the API server's WebSockets.

Every local connection has a tunnel of its own, so one that breaks harms no other, and the listening port stays when
the network drops or the Pod is replaced: the next connection gets a new tunnel. Works wherever kubectl works, without
a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from skyproxy.errors import ClusterError, SkyproxyError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.settings import SETTINGS

logger = logging.getLogger("skyproxy.kubernetes")

PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_POD = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_PIECE_BYTES = 128 << 10
_PING_SECONDS = 20.0
_FIRST_PAUSE_SECONDS = 0.2
_CLOSE_SECONDS = 5.0


class PortForward:
    """A listening port on this machine, its tunnels, and the thread that serves them.

    Use it as a context manager, or call `close`.

    Attributes:
        port: where it listens, on loopback.
        problem: why the last tunnel could not be made; None where the last one could.
    """

    def __init__(self, address: ClusterAddress, pod: str, pod_port: int, *, local_port: int = 0) -> None:
        """Starts to listen. Whether the Pod is there shows with the first connection.

        Args:
            address: the cluster and the namespace.
            pod: the Pod's name; another Pod of that name takes its place.
            pod_port: the port in the Pod.
            local_port: on this machine; 0 takes a free one.

        Raises:
            ConfigurationError: no cluster is configured.
            ClusterError: the local port cannot be had, or no Pod can have that name.
        """
        if not _POD.fullmatch(pod):
            # It comes from a status, and goes into the path of a request.
            raise ClusterError(f"{pod!r:.80} is not the name of a Pod. Look at the worker: kubectl get compute -o yaml")
        self.pod = pod
        self.pod_port = pod_port
        self.problem: SkyproxyError | None = None
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._listening = socket.create_server(("127.0.0.1", local_port))
        except OSError as error:
            self._loop.close()
            raise ClusterError(
                f"port {local_port} of this machine cannot be used: {error.strerror}. Use another."
            ) from error
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="skyproxy-port-forward", daemon=True)
        self._thread.start()
        self._started.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def tunnels(self) -> int:
        """Local connections that are being served."""
        return len(self._tasks)

    def close(self) -> None:
        """Ends the tunnels, the port and the thread; idempotent, bounded in time."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> PortForward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on its own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # handed to whoever waits for the start
            if self._started.is_set():
                logger.exception("the port-forward to %s ended by an internal error", self.pod)
            self._failure = error
        finally:
            self._started.set()
            self._listening.close()
            self._loop.close()

    async def _serve(self) -> None:
        async with ClusterClient(self._address) as client:
            server = await asyncio.start_server(
                lambda reader, writer: self._begin(self._tunnel(client, reader, writer)), sock=self._listening
            )
            self._started.set()
            await self._stop.wait()
            server.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tunnel(self, client: ClusterClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one local connection until either end closes."""
        websocket = None
        try:
            websocket = await self._open(client)
            workers = [
                asyncio.create_task(self._send(reader, websocket)),
                asyncio.create_task(self._receive(websocket, writer)),
                asyncio.create_task(_keep_awake(websocket)),
            ]
            try:
                await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for worker in workers:
                    worker.cancel()
                for outcome in await asyncio.gather(*workers, return_exceptions=True):
                    if isinstance(outcome, ClusterError):
                        raise outcome
                    if isinstance(outcome, Exception):
                        logger.debug("a tunnel to %s ended: %r", self.pod, outcome)
        except SkyproxyError as error:
            self.problem = error
            logger.warning("no tunnel to %s: %s", self.pod, error)
        finally:
            writer.close()
            if websocket is not None:
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(websocket.close(), 1.0)

    async def _open(self, client: ClusterClient) -> Any:
        """A tunnel; tries again for a while, because the Pod may just be replaced or the network come back."""
        path = f"/api/v1/namespaces/{client.namespace}/pods/{self.pod}/portforward"
        deadline = self._loop.time() + SETTINGS.connect_timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                websocket = await client.open_websocket(path, [("ports", str(self.pod_port))], PROTOCOL)
                self.problem = None
                return websocket
            except ClusterError as error:
                if error.status in (401, 403) or self._loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    async def _send(self, reader: asyncio.StreamReader, websocket: Any) -> None:
        while data := await reader.read(_PIECE_BYTES):
            await websocket.send_bytes(bytes([_DATA]) + data)

    async def _receive(self, websocket: Any, writer: asyncio.StreamWriter) -> None:
        # Each channel begins with the number of the port, two bytes, little-endian.
        to_skip = {_DATA: 2, _ERROR: 2}
        async for message in websocket:
            data = message.data
            if not isinstance(data, bytes) or not data or data[0] not in to_skip:
                continue
            channel, payload = data[0], memoryview(data)[1:]
            skipped = min(to_skip[channel], len(payload))
            to_skip[channel] -= skipped
            payload = payload[skipped:]
            if not payload:
                continue
            if channel == _ERROR:
                text = bytes(payload).decode(errors="replace").strip()
                raise ClusterError(f"the kubelet could not forward to port {self.pod_port} of {self.pod}: {text}")
            writer.write(payload)
            await writer.drain()
        if to_skip[_DATA]:
            # A kubelet has more to say of it, and mostly closes the tunnel before that arrives.
            raise ClusterError(
                f"the kubelet closed the tunnel to port {self.pod_port} of {self.pod} at once. "
                "Is anything listening there?"
            )


async def _keep_awake(websocket: Any) -> None:
    """Pings, so that no proxy on the way takes a silent tunnel for a dead one.

    The answers are not waited for: they queue behind data that a busy worker has not read yet.
    """
    while True:
        await asyncio.sleep(_PING_SECONDS)
        await websocket.ping()
