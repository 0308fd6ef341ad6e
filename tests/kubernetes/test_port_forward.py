"""The port-forward over WebSockets that speak the API server's protocol, v4.channel.k8s.io."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes import port_forward as module
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.port_forward import PROTOCOL, PortForward
from skyproxy.settings import Settings

pytestmark = pytest.mark.timeout(60)
POD_PORT = 8765


class Kubelet:
    """The far end: a WebSocket a tunnel, bridged to `serve`, which stands for the program in the Pod.

    Attributes:
        serve: gets what the client sends and a function that answers; returns when the program closes.
        refusals: answers to give before a tunnel is granted, the first one first.
        open: tunnels that are open now.
        silent: closes tunnels as soon as they are open.
    """

    def __init__(self) -> None:
        self.serve: Callable[[Any, Any], Any] = self.echo
        self.refusals: list[int] = []
        self.open = 0
        self.sockets: list[web.WebSocketResponse] = []
        self.error = b""
        self.silent = False

    async def echo(self, receive: Any, send: Any) -> None:
        while (data := await receive()) is not None:
            await send(data)

    async def __call__(self, request: Any) -> Any:
        assert request.path == "/api/v1/namespaces/team/pods/w-0/portforward"
        assert dict(request.query) == {"ports": str(POD_PORT)}
        assert request.headers["Authorization"] == "Bearer secret-token"
        if "*/*" not in request.headers.get("Accept", "*/*"):  # as a real kubelet's streaming server
            return web.Response(status=406, text="406: Not Acceptable")
        if self.refusals:
            return web.json_response({"message": "not now"}, status=self.refusals.pop(0))
        socket_ = web.WebSocketResponse(protocols=[PROTOCOL], max_msg_size=0)
        await socket_.prepare(request)
        assert socket_.ws_protocol == PROTOCOL
        self.open += 1
        self.sockets.append(socket_)
        try:
            if self.silent:
                return socket_
            for channel in (0, 1):
                await socket_.send_bytes(bytes([channel]) + struct.pack("<H", POD_PORT))
            if self.error:
                await socket_.send_bytes(b"\x01" + self.error)

            async def receive() -> bytes | None:
                async for message in socket_:
                    assert message.type is WSMsgType.BINARY
                    assert message.data[0] == 0
                    return bytes(message.data[1:])
                return None

            async def send(data: bytes) -> None:
                await socket_.send_bytes(b"\x00" + data)

            await self.serve(receive, send)
        finally:
            self.open -= 1
            with contextlib.suppress(Exception):
                await socket_.close()
        return socket_


@pytest.fixture
def kubelet(server: Any) -> Kubelet:
    made = Kubelet()
    server.handler = made
    return made


@pytest.fixture
def forward(kubelet: Kubelet, kubeconfig: Path) -> Iterator[PortForward]:
    with PortForward(ClusterAddress(kubeconfig=str(kubeconfig)), "w-0", POD_PORT) as made:
        yield made


def dial(forward: PortForward) -> socket.socket:
    return socket.create_connection(("127.0.0.1", forward.port), timeout=20)


def read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(1 << 20)
        if not piece:
            break
        data += piece
    return bytes(data)


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    while not condition():
        waited.wait(0.01)


def test_bytes_go_there_and_back(forward: PortForward) -> None:
    with dial(forward) as connection:
        connection.sendall(b"hello")
        assert read(connection, 5) == b"hello"


def test_megabytes_arrive_whole_both_ways_at_once(forward: PortForward) -> None:
    data = os.urandom(24 << 20)
    with dial(forward) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        back = read(connection, len(data))
        sender.join()
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()


def test_many_connections_do_not_mix(forward: PortForward, kubelet: Kubelet) -> None:
    connections = [dial(forward) for _ in range(8)]
    for number, connection in enumerate(connections):
        connection.sendall(b"%d" % number * 1000)
    for number, connection in enumerate(connections):
        assert read(connection, 1000) == b"%d" % number * 1000
    assert kubelet.open == 8
    for connection in connections:
        connection.close()
    until(lambda: kubelet.open == 0 and forward.tunnels == 0)


def test_the_program_closes_and_so_does_the_local_end(forward: PortForward, kubelet: Kubelet) -> None:
    async def answer_once(receive: Any, send: Any) -> None:
        await send(b"bye " + (await receive() or b""))

    kubelet.serve = answer_once
    with dial(forward) as connection:
        connection.sendall(b"you")
        assert read(connection, 100) == b"bye you"


def test_a_program_that_does_not_read_holds_its_sender_up_and_nobody_else(
    forward: PortForward, kubelet: Kubelet
) -> None:
    held = threading.Event()

    async def stubborn(receive: Any, send: Any) -> None:
        first = await receive()
        if first == b"wait":
            while not held.is_set():
                await asyncio.sleep(0.01)
        await send(first)
        await kubelet.echo(receive, send)

    kubelet.serve = stubborn
    with dial(forward) as slow, dial(forward) as quick:
        slow.sendall(b"wait")
        slow.settimeout(0.5)
        with pytest.raises(TimeoutError):
            slow.sendall(bytes(48 << 20))
        quick.sendall(b"hello")
        assert read(quick, 5) == b"hello"
        held.set()


def test_after_a_drop_the_next_connection_has_a_new_tunnel(forward: PortForward, kubelet: Kubelet, server: Any) -> None:
    with dial(forward) as first:
        first.sendall(b"x")
        assert read(first, 1) == b"x"
        server._loop.call_soon_threadsafe(kubelet.sockets[0]._req.transport.abort)
        assert read(first, 1) == b""
    with dial(forward) as second:
        second.sendall(b"y")
        assert read(second, 1) == b"y"


def test_a_pod_that_is_just_being_replaced_is_waited_for(forward: PortForward, kubelet: Kubelet) -> None:
    kubelet.refusals = [404, 500, 503]
    with dial(forward) as connection:
        connection.sendall(b"x")
        assert read(connection, 1) == b"x"
    assert forward.problem is None


@pytest.mark.parametrize("refusal", [403, 404])
def test_a_refusal_closes_the_connection_and_is_remembered(
    forward: PortForward, kubelet: Kubelet, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTINGS", Settings(connect_timeout_seconds=0.3))
    kubelet.refusals = [refusal] * 100
    with dial(forward) as connection:
        assert read(connection, 1) == b""
    until(lambda: forward.problem is not None)
    assert isinstance(forward.problem, ClusterError)
    assert forward.problem.status == refusal


def test_what_the_kubelet_reports_ends_the_connection(
    forward: PortForward, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.error = b"connection refused to 127.0.0.1:8765"
    with dial(forward) as connection:
        assert read(connection, 1) == b""
    until(lambda: forward.problem is not None)
    assert "connection refused to 127.0.0.1:8765" in str(forward.problem)


def test_a_tunnel_that_is_closed_without_a_word_is_a_problem_until_the_next_one(
    forward: PortForward, kubelet: Kubelet
) -> None:
    # As containerd does it where nothing listens: its words are lost more often than not.
    kubelet.silent = True
    with dial(forward) as connection:
        assert read(connection, 1) == b""
    until(lambda: forward.problem is not None)
    assert "port 8765 of w-0" in str(forward.problem)
    assert "listening" in str(forward.problem)
    kubelet.silent = False
    with dial(forward) as connection:
        connection.sendall(b"x")
        assert read(connection, 1) == b"x"
    assert forward.problem is None


def test_close_ends_what_goes_through_it_and_frees_the_port(kubelet: Kubelet, kubeconfig: Path) -> None:
    forward = PortForward(ClusterAddress(kubeconfig=str(kubeconfig)), "w-0", POD_PORT)
    connection = dial(forward)
    connection.sendall(b"x")
    assert read(connection, 1) == b"x"
    forward.close()
    assert read(connection, 1) == b""
    with pytest.raises(OSError):
        dial(forward)
    assert not [thread for thread in threading.enumerate() if thread.name == "skyproxy-port-forward"]
    forward.close()


def test_a_port_that_is_taken_is_an_error(forward: PortForward, kubeconfig: Path) -> None:
    with pytest.raises(ClusterError, match=f"port {forward.port} "):
        PortForward(ClusterAddress(kubeconfig=str(kubeconfig)), "w-0", POD_PORT, local_port=forward.port)


def test_without_a_cluster_nothing_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        PortForward(ClusterAddress(kubeconfig=str(tmp_path / "absent")), "w-0", POD_PORT)
    assert not [thread for thread in threading.enumerate() if thread.name == "skyproxy-port-forward"]


@pytest.mark.parametrize(
    "name", ["", "w-0/../v-0", "v-0/exec?command=id&stdout=1#", "v-0%2fexec", "..", "W-0", "w 0", "w-0\n", "a" * 300]
)
def test_a_name_that_no_pod_has_is_in_no_path_of_a_request(name: str, kubeconfig: Path) -> None:
    with pytest.raises(ClusterError, match="is not the name of a Pod"):
        PortForward(ClusterAddress(kubeconfig=str(kubeconfig)), name, POD_PORT)
