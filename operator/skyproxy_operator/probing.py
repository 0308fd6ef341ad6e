"""Asks workers what they are doing, over TLS and with the token of their Compute."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from skyproxy_operator.fair_turns import FairTurns
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.reaping import Report

_MAX_ANSWER_BYTES = 64 << 10
_AT_ONCE = 64
"""Workers that are asked at the same time; half of them may be of one namespace."""
ENDING = "/ending"
TOKEN_REFUSED = "TokenRefused"
CERTIFICATE_REFUSED = "CertificateRefused"
_CLOSING_SECONDS = 1.0
_MAX_IDLE_SECONDS = 10 * 365 * 86400.0


@dataclass(frozen=True)
class ProbeCredentials:
    """The credentials that the workers of a Compute answer to.

    Attributes:
        token: theirs.
        authority: the certificate (PEM) to trust.
        server_name: what their certificate vouches for.
        former: the token before it, which a worker accepts until the new one has got there; empty where there is none.
        namespace: theirs; namespaces take turns at being asked.
    """

    token: str = field(repr=False)
    authority: str = field(repr=False)
    server_name: str
    former: str = field(default="", repr=False)
    namespace: str = ""


class Prober:
    """Asks workers; `close` ends its connections."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._turns = FairTurns(_AT_ONCE)

    async def close(self) -> None:
        """Ends all connections, and waits a second at most for the peers' part of it."""
        if self._session is None:
            return
        await self._session.close()
        # aiohttp forgets a connection that it releases, while TLS may still wait for the peer's last word.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_SECONDS):
                while any(open_socket.fileno() >= 0 for open_socket in self._sockets):
                    await asyncio.sleep(0.001)

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made

    async def ask(
        self, addresses: Sequence[tuple[str, int]], access: ProbeCredentials, path: str = "/activity"
    ) -> list[Report]:
        """The reports of several processes of a Compute, in their order.

        Args:
            addresses: host and port of each; an empty host stands for one that cannot be asked yet.
            access: how they are reached.
            path: `ENDING` tells them that they are ended for good, too.
        """
        try:
            context = ssl.create_default_context(cadata=access.authority)
        except ssl.SSLError as exc:
            problem = f"the certificate authority of its Secret cannot be used: {exc}"
            return [Report(problem=problem, reason=CERTIFICATE_REFUSED) for _ in addresses]
        return list(await asyncio.gather(*(self._ask(host, port, path, access, context) for host, port in addresses)))

    async def _ask(self, host: str, port: int, path: str, access: ProbeCredentials, context: ssl.SSLContext) -> Report:
        if not host:
            return Report(problem="it has no address yet")
        where = f"https://[{host}]:{port}{path}" if ":" in host else f"https://{host}:{port}{path}"
        report = await self._ask_with(access.token, where, access, context)
        if report.reason == TOKEN_REFUSED and access.former:
            return await self._ask_with(access.former, where, access, context)
        return report

    async def _ask_with(self, token: str, where: str, access: ProbeCredentials, context: ssl.SSLContext) -> Report:
        if self._session is None:
            # No proxy of the environment: the token is for the worker alone.
            # And nothing is unpacked: a few bytes could become any number.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, socket_factory=self._make_socket),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        try:
            async with self._turns.turn(access.namespace), asyncio.timeout(self._timeout_seconds):
                async with self._session.get(
                    where,
                    headers={"Authorization": f"Bearer {token}"},
                    ssl=context,
                    server_hostname=access.server_name,
                    allow_redirects=False,
                ) as response:
                    text = b""
                    async for piece in response.content.iter_any():
                        text += piece
                        if len(text) > _MAX_ANSWER_BYTES:
                            return _report_failure("its answer is too long")
                    status = response.status
        except TimeoutError:
            return _report_failure(f"it did not answer within {self._timeout_seconds:g} s")
        except aiohttp.ClientConnectorCertificateError as exc:
            return _report_failure(f"its certificate is not accepted: {exc.certificate_error}", CERTIFICATE_REFUSED)
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            return _report_failure(f"it cannot be asked: {exc}")
        return report_of(status, text)


def report_of(status: int, text: bytes) -> Report:
    """Parse a worker's answer.

    Args:
        status: the HTTP status.
        text: the body. It comes from a container that may run anything, so nothing about it is taken for granted.
    """
    if status != 200:
        return _report_failure(f"it answered HTTP {status}", TOKEN_REFUSED if status in (401, 403) else "")
    try:
        answer: Any = json.loads(text)
        if not isinstance(answer, Mapping):
            return _report_failure("its answer is not an object")
        idle, running = float(answer["idle_seconds"]), int(answer.get("calls_running", 0))
        # NaN compares false. More than a worker's age in any world would overflow the calendar in what is made of it.
        if not 0 <= idle <= _MAX_IDLE_SECONDS:
            return _report_failure("its answer cannot be understood")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return _report_failure("its answer is not an activity report")
    METRICS.probes.labels(result="answered").inc()
    return Report(0.0 if running else idle, answer)


def _report_failure(problem: str, reason: str = "") -> Report:
    METRICS.probes.labels(result="failed").inc()
    # What a peer made of a message can be anything; it goes into a status.
    return Report(problem=problem.encode("utf-8", "replace").decode(), reason=reason)
