"""What every socket of ours is given."""

from __future__ import annotations

import socket

import pytest

from skyproxy.transport.stream import prepare


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no such options")
def test_a_peer_whose_machine_vanished_is_noticed_within_minutes() -> None:
    with socket.socket() as sock:
        prepare(sock)
        idle, interval, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count <= 300
