"""Probes, as a kubelet makes them: from this machine to the Pod's address, or a command inside."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import aiohttp

from tests.e2e.kubelet.api import Object
from tests.e2e.kubelet.containers import Container


def _port(container: Object, port: int | str) -> int:
    for declared in container.get("ports") or []:
        if declared.get("name") == port:
            return int(declared["containerPort"])
    return int(port)


async def _connects(host: str, port: int) -> bool:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    return True


async def _answers(container: Object, request: Object, host: str) -> bool:
    scheme = request.get("scheme", "HTTP").lower()
    url = f"{scheme}://{request.get('host', host)}:{_port(container, request['port'])}{request.get('path', '/')}"
    headers = {entry["name"]: entry["value"] for entry in request.get("httpHeaders") or []}
    # As a kubelet does: it has no name to verify.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers, ssl=context) as response:
        return 200 <= response.status < 400


async def once(probe: Object, container: Object, running: Container, address: str) -> bool:
    """One attempt; whether it succeeded."""
    seconds = float(probe.get("timeoutSeconds", 1))
    try:
        if "tcpSocket" in probe:
            port = _port(container, probe["tcpSocket"]["port"])
            return await asyncio.wait_for(_connects(address, port), seconds)
        if "httpGet" in probe:
            return await asyncio.wait_for(_answers(container, probe["httpGet"], address), seconds)
        return await running.execute(probe["exec"]["command"], seconds)
    except (OSError, TimeoutError, aiohttp.ClientError):
        return False


async def outcomes(
    probe: Object, container: Object, running: Container, address: str, initially: bool
) -> AsyncIterator[bool]:
    """Every change of a probe's outcome after its thresholds, and first the initial one."""
    yield initially
    outcome, streak = initially, 0
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while True:
        if await once(probe, container, running, address) == outcome:
            streak = 0
        else:
            streak += 1
            if streak >= int(probe.get("failureThreshold", 3) if outcome else probe.get("successThreshold", 1)):
                outcome, streak = not outcome, 0
                yield outcome
        await asyncio.sleep(float(probe.get("periodSeconds", 10)))
