"""The cluster's DNS: Services by name, headless ones as the addresses of their Pods, and nothing else.

Debian has no server for it. This one answers queries for addresses over UDP, which is what a resolver of libc sends.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import struct
from collections.abc import Callable
from typing import Any

from tests.e2e.kubelet.api import Api, Object, key

logger = logging.getLogger("real.names")

DOMAIN = "cluster.local"
_HEADER = struct.Struct("!6H")
_A, _IN = 1, 1
_NO_ERROR, _FORMAT_ERROR, _NO_SUCH_NAME, _NOT_IMPLEMENTED = 0, 1, 3, 4
# Answered, with authority; recursion is as good as available, or resolvers complain.
_FLAGS = 0x8480
_MAX_ADDRESSES = 28  # more do not fit into 512 bytes
_SECONDS_TO_LIVE = 0


def answer(query: bytes, find: Callable[[str], list[str] | None]) -> bytes | None:
    """The answer to one query.

    Args:
        query: a datagram from anybody.
        find: the IPv4 addresses of a name in lower case; None for one that is not there.

    Returns:
        What to send back; None for what is no query.
    """
    if len(query) < _HEADER.size:
        return None
    identity, flags, questions, *_ = _HEADER.unpack_from(query)
    if flags & 0x8000:
        return None

    def with_code(code: int, question: bytes = b"", addresses: tuple[str, ...] | list[str] = ()) -> bytes:
        head = _HEADER.pack(identity, _FLAGS | flags & 0x0100 | code, 1 if question else 0, len(addresses), 0, 0)
        # Each names what the question names: 12 bytes from the beginning.
        records = (
            struct.pack("!HHHIH4s", 0xC00C, _A, _IN, _SECONDS_TO_LIVE, 4, ipaddress.IPv4Address(a).packed)
            for a in addresses
        )
        return head + question + b"".join(records)

    if flags & 0x7800:
        return with_code(_NOT_IMPLEMENTED)
    labels, place = [], _HEADER.size
    while questions == 1 and place < len(query) and 0 < query[place] < 64:
        labels.append(query[place + 1 : place + 1 + query[place]])
        place += 1 + query[place]
    if questions != 1 or query[place : place + 1] != b"\0" or len(query) < place + 5:
        return with_code(_FORMAT_ERROR)
    question = query[_HEADER.size : place + 5]
    kind, group = struct.unpack_from("!HH", query, place + 1)
    addresses = find(b".".join(labels).decode("ascii", "replace").lower())
    if addresses is None:
        return with_code(_NO_SUCH_NAME, question)
    wanted = (kind, group) == (_A, _IN)
    return with_code(_NO_ERROR, question, addresses[:_MAX_ADDRESSES] if wanted else [])


class Names:
    """The names of a cluster's Services, kept as the API server has them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._services: dict[tuple[str, str], Object] = {}
        self._endpoints: dict[tuple[str, str], Object] = {}

    async def follow(self) -> None:
        """Keep them in step, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow("/api/v1/services", self._services))
            tasks.create_task(self._follow("/api/v1/endpoints", self._endpoints))

    async def _follow(self, path: str, table: dict[tuple[str, str], Object]) -> None:
        async for kind, item in self._api.watch(path):
            if kind == "DELETED":
                table.pop(key(item), None)
            else:
                table[key(item)] = item

    def find(self, name: str) -> list[str] | None:
        """The addresses of NAME.NAMESPACE.svc.cluster.local, or of one Pod of a Service, HOSTNAME before it.

        Returns:
            None where there is no such name.
        """
        inner, _, domain = name.partition(".svc.")
        parts = inner.split(".")
        if domain != DOMAIN or not 2 <= len(parts) <= 3:
            return None
        service = parts[-1], parts[-2]
        if service not in self._services:
            return None
        address = self._services[service]["spec"].get("clusterIP", "None")
        if len(parts) == 2 and address and address != "None":
            return [address]
        found = [
            entry["ip"]
            for subset in self._endpoints.get(service, {}).get("subsets") or []
            for entry in subset.get("addresses") or []
            if len(parts) == 2 or entry.get("hostname") == parts[0]
        ]
        return found or None

    async def serve(self, address: str, port: int = 53) -> asyncio.DatagramTransport:
        """Answer queries; the caller closes what it gets."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Protocol(self.find), local_addr=(address, port))
        return transport


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, find: Callable[[str], list[str] | None]) -> None:
        self._find = find
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        told = answer(data, self._find)
        if told is not None:
            self._transport.sendto(told, addr)

    def error_received(self, exc: Exception) -> None:
        logger.info("an answer was not delivered: %s", exc)
