"""The kernel's knowledge of a connection that another process writes to. Linux only."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCOUTQ = 0x5411  # of <linux/sockios.h>
_BYTES_ACKED = 120  # the offset of tcpi_bytes_acked in struct tcp_info of <linux/tcp.h>
_TCP_INFO_BYTES = 136


def bytes_written(descriptor: int) -> int:
    """All bytes that were ever written to a TCP connection, by whatever process; -1 where the kernel does not tell.

    Those that the peer has acknowledged and those that wait; read until no acknowledgement comes in between.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            while True:
                acked = _acked_bytes(sock)
                (waiting,) = struct.unpack("i", fcntl.ioctl(sock, _SIOCOUTQ, struct.pack("i", 0)))
                if _acked_bytes(sock) == acked:
                    return acked + int(waiting)
    except (OSError, struct.error):
        return -1


def _acked_bytes(sock: socket.socket) -> int:
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (count,) = struct.unpack_from("Q", information, _BYTES_ACKED)
    return int(count)
